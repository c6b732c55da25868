"""Decode attention of one query position, or of a few that follow each other, over the pages of each row."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import hadamard
from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.paged_attention import cpu, gpu, native, reference, tpu
from pallas_kernels.quantised import Numbers, is_rotated


def of_layer(
    run: Callable[..., Any],
    platform: str | None = None,
    why_not: Callable[..., str | None] | None = None,
    reads_codes: bool = False,
    reads_groups: bool = False,
) -> Any:
    """An implementation that takes the tables of one layer, which XLA cuts out of the tables of all layers."""

    def cut_and_run(query: Any, kv: Any, *tables: Any, with_logits: bool = False) -> Any:
        return run(query, kv, *cut(*tables), with_logits=with_logits)

    def why_not_cut(query: Any, kv: Any, *tables: Any, with_logits: bool = False) -> str | None:
        of_one = cut(*tables) if len(tables) < 4 else jax.eval_shape(cut, *tables)
        return why_not(query, kv, *of_one, with_logits=with_logits) if why_not else None

    return Implementation(
        **by_row(cut_and_run, why_not_cut), platform=platform, reads_codes=reads_codes, reads_groups=reads_groups
    )


def by_row(run: Callable[..., Any], why_not: Callable[..., str | None] | None = None) -> dict[str, Any]:
    """An implementation for queries by row, which takes queries by place [B, T, N, H] too; XLA moves them."""

    def rows(query: Any, num_rows: int) -> Any:
        if query.ndim == 3:
            return query
        batch, places, _, head_size = query.shape
        return jnp.swapaxes(query.reshape(batch, places, num_rows // batch, -1), 1, 2).reshape(num_rows, -1, head_size)

    def run_rows(query: Any, kv: Any, page_table: Any, *rest: Any, with_logits: bool = False) -> Any:
        out, *others = run(rows(query, page_table.shape[-2]), kv, page_table, *rest, with_logits=with_logits)
        if query.ndim == 4:
            batch, places, _, head_size = query.shape
            out = jnp.swapaxes(out.reshape(batch, -1, places, out.shape[1] // places * head_size), 1, 2).reshape(query.shape)
        return out, *others

    def why_not_rows(query: Any, kv: Any, page_table: Any, *rest: Any, with_logits: bool = False) -> str | None:
        if why_not is None:
            return None
        num_rows = page_table.shape[-2]
        shape = query if query.ndim == 3 else jax.eval_shape(functools.partial(rows, num_rows=num_rows), query)
        return why_not(shape, kv, page_table, *rest, with_logits=with_logits)

    return {"run": run_rows, "why_not": why_not_rows}


def cut(page_table: Any, length: Any, log_weight: Any = None, layer: Any = None) -> tuple[Any, Any, Any]:
    """The tables of one layer; without `layer`, the arguments."""
    if layer is None:
        return page_table, length, log_weight
    return page_table[layer], length[layer], None if log_weight is None else log_weight[layer]


IMPLEMENTATIONS = {
    "tpu": of_layer(tpu.paged_attention, "tpu", tpu.why_not, reads_codes=True, reads_groups=True),
    "gpu": Implementation(gpu.paged_attention, "cuda", gpu.why_not, reads_codes=True, reads_groups=True),
    "native": of_layer(native.paged_attention, "cpu", native.why_not, reads_codes=True, reads_groups=True),
    "cpu": of_layer(cpu.paged_attention, "cpu", reads_codes=True, reads_groups=True),
    "reference": of_layer(reference.paged_attention),
}


def paged_attention(
    query: Float[Array, "R G H"] | Float[Array, "B T N H"],
    kv: Numbers,
    page_table: Int[Array, "*L R MP"],
    length: Int[Array, "*L R"] | Int[Array, "*L R T"],
    log_weight: Float[Array, "*L R S"] | None = None,
    layer: Int[Array, ""] | int | None = None,
    *,
    with_logits: bool = False,
    implementation: str | None = None,
) -> tuple[Any, Float[Array, "R _G"], Float[Array, "R _G S"] | None]:
    """The attention output of each row's query group over its filled slots, and the log of the softmax's denominator.

    Slot s of a row is in page `page_table[r, s // page]` at offset `s % page`. The first `length[r]` slots are filled; later
    ones are not used and may hold anything. `log_weight` (S = MP * page) is added to a slot's logit: `ln m` for a slot with
    multiplicity m, `-inf` for a vacant slot, which may hold anything. A row without a slot to read gives zeros and `-inf`.
    Logits are scaled by H ** -0.5. `with_logits` also returns them, float32, with the log-weight, `-inf` where no slot is
    filled, for policies that evict by attention at each step. The pool is `[P, 2, page, H]`: floats, or codes with scales.
    Where these are of rotated vectors, the query is rotated here and the output turned back, once per query head, and
    implementations take a rotated query.

    Rows of T places (a step that appends several tokens) have lengths with one more axis: how many slots the queries of each
    place read, the most at the last one. Then a row has T times the query heads of a KV head, place after place, and each page
    is read once for all of them. A query's result does not depend on what the later places read. Queries and outputs may be by
    place, [B, T, N, H], as the model has them, where R = B * K: a GPU's kernel then reads and writes them where they are.

    With `layer`, tables, lengths and log-weights are those of all layers, and the kernel reads those of this layer in place.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    query = hadamard.rotate(query) if is_rotated(kv) else query
    args = query, kv, page_table, length, log_weight, layer
    out, *rest = call("paged_attention", IMPLEMENTATIONS, implementation, *args, with_logits=with_logits)
    return hadamard.rotate(out) if is_rotated(kv) else out, *rest
