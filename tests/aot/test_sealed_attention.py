"""Sealed pages compile for a GPU and TPUs, with the kernel that reads records; no program copies the pool or rows' floats."""

import dataclasses

import jax.numpy as jnp
import pytest

from jkv.testing import assert_no_pool_copy, find_copies
from pallas_kernels.models import MODELS, Workload
from pallas_kernels.sealed_attention import gpu, shapes, tpu
from tests.aot import targets
from tests.aot.test_programs import assert_runs, shapes_on
from tests.support import programs

WORKLOADS = {
    "page 128": Workload(layers=1),
    "page 16": Workload(page_size=16, layers=1),
    "long": Workload(batch=16, slots=32_768, layers=1),
    "float32": Workload(dtype=jnp.float32, layers=1),
}
ON_TPU = [name for name in WORKLOADS if name != "page 16"]
TPUS = [name for name in targets.WITH_KERNELS if name.startswith("tpu")]
CASES = [("h200", name) for name in ("decode-full", "decode-quest", "prefill", "fork", "release", "detach")]
ON_TPUS = [(target, name) for target in ("tpu-v5e", "tpu-v6e") for name in ("decode-full", "decode-quest", "prefill", "fork")]
EVERYDAY = ("tpu-v5e", "decode-full"), ("tpu-v5e", "prefill")
CASES += [pytest.param(*case, marks=[] if case in EVERYDAY else pytest.mark.slow) for case in ON_TPUS]


def assert_copies_no_pages(compiled, records):
    assert not any(find_copies(compiled.as_text(), x.shape) for x in (records.key, records.value, records.scales))


@pytest.mark.everyday(where=lambda name: name in ("r1-qwen-1.5b", "tiny-reasoner"))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_the_kernel_compiles(name, workload):
    """It keeps parts of outputs, and no floats of pages."""
    args = shapes.arguments(MODELS[name], workload)
    assert gpu.why_not(*args) is None
    compiled = targets.compile_kernel("h200", gpu.sealed_attention, args)
    assert_copies_no_pages(compiled, args[1])
    of_parts = 4 * args[0].size * -(-workload.slots // gpu.PIECE)
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * of_parts


@pytest.mark.everyday(where=lambda name, workload, target: (name, workload) == ("r1-llama-8b", "page 128"))
@pytest.mark.parametrize("workload", ON_TPU)
@pytest.mark.parametrize("name", ["r1-qwen-1.5b", "r1-llama-8b"])
@pytest.mark.parametrize("target", TPUS)
def test_the_kernel_compiles_for_a_tpu(target, name, workload):
    """It reads pages where they lie, and keeps nothing beside its padded queries and outputs."""
    args = shapes.arguments(MODELS[name], WORKLOADS[workload])
    assert tpu.why_not(*args) is None
    compiled = targets.compile_kernel(target, tpu.sealed_attention, args)
    assert_copies_no_pages(compiled, args[1])
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * args[0].size * args[0].dtype.itemsize


@pytest.mark.everyday
@pytest.mark.parametrize(("target", "name"), CASES)
def test_a_program_updates_sealed_pages_in_place(target, name):
    program, layers = programs.PROGRAMS[name], 2 if name.startswith(("decode", "prefill")) else programs.DEEP
    needs = dataclasses.replace(program.needs, window=0)
    shapes_of = shapes_on(target, num_layers=layers, needs=needs, num_rows=64, kv_dtype="kvarn", slots=4096, page_size=128)
    compiled = targets.compile_for(target, program.trace, shapes_of)
    assert_no_pool_copy(compiled, shapes_of.state.cache.pool)
    assert not find_copies(compiled.as_text(), shapes_of.state.cache.tail.kv.shape)
    if name.startswith("decode"):
        assert_runs(compiled, ("paged_attention", "sealed_attention", "rotate_append"))
