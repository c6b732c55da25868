"""`attention_mass` compiles for every TPU and the H200, without a matrix of the window's logits in main memory."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention_mass import gpu, shapes, tpu
from pallas_kernels.models import FILES, MODELS, ModelShape, Workload, of
from tests.aot import targets
from tests.aot.gpu_kernels import kernels_of

BOTH = ("tpu-v5e", "h200")


def compile_for(target, args, over_group):
    module = gpu if target == "h200" else tpu
    assert module.why_not(*args, over_group=over_group) is None
    return targets.compile_kernel(target, module.attention_mass, args, over_group=over_group)


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("page_size", [16, 128])
def test_compiles_for_rows_that_are_no_whole_tiles_with_ages_and_log_weights(target, page_size):
    workload = Workload(slots=1040 + page_size, page_size=page_size, dtype=jnp.float32)
    args = shapes.arguments(MODELS["r1-qwen-1.5b"], workload, window=32, with_age=True, weighted=True)
    compile_for(target, args, "mean")


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("over_group", ["max", "mean"])
@pytest.mark.parametrize("slots", [1152, 32768])
def test_compiles_with_the_learned_sinks_of_gpt_oss(target, over_group, slots):
    model = ModelShape.read(FILES["gpt-oss-20b"])
    args = shapes.arguments(model, Workload(batch=1, slots=slots), window=32, with_age=True)
    compile_for(target, (*args, of(jnp.float32, model.num_kv_heads, model.group)), over_group)


@pytest.mark.parametrize("target", BOTH)
@pytest.mark.parametrize("over_group", ["max", "mean"])
def test_a_prompt_s_chunk_of_long_rows_takes_little_memory(target, over_group):
    workload = Workload(batch=1, slots=32768)
    args = shapes.arguments(MODELS["r1-qwen-7b"], workload, window=512, with_age=True)
    used = compile_for(target, args, over_group).memory_analysis().temp_size_in_bytes
    assert used < args[1].size * 2 // 4  # of the keys; the logits of one head are twice as large as they


@pytest.mark.parametrize("over_group", ["max", "mean"])
@pytest.mark.parametrize("window", [8, 32])
@pytest.mark.parametrize("name", ["qwen3.5-9b", "gemma3-4b"])
def test_heads_of_256_leave_room_for_two_programs_and_spill_nothing(name, window, over_group):
    """On the smallest GPUs, which give a program at most 99 KiB of shared memory, for one."""
    model = ModelShape.read(FILES[name])
    assert model.head_size == 256
    sharding, shape = targets.sharding_of("h200"), shapes.arguments(model, Workload(batch=8), window=window, with_age=True)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shape)
    assert gpu.why_not(*args, over_group=over_group) is None
    run = functools.partial(gpu.attention_mass.__wrapped__, over_group=over_group)
    found = [one for one in kernels_of(jax.jit(run).trace, *args) if one.name.startswith("attention_mass")]
    assert len(found) == 2
    for one in found:
        assert one.shared_bytes <= 99 * 1024
        assert one.spilled_bytes == 0
        assert one.resident >= 2
