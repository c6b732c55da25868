"""No device program copies the pool on the CPU, where float32 is the type to use: 0.10.2 rewrites a bf16 pool in float32."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from jkv.engine import programs as device
from jkv.engine.row_moves import BLOCK
from jkv.testing import TINY, assert_no_pool_copy, find_copies
from pallas_kernels.quantised import FORMATS
from tests.support import programs
from tests.support.sweeps import in_turn


def shapes_on_the_cpu(needs=programs.NOTHING, kv_dtype=None, **settings) -> programs.Shapes:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    config = dataclasses.replace(TINY, head_size=64)  # keys larger than the rows of R-KV's similarity matrix
    settings |= {"dtype": jnp.float32, "page_size": 16, "sharding": sharding, "needs": needs, "kv_dtype": kv_dtype}
    return programs.shapes_of(config, **settings)


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_program_updates_the_pool_in_place(name):
    program = programs.PROGRAMS[name]
    shapes = shapes_on_the_cpu(program.needs)
    assert_no_pool_copy(program.trace(shapes).lower().compile(), shapes.state.cache.pool)


@pytest.mark.everyday(where=lambda name, kv_dtype: in_turn(programs.PROGRAMS, name, FORMATS, kv_dtype))
@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_program_updates_quantised_pages_in_place(name, kv_dtype):
    """A conversion of the whole pool to floats would show too: it has as many elements. Compaction reads one row as floats.

    64 rows, beside which the activations of a prefill are small.
    """
    program, rows = programs.PROGRAMS[name], 64
    shapes = shapes_on_the_cpu(program.needs, kv_dtype, num_rows=rows)
    pool = shapes.state.cache.pool
    row = math.prod(pool.kv.shape) * 4 // rows
    assert_no_pool_copy(program.trace(shapes).lower().compile(), pool, row)


@pytest.mark.parametrize("name", [name for name in programs.PROGRAMS if name.startswith("decode-")])
def test_no_decode_program_sorts_the_vocabulary(name):
    """Draws that cut, and penalise. Quest sorts pages, of which there are few."""
    program = programs.PROGRAMS[name]
    decode = functools.partial(program.trace, draws="truncated", penalises=True)
    text = decode(shapes_on_the_cpu(program.needs)).lower().as_text()
    assert f"tensor<{programs.NUM_ROWS}x{TINY.vocab_size}xi32>" in text  # the counts of penalties
    assert ("stablehlo.sort" in text) == (name == "decode-quest")
    assert "chlo.top_k" not in text


@pytest.mark.parametrize("name", ["read_pages", "measure_pages"])
def test_pages_are_read_without_a_copy_of_the_others(name):
    shapes = shapes_on_the_cpu(programs.SHARING)
    pool = shapes.state.cache.pool
    traced = (
        programs.measure_pages(shapes)
        if name == "measure_pages"
        else device.read_pages.trace(shapes.state, shapes.leaf(TINY.num_kv_heads, BLOCK))
    )
    compiled = traced.lower().compile()
    assert not find_copies(compiled.as_text(), pool.kv.shape)
    assert compiled.memory_analysis().temp_size_in_bytes < pool.kv.size * 4 // 10


@pytest.mark.parametrize("name", ["undonated", "sliced-keys"])
def test_planted_copy_is_found(name):
    shapes = shapes_on_the_cpu()
    compiled = programs.PLANTED[name](shapes).lower().compile()
    with pytest.raises(AssertionError, match="is it donated" if name == "undonated" else "copied"):
        assert_no_pool_copy(compiled, shapes.state.cache.pool)


@pytest.mark.parametrize(
    "line",
    [
        "%copy.1 = bf16[9,2,8,128]{3,2,1,0:T(8,128)(2,1)} copy(%p)",
        "%copy.2 = bf16[18,8,128]{2,1,0} copy(%bitcast)",
        "ROOT %transpose.3 = f32[9,8,2,128]{3,2,1,0} transpose(%p), dimensions={0,2,1,3}",
        "%convert.4 = f32[9,2,8,128]{3,2,1,0} convert(%p)",
        "%copy-done.5 = bf16[9,2,8,128]{3,2,1,0} copy-done(%copy-start.5)",
    ],
    ids=["copy", "copy-of-merged-axes", "transpose", "convert", "asynchronous-copy"],
)
def test_find_copies_knows_each_form(line):
    assert find_copies("%p = bf16[9,2,8,128]{3,2,1,0} parameter(0)\n  " + line, (9, 2, 8, 128)) == [line]
