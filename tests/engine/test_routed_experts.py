"""The experts that tokens went through: returned with results, and given back to scores and training.

The choice of the engine is compared with the router applied to the hidden states of another pass, and a router that would have
chosen otherwise (rollout routing replay, arXiv 2510.11370) is planted.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import rl
from jkv.checkpoints.model_shapes import find_shape
from jkv.model import experts as mixtures
from jkv.model.experts import check_experts, index_dtype
from jkv.replay.columns import dense_columns
from jkv.replay.score import hidden_states
from jkv.testing import TinyTokenizer, tiny_model
from tests.model.test_experts import MIXED
from tests.support import glm

GLM = glm.with_random_biases(tiny_model(1, glm.CONFIG, TinyTokenizer()))
QWEN = tiny_model(2, MIXED, TinyTokenizer())
MODELS = {"sigmoid": GLM, "softmax": QWEN}
PROMPTS = [list(range(1, 22)), [4, 4, 9], [7]]
KNOBS = {"max_new_tokens": 24, "page_size": 4, "chunk": 8, "stop_ids": (), "progress": False, "routed_experts": True}
R_KV = jkv.r_kv(budget=24, interval=8, window=4)


def run(model, policy=None, prompts=PROMPTS, **settings):
    return jkv.generate(model, prompts, policy=policy, **{"sampling": jkv.Sampling(seed=1)} | KNOBS | settings)


def chosen_by_router(params, sequence, monkeypatch):
    """[T, L, A]: what each router chooses in one dense pass, seen by wrapping the router."""
    seen, route = [], mixtures.route

    def spy(*args):
        share, expert = route(*args)
        seen.append(np.asarray(expert))
        return share, expert

    monkeypatch.setattr(mixtures, "route", spy)
    token = jnp.asarray(sequence)[None]
    hidden_states(params, token, dense_columns(params.config, *token.shape))
    monkeypatch.undo()
    return np.stack(seen, axis=1)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_token_of_prompt_and_completion_has_the_experts_of_its_router(model, monkeypatch):
    out, config = run(model, n=2), model.config
    assert out.routed_experts.dtype == np.uint8
    total = max(len(prompt) for prompt in PROMPTS) + KNOBS["max_new_tokens"]
    assert out.routed_experts.shape == (6, total, len(config.expert_layers), config.num_active_experts)
    for i in (0, 2, 5):  # one that starts from another's prompt too
        sequence = [*out.prompts[i], *out.tokens[i, : out.lengths[i]]]
        expected = chosen_by_router(model.params, sequence, monkeypatch)
        np.testing.assert_array_equal(np.sort(out.routed_experts[i, : len(sequence)]), np.sort(expected))
        assert not out.routed_experts[i, len(sequence) :].any()


def test_they_do_not_depend_on_neighbours_preemption_or_sleep():
    one = run(GLM, n=2)
    alone = run(GLM, prompts=PROMPTS[1:2], n=2)
    np.testing.assert_array_equal(one.routed_experts[2:4, :27], alone.routed_experts[:, :27])
    other = run(GLM, n=2, num_pages=110, max_running=4)
    assert other.stats.preemptions > 0
    np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


def test_nothing_is_returned_unless_asked_for():
    assert run(GLM, routed_experts=False).routed_experts is None


# A near tie.


def tied(model, gap):
    """The model with two experts of nearly equal logits everywhere: the first is ahead by `gap`, or with -gap the second."""

    def of_layer(layer):
        if layer.experts is None:
            return layer
        router, bias = layer.experts.router, layer.experts.choice_bias
        router = router.at[:, 1].set(router[:, 0])
        if bias is not None:
            return layer.replace(experts=layer.experts.replace(router=router, choice_bias=bias.at[1].set(bias[0] - gap)))
        return layer.replace(experts=layer.experts.replace(router=router.at[:, 1].set(router[:, 0] * (1 - gap))))

    params = model.params.replace(layers=tuple(map(of_layer, model.params.layers)))
    return dataclasses.replace(model, params=params)


@pytest.mark.parametrize("policy", [jkv.full(), R_KV, jkv.h2o(budget=16)], ids=lambda policy: policy.name)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_trainer_whose_near_ties_fall_otherwise_is_exact_with_the_experts_of_the_engine(model, policy):
    ours, theirs = tied(model, 1e-6), tied(model, -1e-6)
    out = run(ours, policy, return_trace=True, n=2)
    without, given = (
        np.abs(np.asarray(jkv.score(theirs, out, out.trace, routed_experts=given).logprobs) - out.logprobs)
        for given in (None, out.routed_experts)
    )
    assert without.max() > 1e-3
    assert np.percentile(given, 99) <= 1e-5
    assert given.max() <= 1e-4


def test_a_batch_trains_the_router_by_the_weights_of_the_given_experts():
    ours, theirs = tied(GLM, 1e-6), tied(GLM, -1e-6)
    out = run(ours, R_KV, return_trace=True)
    batch, plain = (rl.make_batch(out, np.ones(3), replay=True, routed_experts=given) for given in (True, False))
    got, bare = (np.asarray(rl.log_probs(theirs, x)) for x in (batch, plain))
    mask = np.asarray(batch.mask)
    assert np.percentile(np.abs(got - batch.sampled)[mask], 99) <= 1e-5
    assert np.abs(bare - batch.sampled)[mask].max() > 1e-3
    grads = jax.grad(lambda params: rl.log_probs(params, batch, remat=False).sum())(theirs.params)
    again = jax.grad(lambda params: rl.log_probs(params, batch).sum())(theirs.params)
    assert np.abs(grads.layers[1].experts.router).max() > 0
    assert not grads.layers[1].experts.choice_bias.any()
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_dense_scores_take_them_in_groups_of_rows():
    ours, theirs = tied(GLM, 1e-6), tied(GLM, -1e-6)
    out = run(ours, n=2)
    got = jkv.score(theirs, out, routed_experts=out.routed_experts, max_tokens=64).logprobs
    np.testing.assert_allclose(got, out.logprobs, atol=1e-4)


# Rollouts and conversations.


def test_rollouts_and_conversations_carry_them():
    settings = {"max_new_tokens": 24, "page_size": 4, "routed_experts": True}
    rollout = jkv.Rollout(GLM, R_KV, n=2, **settings)
    out = rollout(PROMPTS[:2], return_trace=True)
    got = jkv.score(GLM, out, out.trace, routed_experts=out.routed_experts).logprobs
    np.testing.assert_allclose(got, out.logprobs, atol=1e-4)
    turns = rollout.converse(
        PROMPTS[:2], lambda turn: [3, 5] if turn.number < 1 else None, max_turn_tokens=6, return_trace=True
    )
    totals = [len(prompt) + int(length) for prompt, length in zip(turns.prompts, turns.lengths, strict=True)]
    assert turns.routed_experts.shape[1] == max(totals)
    assert not turns.mask[:, : turns.lengths.min()].all()  # it has replies
    got = np.asarray(jkv.score(GLM, turns, turns.trace, routed_experts=turns.routed_experts).logprobs)
    np.testing.assert_allclose(np.where(turns.mask, got, 0), turns.logprobs, atol=1e-4)


# Bad input.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:2], r"here \(3, 45, 2, 3\); got \(2, 45, 2, 3\)"),
        (lambda x: x[:, :44], r"here \(3, 45, 2, 3\); got \(3, 44, 2, 3\)"),
        (lambda x: x[:, :, :1], r"got \(3, 45, 1, 3\)"),
        (lambda x: x[..., :2], r"got \(3, 45, 2, 2\)"),
        (lambda x: x[..., 0], r"got \(3, 45, 2\)"),
        (lambda x: x.astype(np.int32) + 8, r"must be integers in \[0, 8\); got int32 in \[8, 15\]"),
        (lambda x: x.astype(np.int32) - 1, r"must be integers in \[0, 8\); got int32 in \[-1, 6\]"),
        (lambda x: x.astype(np.float32), r"must be integers in \[0, 8\); got float32"),
    ],
    ids=["rows", "tokens", "layers", "choices", "axes", "large", "negative", "floats"],
)
def test_experts_of_another_shape_are_refused(change, message):
    experts = np.arange(3 * 45 * 2 * 3, dtype=np.uint8).reshape(3, 45, 2, 3) % 8
    with pytest.raises(ValueError, match=message):
        check_experts(change(experts), glm.CONFIG, [45, 27, 25])
    np.testing.assert_array_equal(check_experts(experts, glm.CONFIG, [45, 27, 25]), experts)


def test_models_without_experts_and_prefix_caches_are_refused():
    plain = tiny_model()
    with pytest.raises(ValueError, match="routed_experts needs a model with a mixture of experts"):
        jkv.Engine(plain, routed_experts=True)
    with pytest.raises(ValueError, match=r"routed_experts needs every token.*prefix_cache"):
        jkv.Engine(GLM, routed_experts=True, prefix_cache=True)
    out = jkv.generate(plain, [5, 6], max_new_tokens=4, stop_ids=(), progress=False)
    with pytest.raises(ValueError, match="of a model with a mixture of experts"):
        jkv.score(plain, out, routed_experts=np.zeros((1, 6, 2, 3), np.uint8))
    with pytest.raises(ValueError, match="this result has none"):
        rl.make_batch(out, np.ones(1), routed_experts=True)
    batch = rl.make_batch(run(GLM), np.ones(3), routed_experts=True)
    with pytest.raises(ValueError, match=r"A batch's experts are of each row.*got \(3, 48, 2, 3\)"):
        rl.log_probs(QWEN.params.replace(config=dataclasses.replace(MIXED, num_active_experts=2)), batch)


def test_the_smallest_integers_hold_every_expert():
    assert index_dtype(find_shape("qwen3-30b-a3b")[1]) == np.uint8
    assert index_dtype(dataclasses.replace(MIXED, num_experts=257)) == np.uint16
