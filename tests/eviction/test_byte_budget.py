"""Budgets in bytes: the same run as with the slots that they hold, in every format, and refusals with the arithmetic."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.slot_size import slot_bytes, slot_size, slot_size_of
from jkv.evaluation.budgets import Budget
from jkv.evaluation.variants import size_in_slots
from jkv.eviction.byte_budget import ByteBudget, parse_bytes
from pallas_kernels.quantised import FORMATS

CONFIG = dataclasses.replace(jkv.testing.TINY, head_size=32)
KNOBS = {"max_new_tokens": 64, "page_size": 4, "stop_ids": (), "progress": False}
PROMPTS = [[5, 1, 9], [3, 7] * 16 + [1]]
#            bytes of a slot of 2 heads of 32 channels in float32, or in codes, and of its position, in 2 layers and 2 KV heads
WHOLE = {None: 4 * (2 * 128 + 4), "int8": 4 * (2 * 36 + 4), "fp8": 4 * (2 * 36 + 4), "int4": 4 * (2 * 18 + 4)}

EVERYDAY = {("r_kv", None), ("r_kv", "int8"), ("h2o", "int4"), ("streaming_llm", "fp8")}


@pytest.fixture(scope="module")
def model():
    """Random, with heads that every format takes."""
    return jkv.testing.tiny_model(config=CONFIG)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("64MB", 64_000_000), ("1 GB", 10**9), ("1.5 GiB", 3 << 29), ("2kB", 2000), ("2KB", 2000), ("2 KiB", 2048), ("7B", 7)],
)
def test_bytes_are_read_with_their_unit(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["64", "MB", "64mb", "-1MB", "0MB", "1e3MB", "64 TB", "", "0.1B", "1MB 2", "9" * 400 + "MB"])
def test_other_texts_are_refused_by_the_name_of_the_setting(text):
    with pytest.raises(ValueError, match=r"r_kv's budget must be a whole number of slots, or bytes such as \"64MB\""):
        jkv.r_kv(budget=text)


@pytest.mark.parametrize("kv_dtype", WHOLE)
def test_a_slot_has_the_bytes_of_keys_values_and_a_position(model, kv_dtype):
    assert slot_size_of(model.params, FORMATS.get(kv_dtype)).whole == WHOLE[kv_dtype]
    engine = jkv.Engine(model, kv_dtype=kv_dtype, page_size=4, max_running=1, max_slots=64)
    assert 4 * engine.page_bytes == 4 * WHOLE[kv_dtype]  # a page of 4 slots in each of 4 layer-heads


def test_int4_holds_3_4_times_the_slots_of_bfloat16():
    plain, coded = (slot_bytes(128, jnp.dtype("bfloat16"), kv_format) for kv_format in (None, FORMATS["int4"]))
    assert (plain, coded) == (516, 148)
    assert plain / coded >= 3.4


@pytest.mark.everyday(where=lambda name, kv_dtype: (name, kv_dtype) in EVERYDAY)
@pytest.mark.parametrize("kv_dtype", WHOLE)
@pytest.mark.parametrize("name", ["r_kv", "h2o", "streaming_llm"])
def test_a_budget_in_bytes_is_the_run_with_the_slots_that_they_hold(model, name, kv_dtype):
    settings = {} if name != "r_kv" else {"interval": 16, "window": 4}
    recipe, sampling = getattr(jkv, name), jkv.Sampling(seed=1)
    bytes_of_24 = 24 * WHOLE[kv_dtype] + WHOLE[kv_dtype] - 1  # no more than 24
    in_bytes = recipe(budget=f"{bytes_of_24}B", **settings)
    expected = jkv.generate(model, PROMPTS, recipe(budget=24, **settings), sampling, kv_dtype=kv_dtype, **KNOBS)
    got = jkv.generate(model, PROMPTS, in_bytes, sampling, kv_dtype=kv_dtype, **KNOBS)
    np.testing.assert_array_equal(got.logprobs, expected.logprobs)
    assert got.policies[0].budget == 24
    assert got.policies == expected.policies
    rest = "".join(f", {field}={value}" for field, value in settings.items())
    assert repr(got.policies[0]) == repr(in_bytes) == f"{name}(budget='{bytes_of_24}B'{rest})"
    engine = jkv.Engine(model, policies=[in_bytes], kv_dtype=kv_dtype, page_size=4, max_running=2, max_slots=256)
    ticket = engine.submit(PROMPTS[1], in_bytes, sampling, 64, stop_ids=())
    engine.run()
    assert engine.result(ticket).policies[0].budget == 24
    rollout = jkv.Rollout(model, in_bytes, kv_dtype=kv_dtype, max_prompt_tokens=40, max_new_tokens=32)
    assert rollout.defaults.policy.budget == 24


def test_a_budget_in_bytes_is_never_more_bytes_than_that(model):
    """But for what a row grows until its next compaction; in pages of one slot."""
    policy = jkv.streaming_llm(budget="20kB", interval=16)
    out = jkv.generate(model, [PROMPTS[0]], policy, kv_dtype="int8", **KNOBS | {"max_new_tokens": 80, "page_size": 1})
    slots = 20_000 // WHOLE["int8"]
    assert out.policies[0].budget == slots
    assert out.stats.peak_kv_bytes <= 20_000 + 16 * WHOLE["int8"]


@pytest.mark.parametrize("kv_dtype", [None, "int4"])
def test_less_than_a_policy_takes_is_refused_with_the_arithmetic(model, kv_dtype):
    whole = WHOLE[kv_dtype]
    policy = jkv.r_kv(budget=f"{7 * whole}B")
    why = (
        rf"r_kv\(budget='{7 * whole}B'\): .* / \(2 layers x 2 KV heads x {whole // 4} bytes of a slot in "
        rf"{kv_dtype or 'float32'} = .*\) is 7 slots, and r_kv takes at least 8 .*Raise the budget"
    )
    options = {} if kv_dtype is None else {"kv_dtype": kv_dtype}
    for call in (
        lambda: jkv.generate(model, PROMPTS, policy, **options),
        lambda: jkv.Engine(model, **options).submit(PROMPTS[0], policy),
        lambda: jkv.Engine(model, policies=[policy], **options),
        lambda: jkv.Rollout(model, policy, **options),
        lambda: jkv.plan(CONFIG, "cpu", policy, dtype="float32", **options),
    ):
        with pytest.raises(ValueError, match=why):
            call()


def test_a_policy_that_frees_no_memory_takes_slots_alone():
    with pytest.raises(ValueError, match=r"quest keeps every token.*Give slots"):
        jkv.quest(budget="64MB")


def test_other_settings_are_checked_at_once():
    with pytest.raises(ValueError, match="importance must lie in"):
        jkv.r_kv(budget="64MB", importance=2.0)
    with pytest.raises(ValueError, match="r_kv's interval must be a whole number"):
        jkv.r_kv(budget="64MB", interval=0.5)


def test_where_no_model_is_known_slots_are_asked_for():
    policy = jkv.r_kv(budget="64MB")
    assert isinstance(policy, ByteBudget)
    assert policy.budget == "64MB"
    assert hash(policy) == hash(jkv.r_kv(budget="64MB"))
    assert policy == jkv.r_kv(budget="64MB") != jkv.r_kv(budget="65MB")
    with pytest.raises(ValueError, match="chain takes policies with budgets in slots"):
        jkv.chain(jkv.reason_cache(), policy)
    with pytest.raises(TypeError, match="verify takes a policy with its budget in slots"):
        jkv.verify(policy)


def test_a_plan_counts_the_slots_of_its_format():
    """At equal bytes, int4 keeps 3.5 times the slots of bfloat16."""
    plans = {
        kv_dtype: jkv.plan("r1-llama-8b", "h200", jkv.r_kv(budget="128MB"), kv_dtype=kv_dtype, dtype="bfloat16")
        for kv_dtype in (None, "int8", "int4")
    }
    whole = {kv_dtype: 32 * 8 * slot_bytes(128, jnp.dtype("bfloat16"), FORMATS.get(kv_dtype)) for kv_dtype in plans}
    for kv_dtype, plan in plans.items():
        slots = 128_000_000 // whole[kv_dtype]
        expected = jkv.plan("r1-llama-8b", "h200", jkv.r_kv(budget=slots), kv_dtype=kv_dtype, dtype="bfloat16")
        assert plan.own == expected.own
    assert plans["int4"].bytes_per_token == whole["int4"]
    assert plans[None].bytes_per_token / plans["int4"].bytes_per_token >= 3.4


def test_a_comparison_has_equal_bytes_in_every_format():
    """A variant in codes has more slots than its policy in floats."""
    settings = {"r_kv": {"interval": 16, "window": 4}, "coded": {"policy": "r_kv", "kv_dtype": "int4"}}
    slots = [
        size_in_slots(name, Budget(num_bytes="30kB"), slot_size(CONFIG, jnp.dtype("float32"), kv_format), settings).slots
        for name, kv_format in (("r_kv", None), ("coded", FORMATS["int4"]), ("oracle", None))
    ]
    assert slots == [30_000 // WHOLE[None], 30_000 // WHOLE["int4"], 30_000 // WHOLE[None]]
    assert size_in_slots("r_kv", Budget(slots=9), slot_size(CONFIG, jnp.dtype("float32")), settings) == Budget(slots=9)
