"""`key_redundancy` compiles for every TPU and the H200, with memory linear in slots."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.key_redundancy import gpu, shapes, tpu
from pallas_kernels.models import MODELS, Workload
from tests.aot import targets
from tests.aot.gpu_kernels import kernels_of

BOTH = ("tpu-v5e", "h200")


def compile_for(target, args, exempt=1, exempt_first=False):
    module, settings = gpu if target == "h200" else tpu, {"threshold": 0.5, "exempt": exempt, "exempt_first": exempt_first}
    assert module.why_not(*args, **settings) is None
    return targets.compile_kernel(target, module.key_redundancy, args, **settings)


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("page_size", [16, 128])
def test_compiles_for_rows_that_are_no_whole_tiles(target, page_size):
    workload = Workload(slots=1040 + page_size, page_size=page_size, dtype=jnp.float32)
    compile_for(target, shapes.arguments(MODELS["r1-qwen-1.5b"], workload))


@pytest.mark.parametrize("target", BOTH)
def test_compiles_for_two_exempt_entries(target):
    compile_for(target, shapes.arguments(MODELS["r1-qwen-1.5b"], Workload()), exempt=2, exempt_first=True)


@pytest.mark.parametrize("target", BOTH)
def test_memory_is_linear_in_slots(target):
    def used(slots):
        args = shapes.arguments(MODELS["r1-qwen-1.5b"], Workload(batch=1, slots=slots))
        return compile_for(target, args).memory_analysis().temp_size_in_bytes

    sizes = [used(slots) for slots in (8192, 16384, 32768)]
    assert sizes[0] < 2 * 8192 * 128 * 2 // 4  # a quarter of the keys
    assert sizes[2] <= 2 * sizes[1] <= 4 * sizes[0]


@pytest.mark.parametrize("head_size", [128, 256])
def test_the_next_tile_is_loaded_while_one_is_compared(head_size):
    """A mask that is loaded first, as that of empty slots was, takes the stage that would be in flight."""
    sharding = targets.sharding_of("h200")
    shape = shapes.arguments(MODELS["r1-llama-8b"]._replace(head_size=head_size), Workload(batch=8, slots=1152))
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shape)
    run = functools.partial(gpu.key_redundancy.__wrapped__, threshold=0.5, exempt=1, exempt_first=False)
    kernels = {kernel.name: kernel for kernel in kernels_of(jax.jit(run).trace, *args)}
    look, take_off = kernels["key_redundancy_look"], kernels["key_redundancy_take_off"]
    assert look.spilled_bytes == take_off.spilled_bytes == 0
    assert look.resident >= 2
    assert look.shared_bytes <= 99 * 1024  # what a program may ask of the smallest GPUs
    if not look.waits:
        pytest.skip("this JAX writes no PTX of Pallas's kernels")
    assert max(look.waits) >= 1
