"""Lets compiled programs go before the process runs out of memory mappings.

On a CPU every compiled program maps tens of memory regions for as long as it is cached. Linux allows a process 65,530 of them
(`vm.max_map_count`) and aborts it beyond that, without a Python exception: after some 150 engines of different shapes, or some
600 programs.
"""

from pathlib import Path

import jax

from jkv.engine.clocks import COMPILING

CHECK_EVERY = 16  # programs compiled between two looks
MOST = 0.25  # of the mappings that the process may have
LIMIT, MAPPINGS = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")

_checked = 0  # programs compiled before the last look


def num_mappings() -> int:
    """The memory regions of this process; 0 where the system does not tell."""
    if not MAPPINGS.exists():
        return 0
    with MAPPINGS.open("rb") as file:
        return sum(1 for _ in file)


def limit() -> int:
    """The most memory regions of a process; 0 where there is no such limit."""
    return int(LIMIT.read_text()) if LIMIT.exists() else 0


def let_programs_go() -> bool:
    """Clears JAX's caches of programs if they hold too many mappings; returns whether it did.

    Programs that are still used compile again, or come from JAX's persistent cache. Call it between programs.
    """
    global _checked
    if COMPILING.count - _checked < CHECK_EVERY:
        return False
    _checked = COMPILING.count
    if num_mappings() <= MOST * limit():
        return False
    jax.clear_caches()
    return True
