"""Conversations of a rollout: one sequence of turns and replies, of which a trainer learns what the model drew."""

import dataclasses
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.rollout import ReplyError
from jkv.rollout.conversing import Conversing
from tests.rollout.test_rollout import PROMPTS, R_KV, make_rollout
from tests.rollout.test_sessions import in_threads
from tests.support.faults import with_failing_programs
from tests.support.mixes import BreakingTokenizer

REPLIES = {0: [7, 8, 9], 1: [11] * 5}  # by number of the turn
SETTINGS = {"max_turns": 3, "max_turn_tokens": 6, "n": 2, "seed": 4, "stop_ids": ()}


@pytest.fixture(scope="module")
def rollout(model):
    return make_rollout(model, R_KV)


def scripted(turn):
    return REPLIES[turn.number]


def drawn(out):
    """The mask that turns of 6 tokens and the scripted replies give."""
    row = [True] * 6 + [False] * 3 + [True] * 6 + [False] * 5 + [True] * 4
    return np.tile(row, (len(out.lengths), 1))


def test_a_conversation_is_one_sequence_whose_mask_is_what_the_model_drew(rollout):
    turns = []
    out = rollout.converse(PROMPTS[:2], lambda turn: (turns.append(turn), scripted(turn))[1], **SETTINGS)
    assert out.lengths.tolist() == [24] * 4  # the rollout's max_new_tokens: the last turn has 4 tokens
    np.testing.assert_array_equal(out.mask, drawn(out))
    assert out.finish_reason == ["length"] * 4
    np.testing.assert_array_equal(out.tokens[:, 6:9], [REPLIES[0]] * 4)
    np.testing.assert_array_equal(out.tokens[:, 15:20], [REPLIES[1]] * 4)
    assert (out.logprobs[out.mask] < 0).all()
    assert (out.logprobs[~out.mask] == 0).all()
    assert (out.policy_version == np.where(out.mask, 0, -1)).all()
    assert [prompt.tolist() for prompt in out.prompts] == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
    assert (out.prompt_index.tolist(), out.sample_index.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert sorted((turn.prompt_index, turn.sample_index, turn.number) for turn in turns) == [
        (prompt, sample, number) for prompt in range(2) for sample in range(2) for number in range(2)
    ]
    for turn in turns:
        row = 2 * turn.prompt_index + turn.sample_index
        whole, start = [*PROMPTS[turn.prompt_index], *out.tokens[row].tolist()], len(PROMPTS[turn.prompt_index])
        start += 9 * turn.number
        assert (turn.before.tolist(), turn.tokens.tolist()) == (whole[:start], whole[start : start + 6])
    assert rollout.num_pending == len(rollout.engine.tickets) == len(rollout.engine.scheduler.kept_rows) == 0
    assert rollout.engine.runner.num_held_pages == 0


@pytest.mark.parametrize("policy", [None, R_KV, jkv.h2o(budget=14)], ids=["full", "r_kv", "h2o"])
def test_its_trace_replays_every_turn_and_a_batch_trains_no_reply(model, policy):
    rollout = make_rollout(model, policy)
    out = rollout.converse(PROMPTS[:2], scripted, return_trace=True, **SETTINGS)
    replayed = np.asarray(jkv.score(model, out, trace=out.trace).logprobs)
    assert np.abs(replayed - out.logprobs)[out.mask].max() <= 1e-4
    batch = jkv.rl.make_batch(out, np.ones(4), replay=True)
    log_probs = np.asarray(jkv.rl.log_probs(model, batch))
    assert int(batch.mask.sum()) == int(out.mask.sum()) == 4 * 16
    np.testing.assert_allclose(log_probs[np.asarray(batch.mask)], replayed[out.mask], atol=1e-5)
    assert (log_probs[~np.asarray(batch.mask)] == 0).all()

    gradient = jax.grad(lambda params: jkv.rl.policy_loss(params, batch)[0])(model.params)
    assert float(jnp.abs(gradient.embedding).max()) > 0
    overlap = jkv.rl.full_overlap(model, out, rows=2)
    np.testing.assert_array_equal(overlap.mask, out.mask[:2])


def test_replies_of_workers_give_the_tokens_of_replies_in_turn(rollout):
    names = set()

    def slow(turn):
        names.add(threading.current_thread().name)
        time.sleep(0.02 * turn.sample_index)
        return scripted(turn)

    out = rollout.converse(PROMPTS[:2], slow, workers=3, **SETTINGS)
    np.testing.assert_array_equal(out.tokens, rollout.converse(PROMPTS[:2], scripted, **SETTINGS).tokens)
    assert all(name.startswith("reply") for name in names)


def test_conversations_of_two_threads_and_a_call_share_the_rollout(rollout):
    calls = [lambda prompt=prompt: rollout.converse([prompt], scripted, **SETTINGS).tokens.tolist() for prompt in PROMPTS[:2]]
    calls.append(lambda: rollout(PROMPTS, n=1, seed=1, stop_ids=()).tokens.tolist())
    assert in_threads(*calls) == [call() for call in calls]


def test_none_ends_a_conversation_and_others_go_on(rollout):
    out = rollout.converse(PROMPTS[:1], lambda turn: None if turn.sample_index else scripted(turn), **SETTINGS)
    assert out.lengths.tolist() == [24, 6]
    assert out.mask[1].tolist() == [True] * 6 + [False] * 18
    assert (out.tokens[1, 6:] == out.pad_id).all()


def test_a_reply_that_fails_ends_its_conversation_alone(rollout):
    def reply(turn):
        if turn.sample_index == 0:
            raise OSError("the tool is gone")
        return [-1] if turn.prompt_index else scripted(turn)

    with pytest.raises(ReplyError, match=r"3 conversations of 4 ended .*: reply raised; .*the tool is gone") as caught:
        rollout.converse(PROMPTS[:2], reply, **SETTINGS)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.warns(UserWarning, match=r"reply raised; the first at turn 0 of prompt 0, sample 0: OSError") as warned:
        returned = rollout.converse(PROMPTS[:2], reply, on_error="return", **SETTINGS)
    assert len(warned) == 1
    for out in (caught.value.rollouts, returned):
        assert out.finish_reason == ["error", "length", "error", "error"]
        assert out.lengths.tolist() == [6, 24, 6, 6]
        assert [type(sample.error) for sample in out.samples] == [OSError, type(None), OSError, jkv.InputError]
        assert "Token ids must lie in [0, " in str(out.samples[3].error)
    assert rollout.pending == len(rollout.engine.tickets) == len(rollout.engine.scheduler.kept_rows) == 0
    assert rollout.engine.runner.num_held_pages == 0


class Hostile:
    """A reply of which nothing can be asked."""

    def __getattribute__(self, name):
        raise RuntimeError("asked")

    def __len__(self):
        raise SystemExit

    def __iter__(self):
        raise SystemExit

    __getitem__ = __iter__


class Leaving(Hostile):
    """A reply that looks like a list, and ends the program when it is read."""

    __getattribute__ = object.__getattribute__


NO_REPLIES = [
    3,
    3.5,
    True,
    object(),
    b"bytes",
    OSError("returned"),
    SystemExit(3),
    [],
    [1.5],
    [[5, 6]],
    [[5], [6, 7]],
    ["a", "b"],
    [None],
    [True, False],
    [-1],
    [10**30],
    {"role": "user", "content": "hi"},
    {5, 6},
    range(3, -1, -1).__iter__(),
    np.float32(2.5),
    np.array(5),
    np.zeros((0,), np.int32),
    jnp.ones((2, 2), jnp.int32),
    "a text without a tokenizer",
    lambda: [5],
    Hostile(),
    Leaving(),
]


@pytest.mark.parametrize("workers", [0, 2])
def test_whatever_a_tool_returns_ends_its_own_conversation_alone(rollout, workers):
    replies = [*NO_REPLIES, *[iter([5, 6]), (token for token in [5, 6])]]
    settings = SETTINGS | {"n": len(replies) + 3, "max_turns": 2}
    good = {0: [5, 6], 1: np.array([5, 6], np.int64), 2: jnp.array([5, 6])}
    with pytest.warns(UserWarning, match=rf"{len(replies)} conversations of {len(replies) + 3} .* returned no reply") as warned:
        out = rollout.converse(
            PROMPTS[:1],
            lambda turn: good[turn.sample_index] if turn.sample_index in good else replies[turn.sample_index - 3],
            workers=workers,
            **settings,
        )
    assert len(warned) == 1
    assert out.finish_reason == ["length"] * 3 + ["error"] * len(replies)
    assert out.lengths.tolist() == [14] * 3 + [6] * len(replies)
    assert all(str(sample.error) or isinstance(sample.error, SystemExit) for sample in out.samples[3:])
    assert rollout.pending == len(rollout.engine.tickets) == len(rollout.engine.scheduler.kept_rows) == 0
    assert rollout.converse(PROMPTS[:1], scripted, **SETTINGS).lengths.tolist() == [24, 24]


class UnprintableError(Exception):
    """An exception whose `str` and `repr` raise."""

    def __str__(self):
        raise SystemExit

    __repr__ = __str__


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), SystemExit(3), GeneratorExit(), KeyboardInterrupt(), UnprintableError()],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("workers", [0, 1])
def test_whatever_a_tool_raises_is_raised_once_the_others_have_ended(rollout, error, workers):
    def reply(turn):
        if turn.sample_index:
            raise error
        return scripted(turn)

    with pytest.raises(ReplyError) as caught:
        rollout.converse(PROMPTS[:1], reply, workers=workers, **SETTINGS)
    assert caught.value.__cause__ is error
    assert caught.value.rollouts.finish_reason == ["length", "error"]
    assert rollout.converse(PROMPTS[:1], scripted, **SETTINGS).lengths.tolist() == [24, 24]


