"""Counted figures of compiled TPU kernels: a row's bundles take less time than its slots take to come from memory."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jkv.testing import find_copies
from pallas_kernels.models import MODELS, Workload
from pallas_kernels.paged_attention import shapes
from pallas_kernels.paged_attention import tpu as attention
from pallas_kernels.rotate_append import tpu as append
from tests.aot import targets, tpu_bundles

SCATTER = 1775  # bundles in which XLA's scatter, one slot after the other, stores 16 slots
CODE = """
     0   :  { %1 = smov 0 }
   0x1 LB: > { %2 = dma.hbm_to_vmem [thread:$0] }
   0x2 LB: >> { %3 = dma.hbm_to_vmem [thread:$0] }
   0x3   : > { %4 = sbr.rel (!%p5) target = $region2 }
   0x4   :  {}
   0x5 PF: > { %5 = smov 1 }
   0x6 LB: >> { %6 = smov 1 }
   0x7   : > { %7 = smov 1 }
   0x8   :  { %8 = sbr.rel (!%p5) target = $region1 }
   0x9   :  {}
"""


@pytest.fixture(scope="module")
def figures():
    """Of all chips and calls. libtpu reads where to write the code when it is loaded, so this runs in another process."""
    for target in tpu_bundles.CHIPS:
        if reason := targets.why_missing(target):
            pytest.skip(reason)
    command = [sys.executable, "-m", "tests.aot.tpu_bundles", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return json.loads(done.stdout.splitlines()[-1])


def test_loops_are_found_in_code():
    (outer,) = tpu_bundles.loops_of(CODE)
    assert outer == tpu_bundles.Loop(5, 1, (tpu_bundles.Loop(3, 1, ()), tpu_bundles.Loop(1, 0, ())))
    assert outer.once == 9


@pytest.mark.parametrize(
    ("target", "call"),
    [
        ("tpu-v5e", "page 128"),
        ("tpu-v5e", "page 16"),
        ("tpu-v5e", "page 128, log-weights"),
        ("tpu-v5e", "page 128, log-weights, logits"),
        ("tpu-v5e", "page 128, head 64"),
        ("tpu-v6e", "page 128"),
    ],
)
def test_a_row_takes_less_time_than_its_slots_from_memory(figures, target, call):
    row = figures[target]["attention"][call]
    assert row["fetch"] + row["rest"] < row["hbm"]


@pytest.mark.parametrize("target", tpu_bundles.CHIPS)
@pytest.mark.parametrize("options", ["", ", log-weights", ", log-weights, logits"])
def test_a_row_of_codes_takes_less_time_than_its_numbers_from_memory(figures, target, options):
    row, numbers = (figures[target]["attention"][f"page 128{form}{options}"] for form in (", int8", ""))
    assert row["fetch"] + row["rest"] < numbers["hbm"]


@pytest.mark.parametrize("options", ["", ", log-weights", ", log-weights, logits"])
def test_a_row_of_int4_takes_two_thirds_of_the_time_of_its_numbers_from_memory(figures, options):
    """On a v5e; a v6e, whose memory is faster for its clock, is limited by these bundles."""
    row, numbers = (figures["tpu-v5e"]["attention"][f"page 128{form}{options}"] for form in (", int4", ""))
    assert row["fetch"] + row["rest"] < 0.67 * numbers["hbm"]


def test_a_row_of_sealed_pages_takes_three_quarters_of_the_time_of_its_numbers_from_memory(figures):
    """On a v5e, as for int4; a v6e takes a third longer than that time."""
    row, numbers = (figures["tpu-v5e"]["attention"][f"page 128{form}"] for form in (", kvarn", ""))
    assert row["fetch"] + row["rest"] < 0.76 * numbers["hbm"]


@pytest.mark.parametrize("target", tpu_bundles.CHIPS)
def test_a_page_is_fetched_in_a_few_bundles(figures, target):
    assert figures[target]["attention"]["page 16"]["fetch"] <= 6 * (1152 // 16)


@pytest.mark.parametrize("target", tpu_bundles.CHIPS)
@pytest.mark.parametrize(("call", "share"), [("append", 5), ("append int8", 4)], ids=["numbers, a fifth", "codes, a quarter"])
def test_a_row_s_slots_are_stored_in_a_part_of_a_scatter_s_bundles(figures, target, call, share):
    assert tpu_bundles.LLAMA.num_kv_heads == 8  # 16 slots, keys and values
    assert figures[target][call] <= SCATTER // share


@pytest.mark.parametrize("target", tpu_bundles.CHIPS)
@pytest.mark.parametrize("head_size", [64, 96])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_narrow_heads_are_read_where_xla_stores_them(target, head_size, dtype):
    model, workload = MODELS["r1-llama-8b"]._replace(head_size=head_size), Workload(batch=32, layers=1, dtype=dtype)
    args = shapes.arguments(model, workload)
    assert attention.why_not(*args) is None
    compiled = targets.compile_kernel(target, attention.paged_attention, args, with_logits=False)
    assert not find_copies(compiled.as_text(), args[1].shape)


@pytest.mark.parametrize("target", tpu_bundles.CHIPS)
@pytest.mark.parametrize(
    ("dtype", "page_size", "kv_format"),
    [
        *((dtype, size, None) for dtype in ("float32", "bfloat16") for size in (16, 128)),
        *(("bfloat16", 128, name) for name in ("int8", "int4")),
    ],
)
@pytest.mark.parametrize("model", ["r1-llama-8b", "r1-qwen-7b"])
def test_slots_are_stored_without_a_scatter_or_a_copy_of_the_pool(target, model, dtype, page_size, kv_format):
    """The second model's 28 query heads do not fill the tiles of a ring: XLA stores them in it."""
    if reason := targets.why_missing(target):
        pytest.skip(reason)
    sharding, (_, heads, kv_heads, head_size) = targets.sharding_of(target), MODELS[model]
    rows, workload = 100, Workload(100, page_size=page_size, layers=1, dtype=dtype, kv_format=kv_format)

    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    kv = jax.tree.map(lambda x: of(x.dtype, *x.shape), workload.pool(MODELS[model]))
    angles = of(jnp.float32, rows, head_size // 2)
    ring = of(dtype, 64 * rows, heads, head_size)
    projected, address = of(dtype, rows, heads + 2 * kv_heads, head_size), of(jnp.int32, rows, kv_heads)
    args = kv, projected, angles, angles, address, ring, of(jnp.int32, rows)
    assert append.why_not(*args) is None
    run = jax.jit(append.rotate_append.__wrapped__, donate_argnums=(0, 5))
    text = targets.compile_for(target, run.trace, *args).as_text()
    assert text.count("tpu_custom_call") == 1
    assert not any(find_copies(text, x.shape) for x in jax.tree.leaves(kv))
    assert not find_copies(text, ring.shape)
    assert text.count(" scatter(") == (heads % 8 != 0)
