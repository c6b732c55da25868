"""Layers with a recurrent state beside layers with full attention: through every part of the engine, and in replay.

Parity with transformers is in `tests/model/test_decoder.py` (the golden checkpoint `qwen3_5`), and the recurrence itself in
`tests/model/test_delta_net.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.engine.chunk_inputs import PrefillPrograms
from jkv.engine.memory import state_bytes
from jkv.engine.state import empty_state
from jkv.eviction import Needs
from jkv.model import decoder
from jkv.replay.columns import dense_columns
from jkv.replay.score import token_scores
from jkv.testing import find_copies
from research.tasks.train import packed_attention
from tests.support import programs
from tests.support.recurrent import CONFIG, SIZES, recurrent_model

PROMPTS = [list(range(1, 22)), [4, 4, 9], [7]]
KNOBS = {"max_new_tokens": 40, "page_size": 4, "chunk": 8, "stop_ids": (), "progress": False, "poison": True}
MODEL = recurrent_model()


def run(prompts=PROMPTS, model=MODEL, **settings):
    return jkv.generate(model, prompts, **{"sampling": jkv.Sampling(seed=1)} | KNOBS | settings)


@pytest.fixture(scope="module")
def out():
    """Tokens that the model has drawn."""
    return run(return_trace=True)


CHANGES = {
    "rotary_size": {"rotary_size": 0},
    "norm_offset": {"norm_offset": 0.5},
    "layers": {"rope_theta": 3.0},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_feature_changes_what_is_computed(out, change):
    other = MODEL.params.replace(config=dataclasses.replace(CONFIG, **change))
    assert np.abs(np.asarray(jkv.score(other, out, trace=out.trace).logprobs) - out.logprobs).max() > 1e-3


@pytest.mark.parametrize("field", ["decay_bias", "log_decay", "rate", "decay", "gate", "norm", "key_taps"])
def test_each_weight_of_a_recurrence_counts(out, field):
    first = MODEL.params.layers[0]
    delta = first.delta.replace(**{field: 1.5 * getattr(first.delta, field) + 0.1})
    other = MODEL.params.replace(layers=(first.replace(delta=delta), *MODEL.params.layers[1:]))
    assert np.abs(np.asarray(jkv.score(other, out, trace=out.trace).logprobs) - out.logprobs).max() > 1e-4


def test_a_long_prompt_enters_in_pieces(monkeypatch):
    prompt = np.random.default_rng(0).integers(4, 30, 170).tolist()
    out = run(prompts=[prompt], return_trace=True)
    monkeypatch.setattr("jkv.engine.chunk_inputs.OF_CPU", PrefillPrograms((16, 64), 8))
    in_pieces = run(prompts=[prompt])
    np.testing.assert_array_equal(in_pieces.tokens, out.tokens)
    np.testing.assert_allclose(in_pieces.logprobs, out.logprobs, atol=1e-5)
    np.testing.assert_allclose(jkv.score(MODEL, out).logprobs, out.logprobs, atol=1e-4)


def test_a_prompt_that_enters_beside_decoding_rows_changes_no_state(monkeypatch):
    """Its pieces are prefilled between the chunks of the others, whose steps must leave its state alone."""
    monkeypatch.setattr("jkv.engine.chunk_inputs.OF_CPU", PrefillPrograms((16,), 8))
    prompts = [PROMPTS[0], np.random.default_rng(0).integers(4, 30, 170).tolist()]

    def outcome(at_once):
        engine = jkv.Engine(MODEL, max_running=2, max_slots=256, page_size=4, chunk=4, prefill_tokens=16, poison=True)
        tickets = [engine.submit(prompts[0], max_new_tokens=60, stop_ids=())]
        for _ in range(2) if at_once else range(100):
            engine.step()
        tickets.append(engine.submit(prompts[1], max_new_tokens=20, stop_ids=()))
        engine.run()
        return [engine.result(ticket) for ticket in tickets]

    for one, other in zip(outcome(True), outcome(False), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_a_row_of_the_batch_begins_from_nothing():
    """Whatever an earlier row has left there."""
    engine = jkv.Engine(MODEL, max_running=1, max_slots=64, page_size=4)
    engine.submit(PROMPTS[0], max_new_tokens=20, stop_ids=())
    ticket = engine.submit([7], max_new_tokens=20, stop_ids=())
    engine.run()
    fresh = run(prompts=[[7]], max_new_tokens=20, sampling=jkv.Sampling(temperature=0.0))
    out = engine.result(ticket)
    np.testing.assert_array_equal(out.tokens, fresh.tokens)
    np.testing.assert_allclose(out.logprobs, fresh.logprobs, atol=1e-6)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_pages_may_be_quantised_and_states_are_not(kv_dtype):
    quantised = {"kv_format": jkv.EngineOptions(kv_dtype=kv_dtype).kv_format, "page_size": 4}
    state = empty_state(CONFIG, Needs(), num_rows=2, num_pages=8, max_pages=4, dtype=jnp.bfloat16, **quantised)
    assert {x.dtype.name for x in jax.tree.leaves(state.cache.states)} == {"float32", "bfloat16"}


def test_weights_may_be_in_eight_bits():
    params = jkv.quantise_weights(MODEL.params, "int8")
    assert params.layers[0].delta.value.code.dtype == jnp.int8
    model = dataclasses.replace(MODEL, params=params)
    out = run(model=model, return_trace=True)
    assert np.percentile(np.abs(np.asarray(jkv.score(model, out, trace=out.trace).logprobs) - out.logprobs), 99) <= 1e-5


def test_gradients_with_and_without_remat_are_the_same():
    out = run(prompts=PROMPTS[:1], max_new_tokens=10)
    token = jnp.asarray([[*PROMPTS[0], *out.tokens[0].tolist()]])
    columns = dense_columns(CONFIG, *token.shape)
    settings = jax.tree.map(jnp.asarray, jkv.model.sampling.rows_of([jkv.Sampling()]))

    def loss(params, remat):
        return token_scores(params, token, columns, settings, remat=remat).log_prob.sum()

    with_remat, without = (jax.grad(loss)(MODEL.params, remat) for remat in (True, False))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), with_remat, without)
    assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(without.layers[0].delta))


@pytest.mark.parametrize("name", ["decode", "prefill", "release", "fork", "detach"])
def test_no_program_copies_the_states(name):
    sizes = dataclasses.replace(SIZES, num_value_heads=8, key_size=64, value_size=64)
    config = dataclasses.replace(CONFIG, delta_net=sizes)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = programs.shapes_of(config, dtype=jnp.float32, page_size=16, sharding=sharding)
    trace = getattr(programs, name, None) or programs.PROGRAMS[name].trace
    compiled = trace(shapes).lower().compile()
    memory = shapes.state.cache.states[0].memory
    assert not find_copies(compiled.as_text(), memory.shape)
    assert compiled.memory_analysis().alias_size_in_bytes >= memory.size * 4
    if name != "prefill":  # whose activations are larger
        assert compiled.memory_analysis().temp_size_in_bytes < memory.size * 4 / 3


# What is counted, and what is refused.


def test_states_count_in_statistics_budgets_and_plans():
    engine = jkv.Engine(MODEL, max_running=3, max_slots=64, page_size=4)
    of_states = state_bytes(CONFIG, 3, jnp.float32)
    assert of_states == 2 * 3 * 4 * (4 * 8 * 12 + 3 * (2 * 2 * 8 + 4 * 12))  # layers, rows, bytes, memory and last inputs
    assert of_states == sum(x.nbytes for x in jax.tree.leaves(engine.runner.state.cache.states))
    assert engine.runner.meter.row_bytes >= of_states
    engine = jkv.Engine(MODEL, max_running=3, max_slots=64, page_size=4, kv_memory=of_states + 10 * engine.page_bytes)
    assert engine.num_pages == 10
    with pytest.raises(ValueError, match=r"kv_memory must hold the recurrent states of 2 layers, .* lower max_running"):
        jkv.Engine(MODEL, max_running=3, max_slots=64, page_size=4, kv_memory=of_states)
    plan = jkv.plan(CONFIG, jkv.DEVICES["h200"], length=1024, prompt=8, batch=4, page_size=4)
    fields = {"num_layers": 2, "state_layers": (), "delta_net": None}
    plain = jkv.plan(dataclasses.replace(CONFIG, **fields), jkv.DEVICES["h200"], length=1024, prompt=8, batch=4, page_size=4)
    assert plan.bytes_per_token == plain.bytes_per_token
    assert plan.own.row_bytes - plain.own.row_bytes == state_bytes(CONFIG, 1, jnp.bfloat16)
    read = plan.own.phases["attention"] - plain.own.phases["attention"]
    assert read == pytest.approx(4 * 2 * state_bytes(CONFIG, 1, jnp.bfloat16) / jkv.DEVICES["h200"].bandwidth)
    of_row, of_token = state_bytes(CONFIG, 1, jnp.bfloat16), 2 * 2 * 2 * 8 * 2  # layers, heads, key and value, channels, bytes
    assert f"2 of 4 layers have a recurrent state: {of_row / 1000:.3g} kB a row at any length" in repr(plan)
    assert f"as much as {of_row // of_token:,} tokens" in repr(plan)


def test_a_full_cache_has_states_too():
    out = run(prompts=[PROMPTS[0]], page_size=1, max_new_tokens=20)
    assert out.stats.dense_kv_bytes == 2 * 41 * 2 * 2 * 8 * 4 + state_bytes(CONFIG, 1, jnp.float32)


def test_the_prefix_cache_is_refused():
    with pytest.raises(ValueError, match=r"prefix_cache .* layers \[0, 2\] have a recurrent state"):
        jkv.Engine(MODEL, prefix_cache=True)


def test_a_computation_that_does_not_know_states_is_refused():
    token = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"full attention in every layer; layers \[0, 2\] have a recurrent state"):
        decoder.forward(MODEL.params, token, token, packed_attention, jnp.ones((1, 4, 4), bool))
