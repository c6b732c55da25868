"""The engine's programs with their kernels chosen: for the devices that run them, or by hand."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from pallas_kernels import choice


class ProgramsFor:
    """Programs that are traced for a compute capability, and with kernels chosen by hand."""

    def __init__(self, programs: Any, capability: tuple[int, int] | None, kernels: str | None) -> None:
        self.programs, self.capability, self.kernels = programs, capability, kernels

    def __getattr__(self, name: str) -> Callable[..., Any]:
        program = getattr(self.programs, name)

        def run(*args: Any, **settings: Any) -> Any:
            with choice.tracing_for(self.capability), choice.choose(self.kernels):
                return program(*args, **settings)

        return run


def programs_for(programs: Any, devices: Iterable[jax.Device], kernels: str | None) -> Any:
    """Programs for these devices; those given, where there is nothing to choose."""
    capability = choice.lowest_capability(devices)
    return programs if capability is None and kernels is None else ProgramsFor(programs, capability, kernels)
