"""C++ for a CPU, called by XLA: each row reads its pages in place, while plain XLA gathers them first.

The machine's C++ compiler compiles the library on first use, for this processor, into the user's cache folder. Without a
compiler, `why_not` returns the reason and plain XLA runs. The threads are XLA's.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jaxtyping import Array, Float, Int

SOURCE = Path(__file__).with_name("native.cc")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-w")
LANES = 8  # numbers of a head per multiplication
TARGET = "jkv_paged_attention"


def why_not(query: Any, kv: Any, page_table: Any, length: Any, log_weight: Any = None, with_logits: bool = False) -> str | None:
    """Why the library cannot take these arguments; None when it can."""
    if not query.dtype == kv.dtype == jnp.float32:
        return f"query and kv must be float32; got {query.dtype} and {kv.dtype}"
    if query.shape[-1] % LANES:
        return f"head size must be a multiple of {LANES}; got {query.shape[-1]}"
    return why_no_library()


def paged_attention(
    query: Float[Array, "R G H"],
    kv: Float[Array, "P 2 page H"],
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
    out, log_total, logits = call(query, kv, page_table, length, weight)
    return out, log_total, logits if with_logits else None


@functools.cache
def why_no_library() -> str | None:
    """Why there is no library, or None; the first call compiles, loads and registers it."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if os.name != "posix" or compiler is None:
        return f"it needs a C++ compiler ({', '.join(COMPILERS)}) on the path"
    try:
        library = ctypes.CDLL(str(compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        message = (getattr(error, "stderr", None) or str(error)).strip()
        return f"{compiler} failed to build the library: {message[-300:]}"
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.PagedAttention), platform="cpu")
    return None


def compiled(compiler: str) -> Path:
    """The library's file; compiles it if there is none yet for this source, version of JAX and processor."""
    text, version = SOURCE.read_bytes(), f"{jaxlib.__version__} {compiler} {FLAGS} {processor()}"
    name = hashlib.sha256(text + version.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jkv"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(dir=folder)
    except OSError:  # the home folder is read-only
        folder = Path(tempfile.mkdtemp())
        made = tempfile.mkdtemp(dir=folder)
    target = folder / f"paged_attention-{name}.so"
    try:
        if not target.exists():
            part = Path(made) / target.name
            command = [compiler, *FLAGS, "-I", jax.ffi.include_dir(), str(SOURCE), "-o", str(part)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            part.replace(target)  # atomic, since several processes may start together
    finally:
        shutil.rmtree(made)
    return target


def processor() -> str:
    """The features of the processor, on which `-march=native` depends; several machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
