"""Rollouts: groups that share a prompt, true log-probabilities, weights that change under way, and memory that comes back."""

import dataclasses
import gc
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jkv
from jkv.checkpoints.loading import export
from jkv.engine import chunk_inputs, programs
from jkv.model.weight_shapes import init_params
from jkv.verify import mismatch
from tests.support.mixes import BreakingTokenizer

PAGE = 4
PROMPTS = [[5, 1, 9], list(range(20)), [3, 7] * 13 + [1], [4] * 8]
R_KV = jkv.r_kv(budget=16, interval=8, window=4)
EVICTING = {
    "r_kv": R_KV,
    "streaming_llm": jkv.streaming_llm(budget=12, interval=8),
    "snap_kv": jkv.snap_kv(budget=12, interval=8, window=4),
    "random": jkv.random(budget=12, interval=8),
    "h2o": jkv.h2o(budget=14),
    "tova": jkv.tova(budget=11),
    "rpc": jkv.rpc(interval=8, window=4),
    "pyramid_kv": jkv.pyramid_kv(budget=14, interval=8, window=4),
    "quest": jkv.quest(budget=12, dense_layers=1),
    "cache_positions": jkv.streaming_llm(budget=12, interval=8, positions="cache"),
}


ALIKE = ("snap_kv", "random", "tova", "rpc", "pyramid_kv", "random_share")  # they take the code path of another policy


def marked(policies):
    """The policies as parameters of a test; `python -m pytest tests/test_rollout.py -m slow` runs those that are alike."""
    return {name: pytest.param(one, marks=[pytest.mark.slow] * (name in ALIKE)) for name, one in policies.items()}


def make_rollout(model, policy=None, **options):
    settings = {"max_prompt_tokens": 32, "max_new_tokens": 24, "n": 4, "max_running": 4, "page_size": PAGE, "chunk": 8}
    return jkv.Rollout(model, policy, **settings | options)


@pytest.fixture(scope="module")
def rollout(model):
    """One with a bounded policy, used again and again, as a trainer would."""
    return make_rollout(model, R_KV)


@pytest.fixture(scope="module")
def other_params(model):
    return init_params(model.config, jax.random.key(17), scale=0.3)


def by_sample(out):
    """(prompt, sample) -> tokens and log-probabilities."""
    ragged = zip(*out.ragged(), strict=True)
    return {
        (tuple(prompt.tolist()), int(index)): (tokens.tolist(), log_probs.tolist())
        for prompt, index, (tokens, log_probs) in zip(out.prompts, out.sample_index, ragged, strict=True)
    }


def assert_same(one, other):
    """Equal tokens, and log-probabilities within the rounding of another number of rows."""
    assert one.keys() == other.keys()
    for key, (tokens, log_probs) in one.items():
        assert tokens == other[key][0]
        np.testing.assert_allclose(log_probs, other[key][1], atol=1e-5)


# Log-probabilities.


@pytest.mark.rounding
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_full_cache_samples_what_a_dense_forward_pass_scores(model, temperature):
    out = make_rollout(model)(PROMPTS, n=2, sampling=jkv.Sampling(temperature=temperature), seed=1, stop_ids=(3,))
    np.testing.assert_allclose(jkv.score(model, out).logprobs, out.logprobs, atol=1e-5)
    np.testing.assert_array_equal(out.logprobs, out.logprobs_full)
    np.testing.assert_array_equal(out.mask, np.arange(out.tokens.shape[1]) < out.lengths[:, None])
    assert (out.logprobs[~out.mask] == 0).all()
    assert (out.logprobs[out.mask] < 0).all()
    ended = [reason == "stop" for reason in out.finish_reason]
    assert any(ended) or temperature == 0
    assert not all(ended)
    last = out.tokens[np.arange(len(ended)), out.lengths - 1]
    assert (last[ended] == 3).all()  # the end token is there, and has its log-probability


