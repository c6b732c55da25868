"""C++ for a CPU, called by XLA: each row reads its pages in place, while plain XLA gathers them first.

How the library comes about says `pallas_kernels.native_target`. Page ids and lengths out of range read what the reference
reads; shapes that do not fit are an error of the program.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import native_target
from pallas_kernels.quantised import Numbers, Quantised

SOURCE = Path(__file__).with_name("native.cc")
LANES = 8  # numbers of a head per multiplication
TARGET = native_target.target_of(SOURCE)
why_no_library = functools.partial(native_target.why_no_library, SOURCE)


def why_not(query: Any, kv: Any, page_table: Any, length: Any, log_weight: Any = None, with_logits: bool = False) -> str | None:
    """Why the library cannot take these arguments; None when it can."""
    if not query.dtype == kv.dtype == jnp.float32:
        return f"query and kv must be float32; got {query.dtype} and {kv.dtype}"
    if not page_table.dtype == length.dtype == jnp.int32:
        return f"page table and lengths must be int32; got {page_table.dtype} and {length.dtype}"
    if log_weight is not None and log_weight.dtype != jnp.float32:
        return f"log-weights must be float32; got {log_weight.dtype}"
    if query.shape[-1] % LANES:
        return f"head size must be a multiple of {LANES}; got {query.shape[-1]}"
    return why_no_library()


def paged_attention(
    query: Float[Array, "R G H"],
    kv: Numbers,
    page_table: Int[Array, "R MP"],
    length: Int[Array, " R"] | Int[Array, "R T"],
    log_weight: Float[Array, "R S"] | None = None,
    with_logits: bool = False,
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"], Float[Array, "R G S"] | None]:
    """See `pallas_kernels.paged_attention`."""
    (rows, group, _), num_slots = query.shape, page_table.shape[1] * kv.shape[2]
    result = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    call = jax.ffi.ffi_call(
        TARGET, (result(query.shape), result((rows, group)), result((rows, group, num_slots if with_logits else 0)))
    )
    weight = jnp.zeros((rows, 0), jnp.float32) if log_weight is None else log_weight
    numbers, scale = (kv.codes, kv.scale) if isinstance(kv, Quantised) else (kv, jnp.zeros(0, jnp.float32))
    out, log_total, logits = call(query, numbers, scale, page_table, length, weight)
    return out, log_total, logits if with_logits else None
