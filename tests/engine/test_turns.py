"""Turns of a conversation: a kept row goes on with new tokens alone, and odd turns are refused by their reason."""

import dataclasses

import numpy as np
import pytest

import jkv
from tests.support.mixes import BreakingTokenizer
from tests.support.turns import FREE, LIMITS, MAX_SLOTS, NEW, PROMPT, R_KV, RNG, assert_same_bits, converse, make

pytestmark = pytest.mark.usefixtures("short_prefills")


@pytest.fixture(scope="module")
def breaking(model):
    return dataclasses.replace(model, tokenizer=BreakingTokenizer())


# What a turn is.


@pytest.mark.rounding
def test_a_full_cache_gives_what_the_whole_conversation_anew_gives(model):
    engine = make(model)
    outs = converse(engine, jkv.full(), sampling=jkv.Sampling(seed=3), request=8)
    for out in outs[1:]:
        ticket = engine.submit(
            out.prompts[0], max_new_tokens=len(out.tokens[0]), sampling=jkv.Sampling(seed=3), request=8, **FREE
        )
        engine.run()
        anew = engine.result(ticket)
        assert anew.tokens.tolist() == out.tokens.tolist()
        np.testing.assert_allclose(anew.logprobs, out.logprobs, atol=1e-5)


def test_a_transcript_has_every_token_with_its_mask(model):
    outs = converse(make(model), R_KV)
    (whole,) = outs[-1].transcripts
    parts, mask, log_probs = [PROMPT], [False] * len(PROMPT), [0.0] * len(PROMPT)
    for out, new in zip(outs, [*NEW, []], strict=True):
        parts += [out.tokens[0].tolist(), new]
        mask += [True] * len(out.tokens[0]) + [False] * len(new)
        log_probs += out.logprobs[0].tolist() + [0.0] * len(new)
    assert whole.tokens.tolist() == [token for part in parts for token in part]
    assert whole.loss_mask.tolist() == mask
    np.testing.assert_array_equal(whole.logprobs, np.float32(log_probs))
    assert set(whole.versions.tolist()) == {0}
    assert outs[-1].prompts[0].tolist() == whole.tokens[: -LIMITS[-1]].tolist()
    assert [out.samples[0].cached_tokens for out in outs] == [0, 34, 64, 72]
    assert outs[0].transcripts[0].tokens.tolist() == PROMPT + outs[0].tokens[0].tolist()


@pytest.mark.parametrize("policy", [jkv.full(), jkv.r_kv(budget=64, interval=16, window=4)], ids=lambda policy: policy.name)
def test_a_second_turn_prefills_its_new_tokens_alone(model, policy, monkeypatch):
    engine = jkv.Engine(model, max_running=1, max_slots=2048, page_size=16, policies=[policy])
    long = np.tile(RNG.integers(4, 30, 200), 10).tolist()
    ticket = engine.submit(long, policy=policy, max_new_tokens=5, keep=True, **FREE)
    engine.run()
    engine.result(ticket)
    counts, program = [], engine.runner.programs.prefill_chunk

    class Counting:
        def __getattr__(self, name):
            return getattr(original, name)

        def prefill_chunk(self, params, state, row, token, num_new, gate, **settings):
            counts.append(int(num_new[0]))
            return program(params, state, row, token, num_new, gate, **settings)

    original = engine.runner.programs
    monkeypatch.setattr(engine.runner, "programs", Counting())
    ticket = engine.extend(ticket, NEW[2][:20], max_new_tokens=3, **FREE)
    engine.run()
    assert engine.result(ticket).prompts[0].size == 2025
    assert sum(counts) == 20
    assert counts == ([16, 4] if policy.evict is None else [11, 9])  # a compaction is due after the 16th token


def test_each_sample_of_a_request_goes_on_by_itself(model):
    engine = make(model)
    ticket = engine.submit(PROMPT, policy=R_KV, max_new_tokens=13, n=3, sampling=jkv.Sampling(seed=1), keep=True, **FREE)
    engine.run()
    first = engine.result(ticket)
    later = [engine.extend(ticket, NEW[0], sample=i, max_new_tokens=9, **FREE) for i in (2, 0)]
    engine.run()
    for i, number in zip((2, 0), later, strict=True):
        out = engine.result(number)
        engine.release(number)
        alone = engine.submit(
            PROMPT, policy=R_KV, max_new_tokens=13, sampling=jkv.Sampling(seed=1), first_sample=i, keep=True, **FREE
        )
        engine.run()
        alone = engine.extend(alone, NEW[0], max_new_tokens=9, **FREE)
        engine.run()
        assert out.transcripts[0].tokens[21:34].tolist() == first.tokens[i].tolist()
        assert_same_bits([out], [engine.result(alone)])
        engine.release(alone)
    assert engine.runner.num_held_pages > 0, "the sample that nobody continued"
    engine.release(ticket)
    assert engine.runner.num_held_pages == 0


