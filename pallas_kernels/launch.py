"""Launches a GPU kernel: a thin layer over Pallas's Triton backend, which all GPU kernels of this package use.

JAX deprecates that backend from 0.11 on, in favour of Mosaic GPU and `jax_triton`. Kernels name only `launch`, `load`, `store`,
`dot` and `barrier`, so another backend changes this file alone.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas import triton

load, store, dot = triton.load, triton.store, triton.dot
barrier = triton.debug_barrier  # all threads of a program wait here for each other


def launch(
    body: Callable[..., None],
    *inputs: jax.Array,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int = 4,
    num_stages: int = 2,
    aliases: Mapping[int, int] | None = None,
    interpret: Any = False,
) -> Any:
    """Runs `body` once per point of the grid, on references to the whole inputs and outputs.

    `aliases` maps the index of an input to that of the output which shares its memory.
    """
    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=dict(aliases or {}),
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*inputs)
