"""The devices that programs are compiled for without having them: TPU through libtpu, GPUs through JAX's CUDA plugin."""

import contextlib
import functools
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

# Read when libtpu is loaded, which happens at the first topology.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import pytest
from jax.experimental import topologies

from jkv.engine.device_program import options_of
from pallas_kernels import choice


def gpu(
    name: str,
    capability: str,
    shared: tuple[int, int],
    cores: int,
    memory: tuple[int, int, int],
    ghz: float,
    fpus: int = 128,
    threads: int = 2048,
) -> str:
    """A GPU as XLA takes it; a real one prints its own: `xla_client.get_topology_for_devices(jax.devices()).target_config`.

    `shared` is the shared memory of a multiprocessor and of a program, `memory` is bytes a second, those of the second cache
    and those of the device. From NVIDIA's white papers and the CUDA C++ Programming Guide ("Technical Specifications").
    """
    bandwidth, cache, size = memory
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared[0]} shared_memory_per_block_optin: {shared[1]}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} device_memory_size: {size}
  cuda_compute_capability {{ {capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""


HOPPER, ADA = (233472, 232448), (102400, 101376)
MIB, GB_S = 1 << 20, 10**9
GPUS = {
    "h200": gpu("NVIDIA H200", "major: 9", HOPPER, 132, (4800 * GB_S, 60 * MIB, 150_000_000_000), 1.98),
    "h100": gpu("NVIDIA H100 80GB HBM3", "major: 9", HOPPER, 132, (3350 * GB_S, 60 * MIB, 85_000_000_000), 1.98),
    "t4": gpu("Tesla T4", "major: 7 minor: 5", (65536, 65536), 40, (320 * GB_S, 4 * MIB, 15_800_000_000), 1.59, 64, 1024),
    "v100": gpu("Tesla V100-SXM2-16GB", "major: 7", (98304, 98304), 80, (900 * GB_S, 6 * MIB, 16_900_000_000), 1.53, 64),
    "a100": gpu("NVIDIA A100-SXM4-80GB", "major: 8", (167936, 166912), 108, (2039 * GB_S, 40 * MIB, 85_000_000_000), 1.41, 64),
    "l4": gpu("NVIDIA L4", "major: 8 minor: 9", ADA, 58, (300 * GB_S, 48 * MIB, 23_600_000_000), 2.04, threads=1536),
    "rtx3090": gpu(
        "NVIDIA GeForce RTX 3090", "major: 8 minor: 6", ADA, 82, (936 * GB_S, 6 * MIB, 25_300_000_000), 1.7, threads=1536
    ),
}

# Target -> (platform, topology, page size)
TARGETS = {
    "tpu-v4": ("tpu", "v4:2x2x1", 128),
    "tpu-v5e": ("tpu", "v5e:2x2", 128),
    "tpu-v5p": ("tpu", "v5p:2x2x1", 128),
    "tpu-v6e": ("tpu", "v6e:2x2", 128),
    "tpu7x": ("tpu", "tpu7x:2x2x1", 128),
    "h200": ("cuda", "1x1x1", 16),
    "h100": ("cuda", "1x1x1", 16),
    "t4": ("cuda", "1x1x1", 16),
    "v100": ("cuda", "1x1x1", 16),
    "a100": ("cuda", "1x1x1", 16),
    "l4": ("cuda", "1x1x1", 16),
    "rtx3090": ("cuda", "1x1x1", 16),
}
OLD_GPUS = ("t4", "v100")  # without Triton: plain XLA computes the kernels
SMALLER_GPUS = ("a100", "l4", "rtx3090")  # with less shared memory, two without conversions of fp8: `test_smaller_gpus`
ALIKE = ("h100",)  # differs from another target in memory alone
WITH_KERNELS = tuple(target for target in TARGETS if target not in OLD_GPUS + SMALLER_GPUS + ALIKE)
FEW = ("r1-llama-8b", "r1-qwen-1.5b", "tiny-reasoner")
MAIN = (*FEW, "qwq-32b")  # groups of 4, 6 and 5, narrow heads
# Target -> the models that are compiled for it every day. Other targets take the same programs in much the same way.
EVERYDAY = {"tpu-v5e": MAIN, "tpu-v6e": ("r1-qwen-1.5b",), "h200": MAIN, "h100": ("r1-llama-8b",), "t4": FEW, "rtx3090": FEW}
TPUS = tuple(target for target, (platform, *_) in TARGETS.items() if platform == "tpu")
COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin")}  # any one of them
ASSEMBLER = "nvidia-cuda-nvcc-cu12"  # CUDA 13 has none for Volta
EXTRAS = {"tpu": "jkv-cache[aot-tpu]", "cuda": "jkv-cache[aot-gpu]"}


def why_missing(target: str) -> str | None:
    """Why a target cannot be compiled for here; None when its compiler is installed, which says nothing of its working."""
    platform = TARGETS[target][0]
    installed = {distribution.name for distribution in metadata.distributions()}
    if target == "v100" and ASSEMBLER not in installed:
        return f"{ASSEMBLER} is not installed (extra {EXTRAS[platform]})"
    if installed & set(COMPILERS[platform]):
        return None
    return f"{' or '.join(COMPILERS[platform])} is not installed (extra {EXTRAS[platform]})"


@functools.cache
def sharding_of(target: str) -> jax.sharding.Sharding:
    """One device of the target."""
    platform, topology, _ = TARGETS[target]
    options = {"topology": topology, "target_config": GPUS[target]} if platform == "cuda" else {}
    described = topologies.get_topology_desc(topology, platform=platform, **options)
    return jax.sharding.SingleDeviceSharding(described.devices[0])


def compile_for(
    target: str, trace: Callable[..., jax.stages.Traced], *args: Any, compiler_options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """The program that `trace` gives for these arguments, as the target would run it."""
    platform = TARGETS[target][0]
    capability = choice.lowest_capability(sharding_of(target).device_set)
    with described(platform), choice.compiling_for(platform), choice.tracing_for(capability):
        options = options_of(platform) | (compiler_options or {})
        return trace(*args).lower(lowering_platforms=(platform,)).compile(options)


def described(platform: str) -> Any:
    """Tells Pallas which GPU it writes for, where none is at hand to ask (jax 0.11 and later; earlier ones do not ask)."""
    device = getattr(jax.sharding, "AbstractDevice", None)
    if platform != "cuda" or device is None:
        return contextlib.nullcontext()
    gpu = device(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu))


def compile_kernel(target: str, run: Callable[..., Any], args: Any, **settings: Any) -> jax.stages.Compiled:
    """One kernel for shapes, compiled as the target would run it; skips the test where the target's compiler is missing."""
    if reason := why_missing(target):
        pytest.skip(reason)
    leaves, tree = jax.tree.flatten(args)
    return compile_once(target, run, tuple((x.shape, x.dtype) for x in leaves), tree, tuple(settings.items()))


@functools.cache
def compile_once(target: str, run: Callable[..., Any], leaves: Any, tree: Any, settings: Any) -> jax.stages.Compiled:
    """A kernel for shapes that several models may share."""
    sharding = sharding_of(target)
    args = tree.unflatten(jax.ShapeDtypeStruct(*leaf, sharding=sharding) for leaf in leaves)
    return compile_for(target, jax.jit(functools.partial(run, **dict(settings))).trace, *args)