def test_the_most_likely_tokens_are_arrays_padded_to_one_shape(model):
    rollout = make_rollout(model, top_logprobs=3)
    out = rollout(PROMPTS, n=1, sampling=jkv.Sampling(0.7), seed=1, stop_ids=(3,))
    own = jkv.score(model, out, sampling=jkv.Sampling(), top=3)  # at temperature 1
    assert out.vocab_size == own.vocab_size
    for one, other in zip(out.top, own.top, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)
    assert not out.mask.all()
    assert (out.top.tokens[~out.mask] == -1).all()
    assert [len(places) for places in out.top_logprobs] == out.lengths.tolist()
    other = rollout(PROMPTS[:1], n=1, seed=1, top_logprobs=40)
    assert other.top.tokens.shape[-1] == 40  # of 32
    assert np.isneginf(other.top.rest[other.mask]).all()
    assert rollout(PROMPTS[:1], n=1, seed=1, top_logprobs=0).top is None
    talks = rollout.converse(PROMPTS[:1], lambda turn: [5, 6], max_turns=2, max_turn_tokens=4, seed=1, stop_ids=())
    assert (talks.top.tokens[..., 0] >= 0).tolist() == talks.mask.tolist()
    for wrong in (65, -1, 2.5):
        with pytest.raises(jkv.InputError, match="top_logprobs must"):
            rollout(PROMPTS[:1], top_logprobs=wrong)


def test_greedy_tokens_have_the_log_probabilities_of_temperature_one(model):
    out = make_rollout(model)(PROMPTS[:1], n=1, sampling=jkv.Sampling(temperature=0.0), stop_ids=())
    np.testing.assert_allclose(jkv.score(model, out, sampling=jkv.Sampling()).logprobs, out.logprobs, atol=1e-5)


@pytest.mark.rounding
@pytest.mark.parametrize("policy", marked(EVICTING).values(), ids=EVICTING)
def test_replay_gives_the_log_probabilities_of_a_group_that_shares_its_prompt(model, policy):
    out = make_rollout(model, policy)(PROMPTS, n=3, seed=5, stop_ids=(), return_trace=True)
    assert out.stats.forks == len(PROMPTS) * 3
    difference = np.abs(np.asarray(jkv.score(model, out, trace=out.trace).logprobs) - out.logprobs)
    assert np.percentile(difference[out.mask], 99) <= 1e-5
    assert difference.max() <= 1e-4
    assert np.abs(np.asarray(jkv.score(model, out).logprobs) - out.logprobs).max() > 1e-3  # something was evicted


@pytest.mark.rounding
def test_log_probabilities_are_those_of_the_cut_distribution_and_of_the_whole_one(model):
    sampling = jkv.Sampling(temperature=0.8, top_k=5, top_p=0.9)
    with pytest.warns(UserWarning, match="top_k=5, top_p=0.9, min_p=0.0 cut"):
        out = make_rollout(model)(PROMPTS, n=2, sampling=sampling, seed=0, stop_ids=())
    whole = jkv.score(model, out, sampling=jkv.Sampling(temperature=0.8)).logprobs
    for replayed, drawn in ((jkv.score(model, out).logprobs, out.logprobs), (whole, out.logprobs_full)):
        difference = np.abs(np.asarray(replayed) - drawn)[out.mask]
        assert np.percentile(difference, 99) <= 1e-5
        assert difference.max() <= 1e-4
    assert (out.logprobs >= out.logprobs_full - 1e-6).all()
    assert (out.logprobs - out.logprobs_full).max() > 0.1


def test_first_tokens_follow_the_distribution_after_the_prompt(model):
    """2,048 draws through the engine: a key used twice, or a temperature lost, would show."""
    count, prompt = 2048, PROMPTS[0]
    every = make_rollout(model, max_running=64, max_new_tokens=1)([prompt], n=count, seed=3, stop_ids=())
    vocab = model.config.vocab_size
    scored = jkv.score(model, np.arange(vocab, dtype=np.int32)[:, None], prompts=[prompt] * vocab)
    expected = count * np.exp(np.asarray(scored.logprobs)[:, 0])
    seen = np.bincount(every.tokens[:, 0], minlength=vocab)
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < vocab + 4 * (2 * vocab) ** 0.5


# Groups, seeds, shapes.


