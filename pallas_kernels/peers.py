"""Decode attention over one contiguous cache, the baseline for `paged_attention`.

The peers are cuDNN and XLA through JAX, tokamax if it is installed, and PyTorch if it is installed with a GPU; a report has a
line for those that are not. A contiguous cache cannot share, evict or free memory, but reads it best: the difference from a
paged kernel is the price of the pages.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels.dispatch import own_platform, refusals
from pallas_kernels.models import ModelShape, Workload
from pallas_kernels.paged_attention import IMPLEMENTATIONS, paged_attention, shapes
from pallas_kernels.timing import median_seconds, seconds_of

HEADS = ModelShape(1, 4, 1, 128)  # R1-Llama-8B's heads with one KV head per row
ROWS = (512, 2048, 1024, 256)
SLOTS = (4096, 1024, 32_768, 8192)  # the most important ones first, in case the time runs out
PAGE_SIZES = (16, 64)
IN_JAX = ("cudnn", "xla")
IN_TOKAMAX = ("mosaic", "triton", "xla")  # by name, as without one plain XLA may take the place of the others
MOST_BYTES = 40e9  # per cache


def rows_of_peers(copy: float, until: float) -> Iterator[dict[str, Any]]:
    """Yields a row of the report for each contender at each number of rows and slots that fits the device."""
    for slots in SLOTS:
        for rows in ROWS:
            for page_size in PAGE_SIZES:
                workload = Workload(batch=rows, slots=slots, page_size=page_size, layers=1)
                moved = shapes.num_bytes(HEADS, workload)
                setting = {
                    "kernel": "decode attention",
                    "case": "decode step",
                    "model": f"{rows} rows of 128 x 4",
                    "batch": rows,
                    "slots": slots,
                }
                setting |= {"page_size": page_size, "bytes": moved}
                if moved > MOST_BYTES:
                    yield setting | {"implementation": "all", "not_timed": f"a cache of {moved / 1e9:.0f} GB"}
                    continue
                for name, run, values in contenders(workload):
                    row = setting | {"implementation": name}
                    if time.perf_counter() > until:
                        yield row | {"not_timed": "out of time"}
                        continue
                    try:
                        seconds, clock = run(values()) if name == "torch" else seconds_of(run, values())
                    except Exception as error:  # a contender that cannot run is a result, not the end of the run
                        yield row | {"not_timed": f"{type(error).__name__}: {str(error)[:200]}"}
                        continue
                    share = round(moved / seconds / copy, 3)
                    yield row | {"milliseconds": round(1000 * seconds, 4), "clock": clock, "share_of_copy_rate": share}


def contenders(workload: Workload) -> Iterator[tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]]]]:
    """Name, function and maker of the arguments of each contender."""
    args = shapes.arguments(HEADS, workload)
    reasons = refusals(IMPLEMENTATIONS, own_platform(), *args)
    for name in IMPLEMENTATIONS:
        if name not in reasons:
            yield (
                name,
                jax.jit(lambda *args, name=name: paged_attention(*args, implementation=name)[0]),
                lambda: shapes.values(HEADS, workload),
            )
    if workload.page_size != PAGE_SIZES[0]:
        return  # a contiguous cache has no pages: it is timed once

    def contiguous() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 3)
        sizes = (1, HEADS.num_query_heads), (workload.slots, 1), (workload.slots, 1)
        return tuple(
            jax.random.normal(key, (workload.batch, *size, HEADS.head_size), workload.dtype)
            for key, size in zip(keys, sizes, strict=True)
        )

    for name in IN_JAX:
        yield f"{name}, contiguous", jax.jit(functools.partial(jax.nn.dot_product_attention, implementation=name)), contiguous
    for name in IN_TOKAMAX:
        yield f"tokamax {name}, contiguous", jax.jit(functools.partial(tokamax_attention, implementation=name)), contiguous
    yield "torch", torch_seconds, lambda: (workload,)


def tokamax_attention(query: jax.Array, key: jax.Array, value: jax.Array, implementation: str) -> jax.Array:
    """Attention by tokamax, which has paged attention for TPUs alone.

    Raises:
      RuntimeError: it cannot be imported.
    """
    try:
        import tokamax
    except ImportError as error:
        raise RuntimeError(f"tokamax must be installed, with Python 3.12 or higher: pip install tokamax; got {error}") from None
    return tokamax.dot_product_attention(query, key, value, implementation=implementation)


def torch_seconds(args: tuple[Workload]) -> tuple[float, str]:
    """Seconds of PyTorch's attention over a contiguous cache, by CUDA events."""
    import torch

    (workload,) = args
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    options: Any = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(workload.batch, HEADS.num_query_heads, 1, HEADS.head_size, **options)
    key, value = (torch.randn(workload.batch, 1, workload.slots, HEADS.head_size, **options) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention

    def queue(calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            attend(query, key, value, enable_gqa=True)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000

    return median_seconds(queue), "CUDA events"
