"""A learned sink in every query head: through every part of the engine, in scores, in replay and its gradients.

Parity with transformers is in `tests/model/test_decoder.py` (the golden checkpoint `gpt_oss`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.analysis.recall import attention_received
from jkv.eviction.scores import AttentionMass
from jkv.model import decoder
from jkv.policies.g_kv import largest_attention
from jkv.testing import TINY, TinyTokenizer, random_view, tiny_model
from research.tasks.train import packed_attention
from tests.support.learned_sinks import CONFIG, with_random_vectors

MODEL = with_random_vectors(tiny_model(1, CONFIG, TinyTokenizer()))
PROMPTS = [list(range(1, 22)), [4, 4, 9], [7]]
KNOBS = {"max_new_tokens": 40, "page_size": 4, "chunk": 8, "stop_ids": (), "progress": False, "poison": True}
POLICIES = {
    "r_kv": jkv.r_kv(budget=24, interval=8, window=4),
    "h2o": jkv.h2o(budget=16),
}


def run(policy=None, prompts=PROMPTS, model=MODEL, **settings):
    return jkv.generate(model, prompts, policy=policy or jkv.full(), **{"sampling": jkv.Sampling(seed=1)} | KNOBS | settings)


def with_sinks(model, change):
    """The model with other sinks."""
    layers = tuple(layer.replace(sink=change(layer.sink)) for layer in model.params.layers)
    return dataclasses.replace(model, params=model.params.replace(layers=layers))


@pytest.mark.parametrize("layers", [(0,), (1, 2)], ids=["window", "paged"])
def test_a_replay_without_the_sinks_of_some_layers_differs(layers):
    out = run(return_trace=True)
    none = tuple(
        layer.replace(sink=jnp.full_like(layer.sink, -1e9)) if i in layers else layer
        for i, layer in enumerate(MODEL.params.layers)
    )
    other = dataclasses.replace(MODEL, params=MODEL.params.replace(layers=none))
    assert np.abs(np.asarray(jkv.score(other, out, trace=out.trace).logprobs) - out.logprobs).max() > 1e-2


def test_sinks_far_below_all_logits_change_nothing():
    plain = dataclasses.replace(CONFIG, has_sinks=False)
    none = tuple(layer.replace(sink=None) for layer in MODEL.params.layers)
    without = dataclasses.replace(MODEL, params=MODEL.params.replace(config=plain, layers=none))
    out, other = (run(POLICIES["h2o"], model=one) for one in (with_sinks(MODEL, lambda x: x - 1e5), without))
    np.testing.assert_array_equal(out.tokens, other.tokens)
    np.testing.assert_allclose(out.logprobs, other.logprobs, atol=1e-5)


def test_a_score_of_a_trace_is_differentiable_by_the_sinks():
    # A router's choice has no gradient, and a bounded value has a kink, at which numeric slopes are off.
    plain = {"num_experts": 0, "num_active_experts": 0, "expert_bias": False, "swiglu_limit": 0.0}
    model = with_random_vectors(tiny_model(1, dataclasses.replace(CONFIG, **plain)))
    out = run(POLICIES["r_kv"], return_trace=True, model=model)

    def total(step):
        moved = with_sinks(model, lambda x: x + step)
        return jkv.score(moved, out, trace=out.trace).logprobs.sum()

    numeric = (float(total(1e-2)) - float(total(-1e-2))) / 2e-2
    gradient = float(jax.grad(total)(0.0))
    assert abs(numeric) > 0.1
    assert gradient == pytest.approx(numeric, rel=2e-2)
    each = jax.grad(lambda params: jkv.score(params, out, trace=out.trace).logprobs.sum())(model.params)
    assert all((np.abs(layer.sink) > 0).all() for layer in each.layers)


# What scores see.


def attention_by_hand(query, key, may_read, sink):
    """The attention of each query of a row over the slots that it may read `[K, W, S]`, as `[K, G, W, S]` in float64."""
    query, key, sink = (np.asarray(x, np.float64) for x in (query, key, sink))
    grouped = query.reshape(len(key), -1, *query.shape[1:])
    weight = np.exp(np.einsum("kgwh,ksh->kgws", grouped, key) / key.shape[-1] ** 0.5)
    weight = np.where(may_read[:, None], weight, 0.0)
    return weight / (weight.sum(axis=-1, keepdims=True) + np.exp(sink.reshape(len(key), -1))[..., None, None])


def view_with_sinks(seed):
    rng = np.random.default_rng(seed)
    view = random_view(rng)
    return view._replace(key=jnp.nan_to_num(view.key), sink=jnp.asarray(rng.uniform(-2, 4, (2, 4)), jnp.float32))


def expected_scores(view, row):
    """By name: what scores of the last 8 queries are, slot by slot of a row."""
    position, newest = np.asarray(view.position[row]), int(view.num_seen[row]) - 1
    age, after = newest - position, np.arange(8)[::-1]
    is_past = (position >= 0) & (age >= 8)
    seen = (position >= 0)[:, None] & (age[:, None] >= after[:, None])
    args = view.query[row], view.key[row]
    over_seen = attention_by_hand(*args, seen, view.sink[row])
    over_past = attention_by_hand(*args, np.broadcast_to(is_past[:, None], seen.shape), view.sink[row]).max(axis=1)
    shares = {
        "causal": over_seen.mean(axis=(1, 2)),
        "max-probability": (over_past / over_past.sum(axis=-1, keepdims=True)).mean(axis=1),
        "largest": over_seen.max(axis=1).mean(axis=1),
    }
    return {name: np.where(is_past, share, 0.0) for name, share in shares.items()}, is_past


@pytest.mark.parametrize("seed", range(3))
def test_scores_by_attention_have_the_sink_in_the_denominator(seed):
    view = view_with_sinks(seed)
    found = {
        "causal": AttentionMass(8, over_group="mean", candidates="causal")(view),
        "max-probability": AttentionMass(8, over_group="max-probability")(view),
        "largest": largest_attention(view, 8),
    }
    for row in range(2):
        expected, is_past = expected_scores(view, row)
        for name, score in found.items():
            np.testing.assert_allclose(np.asarray(score[row])[is_past], expected[name][is_past], rtol=1e-4, atol=1e-7)


def test_expected_attention_weighs_the_heads_of_a_group_by_what_their_sinks_leave():
    view = view_with_sinks(0)
    score = jkv.expected_attention(budget=24, num_queries=8, sinks=0).evict.score
    others = view._replace(sink=view.sink.at[:, ::2].set(50.0))  # the first head of each group gives all to its sink
    last = view._replace(query=jnp.repeat(view.query[:, 1::2], 2, axis=1), sink=jnp.repeat(view.sink[:, 1::2], 2, axis=1))
    filled = np.asarray(view.is_filled)
    np.testing.assert_allclose(np.asarray(score(others))[filled], np.asarray(score(last))[filled] / 2, rtol=1e-4, atol=1e-9)


def test_a_compaction_passes_the_sinks_of_its_layers_to_the_score():
    seen = []

    def watch(view):
        seen.append(None if view.sink is None else view.sink.shape)
        return view.position.astype(jnp.float32)

    policy = jkv.evict_by(watch, budget=16, interval=8, needs=jkv.Needs(window=4))
    run(policy, PROMPTS[:1])
    run(policy, PROMPTS[:1], model=tiny_model(1, TINY, TinyTokenizer()))
    assert list(dict.fromkeys(seen)) == [(2, 4), None]  # two layers are in the pool; the trial at submission reads both


def test_the_accumulated_mass_of_each_slot_is_the_attention_with_the_sink():
    greedy = jkv.Sampling(temperature=0.0)
    text = [*PROMPTS[0], *run(prompts=PROMPTS[:1], sampling=greedy).tokens[0].tolist()]
    policy = jkv.h2o(budget=60)
    engine = jkv.Engine(MODEL, max_running=1, max_slots=64, page_size=4, chunk=8, policies=[policy])
    engine.submit(PROMPTS[0], policy=policy, max_new_tokens=40, stop_ids=(), sampling=greedy)
    engine.step()
    engine.step()
    pool = engine.runner.state.cache.pool
    total = int(pool.logical_length[0])
    assert len(PROMPTS[0]) + 8 <= total < 60
    mass = np.asarray(pool.slot_data["mass"])[:, 0, :, :total]
    (received,) = zip(*attention_received(MODEL.params, text[:total], powers=(1,)), strict=True)
    np.testing.assert_allclose(mass, 2 * np.stack(received)[:, :, total], rtol=1e-4, atol=1e-6)  # of two query heads
    assert (mass.sum(axis=-1) < 2 * total - 1).all()


# What is refused.


def test_a_computation_that_does_not_know_sinks_is_refused():
    config = dataclasses.replace(CONFIG, window=0, window_layers=())
    token = jnp.zeros((1, 4), jnp.int32)
    params = tiny_model(1, config).params
    with pytest.raises(ValueError, match="a model without learned sinks"):
        decoder.forward(params, token, token, packed_attention, jnp.ones((1, 4, 4), bool))