def test_samples_of_a_group_differ_and_are_those_of_calls_of_one(rollout):
    whole = rollout(PROMPTS, n=8, seed=11, stop_ids=())
    assert len({tuple(row.tolist()) for row in whole.tokens}) == len(whole.tokens)
    assert whole.prompt_index.tolist() == [i for i in range(len(PROMPTS)) for _ in range(8)]
    assert whole.sample_index.tolist() == list(range(8)) * len(PROMPTS)
    singles = [rollout(PROMPTS, n=1, seed=11, stop_ids=(), first_sample=i) for i in range(8)]
    for i, single in enumerate(singles):
        np.testing.assert_array_equal(single.tokens, whole.tokens[i::8])
        np.testing.assert_array_equal(single.logprobs, whole.logprobs[i::8])


@pytest.mark.rounding
@pytest.mark.parametrize("options", [{"max_running": 2}, {"max_running": 3}, {"max_running": 16}, {"page_size": 8}], ids=str)
def test_tokens_do_not_depend_on_order_rows_pages_or_batch(model, rollout, options):
    expected = by_sample(rollout(PROMPTS, n=3, seed=2, stop_ids=()))
    other = make_rollout(model, R_KV, **options)
    out = other([*reversed(PROMPTS), [9, 9, 9]], n=3, seed=2, stop_ids=())
    assert_same(expected, {key: value for key, value in by_sample(out).items() if key[0] != (9, 9, 9)})


def test_equal_seeds_repeat_others_do_not_and_none_is_fresh(rollout):
    first, again, other = (rollout(PROMPTS, seed=seed) for seed in (1, 1, 2))
    assert by_sample(first) == by_sample(again)
    assert by_sample(first) != by_sample(other)
    fresh, later = rollout(PROMPTS), rollout(PROMPTS)
    assert fresh.stats.seed != later.stats.seed
    assert by_sample(fresh) != by_sample(later)
    assert by_sample(rollout(PROMPTS, seed=fresh.stats.seed)) == by_sample(fresh)


def test_a_group_prefills_its_prompt_once_and_holds_its_pages_once(model):
    rollout = make_rollout(model, max_running=8)
    alone, group = rollout(PROMPTS[2:3], n=1, stop_ids=()), rollout(PROMPTS[2:3], n=8, stop_ids=())
    assert alone.stats.prefills == group.stats.prefills == 1
    assert rollout(PROMPTS, n=8, stop_ids=()).stats.prefills == len(PROMPTS)
    assert group.stats.peak_kv_bytes < 8 * alone.stats.peak_kv_bytes - 6 * rollout.engine.page_bytes


