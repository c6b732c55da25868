"""Sealed pages compile for a GPU, with the kernel that reads records, and no program copies the pool or the floats of rows."""

import dataclasses

import jax.numpy as jnp
import pytest

from jkv.testing import assert_no_pool_copy, find_copies
from pallas_kernels.models import MODELS, Workload
from pallas_kernels.sealed_attention import gpu, shapes
from tests.aot import targets
from tests.aot.test_programs import assert_runs, shapes_on
from tests.support import programs

WORKLOADS = {
    "page 128": Workload(layers=1),
    "page 16": Workload(page_size=16, layers=1),
    "long": Workload(batch=16, slots=32_768, layers=1),
    "float32": Workload(dtype=jnp.float32, layers=1),
}


@pytest.mark.everyday(where=lambda name: name in ("r1-qwen-1.5b", "tiny-reasoner"))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_the_kernel_compiles(name, workload):
    """It keeps parts of outputs, and no floats of pages."""
    args = shapes.arguments(MODELS[name], workload)
    assert gpu.why_not(*args) is None
    compiled = targets.compile_kernel("h200", gpu.sealed_attention, args)
    assert not any(find_copies(compiled.as_text(), x.shape) for x in (args[1].key, args[1].value))
    of_parts = 4 * args[0].size * -(-workload.slots // gpu.PIECE)
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * of_parts


@pytest.mark.parametrize("name", ["decode-full", "decode-quest", "prefill", "fork", "release", "detach"])
def test_a_program_updates_sealed_pages_in_place(name):
    program, layers = programs.PROGRAMS[name], 2 if name.startswith(("decode", "prefill")) else programs.DEEP
    needs = dataclasses.replace(program.needs, window=0)
    shapes_of = shapes_on("h200", num_layers=layers, needs=needs, num_rows=64, kv_dtype="kvarn", slots=4096, page_size=128)
    compiled = targets.compile_for("h200", program.trace, shapes_of)
    assert_no_pool_copy(compiled, shapes_of.state.cache.pool)
    assert not find_copies(compiled.as_text(), shapes_of.state.cache.tail.kv.shape)
    if name.startswith("decode"):
        assert_runs(compiled, ("paged_attention", "sealed_attention", "rotate_append"))
