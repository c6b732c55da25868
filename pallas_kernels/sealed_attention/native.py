"""C++ for a CPU, called by XLA: each row reads its records in place, and their codes become numbers in registers alone.

How the library comes about says `pallas_kernels.native_target`. Page ids out of range read what the reference reads, and counts
out of range are limited to the table; shapes that do not fit are an error of the program.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import native_target
from pallas_kernels.sealed import Records, bits_of

SOURCE = Path(__file__).with_name("native.cc")
LANES = 8  # bytes of codes, and slots, that are read at once
TARGET = native_target.target_of(SOURCE)
why_no_library = functools.partial(native_target.why_no_library, SOURCE)


def why_not(query: Any, records: Any, page_table: Any, num_pages: Any) -> str | None:
    """Why the library cannot take these arguments; None when it can."""
    if not query.dtype == records.dtype == jnp.float32:
        return f"queries and records must be of float32; got {query.dtype} and {records.dtype}"
    if not page_table.dtype == num_pages.dtype == jnp.int32:
        return f"page table and page counts must be int32; got {page_table.dtype} and {num_pages.dtype}"
    if bits_of(records) not in ((4, 2), (4, 4)):
        return f"codes of keys must have 4 bits, and those of values 2 or 4; got {bits_of(records)}"
    if query.shape[2] % (least := LANES * 8 // records.format.value_bits):
        return f"the head size must be a multiple of {least}; got {query.shape[2]}"
    if records.shape[2] % LANES:
        return f"pages must be multiples of {LANES} slots; got {records.shape[2]}"
    return why_no_library()


def sealed_attention(
    query_RGH: Float[Array, "R G H"], records: Records, page_table: Int[Array, "R MP"], num_pages: Int[Array, " R"]
) -> tuple[Float[Array, "R G H"], Float[Array, "R G"]]:
    """See `pallas_kernels.sealed_attention`."""
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (query_RGH.shape, query_RGH.shape[:2])]
    out, log_total = jax.ffi.ffi_call(TARGET, results)(query_RGH, *jax.tree.leaves(records), page_table, num_pages)
    return out, log_total