def test_sixteen_samples_hold_the_prompt_once_and_their_budgets(model):
    """The bound of memory: the prompt's whole pages once, 16 x (budget + interval) slots, a page for each head and sample."""
    n, prompt = 16, PROMPTS[2]
    rollout = make_rollout(model, R_KV, n=n, max_running=n, page_size=2)
    out = rollout([prompt], stop_ids=())
    config, slots = model.config, R_KV.budget + R_KV.schedule.interval
    heads = config.num_layers * config.num_kv_heads
    pages = heads * (len(prompt) // 2 + n * slots // 2 + n)
    assert out.stats.peak_kv_bytes <= pages * rollout.engine.page_bytes + rollout.engine.runner.meter.row_bytes
    assert out.stats.compactions >= n
    dense = n * (len(prompt) + out.lengths[0]) * heads * 2 * config.head_size * 4
    assert out.stats.kv_bytes_saved == dense - out.stats.peak_kv_bytes > 0


def test_ragged_and_padded_views_agree(rollout):
    out = rollout(PROMPTS, n=2, seed=0, stop_ids=(3, 7))
    tokens, log_probs = out.ragged()
    assert [len(row) for row in tokens] == out.lengths.tolist() == [len(row) for row in log_probs]
    padded = out.left_padded_prompts(40)
    assert padded.shape == (len(tokens), 40)
    for row, prompt in zip(padded, out.prompts, strict=True):
        assert row[40 - len(prompt) :].tolist() == prompt.tolist()
        assert (row[: 40 - len(prompt)] == out.pad_id).all()
    with pytest.raises(ValueError, match="the longest has 27 tokens, the width is 9"):
        out.left_padded_prompts(9)


# Weights.


def num_programs():
    names = ("decode_chunk", "prefill_chunk", "compact", "fork", "detach", "free", "release")
    return sum(getattr(programs, name).num_compiled() for name in names)


@pytest.mark.rounding
def test_new_weights_compile_nothing_and_give_what_a_fresh_rollout_gives(model, other_params):
    rollout = make_rollout(model, R_KV)
    before = rollout(PROMPTS, seed=4, stop_ids=())
    compiled = num_programs()
    trained = jax.jit(lambda params: jax.tree.map(jnp.copy, params))(other_params)  # as an optimiser leaves them
    rollout.update(trained)
    out = rollout(PROMPTS, seed=4, stop_ids=())
    assert num_programs() == compiled
    fresh = make_rollout(dataclasses.replace(model, params=other_params), R_KV)(PROMPTS, seed=4, stop_ids=())
    np.testing.assert_array_equal(out.tokens, fresh.tokens)
    np.testing.assert_array_equal(out.logprobs, fresh.logprobs)
    assert (before.policy_version[before.mask] == 0).all()
    assert (out.policy_version[out.mask] == 1).all()
    assert (out.policy_version[~out.mask] == -1).all()
    named = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:1], ("x",)), jax.sharding.PartitionSpec())
    rollout.update(jax.device_put(other_params, named))  # the same place by another name, as trainers have it
    weak = jax.tree.map(lambda x: x, other_params).replace(final_norm=jnp.full(other_params.final_norm.shape, 1.0))
    assert weak.final_norm.weak_type
    rollout.update(weak)
    np.testing.assert_array_equal(rollout(PROMPTS, seed=4, stop_ids=()).tokens, out.tokens)
    assert num_programs() == compiled
    rollout.update(model.params)  # the old ones were not donated
    np.testing.assert_array_equal(rollout(PROMPTS, seed=4, stop_ids=()).tokens, before.tokens)


def test_samples_that_wait_start_from_new_weights_and_running_ones_continue(model, other_params):
    rollout = make_rollout(model, R_KV, n=8)
    rollout.submit(PROMPTS[1:2], seed=6, stop_ids=(), return_trace=True)
    first = rollout.run(max_steps=8)
    assert (first.lengths.size, rollout.pending) == (0, 8)
    rollout.update(other_params)
    out = rollout.run()
    assert not rollout.engine.scheduler.prefixes
    ran, waited = slice(0, 4), slice(4, 8)
    np.testing.assert_array_equal(out.policy_version[ran], np.tile(np.r_[np.zeros(9), np.ones(15)], (4, 1)))
    assert (out.policy_version[waited] == 1).all()
    old = make_rollout(model, R_KV, n=8)(PROMPTS[1:2], seed=6, stop_ids=())
    new = make_rollout(dataclasses.replace(model, params=other_params), R_KV, n=8)(PROMPTS[1:2], seed=6, stop_ids=())
    np.testing.assert_array_equal(out.tokens[ran, :9], old.tokens[ran, :9])  # the ninth from logits of the old weights
    np.testing.assert_array_equal(out.logprobs[ran, :9], old.logprobs[ran, :9])
    assert (out.tokens[ran, 9:] != old.tokens[ran, 9:]).any()
    np.testing.assert_array_equal(out.tokens[waited], new.tokens[waited])


def wrong_weights(params):
    layer = params.layers[0]
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    narrow = params.replace(layers=(layer.replace(query=layer.query[:, :-1]), *params.layers[1:]))
    unbiased = params.replace(layers=(layer.replace(query_bias=None), *params.layers[1:]))
    other = params.replace(config=dataclasses.replace(params.config, rope_theta=5.0))
    endless = params.replace(final_norm=params.final_norm.at[0].set(jnp.nan))
    gone = params.replace(final_norm=jnp.copy(params.final_norm))
    gone.final_norm.delete()
    return [
        (half, r"bfloat16.*, not float32"),
        (narrow, r"params\.layers\[0\]\.query is"),
        (unbiased, r"missing: \['\.layers\[0\]\.query_bias'\]"),
        (other, r"differs in rope_theta: \[5\.0\]"),
        (endless, r"params\.final_norm holds NaN"),
        (gone, r"params\.final_norm was donated or deleted"),
        (params.replace(final_norm=np.asarray(params.final_norm, np.float64)), r"params\.final_norm is float64.*, not float32"),
        (params.replace(final_norm=[1.0]), "missing"),
    ]


