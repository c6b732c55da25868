"""`attention_mass` compiles for every TPU and the H200, without a matrix of the window's logits in main memory."""

import jax.numpy as jnp
import pytest

from pallas_kernels.attention_mass import gpu, shapes, tpu
from pallas_kernels.models import MODELS, Workload
from tests.aot import targets

BOTH = ("tpu-v5e", "h200")


def compile_for(target, args, over_group):
    module = gpu if target == "h200" else tpu
    assert module.why_not(*args, over_group) is None
    return targets.compile_kernel(target, module.attention_mass, args, over_group=over_group)


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("page_size", [16, 128])
def test_compiles_for_rows_that_are_no_whole_tiles_with_ages_and_log_weights(target, page_size):
    workload = Workload(slots=1040 + page_size, page_size=page_size, dtype=jnp.float32)
    args = shapes.arguments(MODELS["r1-qwen-1.5b"], workload, window=32, with_age=True, weighted=True)
    compile_for(target, args, "mean")


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("over_group", ["max", "mean"])
def test_a_prompt_s_chunk_of_long_rows_takes_little_memory(target, over_group):
    workload = Workload(batch=1, slots=32768)
    args = shapes.arguments(MODELS["r1-qwen-7b"], workload, window=512, with_age=True)
    used = compile_for(target, args, over_group).memory_analysis().temp_size_in_bytes
    assert used < args[1].size * 2 // 4  # of the keys; the logits of one head are twice as large as they