def test_a_reply_longer_than_any_memory_ends_its_conversation_unread(rollout):
    out = rollout.converse(PROMPTS[:1], lambda turn: range(2**70) if turn.sample_index else range(10**12), **SETTINGS)
    assert out.finish_reason == ["length"] * 2


def test_a_reply_that_does_not_fit_ends_the_conversation_unread(rollout):
    out = rollout.converse(PROMPTS[:1], lambda turn: [5] * 18, **SETTINGS)
    assert out.lengths.tolist() == [6, 6]
    assert out.finish_reason == ["length"] * 2
    assert rollout.converse(PROMPTS[:1], lambda turn: [5] * 17, **SETTINGS).lengths.tolist() == [24, 24]


def test_an_interrupt_returns_every_conversation_with_its_turns_so_far(rollout):
    def reply(turn):
        if turn.number == 1:
            signal.raise_signal(signal.SIGINT)
        return scripted(turn)

    out = rollout.converse(PROMPTS[:2], reply, **SETTINGS)
    assert "cancelled" in out.finish_reason
    assert all(length in range(6, 25) for length in out.lengths)
    assert rollout.num_pending == len(rollout.engine.tickets) == len(rollout.engine.scheduler.kept_rows) == 0
    rollout.converse(PROMPTS[:1], scripted, **SETTINGS)