def test_wrong_weights_are_refused_and_the_old_ones_stay(rollout, model):
    before, version = rollout(PROMPTS[:1], seed=1), rollout.version
    for params, match in wrong_weights(model.params):
        with pytest.raises(ValueError, match=match):
            rollout.update(params)
    assert rollout.version == version
    np.testing.assert_array_equal(rollout(PROMPTS[:1], seed=1).tokens, before.tokens)


def test_weights_of_any_form_are_taken_and_a_refused_one_loses_nothing(model, other_params, tmp_path):
    rollout = make_rollout(model, R_KV)
    before = rollout(PROMPTS[:1], seed=6, stop_ids=())
    export(other_params, None, tmp_path, dtype="float32")
    state = load_file(tmp_path / "model.safetensors")
    rollout.submit(PROMPTS[:1], seed=6, stop_ids=())
    assert len(rollout.run(max_steps=8).tokens) == 0
    with pytest.raises(ValueError, match=r"must have model\.norm\.weight; missing"):
        rollout.update({name: tensor for name, tensor in state.items() if name != "model.norm.weight"})
    out = rollout.run()
    np.testing.assert_array_equal(out.tokens, before.tokens)
    assert (rollout.version, set(out.policy_version[out.mask])) == (0, {0})
    rollout.update(other_params)
    expected, compiled = rollout(PROMPTS[:1], seed=6, stop_ids=()), num_programs()
    for weights in (jax.tree.map(np.array, state), jax.tree.map(np.array, other_params)):
        rollout.update(model)
        rollout.update(weights)
        jax.tree.map(lambda x: x.fill(0), weights)  # the trainer's own, to write into
        np.testing.assert_array_equal(rollout(PROMPTS[:1], seed=6, stop_ids=()).tokens, expected.tokens)
    assert num_programs() == compiled


@pytest.mark.parametrize(
    ("lengths", "field", "words"),
    [
        (
            {"max_new_tokens": 10_000},
            "max_new_tokens",
            "max_new_tokens must be below the model's .* positions.*got 10,000. Lower",
        ),
        ({"max_prompt_tokens": 10_000}, "max_prompt_tokens", "max_prompt_tokens must be below.*got 10,000. Lower it"),
        ({"max_prompt_tokens": 4_000, "max_new_tokens": 97}, "max_new_tokens", r"together; got 4,000 \+ 97. Lower either"),
    ],
    ids=["completion", "prompt", "both"],
)
def test_lengths_that_the_model_has_no_positions_for_are_refused_by_their_own_names(model, lengths, field, words):
    with pytest.raises(jkv.InputError, match=words) as error:
        jkv.Rollout(model, **lengths)
    assert error.value.field == field


def test_weights_that_a_trainer_donated_are_reported(model):
    rollout = make_rollout(dataclasses.replace(model, params=jax.tree.map(jnp.copy, model.params)), R_KV)
    trained = jax.jit(lambda params: jax.tree.map(lambda x: 2 * x, params), donate_argnums=0)(rollout.model.params)
    with pytest.raises(ValueError, match=r"donated or deleted\. Call update\(params\) first"):
        rollout(PROMPTS[:1], n=1)
    rollout.update(trained)
    assert len(rollout.run().lengths) == 1


def test_forgotten_weights_are_not_held_and_must_be_replaced(model, other_params):
    rollout = make_rollout(dataclasses.replace(model, params=jax.tree.map(jnp.copy, model.params)), R_KV)
    expected = rollout(PROMPTS[:1], seed=1)
    before = live_bytes()
    rollout.sleep(forget_weights=True)
    assert before - live_bytes() >= sum(x.nbytes for x in jax.tree.leaves(model.params))
    rollout.submit(PROMPTS[:1], seed=1)
    with pytest.raises(ValueError, match=r"forgotten, donated or deleted\. Call update\(params\) first"):
        rollout.run()
    rollout.update(model.params)
    np.testing.assert_array_equal(rollout.run().tokens, expected.tokens)


