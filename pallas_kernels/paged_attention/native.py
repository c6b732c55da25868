"""C++ for a CPU, called by XLA: each row reads its pages in place, while plain XLA gathers them first.

A wheel may bring the library (`pallas_kernels.prebuilt`). Otherwise the machine's C++ compiler compiles it on first use, for
this processor, into the user's cache folder (`pallas_kernels.native_library`). Without either, `why_not` returns the reason and
plain XLA runs. The threads are XLA's.
Page ids and lengths out of range read what the reference reads; shapes that do not fit are an error of the program.
"""

import functools
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import native_library, prebuilt
from pallas_kernels.dispatch import own_platform
from pallas_kernels.quantised import Numbers, Quantised

SOURCE = Path(__file__).with_name("native.cc")
LANES = 8  # numbers of a head per multiplication
READ = ("int8", "int4")  # formats of quantised pages
TARGET, SYMBOL = "jkv_paged_attention", "PagedAttention"
LOADING = threading.Lock()


def why_not(query: Any, kv: Any, page_table: Any, length: Any, log_weight: Any = None, with_logits: bool = False) -> str | None:
    """Why the library cannot take these arguments; None when it can."""
    if isinstance(kv, Quantised) and kv.format.name not in READ:
        return f"quantised pages must be {' or '.join(READ)}; got {kv.format.name}"
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
    length: Int[Array, " R"],
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


def why_no_library() -> str | None:
    """Why there is no library, or None; the first call compiles, loads and registers it, and warns where it cannot."""
    with LOADING:
        return load_once()


@functools.cache
def load_once() -> str | None:
    """The outcome of the only try in this process."""
    try:
        library = prebuilt.load(SOURCE, (SYMBOL,)) or native_library.load(SOURCE, (SYMBOL,))
    except native_library.UnavailableError as error:
        if own_platform() == "cpu":
            warnings.warn(f"The compiled paged_attention cannot be used, and plain XLA is slower: {error}.", stacklevel=2)
        return str(error)
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(getattr(library, SYMBOL)), platform="cpu")
    return None
