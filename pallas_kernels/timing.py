"""The one timer of kernels: device seconds of a call, as the median of several measurements after a warm-up.

On an NVIDIA GPU, CUPTI measures the kernels themselves. Elsewhere, calls are queued back to back and the queue is timed by the
wall clock. `pallas_kernels.bench` and `pallas_kernels.peers` use it.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import own_platform

ROUNDS = 5  # measurements; the median counts
SECONDS = 0.05  # minimum length of one measurement
IN_PROGRAM = 16  # calls on an updated argument inside one program of an accelerator


def seconds_of(run: Callable[..., Any], args: tuple[Any, ...], is_updated: bool = False) -> tuple[float, str]:
    """Device seconds of one call and the name of the clock, "cupti", "loop" or "queue".

    With `is_updated`, the first argument is donated to each call and is the first of its results, or the only one. CUPTI cannot
    measure that. On an accelerator such a call is repeated inside one program, as its dispatch takes longer than the kernel; a
    queue hides the dispatch of calls that take longer than theirs.
    """
    if own_platform() == "cuda" and not is_updated:
        try:
            from jax.experimental.mosaic.gpu import profiler

            _, milliseconds = profiler.measure(jax.jit(run), iterations=4 * ROUNDS)(*args)
            if milliseconds is None:
                raise RuntimeError("the profiler recorded no kernel")
            return statistics.median(milliseconds) / 1000, "cupti"
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            print(f"CUPTI is not available ({error}): calls are queued instead.", file=sys.stderr)
    repeats = IN_PROGRAM if is_updated and own_platform() != "cpu" else 1
    program = jax.jit(functools.partial(repeated, run, repeats), donate_argnums=0) if is_updated else jax.jit(run)
    first = jax.tree.map(jnp.array, args[0]) if is_updated else args[0]

    def queue(calls: int) -> float:
        nonlocal first
        out: Any = None
        began = time.perf_counter()
        for _ in range(calls):
            out = program(first, *args[1:])
            first = first_of(out, first) if is_updated else first
        jax.block_until_ready(out)
        return time.perf_counter() - began

    if repeats > 1:
        return median_seconds(queue) / repeats, "loop"
    return median_seconds(queue), "queue"


def first_of(out: Any, like: Any) -> Any:
    """The first of a call's results, of the structure of the argument that it replaces."""
    structure: Any = jax.tree.structure(like)
    return structure.unflatten(jax.tree.leaves(out)[: structure.num_leaves])


def repeated(run: Callable[..., Any], times: int, first: Any, *args: Any) -> Any:
    """The results of the last of so many calls, each with the first result of the one before."""
    out = run(first, *args)
    return jax.lax.fori_loop(1, times, lambda _, out: run(first_of(out, first), *args), out)


def median_seconds(queue: Callable[[int], float]) -> float:
    """Seconds of one call: `queue(n)` makes n calls and returns the seconds that they took together.

    The first call is a warm-up. Each measurement makes enough calls to take at least `SECONDS`.
    """
    queue(1)
    calls = max(1, round(SECONDS / max(queue(2) / 2, 1e-6)))
    return statistics.median(queue(calls) / calls for _ in range(ROUNDS))


def copy_rate() -> float:
    """Bytes read and written per second by a copy of 1 GiB (64 MiB on a CPU)."""
    size = (1 << 24 if own_platform() == "cpu" else 1 << 28) // 4
    x = jnp.ones(4 * size, jnp.float32)
    return 2 * x.nbytes / seconds_of(lambda x: x + 1, (x,), is_updated=True)[0]