def live_bytes():
    """On the device; arrays may share a buffer."""
    gc.collect()
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays()}.values())


def test_a_hundred_updates_leak_nothing(model, other_params):
    rollout = make_rollout(model, R_KV)
    held = []
    for i in range(100):
        rollout.update((model.params, other_params)[i % 2])
        rollout(PROMPTS[i % 2 : i % 2 + 1], n=2, max_new_tokens=2, seed=i)
        if i % 40 == 19:
            held.append(live_bytes())
    assert len(set(held)) == 1
    assert not rollout.engine.scheduler.prefixes
    assert not rollout.engine.tickets


# Memory and time.


def test_sleeping_frees_the_pool_and_waking_changes_nothing(model):
    baseline = live_bytes()
    rollout = make_rollout(model, R_KV)
    expected = rollout(PROMPTS, seed=9, stop_ids=())
    awake = live_bytes()
    rollout.sleep()
    assert rollout.is_asleep
    assert live_bytes() - baseline < 0.05 * (awake - baseline)
    ticket = rollout.engine.submit([1, 2], R_KV)
    with pytest.raises(ValueError, match=r"Call wake\(\) first"):
        rollout.engine.step()
    rollout.engine.cancel(ticket)
    rollout.sleep()  # twice is once
    np.testing.assert_array_equal(rollout(PROMPTS, seed=9, stop_ids=()).tokens, expected.tokens)  # a call wakes it


SLEEPERS = {name: EVICTING[name] for name in ("r_kv", "h2o", "tova", "rpc", "quest", "cache_positions")}
SLEEPERS["full"] = jkv.full()
LOOSE = {"strict": 0.0, "soft": 0.0, "structure": False, "threshold": 1e9, "match": 0.0, "pairing": "all", "interval": 4}
SLEEPERS["reason_cache"] = jkv.reason_cache(**LOOSE)
SLEEPERS["random_share"] = jkv.random_share(jkv.reason_cache(**LOOSE))
SLEEPERS["chain"] = jkv.chain(jkv.reason_cache(**LOOSE), jkv.r_kv(budget=30, interval=8, window=4))
SLEEPERS["skip_kv"] = jkv.skip_kv(budget=14, interval=8, window=4, tau=0.2, ends=(1, 5, 9, 17))
SLEEPERS = marked(SLEEPERS)


@pytest.mark.rounding
@pytest.mark.parametrize("policy", SLEEPERS.values(), ids=SLEEPERS)
def test_pausing_and_sleeping_between_steps_change_no_token(model, policy):
    named = dataclasses.replace(model, tokenizer=BreakingTokenizer())
    rollout = make_rollout(named, policy)
    expected = rollout(PROMPTS, n=2, seed=8, stop_ids=(), return_trace=True)
    rollout.submit(PROMPTS, n=2, seed=8, stop_ids=(), return_trace=True)
    parts = []
    while rollout.pending:
        parts.append(rollout.run(max_steps=8))
        rollout.sleep()
    assert sum(len(part.lengths) > 0 for part in parts) >= 2
    assert rollout.engine.stats.preemptions == 0  # there was room
    assert_same(by_sample(expected), {key: value for part in parts for key, value in by_sample(part).items()})
    for part in parts:
        if len(part.lengths):
            replayed = jkv.score(named, part, trace=part.trace).logprobs
            assert mismatch(part.logprobs, replayed, "the replay of its trace") is None


def test_run_returns_once_enough_are_done_and_continues_later(rollout):
    expected = by_sample(rollout(PROMPTS, n=2, seed=3, stop_ids=(3, 7)))
    rollout.submit(PROMPTS, n=2, seed=3, stop_ids=(3, 7))
    some = rollout.run(until_done=3)
    assert 3 <= len(some.lengths) < 8
    with pytest.raises(ValueError, match=r"samples are\. Call run\(\) or cancel\(\) first"):
        rollout(PROMPTS)
    rest = rollout.run()
    assert by_sample(some) | by_sample(rest) == expected