def test_an_interrupt_does_not_wait_for_replies_that_take_long(rollout):
    leave, ended = threading.Event(), []

    def reply(turn):
        if turn.sample_index:
            signal.raise_signal(signal.SIGINT)
        leave.wait(60)
        ended.append(turn)

    out = rollout.converse(PROMPTS[:1], reply, workers=2, **SETTINGS)
    assert ended == []
    leave.set()
    assert out.finish_reason == ["cancelled"] * 2
    assert out.lengths.tolist() == [6, 6]


def test_what_an_error_leaves_pending_is_returned_by_the_next_run(rollout, monkeypatch):
    """One conversation waits for its reply; its turn has ended, and no later event says so."""
    waiting, go_on = threading.Event(), Conversing.go_on

    def stop(conversing):
        go_on(conversing)
        if conversing.asked and not conversing.running:
            raise RuntimeError("stop")

    monkeypatch.setattr(Conversing, "go_on", stop)
    with pytest.raises(RuntimeError, match="stop"):
        rollout.converse(PROMPTS[:1], lambda turn: waiting.wait(60) and None, workers=2, **SETTINGS)
    assert rollout.pending == 2
    out = rollout.run()
    waiting.set()
    assert out.lengths.tolist() == [6, 6]
    assert rollout.num_pending == len(rollout.engine.tickets) == len(rollout.engine.scheduler.kept_rows) == 0


