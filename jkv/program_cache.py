"""Compiled programs on disk, so that the next process compiles nothing again: JAX's persistent cache, in a folder of jkv.

`jkv.load` and each engine call `keep_programs`. JAX has one such cache a process, so it then keeps what the caller jits, too.
"""

import functools
import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.native_library import cache_folder, processor

SWITCH = "JKV_CACHE"
MOST_BYTES = 1 << 30
LEAST_SECONDS = 0.1  # that a program takes to compile; JAX keeps none that take less than a second


@functools.cache  # once a process: what the caller sets later stays
def keep_programs() -> None:
    """Turns JAX's persistent cache on, unless the caller has set or disabled it, or JKV_CACHE=off.

    Others could put programs into a folder that they may write to, so such a folder is refused, with a warning. JAX's own limit
    of the size reads the whole folder for each program; this one does once, here.
    """
    config: Any = jax.config
    is_users = config.jax_compilation_cache_dir is not None or "JAX_ENABLE_COMPILATION_CACHE" in os.environ
    if is_users or not config.jax_enable_compilation_cache or os.environ.get(SWITCH, "").lower() == "off":
        return
    try:
        programs = cache_folder() / "programs"
        # Machines with other processors may share the folder; programs for a CPU run on their own kind alone.
        folder = programs / hashlib.sha256(processor().encode()).hexdigest()[:8]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        bound(programs)
    except OSError as error:
        warnings.warn(
            f"Compiled programs are not kept, so the next process compiles them again: {error}. Correct the folder, set "
            f"{SWITCH} to another, or {SWITCH}=off.",
            stacklevel=3,
        )
        return
    config.update("jax_compilation_cache_dir", str(folder))
    if config.jax_persistent_cache_min_compile_time_secs == 1:  # JAX's default
        config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


def bound(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Removes the files that were not read for longest, where a folder has more bytes than `most_bytes`.

    Other processes may read, write and remove meanwhile: a program that one of them does not find is compiled.
    """
    found = []
    for place, _, names in os.walk(folder):
        for path in (os.path.join(place, name) for name in names):
            try:
                status = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                continue
            found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    left = sum(size for _, size, _ in found) - most_bytes
    for _, size, path in sorted(found):
        if left <= 0:
            return
        Path(path).unlink(missing_ok=True)
        left -= size