def test_samples_that_end_without_a_turn_of_their_session_are_returned_by_run(rollout):
    expected = by_sample(rollout(PROMPTS, n=2, seed=3, stop_ids=()))
    rollout.submit(PROMPTS, n=2, seed=3, stop_ids=())
    rollout.run(max_steps=8)
    rollout.engine.run()
    assert by_sample(rollout.run()) == expected


def test_cancelled_samples_keep_their_tokens_and_leave_the_engine_usable(rollout):
    expected = by_sample(rollout(PROMPTS, n=2, seed=3, stop_ids=()))
    rollout.submit(PROMPTS, n=2, seed=3, stop_ids=())
    rollout.run(max_steps=8)
    left = rollout.cancel()
    assert set(left.finish_reason) == {"cancelled"}
    assert sorted(set(left.lengths.tolist())) == [0, 8]
    for key, (tokens, _) in by_sample(left).items():
        assert expected[key][0][: len(tokens)] == tokens
    assert rollout.pending == 0
    assert by_sample(rollout(PROMPTS, n=2, seed=3, stop_ids=())) == expected


def test_an_interrupt_returns_finished_samples_and_the_rest_continues(rollout, monkeypatch):
    expected = by_sample(rollout(PROMPTS, n=2, seed=3, stop_ids=()))
    step, chunks = rollout.engine.step, []

    def interrupted():
        chunks.append(1)
        if len(chunks) == 4:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(rollout.engine, "step", interrupted)
    out = rollout(PROMPTS, n=2, seed=3, stop_ids=())
    assert 0 < len(out.lengths) < 8
    assert by_sample(out) | by_sample(rollout.run()) == expected


def test_rows_are_refilled_on_a_skewed_mix_of_lengths(model):
    """Half of the tokens are in one of eight samples: static batches of four would step as long as their longest."""
    rollout = make_rollout(model, R_KV, max_new_tokens=96, chunk=4)
    lengths = [96, 12, 12, 12, 12, 12, 12, 12] * 3
    for i, length in enumerate(lengths):
        rollout.submit([[1, 2, 3 + i]], n=1, seed=0, stop_ids=(), max_new_tokens=length)
    out = rollout.run()
    assert out.lengths.tolist() == lengths
    assert out.prompt_index.tolist() == list(range(len(lengths)))
    static = sum(max(lengths[i : i + 4]) for i in range(0, len(lengths), 4))
    assert rollout.engine.stats.steps < 0.75 * static
    assert out.stats.occupancy > 0.8


def test_a_result_that_cannot_be_built_loses_nothing(rollout, monkeypatch):
    expected = by_sample(rollout(PROMPTS, n=2, seed=3))

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("jkv.rollout.results.make_result", fail)
        with pytest.raises(MemoryError):
            rollout(PROMPTS, n=2, seed=3)
    assert by_sample(rollout.run()) == expected


def test_parts_of_several_submits_have_prompt_indices(rollout):
    rollout.submit(PROMPTS[:1], n=1, stop_ids=())
    rollout.submit(PROMPTS[1:3], n=1, stop_ids=(), max_new_tokens=2)
    first = rollout.run(until_done=2)
    assert sorted(first.prompt_index.tolist()) == [1, 2]
    rollout.submit(PROMPTS[3:], n=1, seed=5)
    rest = rollout.run()
    assert rest.prompt_index.tolist() == [0, 3]
    assert len({*first.seeds.tolist(), *rest.seeds.tolist()}) == 3  # each submit drew its own
    assert rest.seeds[1] == 5


# Prompts in pieces, and salts.


def test_long_prompts_enter_in_pieces_and_replay(model):
    """The pool is sized for a piece, and a trainer replays what later pieces read."""
    prompt = (np.arange(90) * 7 % 31).tolist()
    settings = {"max_prompt_tokens": 90, "n": 3, "max_new_tokens": 10}
    rollout = make_rollout(model, R_KV, prompt_piece=12, **settings)
    assert 3 * rollout.engine.num_pages < make_rollout(model, R_KV, **settings).engine.num_pages
    out = rollout([prompt], seed=4, stop_ids=(), return_trace=True)
    asked = {"sampling": jkv.Sampling(seed=4), "stop_ids": (), "page_size": PAGE}
    alone = jkv.generate(model, prompt, R_KV, n=3, max_new_tokens=10, prompt_piece=12, **asked)
    np.testing.assert_array_equal(out.tokens, alone.tokens)
    replayed = np.asarray(jkv.score(model, out, trace=out.trace).logprobs)
    assert np.percentile(np.abs(replayed - out.logprobs), 99) <= 1e-5