def test_conversations_go_on_after_a_failed_program(model):
    rollout = make_rollout(model, R_KV)
    programs = with_failing_programs(rollout.engine)
    programs.fail(6, False)
    out = rollout.converse(PROMPTS[:2], scripted, **SETTINGS)
    assert programs.failing is None
    assert len(out.lengths) == 4
    assert rollout.num_pending == len(rollout.engine.tickets) == 0
    assert rollout.converse(PROMPTS[:1], scripted, **SETTINGS).lengths.tolist() == [24, 24]


def test_a_text_is_a_reply_where_there_is_a_tokenizer():
    model = jkv.load("tiny-reasoner")
    rollout = jkv.Rollout(model, jkv.r_kv(budget=32, interval=8), max_prompt_tokens=64, max_new_tokens=48, page_size=4)
    texts = []

    def reply(turn):
        texts.append(turn.text)
        return "Wait "

    out = rollout.converse("b=3;c=7;d=b*c;?d", reply, max_turns=2, max_turn_tokens=12, seed=0, stop_ids=())
    assert out.text[0].startswith(texts[0])
    assert "Wait" in out.text[0][len(texts[0]) :]
    assert out.mask[0].tolist().count(False) == len(model.tokenizer.encode("Wait ", add_special_tokens=False))


def test_the_token_that_ended_a_turn_is_in_no_text(model):
    class Numbers:
        def decode(self, ids, skip_special_tokens=False):
            return "".join(f"{int(i)} " for i in ids)

    rollout = make_rollout(dataclasses.replace(model, tokenizer=Numbers()), R_KV)
    settings = SETTINGS | {"max_turns": 2, "max_turn_tokens": 4}
    free, turns = rollout.converse(PROMPTS[:1], lambda turn: None, **settings), []
    end = int(free.tokens[0, 0])
    asked = settings | {"stop_ids": (end,)}
    out = rollout.converse(PROMPTS[:1], lambda turn: (turns.append(turn), [1, 2])[1], **asked)
    assert (turns[0].tokens[-1], turns[0].finish_reason) == (end, "stop")
    assert turns[0].text == Numbers().decode(turns[0].tokens[:-1])
    last = out.tokens[0][: out.lengths[0]].tolist()[len(turns[0].tokens) :]
    last = last[:-1] if out.finish_reason[0] == "stop" else last
    assert out.text[0] == turns[0].text + Numbers().decode(last)


def test_a_text_of_a_tool_makes_no_control_tokens_unless_it_may():
    model = jkv.load("tiny-reasoner")
    end = model.tokenizer.eos_token_id
    rollout = jkv.Rollout(model, jkv.full(), max_prompt_tokens=64, max_new_tokens=16, page_size=4)
    settings = {"max_turns": 2, "max_turn_tokens": 2, "seed": 0, "stop_ids": ()}
    for options, count in (({}, 0), ({"parse_special": True}, 1)):
        out = rollout.converse("b=3;?b", lambda turn: f"1{model.tokenizer.eos_token}2", **settings, **options)
        replied = out.tokens[0][: out.lengths[0]][~out.mask[0][: out.lengths[0]]]
        assert replied.tolist().count(end) == count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reply": 3}, "reply must be a function"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_turn_tokens": 0}, "max_turn_tokens"),
        ({"workers": -1}, "workers must lie in"),
        ({"on_error": "warn"}, "on_error must be one of raise, return"),
        ({"sampling": jkv.Sampling(presence_penalty=0.5)}, "without penalties"),
    ],
)
def test_bad_input_is_refused_before_anything_is_queued(rollout, change, message):
    reply = change.pop("reply", scripted)
    with pytest.raises(ValueError, match=message):
        rollout.converse(PROMPTS[:1], reply, **SETTINGS | change)
    assert rollout.num_pending == 0


def test_a_policy_whose_rows_cannot_be_kept_is_refused_by_name(model):
    named = dataclasses.replace(model, tokenizer=BreakingTokenizer())
    sharing = make_rollout(named, jkv.random_share(jkv.reason_cache(interval=4)))
    with pytest.raises(ValueError, match="keep needs a row that a later turn can continue"):
        sharing.converse(PROMPTS[:1], scripted, **SETTINGS)
