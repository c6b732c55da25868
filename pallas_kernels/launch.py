"""Launches a GPU kernel: a thin layer over Pallas's Triton backend, which all GPU kernels of this package use.

JAX deprecates that backend from 0.11 on, in favour of Mosaic GPU and `jax_triton`. Kernels name only `launch`, `load`, `store`,
`dot` and `barrier`, so another backend changes this file alone. It is imported at the first kernel: a JAX without it runs
everything else.
"""

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
from jax.experimental import pallas as pl


@functools.cache
def triton() -> ModuleType:
    """Pallas's Triton backend.

    Raises:
      ImportError: this JAX has none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("jax.experimental.pallas.triton")


def load(*args: Any, **settings: Any) -> jax.Array:
    """Reads from memory."""
    return triton().load(*args, **settings)


def store(*args: Any, **settings: Any) -> None:
    """Writes to memory."""
    triton().store(*args, **settings)


def dot(*args: Any, **settings: Any) -> jax.Array:
    """A product of matrices."""
    return triton().dot(*args, **settings)


def barrier() -> None:
    """All threads of a program wait here for each other."""
    triton().debug_barrier()


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
        compiler_params=triton().CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*inputs)