def test_only_prompts_of_one_salt_share_the_prefix_cache(model, monkeypatch):
    monkeypatch.setattr(chunk_inputs, "OF_CPU", chunk_inputs.PrefillPrograms((8,), 8))  # of the pieces that are kept
    rollout = make_rollout(model, prefix_cache=True)
    prompt = [(np.arange(30) * 7 % 31).tolist()]
    cached = [rollout(prompt, n=1, cache_salt=salt, seed=1).stats.cached_tokens for salt in ("", "a", "a", "")]
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] > 0


# Bad input.


def test_unknown_options_are_refused_by_name(rollout):
    for name in ("prompt_piece", "policy", "temperature"):
        with pytest.raises(TypeError, match=f"Options of samples are n, sampling, .*; got {name}"):
            rollout(PROMPTS, **{name: None})
    for name, value in {"max_new_tokens": 3, "stop_strings": ("a",)}.items():
        with pytest.raises(ValueError, match=f"Turns are limited by max_turn_tokens .*; got {name}"):
            rollout.converse(PROMPTS, lambda turn: None, **{name: value})
    assert not rollout.pending


def test_settings_out_of_range_are_refused(model):
    for match, options in {
        "max_new_tokens must be at least 1": {"max_new_tokens": 0},
        "n must be at least 1": {"n": 0},
        r"pad_id must be a token id in \[0, 32\)": {"pad_id": 32},
        "must fit the model's": {"max_prompt_tokens": 4_000, "max_new_tokens": 4_000},
    }.items():
        with pytest.raises(ValueError, match=match):
            make_rollout(model, **options)


def test_padding_with_an_end_token_warns(model):
    ending = dataclasses.replace(
        model, params=model.params.replace(config=dataclasses.replace(model.config, end_ids=(6,))), tokenizer=None
    )
    with pytest.warns(UserWarning, match=r"pad_id=6 is also an end token.*never learns to stop"):
        rollout = make_rollout(ending, pad_id=6)
    other = make_rollout(model, pad_id=6)  # whose end tokens come with the call
    with pytest.warns(UserWarning, match="pad_id=6 is also an end token"):
        other.submit(PROMPTS, stop_ids=(6,))
    out = rollout(PROMPTS, n=4, seed=0)
    ended = [reason == "stop" for reason in out.finish_reason]
    assert any(ended)
    assert out.mask[ended, out.lengths[ended] - 1].all()
    assert (out.tokens[ended, out.lengths[ended] - 1] == 6).all()


def test_bad_calls_are_refused_and_pending_samples_continue(rollout):
    expected = by_sample(rollout(PROMPTS, n=2, seed=3))
    rollout.submit(PROMPTS, n=2, seed=3)
    rollout.run(max_steps=4)
    for match, call in {
        "max_prompt_tokens; prompt 1 has 33": {"prompts": [[1], [1] * 33]},
        "rollout's max_new_tokens; got 25": {"prompts": [[1]], "max_new_tokens": 25},
        "n must be at least 1": {"prompts": [[1]], "n": 0},
        "seed must lie in": {"prompts": [[1]], "seed": -1},
        "Token ids must lie in": {"prompts": [[99]]},
        "at least one prompt": {"prompts": []},
        "first_sample must lie in": {"prompts": [[1]], "first_sample": -1},
        "stop_ids must be at most 8 token ids": {"prompts": [[1]], "stop_ids": tuple(range(9))},
        "All pending samples are traced, or none": {"prompts": [[1]], "return_trace": True},
    }.items():
        with pytest.raises(ValueError, match=match):
            rollout.submit(**call)
    with pytest.raises(ValueError, match="max_steps must be at least 1"):
        rollout.run(max_steps=0)
    assert by_sample(rollout.run()).items() <= expected.items()
    assert by_sample(rollout(PROMPTS, n=2, seed=3)) == expected
