"""A kernel's C++ function as a target that XLA calls on a CPU.

A wheel may bring the library (`pallas_kernels.prebuilt`). Otherwise the machine's C++ compiler compiles it on first use, for
this processor, into the user's cache folder (`pallas_kernels.native_library`). Without either, the kernel's `why_not` returns
the reason and plain XLA runs. The threads are XLA's. `native.py` of a kernel calls this.
"""

import functools
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import native_library, prebuilt
from pallas_kernels.dispatch import own_platform, possible_platforms

LOADING = threading.Lock()


def target_of(source: Path) -> str:
    """The name by which XLA calls the function of a kernel's C++ file: `jkv_paged_attention`."""
    return f"jkv_{source.parent.name}"


def why_no_library(source: Path) -> str | None:
    """Why a kernel has no library, or None; the first call compiles, loads and registers it, and warns where it cannot."""
    with LOADING:
        return load_once(source)


def why_not_rows(source: Path, x: Any, most: int) -> str | None:
    """Why a kernel of rows in float32, which XLA computes on accelerators, cannot take them; None when it can."""
    if reason := why_left_to_xla():
        return reason
    if x.dtype != jnp.float32:
        return f"rows must be float32; got {x.dtype}"
    if (rows := x.size // x.shape[-1]) > most:
        return f"there must be at most {most} rows; got {rows}"
    return why_no_library(source)


def why_left_to_xla() -> str | None:
    """Why a kernel that only CPUs have is not used; None in a process without an accelerator."""
    return None if possible_platforms() == ("cpu",) else "a process with an accelerator leaves it to XLA"


@functools.cache
def load_once(source: Path) -> str | None:
    """The outcome of the only try in this process."""
    symbol = source.parent.name.title().replace("_", "")
    try:
        library = prebuilt.load(source, (symbol,)) or native_library.load(source, (symbol,))
    except native_library.UnavailableError as error:
        if own_platform() == "cpu":
            warn_once(str(error))
        return str(error)
    jax.ffi.register_ffi_target(target_of(source), jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return None


@functools.cache
def warn_once(reason: str) -> None:
    """Warns of a reason that kernels cannot be compiled, which holds for all of them."""
    warnings.warn(f"The kernels for a CPU cannot be compiled, and plain XLA is slower: {reason}.", stacklevel=4)
