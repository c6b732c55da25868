"""How a device program is compiled: jitted at its first call, with the options that XLA needs on this platform."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import choice
from pallas_kernels.dispatch import own_platform

OPTIONS: dict[str, dict[str, Any]] = {
    "cuda": {
        # XLA cuts products over their inner axis by a rule of thumb, before anything is timed, and adds the parts in a kernel
        # of its own: three more kernels per layer. Without it, the autotuner chooses among libraries that do so in one or two.
        "xla_gpu_experimental_force_split_k": 1,
        # XLA counts a pool anew for every kernel that updates it in place. Above this percentage of the device's memory it
        # would compute things twice to save some, in vain. The engine itself sees to it that everything fits.
        "xla_gpu_memory_limit_slop_factor": 100_000,
    }
}

# More of them for a GPU without Triton: there XLA joins products of the same input by a copy of their matrices in every step.
OF_OLD_GPUS: dict[str, Any] = {"xla_gpu_dot_merger_threshold_mb": 0}

# Rows of the pool: XLA for GPUs turns some products of a single row into multiplications whose results it writes to memory.
LEAST_ROWS = {"cuda": 2}


def options_of(platform: str) -> dict[str, Any]:
    """XLA's options on a platform, for the GPU that programs are traced for."""
    return OPTIONS.get(platform, {}) | (OF_OLD_GPUS if platform == "cuda" and choice.is_old_gpu() else {})


class DeviceProgram:
    """A function that runs as one program on the device. Inside another program, call `function`."""

    def __init__(self, function: Callable[..., Any], settings: dict[str, Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.settings = function, settings

    @functools.cached_property
    def jitted(self) -> Any:
        """The function, jitted for the platform of this process."""
        return jax.jit(self.function, compiler_options=options_of(own_platform()), **self.settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.jitted(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """`jax.jit(...).trace`."""
        return self.jitted.trace(*args, **kwargs)

    def num_compiled(self) -> int:
        """Programs compiled so far, one for each set of shapes and settings."""
        return self.jitted._cache_size()


def device_program(**settings: Any) -> Callable[[Callable[..., Any]], DeviceProgram]:
    """A decorator; settings are those of `jax.jit`."""
    return lambda function: DeviceProgram(function, settings)
