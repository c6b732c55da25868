"""`take_slots` compiles for every target, for the shapes of real models, and updates a donated pool in place."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as kernels
from jkv.testing import find_copies
from pallas_kernels.models import MODELS, Workload, of
from pallas_kernels.take_slots import gpu, reference, tpu
from pallas_kernels.take_slots.shapes import arguments
from tests.aot import targets

IMPLEMENTATIONS = {name: tpu if name in targets.TPUS else gpu for name in targets.WITH_KERNELS}
CASES = [(target, model) for target in targets.WITH_KERNELS for model in MODELS]
NUM_LAYERS = 3


def compile_layers(target, run, args):
    """All layers one after the other, as the pool calls it."""

    def layers(kv, *of_layers):
        return jax.lax.scan(lambda kv, layer: (run(kv, *layer), None), kv, of_layers)[0]

    if reason := targets.why_missing(target):
        pytest.skip(reason)
    args = args[0], *(of(x.dtype, NUM_LAYERS, *x.shape) for x in args[1:])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=targets.sharding_of(target)), args)
    return targets.compile_for(target, jax.jit(layers, donate_argnums=0).trace, *args)


def assert_in_place(compiled, args):
    pool, memory = jax.tree.leaves(args[0]), compiled.memory_analysis()
    num_bytes = sum(x.size * x.dtype.itemsize for x in pool)
    of_slots = args[1].size * pool[0].shape[3] * 2 * pool[0].dtype.itemsize
    assert memory.alias_size_in_bytes >= num_bytes
    assert memory.temp_size_in_bytes < max(of_slots // 4, 12 * 4 * args[1].size)  # tables and addresses, in words
    assert not [line for x in pool for line in find_copies(compiled.as_text(), x.shape)]


@pytest.mark.parametrize(("page_size", "kv_format"), [(16, None), (128, None), (128, "int8"), (128, "int4")])
@pytest.mark.parametrize(("target", "model"), CASES)
def test_it_compiles_and_updates_the_pool_in_place(target, model, page_size, kv_format):
    args = arguments(MODELS[model], Workload(batch=4, page_size=page_size, layers=NUM_LAYERS, kv_format=kv_format))
    one = IMPLEMENTATIONS[target]
    if target != "h200" and model == "tiny-reasoner" and kv_format != "int4":
        assert "head size must be a multiple of 128, at most 1024; got 64" in one.why_not(*args)
    else:
        assert one.why_not(*args) is None
        assert_in_place(compile_layers(target, one.take_slots, args), args)


@pytest.mark.parametrize("target", ["tpu-v5e", "h200"])
@pytest.mark.parametrize(
    "workload",
    [
        Workload(batch=1, page_size=16, slots=4096, dtype=jnp.float32, layers=1),
        Workload(batch=1, page_size=128, slots=4096, dtype=jnp.float32, layers=1),
        Workload(batch=1, page_size=16, slots=8192, layers=1),
        Workload(batch=1, page_size=1024, slots=8192, layers=1),
        Workload(batch=1, page_size=64, slots=64, layers=1),
        Workload(batch=1, page_size=128, slots=8192, layers=1, kv_format="int4"),
        Workload(batch=1, page_size=1024, slots=8192, layers=1, kv_format="int4"),
    ],
    ids=["float32", "float32_of_large_pages", "most_slots", "largest_pages", "one_page", "int4_most_slots", "int4_large_pages"],
)
def test_the_largest_rows_compile(target, workload):
    args, one = arguments(MODELS["r1-qwen-1.5b"], workload), IMPLEMENTATIONS[target]
    assert one.why_not(*args) is None
    targets.compile_kernel(target, one.take_slots, args)


@pytest.mark.parametrize("target", ["tpu-v5e", "h200"])
def test_the_choice_among_implementations_copies_no_pool_either(target):
    args = arguments(MODELS["r1-qwen-1.5b"], Workload(batch=4, page_size=16, layers=NUM_LAYERS))
    compiled = compile_layers(target, functools.partial(kernels.take_slots, implementation=None), args)
    assert_in_place(compiled, args)
    calls = [line for line in compiled.as_text().splitlines() if "custom_call_target=" in line]
    assert any("take_slots" in line for line in calls)


@pytest.mark.parametrize("target", ["tpu-v5e", "h200"])
def test_the_reference_is_seen_to_put_the_slots_aside(target):
    args = arguments(MODELS["r1-qwen-1.5b"], Workload(batch=4, page_size=16, layers=NUM_LAYERS))
    with pytest.raises(AssertionError, match=r"temp_size_in_bytes|copy-done"):
        assert_in_place(compile_layers(target, reference.take_slots, args), args)


def test_an_undonated_pool_is_seen_to_be_copied():
    args = arguments(MODELS["r1-qwen-1.5b"], Workload(batch=4, page_size=16, layers=NUM_LAYERS))
    compiled = targets.compile_kernel("tpu-v5e", tpu.take_slots, args)
    assert find_copies(compiled.as_text(), args[0].shape)
