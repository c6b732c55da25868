"""Plain XLA for a CPU: a few rows at a time, up to the last page of the longest of them.

The work depends on the lengths of rows, not on the width of their tables, and the codes of a block stay in the processor's
cache. The trip count is dynamic, for which a GPU would wait on the host: there the reference runs. A block that a row does not
read multiplies its sums by exactly 1 and adds exactly 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.sealed import Records
from pallas_kernels.sealed_attention.reference import in_blocks, over_blocks

GROUP = 8  # rows


def sealed_attention(
    query_RGH: Float[Array, "R G H"], records: Records, page_table: Int[Array, "R MP"], num_pages: Int[Array, " R"]
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"]]:
    """See `pallas_kernels.sealed_attention`."""
    rows = len(page_table)
    page_table, pages = in_blocks(page_table, records)
    num_pages = jnp.clip(num_pages, 0, page_table.shape[1])  # it bounds the loop

    def attend(group: tuple[Array, ...]) -> tuple[Array, Array]:
        query, table, count = group
        return over_blocks(query, records, table, count, pages, (count.max() + pages - 1) // pages)

    args = query_RGH, page_table, num_pages
    if rows <= GROUP:
        return attend(args)
    padded = (jnp.pad(x, [(0, -rows % GROUP)] + [(0, 0)] * (x.ndim - 1)) for x in args)
    groups = tuple(x.reshape(-1, GROUP, *x.shape[1:]) for x in padded)
    out, log_total = jax.lax.map(attend, groups)
    return out.reshape(-1, *out.shape[2:])[:rows], log_total.reshape(-1, log_total.shape[-1])[:rows]
