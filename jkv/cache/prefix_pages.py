"""Full pages of a prompt that stay in the pool without a row: held, put at the start of a later row's table, dropped."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jkv.cache.pool import Pool, drop_references


def hold(pool: Pool, row: Int[Array, ""], entry: Int[Array, " I"]) -> tuple[Pool, Int[Array, "L K I"]]:
    """Takes one more reference on the full pages at some entries of a row's table; returns these pages."""
    page = pool.page_table[:, row][..., entry]
    return pool.replace(refcount=pool.refcount.at[page].add(1)), page


def adopt(pool: Pool, row: Int[Array, ""], page: Int[Array, "L K I"]) -> Pool:
    """Appends full pages to a row, which shares them and whose own pages are all full. Their slot data are zero."""
    num_new = page.shape[-1] * pool.page_size
    entry = pool.length[:, row, :, None] // pool.page_size + jnp.arange(page.shape[-1], dtype=jnp.int32)
    layer, head, _ = jnp.indices(page.shape, dtype=jnp.int32, sparse=True)
    return pool.replace(
        refcount=pool.refcount.at[page].add(1),
        page_table=pool.page_table.at[layer, row, head, entry].set(page),
        length=pool.length.at[:, row].add(num_new),
        logical_length=pool.logical_length.at[row].add(num_new),
    )


def drop(pool: Pool, page: Int[Array, "L K I"]) -> Pool:
    """Drops the references that `hold` took; pages that no row reads become free."""
    return drop_references(pool, page, jnp.ones(page.shape, bool))
