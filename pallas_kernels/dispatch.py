"""Chooses the implementation of a kernel: the best one for the platform by default, or the named one, or a clear error.

A kernel's table lists its implementations, best first. One with a platform runs only on that platform. One that cannot take
some arguments returns the reason, which depends on shapes and dtypes alone, never on values. The reference takes all arguments
on all platforms. `pallas_kernels.choice` says for which GPU, and what was chosen by hand.
"""

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.choice import PLATFORM, chosen, is_old_gpu, why_no_triton
from pallas_kernels.quantised import Quantised

PLATFORMS = ("cpu", "tpu", "cuda")


def takes_all(*args: Any, **settings: Any) -> None:
    """The `why_not` of an implementation that takes all arguments."""


class Implementation(NamedTuple):
    """One way to compute a kernel."""

    run: Callable[..., Any]
    platform: str | None = None  # None: all
    why_not: Callable[..., str | None] = takes_all  # the kernel's arguments -> why it cannot take them, or None
    reads_codes: bool = False  # whether it takes quantised pages; one for all platforms does
    reads_groups: bool = False  # whether it takes those with a scale for each group of channels too


Table = Mapping[str, Implementation]
TAKEN: dict[tuple[str, str], set[str]] = {}  # (kernel, platform) -> what was chosen there, in programs of this process


class Kernel(NamedTuple):
    """What a kernel's folder holds."""

    call: Callable[..., Any]  # the public function
    implementations: Table
    shapes: ModuleType  # real calls: CASES, arguments, values, num_bytes


def kernel_in(name: str) -> Kernel:
    """The kernel in the folder of that name: the function of the same name, `IMPLEMENTATIONS`, and `shapes.py`."""
    folder = importlib.import_module(f"pallas_kernels.{name}")
    return Kernel(getattr(folder, name), folder.IMPLEMENTATIONS, importlib.import_module(f"pallas_kernels.{name}.shapes"))


def reason_against(implementation: Implementation, *args: Any, **settings: Any) -> str | None:
    """Why an implementation cannot take these arguments, by their shapes and dtypes, or not on this GPU; None when it can."""
    if implementation.platform is None:
        return None
    if implementation.platform == "cuda" and (reason := why_no_triton()):
        return reason
    if any(0 in np.shape(x) for x in jax.tree.leaves(args)):
        return "an argument is empty"
    if not implementation.reads_codes and any(isinstance(x, Quantised) for x in args):
        return "it does not take quantised pages"
    if not implementation.reads_groups:
        for x in args:
            if isinstance(x, Quantised) and x.format.group is not None:
                return f"it does not take quantised pages of {x.format.name}, which have a scale for each group of channels"
    return implementation.why_not(*args, **settings)


def best(table: Table, platform: str, *args: Any, **settings: Any) -> str:
    """The name of the implementation that None chooses on a platform."""
    for name, implementation in table.items():
        if implementation.platform == platform and reason_against(implementation, *args, **settings) is None:
            return name
    return "reference"


def runs_native(kernel: str, table: Table, *args: Any, **settings: Any) -> bool:
    """Whether C++ computes a kernel, in programs for a CPU with arguments of these shapes and dtypes."""
    return (chosen(kernel) or best(table, "cpu", *args, **settings)) == "native"


def refusals(table: Table, platform: str, *args: Any, **settings: Any) -> dict[str, str]:
    """Name -> reason, for each implementation that cannot run on a platform or with these arguments."""
    found = {}
    for name, implementation in table.items():
        if implementation.platform not in (None, platform):
            found[name] = f"it is for {implementation.platform}, and this process computes on {platform}"
        elif (reason := reason_against(implementation, *args, **settings)) is not None:
            found[name] = reason
    return found


def call(kernel: str, table: Table, implementation: str | None, *args: Any, **settings: Any) -> Any:
    """The result of the named implementation; None takes the one chosen by hand, or the best one for the platform that the
    program is compiled for, which is one of `possible_platforms`.

    Warns when this process computes on an accelerator and None chooses the reference there, except where the kernel has no
    implementation for an accelerator that others are for: XLA's is meant.

    Raises:
      ValueError: the kernel has no implementation of that name, or that one cannot run here or with these arguments.
    """
    here = own_platform()
    if implementation is None and (implementation := chosen(kernel)) is not None:
        TAKEN.setdefault((kernel, here), set()).add(implementation)
    if implementation is None:
        names = {platform: best(table, platform, *args, **settings) for platform in possible_platforms()}
        for platform, name in names.items():
            TAKEN.setdefault((kernel, platform), set()).add(name)
        is_for_here = here not in PLATFORMS or any(one.platform == here for one in table.values())
        is_plain = is_for_here and names.get(here, "reference") == "reference"
        if here != "cpu" and is_plain and not (here == "cuda" and is_old_gpu()):
            found = refusals({name: one for name, one in table.items() if one.platform == here}, here, *args, **settings)
            reasons = "; ".join(f"{name}: {reason}" for name, reason in found.items()) or "it has no other implementation"
            warnings.warn(f"{kernel} is computed by plain XLA on this {here}: {reasons}.", stacklevel=3)
        if len(names) == 1:
            return table[next(iter(names.values()))].run(*args, **settings)
        own = {platform: bind(table[name], settings) for platform, name in names.items() if name != "reference"}
        if not own:
            return table["reference"].run(*args, **settings)
        return jax.lax.platform_dependent(*args, default=bind(table["reference"], settings), **own)
    if implementation not in table:
        raise ValueError(f"{kernel} has the implementations {sorted(table)}, or None for the best; got {implementation!r}.")
    if implementation in refusals({implementation: table[implementation]}, here, *args, **settings):
        found = refusals(table, here, *args, **settings)
        reasons, able = "; ".join(f"{name}: {reason}" for name, reason in found.items()), [x for x in table if x not in found]
        raise ValueError(f"{kernel} cannot run as {implementation!r} ({reasons}). Choose one of {able}, or None for the best.")
    return table[implementation].run(*args, **settings)


def taken(platform: str) -> dict[str, str]:
    """Kernel -> the implementations that None chose on a platform, in the programs traced in this process so far."""
    return {kernel: ", ".join(sorted(names)) for (kernel, of), names in sorted(TAKEN.items()) if of == platform}


def bind(implementation: Implementation, settings: dict[str, Any]) -> Callable[..., Any]:
    """The implementation as a function of its arrays."""
    return lambda *args: implementation.run(*args, **settings)


def own_platform() -> str:
    """The platform that this process computes on by default: one of `PLATFORMS`, or another one ("rocm")."""
    return platform_of(jax.devices()[0])


def possible_platforms() -> tuple[str, ...]:
    """The platforms that a program traced now may be lowered for: that of `choice.compiling_for`, or this process's."""
    return (PLATFORM.value,) if PLATFORM.value else platforms_here()


@functools.cache
def platforms_here() -> tuple[str, ...]:
    """The platforms of which this process has devices. Tracing a kernel for others would take as long again, for nothing."""

    def is_here(platform: str) -> bool:
        try:
            return bool(jax.devices(platform))
        except RuntimeError:
            return False

    return tuple(filter(is_here, PLATFORMS))


def platform_of(device: jax.Device) -> str:
    """The platform of a device; for a GPU, "cuda" or "rocm"."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
