"""Which implementations real models get on an accelerator."""

import pytest

from pallas_kernels import KERNELS
from pallas_kernels.dispatch import best
from pallas_kernels.models import MODELS, Workload

OF = {"tpu": "tpu", "cuda": "gpu"}  # platform -> its implementation's name
CASES = [
    pytest.param(kernel, platform, model, id=f"{kernel}-{platform}-{model}")
    for kernel, (_, implementations, _) in KERNELS.items()
    for platform in OF
    if any(one.platform == platform for one in implementations.values())
    for model in MODELS
    if model != "tiny-reasoner"
]


@pytest.mark.parametrize(("kernel", "platform", "model"), CASES)
def test_real_models_fall_back_nowhere_on_an_accelerator(kernel, platform, model):
    _, table, shapes = KERNELS[kernel]
    batch = 64 if MODELS[model].num_kv_heads < 32 else 32  # kernels take fewer than 2**31 numbers of keys; the engine, one row
    for page_size in (16, 128):
        for slots in (1152, 4096, 16_384 if kernel == "paged_attention" else 8192):
            args = shapes.arguments(MODELS[model], Workload(batch=batch, slots=slots, page_size=page_size))
            assert best(table, platform, *args) == OF[platform]


@pytest.mark.parametrize(
    "kernel", ["attention_mass", "block_distance", "key_redundancy", "paged_attention", "replay_attention", "take_slots"]
)
def test_what_the_engine_calls_runs_as_a_kernel_on_both_accelerators(kernel):
    """A kernel may have fewer implementations; the engine's have both."""
    assert {"tpu", "gpu", "reference"} <= set(KERNELS[kernel].implementations)
