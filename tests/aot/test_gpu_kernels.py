"""Counted figures of compiled GPU kernels: loads in flight while a program computes, and programs that the device holds."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import gpu
from tests.aot import gpu_kernels, targets
from tests.aot.gpu_kernels import CALLS, LLAMA, R_KV, attention_kernels
from tests.support import programs

OF_WHOLE_ROWS = "256 slots", "128 rows", "703 rows", "int4, 128 rows"
HEADS = (64, 96, 128, 256)
GROUPS = [
    pytest.param(group, head_size, marks=[] if group in (1, 5, 8) else [pytest.mark.slow])
    for head_size in HEADS
    for group in range(1, 9)
]


def figures_of(*call, **options):
    """The kernels of a call with the figures of their code."""
    found = attention_kernels(*call, **options)
    if not found[0].registers:
        pytest.skip("this JAX writes no PTX of Pallas's kernels")
    return found


@pytest.mark.parametrize("call", CALLS)
def test_two_blocks_are_on_their_way_and_one_wave_holds_all_programs(call):
    model, workload, options = CALLS[call]
    attend, *rest = figures_of(model, workload, **options)
    assert [one.name for one in rest] == ([] if call in OF_WHOLE_ROWS else ["paged_attention_combine"])
    assert max(attend.waits) >= 2  # the keys and the values of the next block
    assert attend.waves <= 1
    item = jnp.dtype(workload.dtype).itemsize
    of_number = {None: item, "int4": 0}.get(workload.kv_format, 1)
    expected = gpu.shared_bytes(model.head_size, of_number, item)
    least = expected - 2304 - 1024 * (call == "int4, head 64")
    assert least <= attend.shared_bytes <= expected + 2048 * options.get("with_logits", False)
    assert attend.spilled_bytes <= (8 if call == "int4" or model.head_size == 256 or call in OF_WHOLE_ROWS else 0)
    assert not any(one.spilled_bytes for one in rest)


def test_a_program_of_128_channels_takes_a_third_of_a_multiprocessor():
    for name in ("32 rows", "page 128", "log-weights"):
        attend, _ = figures_of(CALLS[name][0], CALLS[name][1], **CALLS[name][2])
        assert 60_000 <= attend.shared_bytes <= 100_000
        assert attend.registers <= (160 if name == "log-weights" else 128)
        assert (attend.programs, attend.resident) == (3 * 132, 3)


def test_a_pipeline_of_one_stage_less_is_seen_to_leave_nothing_on_its_way(monkeypatch):
    """A planted fault: every wait is for all loads."""
    monkeypatch.setattr(gpu, "STAGES", 2)
    gpu.paged_attention.clear_cache()
    attend, _ = figures_of(LLAMA, R_KV._replace(batch=31))
    gpu.paged_attention.clear_cache()
    assert max(attend.waits) == 0


@pytest.mark.parametrize(("group", "head_size"), GROUPS)
def test_every_group_and_head_size_compiles(group, head_size):
    model = LLAMA._replace(num_query_heads=group * LLAMA.num_kv_heads, head_size=head_size)
    attend, combine = figures_of(model, R_KV, weighted=group % 2 == 0)
    assert attend.waits[0] >= 2
    assert combine.programs == R_KV.batch * LLAMA.num_kv_heads * group


@pytest.mark.parametrize("call", ["32 rows", "128 rows"])
def test_no_product_and_sum_are_joined_in_one_rounding(call):
    """Two kernels add up the pieces of a row, and must round alike. What is joined belongs to `exp` and `log`."""
    found = gpu_kernels.attention_code(*CALLS[call][:2])
    assert set(found) == {"paged_attention"} | ({"paged_attention_combine"} if call not in OF_WHOLE_ROWS else set())
    for code in found.values():
        assert re.findall(r"\b(?:mul|add)\.rn\.f32", code)
        assert not re.findall(r"\b(?:mul|add|sub)\.(?:ftz\.)?f32", code)  # of those, the assembler may join two
        for joined in re.findall(r"\bfma\.\S*f32\s.*;", code):
            assert re.search(r"0f[0-9A-F]{8}|\.rm\.|(%r\d+), \1;", joined), joined  # a constant of a series, or its last step


@pytest.mark.everyday
def test_a_layer_of_a_decode_step_has_10_kernels():
    """docs/kernels.md lists them. The second layer and the third differ from each other in their weights alone."""
    if reason := targets.why_missing("h200"):
        pytest.skip(reason)
    program, found = programs.PROGRAMS["decode-r_kv"], []
    for num_layers in (2, 3):
        config = dataclasses.replace(programs.R1_LLAMA, num_layers=num_layers)
        sharding = targets.sharding_of("h200")
        shapes = programs.shapes_of(config, dtype=jnp.bfloat16, page_size=16, sharding=sharding, needs=program.needs)
        found.append([one.name for one in gpu_kernels.kernels_of(program.trace, shapes)])
    assert len(found[1]) - len(found[0]) == 10
    for kernel, per_layer in (("paged_attention", 2), ("rotate_append", 1), ("add_norm", 2)):
        assert [sum(name.startswith(kernel) for name in names) for names in found] == [2 * per_layer, 3 * per_layer]
