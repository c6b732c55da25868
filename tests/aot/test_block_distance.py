"""`block_distance` compiles for every target, for the shapes of real models, and copies nothing."""

import jax
import jax.numpy as jnp
import pytest

from jkv.testing import find_copies
from pallas_kernels.block_distance import gpu, tpu
from pallas_kernels.block_distance.shapes import arguments
from pallas_kernels.models import MODELS, Workload
from tests.aot import targets

IMPLEMENTATIONS = {name: tpu if name in targets.TPUS else gpu for name in targets.WITH_KERNELS}
CASES = [(target, model) for target in targets.WITH_KERNELS for model in MODELS]


def compile_for(target, model, dtype, page_size, turned, kv_format=None):
    workload = Workload(batch=4, page_size=page_size, dtype=dtype, kv_format=kv_format)
    args, one = arguments(MODELS[model], workload, turned=turned), IMPLEMENTATIONS[target]
    reason = one.why_not(*args)
    if reason is None:
        compiled = targets.compile_kernel(target, one.block_distance, args)
        assert not [line for x in jax.tree.leaves(args[0]) for line in find_copies(compiled.as_text(), x.shape)]
        assert compiled.memory_analysis().temp_size_in_bytes < 12 << 20  # tables, and 64 matrices that turn keys of int4
    return reason


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize(("target", "model"), CASES)
def test_it_compiles_and_copies_nothing(target, model, page_size):
    reason = compile_for(target, model, jnp.bfloat16, page_size, turned=True)
    if target != "h200" and model == "tiny-reasoner":
        assert "head size must be a multiple of 128; got 64" in reason
    else:
        assert reason is None


@pytest.mark.parametrize(("dtype", "turned"), [(jnp.float32, True), (jnp.bfloat16, False)], ids=["float32", "as_cached"])
@pytest.mark.parametrize("target", ["tpu-v5e", "h200"])
def test_other_dtypes_and_pages_as_cached_compile(target, dtype, turned):
    for page_size in (16, 128):
        assert compile_for(target, "phi-4", dtype, page_size, turned) is None


@pytest.mark.parametrize("turned", [True, False], ids=["turned", "as_cached"])
@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("target", targets.WITH_KERNELS)
def test_pages_of_codes_are_read_where_they_lie(target, kv_format, turned):
    for model in ("r1-llama-8b", "r1-qwen-1.5b"):
        assert compile_for(target, model, jnp.bfloat16, 128, turned, kv_format) is None
    reason = compile_for(target, "tiny-reasoner", jnp.bfloat16, 128, turned, kv_format)
    assert (reason is None) == (target == "h200" or kv_format == "int4")
