"""How a device program is compiled, and how long it is kept.

It is jitted at its first call, with the options that XLA needs on this platform. On a CPU every compiled program maps tens of
memory regions for as long as it is cached. Linux allows a process 65,530 of them (`vm.max_map_count`) and aborts it beyond
that, without a Python exception: after some 150 engines of different shapes, or some 600 programs. So `let_programs_go`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from jkv.engine.clocks import COMPILING
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

CHECK_EVERY = 16  # programs compiled between two looks
MOST_SHARE = 0.25  # of the mappings that the process may have
LIMIT, MAPPINGS = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")

_checked = 0  # programs compiled before the last look


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

    @property
    def static(self) -> tuple[str, ...]:
        """The names of the static arguments."""
        names = self.settings.get("static_argnames", ())
        return (names,) if isinstance(names, str) else tuple(names)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled program for these static arguments and shapes; it takes the other arguments, by name."""
        return self.jitted.lower(*args, **kwargs).compile()

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """`jax.jit(...).trace`."""
        return self.jitted.trace(*args, **kwargs)

    def shapes(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, as shapes and types; what was traced before is not traced again."""
        return self.jitted.eval_shape(*args, **kwargs)

    def num_compiled(self) -> int:
        """Programs compiled so far, one for each set of shapes and settings."""
        return self.jitted._cache_size()


def device_program(**settings: Any) -> Callable[[Callable[..., Any]], DeviceProgram]:
    """A decorator with the settings of `jax.jit`."""
    return lambda function: DeviceProgram(function, settings)


class ProgramsFor:
    """Programs that are traced for a compute capability, and with kernels chosen by hand."""

    def __init__(self, programs: Any, capability: tuple[int, int] | None, kernels: str | None) -> None:
        self.programs, self.capability, self.kernels = programs, capability, kernels

    def __getattr__(self, name: str) -> "ProgramFor":
        return ProgramFor(getattr(self.programs, name), self.capability, self.kernels)


class ProgramFor:
    """One program of `ProgramsFor`."""

    def __init__(self, program: DeviceProgram, capability: tuple[int, int] | None, kernels: str | None) -> None:
        functools.update_wrapper(self, program, updated=())
        self.program, self.static, self._given = program, program.static, (capability, kernels)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._tracing():
            return self.program(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """See `DeviceProgram.compile`."""
        with self._tracing():
            return self.program.compile(*args, **kwargs)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        with choice.tracing_for(self._given[0]), choice.choose(self._given[1]):
            yield


def programs_for(programs: Any, devices: Iterable[jax.Device], kernels: str | None) -> Any:
    """Programs for these devices; those given, where there is nothing to choose."""
    capability = choice.lowest_capability(devices)
    return programs if capability is None and kernels is None else ProgramsFor(programs, capability, kernels)


def num_mappings() -> int:
    """The memory regions of this process; 0 where the system does not tell."""
    if not MAPPINGS.exists():
        return 0
    with MAPPINGS.open("rb") as file:
        return sum(1 for _ in file)


def most_mappings() -> int:
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
    if num_mappings() <= MOST_SHARE * most_mappings():
        return False
    jax.clear_caches()
    return True
