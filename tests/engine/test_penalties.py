"""Penalties in the engine: against a decoder in float64, in any batch, through preemption, forks, sleep and replay."""

import dataclasses

import jax
import numpy as np
import pytest

import jkv
from jkv.engine import programs
from jkv.engine.clocks import COMPILING
from jkv.rl import full_overlap, log_probs, make_batch
from jkv.testing import TINY, tiny_model
from tests.model.test_numbers import reference_logits
from tests.model.test_penalties import penalised
from tests.support.sweeps import in_turn

PROMPTS = [[4, 5, 6, 7, 8], [9, 9, 1], list(range(3, 30))]
KNOBS = {"max_new_tokens": 50, "stop_ids": (), "page_size": 4}
POLICIES = {
    "full": jkv.full(),
    "r_kv": jkv.r_kv(budget=16, interval=8, window=4),
    "h2o": jkv.h2o(budget=16),
    "quest": jkv.quest(budget=16),
}
SETTINGS = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.5},
    "all": {"repetition_penalty": 0.8, "presence_penalty": -0.3, "frequency_penalty": 0.6},
}
DRAWN = jkv.Sampling(0.9, seed=3, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3)
CUT = dataclasses.replace(DRAWN, top_p=0.9, top_k=20, min_p=0.01)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_tokens_and_log_probs_are_what_float64_says(model, name):
    """Of two chunks and a part, so that counts go from chunk to chunk."""
    sampling = jkv.Sampling(temperature=0.0, **SETTINGS[name])
    out = jkv.generate(model, PROMPTS, sampling=sampling, **KNOBS)
    assert (out.tokens != jkv.generate(model, PROMPTS, **KNOBS).tokens).any()
    for row, prompt in enumerate(PROMPTS):
        tokens = out.tokens[row].tolist()
        logits = reference_logits(model.params, [*prompt, *tokens])[len(prompt) - 1 : -1]
        for step, token in enumerate(tokens):
            wanted = penalised(logits[step], prompt, tokens[:step], sampling)
            assert token == wanted.argmax()
            wanted -= wanted.max()
            assert out.logprobs[row, step] == pytest.approx(-np.log(np.exp(wanted).sum()), abs=1e-4)


@pytest.mark.everyday(where=lambda name, sampling: in_turn(POLICIES, name, (DRAWN, CUT), sampling))
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("sampling", [DRAWN, CUT], ids=["drawn", "cut"])
def test_log_probs_are_those_of_the_replay(model, name, sampling):
    out = jkv.generate(model, PROMPTS, POLICIES[name], sampling, n=2, return_trace=True, **KNOBS)
    np.testing.assert_allclose(jkv.score(model, out, trace=out.trace).logprobs, out.logprobs, atol=2e-5)
    plain = jkv.score(model, out, trace=out.trace, sampling=jkv.Sampling(0.9)).logprobs
    np.testing.assert_allclose(plain, out.logprobs_full, atol=2e-5)
    assert np.abs(out.logprobs - out.logprobs_full).max() > 0.1


def test_trainers_see_the_penalised_distribution(model):
    out = jkv.generate(model, PROMPTS, sampling=DRAWN, n=2, return_trace=True, **KNOBS)
    np.testing.assert_allclose(full_overlap(model, out).values, 1, atol=1e-5)
    for replay in (False, True):
        batch = make_batch(out, np.zeros(6), replay=replay, rows=8)
        got = np.asarray(jax.jit(log_probs)(model.params, batch))
        for row, prompt in enumerate(out.prompts):
            np.testing.assert_allclose(got[row, len(prompt) :][:50], out.logprobs[row], atol=2e-5)


@pytest.mark.parametrize("sampling", [DRAWN, CUT], ids=["drawn", "cut"])
def test_a_request_draws_the_same_by_itself_in_a_batch_and_as_a_sample_of_a_group(model, sampling):
    engine = {"max_running": 4, "max_slots": 128, "page_size": 4}
    together = jkv.Engine(model, **engine)
    tickets = [together.submit(prompt, sampling=sampling, max_new_tokens=50, n=3, stop_ids=()) for prompt in PROMPTS]
    together.run()
    for prompt, ticket in zip(PROMPTS, tickets, strict=True):
        out, apart = together.result(ticket), jkv.Engine(model, **engine)
        for sample in range(3):
            single = apart.submit(prompt, sampling=sampling, max_new_tokens=50, stop_ids=(), first_sample=sample)
            apart.run()
            alone = apart.result(single)
            np.testing.assert_array_equal(alone.tokens[0], out.tokens[sample])
            np.testing.assert_array_equal(alone.logprobs[0], out.logprobs[sample])


def test_rows_without_penalties_are_not_affected_by_rows_with_some(model):
    engine = jkv.Engine(model, max_running=4, max_slots=128)
    plain = [jkv.Sampling(temperature=0.0), jkv.Sampling(seed=1)]
    tickets = []
    for i, sampling in enumerate([*plain, *plain]):
        engine.submit([*PROMPTS[0], i], sampling=DRAWN, max_new_tokens=20 + 7 * i, stop_ids=())
        tickets.append(engine.submit([*PROMPTS[1], i], sampling=sampling, max_new_tokens=40, stop_ids=()))
    engine.run()
    other = jkv.Engine(model, max_running=4, max_slots=128)
    for i, (ticket, sampling) in enumerate(zip(tickets, [*plain, *plain], strict=True)):
        alone = other.submit([*PROMPTS[1], i], sampling=sampling, max_new_tokens=40, stop_ids=())
        other.run()
        among, alone = engine.result(ticket), other.result(alone)
        np.testing.assert_array_equal(among.tokens, alone.tokens)
        np.testing.assert_array_equal(among.logprobs, alone.logprobs)
        np.testing.assert_array_equal(among.logprobs_full, alone.logprobs_full)


