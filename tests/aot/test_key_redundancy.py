"""`key_redundancy` compiles for every TPU and the H200, with memory linear in slots."""

import jax.numpy as jnp
import pytest

from pallas_kernels.key_redundancy import gpu, shapes, tpu
from pallas_kernels.models import MODELS, Workload
from tests.aot import targets

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
