"""Which GPU programs are traced for, and which kernels were chosen by hand.

`with choose("reference"):` chooses for the programs traced inside, and is part of the key of JAX's program caches, as the GPU
is. `JKV_KERNELS=reference` in the environment chooses for a whole process.
"""

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Iterable, Iterator

import jax

from pallas_kernels.launch import triton

VARIABLE = "JKV_KERNELS"
LEAST_CAPABILITY = (8, 0)  # of Triton, in which the GPU kernels are written, and of arithmetic in bfloat16
FP8_CAPABILITY = (8, 9)  # of Triton's conversions from and to floats of 8 bits: with less, the compiler ends the process

# Shared memory of a multiprocessor from a compute capability on (CUDA C++ Programming Guide, "Technical Specifications").
SHARED_KIB = {(8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100, (9, 0): 228, (12, 0): 100}
RESERVED_BYTES = 1024  # of each program, by CUDA

NAMES: dict[str, tuple[str, ...]] = {}  # kernel -> its implementations, best first; the package fills it

Choices = tuple[tuple[str, str], ...]  # (kernel or "*", implementation)

CAPABILITY = jax.make_user_context(None)
PLATFORM = jax.make_user_context(None)
CHOICES = jax.make_user_context(None)


@contextlib.contextmanager
def tracing_for(capability: tuple[int, int] | None) -> Iterator[None]:
    """Programs traced inside are for a GPU of this compute capability, as (major, minor); None changes nothing."""
    with contextlib.nullcontext() if capability is None else CAPABILITY(capability):
        yield


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Programs traced inside are lowered for this platform ("cpu", "tpu" or "cuda"), which this process may not have."""
    with PLATFORM(platform):
        yield


def lowest_capability(devices: Iterable[jax.Device]) -> tuple[int, int] | None:
    """The lowest compute capability of some devices, as (major, minor); None if none of them is an NVIDIA GPU.

    A program of several devices must run on each.
    """
    found = [parse_capability(str(getattr(device, "compute_capability", ""))) for device in devices]
    return min((one for one in found if one is not None), default=None)


def parse_capability(text: str) -> tuple[int, int] | None:
    """A compute capability as (major, minor); None for another text, such as an AMD GPU's.

    >>> parse_capability("7.5"), parse_capability("gfx90a")
    ((7, 5), None)
    """
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def capability() -> tuple[int, int] | None:
    """The compute capability that programs are traced for: that given, or the lowest of this process's GPUs; None without."""
    return CAPABILITY.value or own_capability()


@functools.cache
def own_capability() -> tuple[int, int] | None:
    """The lowest compute capability of this process's GPUs."""
    return lowest_capability(jax.local_devices())


def num_resident(shared_bytes: int, most: int) -> int:
    """Programs with so many bytes of shared memory that a GPU of this process runs at once, `most` or fewer per multiprocessor.

    Without a GPU, as many as an H200 runs.
    """
    return num_multiprocessors() * max(1, min(most, shared_of_multiprocessor() // (shared_bytes + RESERVED_BYTES)))


def shared_of_multiprocessor() -> int:
    """Bytes of shared memory of a multiprocessor of the GPU that programs are traced for; of an H200 without a GPU."""
    known = max(one for one in SHARED_KIB if one <= max(capability() or (9, 0), min(SHARED_KIB)))
    return SHARED_KIB[known] * 1024


@functools.cache
def num_multiprocessors() -> int:
    """Multiprocessors of this process's smallest GPU; an H200's without a GPU."""
    return min((device.core_count for device in jax.local_devices() if device.platform == "gpu"), default=132)


def why_no_triton() -> str | None:
    """Why the GPU kernels cannot be compiled; None when they can, or when nothing is known of the GPU."""
    found = capability()
    if found is not None and found < LEAST_CAPABILITY:
        return f"it needs compute capability {spell(LEAST_CAPABILITY)}, and this GPU has {spell(found)}"
    return why_no_backend()


def why_no_fp8() -> str | None:
    """Why a Triton kernel cannot convert floats of 8 bits; None when it can, or when nothing is known of the GPU."""
    found = capability()
    if found is None or found >= FP8_CAPABILITY:
        return None
    return f"fp8 needs compute capability {spell(FP8_CAPABILITY)}, and this GPU has {spell(found)}; int8 needs no more than 8.0"


@functools.cache
def why_no_backend() -> str | None:
    """Why this JAX cannot compile Triton kernels; None when it can."""
    try:
        triton()
    except ImportError as error:
        return f"JAX {jax.__version__} has no Triton backend of Pallas ({error})"
    return None


def spell(parts: tuple[int, int]) -> str:
    """A compute capability as text."""
    return ".".join(map(str, parts))


def is_old_gpu() -> bool:
    """Whether programs are traced for a GPU without Triton and bfloat16; the first time, a warning says what that means."""
    found = capability()
    if found is None or found >= LEAST_CAPABILITY:
        return False
    warn_of_old_gpu(found)
    return True


@functools.cache
def warn_of_old_gpu(found: tuple[int, int]) -> None:
    """Warns, once for each compute capability."""
    warnings.warn(
        f"This GPU has compute capability {spell(found)}, below {spell(LEAST_CAPABILITY)}: it computes in float32, the default "
        "dtype of weights here, and plain XLA takes the place of the Triton kernels. Results are right, and slower.",
        stacklevel=3,
    )


# By hand.


@contextlib.contextmanager
def choose(kernels: str | None) -> Iterator[None]:
    """Kernels chosen by hand for the programs traced inside; see `parse_choices`. None changes nothing.

    Raises:
      ValueError: an unknown kernel or implementation.
    """
    with contextlib.nullcontext() if kernels is None else CHOICES(parse_choices(kernels)):
        yield


def chosen(kernel: str) -> str | None:
    """The implementation of a kernel that was chosen by hand; None for the best."""
    choices = CHOICES.value
    if choices is None:
        choices = parse_choices(os.environ.get(VARIABLE, ""))
    found = dict(choices)
    return found.get(kernel, found.get("*"))


@functools.cache
def parse_choices(text: str) -> Choices:
    """`"reference"` for every kernel, or `"paged_attention=reference,take_slots=gpu"`; `""` and `"auto"` are the best of each.

    Raises:
      ValueError: an unknown kernel or implementation; the known ones are listed.
    """
    if text in ("", "auto"):
        return ()
    if text == "reference":
        return (("*", text),)
    choices = []
    for part in text.split(","):
        kernel, is_pair, name = (word.strip() for word in part.partition("="))
        if not is_pair or name not in NAMES.get(kernel, ()):
            known = "; ".join(f"{kernel}: {', '.join(names)}" for kernel, names in NAMES.items())
            raise ValueError(
                f'kernels ({VARIABLE}) must be "auto", "reference", or pairs like "paged_attention=reference"; got '
                f"{text[:200]!r}. Known: {known}."
            )
        choices.append((kernel, name))
    return tuple(choices)