def submit_all(engine):
    """Four samples of two prompts."""
    return [engine.submit(prompt, sampling=CUT, max_new_tokens=50, n=2, stop_ids=()) for prompt in PROMPTS[:2]]


def tokens_of(engine, tickets):
    engine.run()
    return [engine.result(ticket).tokens.tolist() for ticket in tickets]


@pytest.fixture(scope="module")
def undisturbed(model):
    engine = jkv.Engine(model, max_running=4, max_slots=128, page_size=4)
    return tokens_of(engine, submit_all(engine))


def test_preempted_samples_go_on_with_their_counts(model, undisturbed):
    engine = jkv.Engine(model, max_running=4, max_slots=128, page_size=4, num_pages=150)
    tickets = submit_all(engine)
    assert tokens_of(engine, tickets) == undisturbed
    assert engine.stats.preemptions > 0


def test_sleep_a_reset_and_a_new_request_change_no_counts(model, undisturbed):
    engine = jkv.Engine(model, max_running=4, max_slots=128, page_size=4)
    tickets = submit_all(engine)
    engine.step()
    engine.step()
    engine.sleep()
    engine.wake()
    engine.step()
    other = engine.submit(PROMPTS[2], max_new_tokens=9, stop_ids=())
    assert tokens_of(engine, tickets) == undisturbed
    plain = engine.result(other).tokens.tolist()
    assert plain == jkv.generate(model, PROMPTS[2], max_new_tokens=9, stop_ids=(), max_running=4).tokens.tolist()
    tickets = submit_all(engine)
    engine.step()
    engine.reset()
    assert tokens_of(engine, tickets) == undisturbed


def test_a_rollout_that_pauses_goes_on_with_its_counts(model):
    make = lambda: jkv.Rollout(model, POLICIES["r_kv"], max_prompt_tokens=32, max_new_tokens=50, page_size=4)  # noqa: E731
    with pytest.warns(UserWarning, match="repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3 change"):
        whole = make()(PROMPTS, n=2, sampling=DRAWN, stop_ids=())
    paused = make()
    with pytest.warns(UserWarning, match="train on it"):
        paused.submit(PROMPTS, n=2, sampling=DRAWN, stop_ids=())
    assert not len(paused.run(max_steps=16).lengths)
    np.testing.assert_array_equal(paused.run().tokens, whole.tokens)


def test_forced_tokens_count_as_generated(model):
    drawn = jkv.generate(model, PROMPTS[0], sampling=DRAWN, **KNOBS)
    begun = jkv.generate(model, PROMPTS[0], sampling=DRAWN, forced_tokens=drawn.tokens[0, :20].tolist(), **KNOBS)
    np.testing.assert_array_equal(begun.tokens, drawn.tokens)
    np.testing.assert_array_equal(begun.logprobs, drawn.logprobs)


def test_later_requests_compile_nothing(model):
    engine = jkv.Engine(model, max_running=2, max_slots=128)
    for sampling in (DRAWN, CUT):
        engine.submit(PROMPTS[0], sampling=sampling, max_new_tokens=31, stop_ids=())
        engine.run()
    before = programs.decode_chunk.num_compiled()
    for sampling in (CUT, DRAWN, None, jkv.Sampling(seed=2, presence_penalty=1.0)):
        engine.submit(PROMPTS[1], sampling=sampling, max_new_tokens=31, stop_ids=())
        engine.run()
    assert programs.decode_chunk.num_compiled() == before


def test_an_engine_keeps_counts_only_once_a_request_needs_them(model):
    engine = jkv.Engine(model, max_running=2, max_slots=128)
    engine.submit(PROMPTS[0], max_new_tokens=4, stop_ids=())
    engine.run()
    runner = engine.runner
    assert runner._carried.generated is runner._settings.parts.penalties is runner._settings.sampling.penalties is None
    engine.submit(PROMPTS[0], sampling=DRAWN, max_new_tokens=4, stop_ids=())
    engine.run()
    assert runner._carried.generated.shape == runner._settings.parts.penalties.is_prompted.shape == (2, TINY.vocab_size)


def test_a_mesh_of_one_device_counts_too(model, undisturbed):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("tensor",))
    sharded = jkv.Model(jkv.shard(model.params, mesh), model.tokenizer)
    engine = jkv.Engine(sharded, max_running=4, max_slots=128, page_size=4, mesh=mesh)
    assert tokens_of(engine, submit_all(engine)) == undisturbed


def test_a_chunk_with_penalties_compiles_once():
    """Counts of tokens that come from the host are placed as those that the last chunk returned."""
    engine = jkv.Engine(tiny_model(), max_running=2, max_slots=64, page_size=4, chunk=8)
    settings = {"stop_ids": (), "sampling": jkv.Sampling(temperature=0.0, presence_penalty=0.5)}
    for _ in range(2):  # of one chunk each
        engine.submit([5, 6, 7], max_new_tokens=8, **settings)
        engine.run()
    compiled = COMPILING.count
    engine.submit([5, 6, 7], max_new_tokens=24, **settings)
    engine.run()
    assert COMPILING.count == compiled