def test_a_turn_may_have_other_settings_and_end_by_a_stop_id(model):
    engine = make(model)
    ticket = engine.submit(PROMPT, policy=R_KV, max_new_tokens=6, sampling=jkv.Sampling(seed=1), keep=True, **FREE)
    engine.run()
    drawn = engine.extend(ticket, NEW[0], max_new_tokens=20, sampling=jkv.Sampling(temperature=0.0), **FREE)
    engine.run()
    out = engine.result(drawn)
    assert out.sampling[0].temperature == 0
    stop = int(out.tokens[0, 4])
    at = out.tokens[0].tolist().index(stop)
    ticket = engine.submit(PROMPT, policy=R_KV, max_new_tokens=6, sampling=jkv.Sampling(seed=1), keep=True, **FREE)
    engine.run()
    ticket = engine.extend(
        ticket, NEW[0], max_new_tokens=20, sampling=jkv.Sampling(temperature=0.0), stop_ids=[stop], keep=False
    )
    engine.run()
    stopped = engine.result(ticket)
    assert stopped.finish_reason == ["stop"]
    assert stopped.tokens[0].tolist() == out.tokens[0, : at + 1].tolist()
    engine.release(drawn)
    assert engine.runner.num_held_pages == 0, "keep=False leaves no row"


# What is refused.


@pytest.fixture(scope="module")
def shared(breaking):
    return make(breaking)


def test_a_ticket_without_a_row_is_refused_by_the_reason(shared):
    engine = shared
    plain = engine.submit(PROMPT, policy=R_KV, max_new_tokens=3, **FREE)
    kept = engine.submit(PROMPT, policy=R_KV, max_new_tokens=3, keep=True, **FREE)
    with pytest.raises(ValueError, match=r"this one still runs\. Wait"):
        engine.extend(kept, [5])
    engine.run()
    with pytest.raises(ValueError, match=r"this one was not\. Submit it again, with keep=True"):
        engine.extend(plain, [5])
    with pytest.raises(ValueError, match="sample must be one of the request's 1; got 1"):
        engine.extend(kept, [5], sample=1)
    with pytest.raises(ValueError, match="it was never given, or its request was not submitted with keep=True"):
        engine.extend(77, [5])
    for wrong in ("a", 1.5, None, True):
        with pytest.raises(ValueError, match="ticket must be a whole number"):
            engine.extend(wrong, [5])
    later = engine.extend(kept, [5], max_new_tokens=2, **FREE)
    with pytest.raises(ValueError, match="it was extended, and the conversation goes on in the later ticket"):
        engine.extend(kept, [5])
    engine.run()
    engine.release(later)
    with pytest.raises(ValueError, match="it was closed"):
        engine.extend(later, [5])
    assert engine.runner.num_held_pages == 0


def fail(event):
    raise KeyError("callback")


def test_a_failed_request_leaves_no_row(shared):
    ticket = shared.submit(PROMPT, policy=R_KV, max_new_tokens=30, keep=True, on_tokens=fail, **FREE)
    shared.run()
    with pytest.raises(ValueError, match=r"finished by stop or length; this one ended by 'error'"):
        shared.extend(ticket, [5])
    assert shared.runner.num_held_pages == 0


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "at least one token; the list is empty"),
        ("text", "Encode texts"),
        (7, "flat list"),
        (None, "flat list"),
        ([[1, 2]], "Flatten it"),
        ([[1], [2, 3]], "Flatten it"),
        ([1.5], "float64"),
        ([True], "bool"),
        ([-1], r"must lie in \[0, .*holds -1"),
        ([10**30], r"must lie in \[0, "),
        ([5, 10**6], r"must lie in \[0, .*holds 1000000"),
        (range(2**40), "no more than the model's"),
        ([5] * 100_000, "no more than the model's"),
    ],
)
def test_tokens_that_are_none_are_refused_and_the_row_stays(shared, tokens, words):
    ticket = shared.submit(PROMPT, policy=R_KV, max_new_tokens=3, keep=True, **FREE)
    shared.run()
    with pytest.raises(ValueError, match=words):
        shared.extend(ticket, tokens)
    for settings, words_of_settings in (
        ({"policy": jkv.full()}, "with its policy, salt and adapter; got policy"),
        ({"n": 2}, "got n=2"),
        ({"first_sample": 1}, "got first_sample=1"),
        ({"cache_salt": "b"}, "got cache_salt='b'"),
        ({"stop_strings": ["a"]}, "a stop string"),
        ({"max_new_tokens": 10**6}, "A conversation must fit the model's"),
        ({"keep": 1}, "keep must be"),
    ):
        with pytest.raises(ValueError, match=words_of_settings):
            shared.extend(ticket, [5], **settings)
    later = shared.extend(ticket, [5], max_new_tokens=2, **FREE)
    shared.run()
    shared.release(later)
    assert shared.runner.num_held_pages == 0


def test_a_conversation_beyond_the_engine_is_refused(shared):
    ticket = shared.submit(PROMPT, max_new_tokens=3, keep=True, **FREE)
    shared.run()
    with pytest.raises(ValueError, match=f"may fill {MAX_SLOTS} slots"):
        shared.extend(ticket, [5] * 160, max_new_tokens=20)
    shared.release(ticket)


def test_stop_strings_and_odd_keeps_are_refused_at_submit(shared):
    with pytest.raises(ValueError, match="end turns by stop_ids"):
        shared.submit(PROMPT, keep=True, stop_strings=["a"])
    with pytest.raises(ValueError, match="keep must be"):
        shared.submit(PROMPT, keep="yes")
