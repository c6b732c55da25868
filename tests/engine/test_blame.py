"""One request's fault is its own: it ends with the reason "error", and the others have the tokens of an undisturbed run."""

import dataclasses
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.analysis import recall
from jkv.engine.results import complete
from jkv.evaluation import held_out as evaluate
from jkv.evaluation import probe
from jkv.evaluation.probe_texts import Probe
from jkv.testing import TinyTokenizer
from tests.support.faults import DeviceError, with_poison
from tests.support.mixes import assert_engine_is_consistent

PROMPTS = [[5, 1, 9], [3, 7] * 13 + [1], [4] * 8, list(range(20))]
GUILTY = 2  # the index of the prompt whose request is at fault
FULL, BUDGET = jkv.full(), {"budget": 16, "interval": 8}
SETTINGS = {"max_new_tokens": 20, "stop_ids": ()}
SIZES = {"max_running": 4, "max_slots": 64, "page_size": 4, "chunk": 8, "poison": True}


class Exit(BaseException):
    """Neither an Exception nor an interrupt, and without a text."""

    def __str__(self):
        raise RuntimeError("no text")


def exiting(kind, *arguments):
    """A score that raises."""

    def score(view):
        raise kind(*arguments)

    return score


def branching(view):
    return view.key[..., 0] if view.position.sum() > 0 else view.key[..., 1]


def with_numpy(view):
    return jnp.asarray(np.asarray(view.key)[..., 0])


BAD_SCORES = {
    "raises": (exiting(OSError, "the disk is full"), "OSError: the disk is full"),
    "exits": (lambda view: sys.exit(3), "SystemExit: 3"),
    "interrupts": (exiting(KeyboardInterrupt), "KeyboardInterrupt"),
    "ends a generator": (exiting(GeneratorExit), "GeneratorExit"),
    "raises what has no text": (exiting(Exit), "raised Exit"),
    "branches": (branching, "jnp.where in place of if"),
    "counts": (lambda view: jnp.ones((int(view.position[0, 0, 0]), 2, 64)), "jnp.where in place of if"),
    "indexes by a mask": (lambda view: view.key[view.is_filled], "A mask has no fixed number of slots"),
    "calls NumPy": (with_numpy, r"Use jax\.numpy"),
    "returns None": (lambda view: None, "got NoneType"),
    "returns two": (lambda view: (view.key[..., 0], view.key[..., 1]), "returns a pair"),
    "returns a list": (lambda view: [view.key[..., 0]], "got list"),
    "returns a number": (lambda view: 1.0, "got float"),
    "returns a mask": (lambda view: view.position > 3, "got a mask of booleans.*jnp.where"),
    "returns positions": (lambda view: view.position, r"got int32.*astype\(jnp\.float32\)"),
    "rounds": (lambda view: view.key[..., 0].astype(jnp.bfloat16), r"got bfloat16.*astype\(jnp\.float32\)"),
    "scores heads": (lambda view: view.key[:, :, 0, 0], r"got the shape \(\d+, \d+\)"),
    "scores one row": (lambda view: view.key[:1, :, :, 0], r"got the shape \(1, \d+, \d+\)"),
    "reads what it does not declare": (lambda view: view.query[..., 0].sum(axis=2), "this view has no query"),
}


@pytest.fixture(scope="module")
def model(model):
    return dataclasses.replace(model, tokenizer=TinyTokenizer())


@pytest.fixture(scope="module")
def whole(model):
    """The tokens of each prompt in an undisturbed run."""
    engine = jkv.Engine(model, **SIZES)
    tickets = submit(engine, r_kv(GUILTY))
    engine.run()
    return [engine.result(ticket).tokens[0].tolist() for ticket in tickets]


def r_kv(_):
    return jkv.r_kv(**BUDGET, window=4)


def submit(engine, policy, **settings):
    """Requests for all prompts; the guilty one has the settings and the policy, the others R-KV."""
    common = {"policy": r_kv(0)} | SETTINGS
    return [
        engine.submit(prompt, **(common | {"policy": policy} | settings if i == GUILTY else common))
        for i, prompt in enumerate(PROMPTS)
    ]


def assert_neighbours_are_whole(engine, tickets, whole, error, words=""):
    """Runs to the end; the guilty request has ended with an error, and the engine serves others and holds no page."""
    engine.run()
    for i, ticket in enumerate(tickets):
        out = engine.result(ticket)
        got = out.tokens[0, : out.lengths[0]].tolist()
        if i == GUILTY:
            assert out.finish_reason == ["error"]
            assert isinstance(out.samples[0].error, error), out.samples[0].error
            assert not words or words in str(out.samples[0].error)
        else:
            assert (out.finish_reason, got) == (["length"], whole[i])
    assert_engine_serves(engine, whole)


def assert_engine_serves(engine, whole):
    ticket = engine.submit(PROMPTS[0], policy=r_kv(0), **SETTINGS)
    engine.run()
    assert engine.result(ticket).tokens[0].tolist() == whole[0]
    engine.step()
    assert_engine_is_consistent(engine)
    assert engine.runner.num_held_pages == 0
    assert not engine.tickets
    assert not engine.scheduler.prefixes
    assert not engine.scheduler.held


def test_a_bad_score_is_refused_before_anything_of_its_request_is_admitted(model, whole):
    """Every kind, at a bare engine and at a served one; each message has the rule, what was got, and how to correct it."""
    engine = jkv.Engine(model, **SIZES)
    running = engine.submit(PROMPTS[1], policy=r_kv(0), **SETTINGS)
    engine.step()

    def refuse(target):
        for kind, (score, words) in BAD_SCORES.items():
            policy = jkv.evict_by(score, **BUDGET, name="mine")
            with pytest.raises(ValueError, match=f"(?s)must return .*{words}.*[.]$") as caught:
                target.submit(PROMPTS[0], policy=policy, **SETTINGS)
            assert "\n" not in str(caught.value), kind

    refuse(engine)
    assert set(engine.tickets) == {running}
    engine.run()
    assert engine.result(running).tokens[0].tolist() == whole[1]
    with jkv.Service(engine) as service:
        ticket = service.submit(PROMPTS[1], policy=r_kv(0), **SETTINGS)
        refuse(service)
        assert ticket.result(60).tokens[0].tolist() == whole[1]
    assert_engine_serves(engine, whole)


def test_a_score_is_tried_once_for_each_engine(model):
    calls = []

    def score(view):
        calls.append(view.position.shape)
        return -view.age.astype(jnp.float32)

    engine = jkv.Engine(model, **SIZES)
    for budget in (16, 16, 20, 24):
        engine.submit(PROMPTS[0], policy=jkv.evict_by(score, budget=budget, name="mine"), n=2, **SETTINGS)
    assert calls == [(2, 2, 64)]


@dataclasses.dataclass(frozen=True)
class Odd(jkv.eviction.schedules.Every):
    """A schedule with one answer that is none."""

    method: str = ""
    answer: object = None

    def _or_odd(self, method, answer):
        if method == self.method and isinstance(self.answer, type):
            raise self.answer
        return self.answer if method == self.method else answer

    def target(self, prompt, generated):
        return self._or_odd("target", super().target(prompt, generated))

    def steps_until_due(self, generated):
        return self._or_odd("steps_until_due", super().steps_until_due(generated))

    def most_slots(self, prompt, new):
        return self._or_odd("most_slots", super().most_slots(prompt, new))


@pytest.mark.parametrize("method", ["target", "steps_until_due", "most_slots"])
def test_a_bad_schedule_is_refused_when_it_is_submitted(model, method):
    engine = jkv.Engine(model, **SIZES)
    for answer, words in [(2.5, "whole number"), ("a", "whole number"), (0, "at least 1"), (SystemExit, "SystemExit")]:
        policy = dataclasses.replace(r_kv(0), schedule=Odd(**BUDGET, method=method, answer=answer))
        with pytest.raises(ValueError, match=f"r_kv's .*{words}"):
            engine.submit(PROMPTS[0], policy=policy, **SETTINGS)
    assert not engine.tickets


@dataclasses.dataclass(frozen=True)
class Late(jkv.eviction.schedules.Every):
    """A schedule whose answer is none after some tokens."""

    def target(self, prompt, generated):
        return 2.5 if generated >= 16 else super().target(prompt, generated)


def test_a_schedule_is_asked_again_for_a_longer_row(model):
    engine = jkv.Engine(model, **SIZES)
    policy = dataclasses.replace(r_kv(0), schedule=Late(**BUDGET))
    engine.submit(PROMPTS[0], policy=policy, **SETTINGS | {"max_new_tokens": 9})
    with pytest.raises(ValueError, match=r"r_kv's Late.target must return a whole number, at least 1, or None; got 2\.5"):
        engine.submit(PROMPTS[0], policy=policy, **SETTINGS)


def test_a_schedule_whose_answer_is_none_later_than_it_is_asked_ends_its_request_alone(model, whole, monkeypatch):
    monkeypatch.setattr("jkv.eviction.schedules.MOST_ASKED", 1)
    engine = jkv.Engine(model, **SIZES)
    late = dataclasses.replace(r_kv(0), schedule=Late(**BUDGET))
    assert_neighbours_are_whole(engine, submit(engine, late), whole, ValueError, "Late.target must return")


def scored(number, where=lambda view: True):
    """A policy whose score is a number in some slots, and the position elsewhere."""

    def score(view):
        return jnp.where(where(view), jnp.float32(number), view.position.astype(jnp.float32))

    return jkv.evict_by(score, **BUDGET, name="mine", sinks=1, recent=4)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (scored(np.nan), "got NaN in"),
        (scored(np.nan, lambda view: view.position == 3), "got NaN in 4 of"),
        (scored(np.inf), "got infinity in all of"),
        (scored(-np.inf), "got infinity in all of"),
    ],
    ids=["NaN", "NaN in a slot of each layer and head", "inf", "-inf"],
)
@pytest.mark.parametrize("settings", [{}, {"ahead": True}, {"return_trace": True}], ids=["", "ahead", "traced"])
def test_scores_that_rank_nothing_end_the_request_with_the_reason(model, whole, policy, words, settings):
    engine = jkv.Engine(model, **SIZES, **settings)
    assert_neighbours_are_whole(engine, submit(engine, policy), whole, ValueError, words)


@pytest.mark.parametrize("n", [1, 3], ids=["alone", "forked"])
def test_scores_of_a_prompt_that_rank_nothing_end_all_that_start_from_it(model, whole, n):
    """The prompt is longer than the budget, and compacted before its first token."""
    engine = jkv.Engine(model, **SIZES)
    bad = engine.submit(PROMPTS[1], policy=scored(np.nan), n=n, **SETTINGS)
    other = engine.submit(PROMPTS[0], policy=r_kv(0), **SETTINGS)
    engine.run()
    out = engine.result(bad)
    assert out.finish_reason == ["error"] * n
    assert all("mine's scores must be numbers" in str(sample.error) for sample in out.samples)
    assert engine.result(other).tokens[0].tolist() == whole[0]
    assert_engine_serves(engine, whole)


@pytest.mark.parametrize("ahead", [False, True])
def test_who_joins_a_prompt_later_has_the_fault_of_its_scores(model, whole, ahead):
    """Four samples on two rows, and after each of the first steps one more: most start from a prompt that others prefilled."""
    engine = jkv.Engine(model, **SIZES | {"max_running": 2, "ahead": ahead})
    given = {"policy": scored(np.nan)} | SETTINGS | {"max_new_tokens": 6}  # no compaction but the prompt's
    bad = [engine.submit(PROMPTS[1], n=4, **given)]
    for _ in range(4):
        engine.step()
        bad.append(engine.submit(PROMPTS[1], **given))
    engine.run()
    assert [sample.completion.finish_reason for sample in engine.take(bad)] == ["error"] * 8
    assert engine.stats.forks > 0
    assert_engine_serves(engine, whole)


@pytest.mark.parametrize(
    ("number", "where"),
    [
        (-np.inf, lambda view: view.position % 2 == 0),
        (np.inf, lambda view: view.position % 2 == 0),
        (np.nan, lambda view: (view.position < 1) | (view.age < 4)),  # protected slots need no score
        (np.nan, lambda view: ~view.is_filled),
        (-np.inf, lambda view: (jnp.arange(view.position.shape[1]) == 0)[:, None]),  # a head that keeps what is protected
    ],
)
def test_scores_that_rank_something_are_no_fault(model, number, where):
    engine = jkv.Engine(model, **SIZES)
    ticket = engine.submit(PROMPTS[1], policy=scored(number, where), **SETTINGS)
    engine.run()
    assert engine.result(ticket).finish_reason == ["length"]


def test_counting_scores_reads_the_device_no_more_often(model, monkeypatch):
    reads, device_get = [], jax.device_get
    for name in ("jkv.engine.runner.host", "jax.device_get"):
        monkeypatch.setattr(name, lambda tree: reads.append(1) or device_get(tree))
    engine = jkv.Engine(model, **SIZES)
    submit(engine, r_kv(0))
    engine.run()
    assert len(reads) == engine.stats.chunks


class Breaking(TinyTokenizer):
    """Cannot decode one token."""

    def __init__(self, token, error):
        self.token, self.error = token, error

    def decode(self, tokens, **settings):
        if self.token in np.asarray(tokens).tolist():
            raise self.error
        return super().decode(tokens, **settings)


@pytest.mark.parametrize("error", [KeyError("piece"), SystemExit(1), Exit()], ids=["an error", "an exit", "a panic"])
@pytest.mark.parametrize("how", ["stop strings", "streamed", "result"])
def test_a_token_that_cannot_be_decoded_ends_its_sample_alone(model, whole, error, how):
    only = next(token for token in whole[GUILTY] if sum(token in tokens for tokens in whole) == 1)
    engine = jkv.Engine(dataclasses.replace(model, tokenizer=Breaking(only, error)), **SIZES)
    heard = []
    given = {"stop strings": {"stop_strings": ("zzz",)}, "streamed": {"on_tokens": heard.append}, "result": {}}[how]
    tickets = submit(engine, r_kv(0), **given)
    assert_neighbours_are_whole(engine, tickets, whole, type(error), "piece" if isinstance(error, KeyError) else "")
    assert not heard or heard[-1].finish_reason == "error"


@pytest.mark.parametrize("error", [OSError("the socket is closed"), SystemExit(1), GeneratorExit(), Exit()])
def test_a_callback_that_raises_or_exits_ends_its_request_alone(model, whole, error):
    def on_tokens(event):
        raise error

    engine = jkv.Engine(model, **SIZES)
    tickets = submit(engine, r_kv(0), on_tokens=on_tokens)
    engine.run()
    out = engine.take(tickets)
    assert out[GUILTY].completion.error is error
    assert [sample.completion.tokens for i, sample in enumerate(out) if i != GUILTY] == [*whole[:GUILTY], *whole[GUILTY + 1 :]]
    assert_engine_serves(engine, whole)


def is_poison(sample):
    return sample.request.prompt.tolist() == PROMPTS[GUILTY]


@pytest.mark.parametrize(
    ("name", "from_token", "is_before", "error"),
    [
        ("decode_chunk", 0, False, None),
        ("decode_chunk", 9, True, None),
        ("decode_chunk", 9, False, SystemExit(1)),
        ("decode_chunk", 0, True, GeneratorExit()),
        ("prefill_chunk", 0, False, None),
        ("compact", 0, False, None),
        ("compact", 0, True, Exit()),
    ],
)
def test_a_program_that_always_fails_with_a_sample_ends_it_alone(model, whole, name, from_token, is_before, error):
    engine = jkv.Engine(model, **SIZES)
    tickets = submit(engine, r_kv(0))
    poisoned = with_poison(engine, name, lambda one: is_poison(one) and one.generated >= from_token, is_before, error)
    assert_neighbours_are_whole(engine, tickets, whole, type(error or DeviceError()))
    assert poisoned.num_failures <= 5  # of four rows: all, all, the one for which the device worked, two, one


def test_two_of_many_are_found_and_all_others_are_whole(model):
    """12 requests on 4 rows, of which the third and the tenth fail after some tokens, later ones submitted on the way."""
    engine, quiet = (jkv.Engine(model, **SIZES) for _ in range(2))
    prompts = [[1 + i, 5, 9] for i in range(12)]
    with_poison(engine, "decode_chunk", lambda one: one.request.prompt[0] in (3, 10) and one.generated >= 10)
    tickets = [engine.submit(prompt, **SETTINGS) for prompt in prompts[:8]]
    expected = [quiet.submit(prompt, **SETTINGS) for prompt in prompts]
    quiet.run()
    events = engine.step() + engine.step()
    tickets += [engine.submit(prompt, **SETTINGS) for prompt in prompts[8:]]
    engine.run(events.extend)
    for ticket, other, prompt in zip(tickets, expected, prompts, strict=True):
        out, alone = engine.result(ticket), quiet.result(other)
        told = [token for event in events if event.ticket == ticket for token in event.tokens]
        assert out.finish_reason == ["error" if prompt[0] in (3, 10) else "length"]
        length = out.lengths[0]
        assert told == out.tokens[0, :length].tolist() == alone.tokens[0, :length].tolist()
    engine.step()
    assert engine.runner.num_held_pages == 0


def test_a_program_that_fails_whatever_runs_ends_every_request_and_not_the_engine(model, whole):
    engine = jkv.Engine(model, **SIZES)
    tickets = submit(engine, r_kv(0))
    poisoned = with_poison(engine, "decode_chunk", lambda one: True)
    engine.run()
    assert [engine.result(ticket).finish_reason for ticket in tickets] == [["error"]] * 4
    engine.runner.programs = engine.runner.sharer.programs = poisoned.programs
    assert_engine_serves(engine, whole)


def test_a_failure_without_any_request_is_raised_after_some_repairs(model):
    engine = jkv.Engine(model, **SIZES)
    engine._run_step = lambda: 1 / 0
    engine.step()
    engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(RuntimeError, match=r"reset\(\)"):
        engine.step()


def test_a_schedule_that_raises_later_ends_its_sample_alone(model, whole):
    """Beyond what was asked of it when it was submitted."""

    class Late(Odd):
        def steps_until_due(self, generated):
            if generated and not asked:
                raise OSError("late")
            return super().steps_until_due(generated)

    asked = [True]
    engine = jkv.Engine(model, **SIZES)
    tickets = submit(engine, dataclasses.replace(r_kv(0), schedule=Late(**BUDGET)))
    asked.clear()
    assert_neighbours_are_whole(engine, tickets, whole, OSError, "late")


@pytest.mark.parametrize("error", [OSError("the model of sentences is gone"), SystemExit(1)])
def test_an_encoder_that_fails_ends_its_sample_alone(model, whole, error):
    def encode(texts):
        raise error

    share = jkv.reason_cache(encoder=encode, structure=False)
    engine = jkv.Engine(model, **SIZES, policies=[share, r_kv(0)])
    tickets = submit(engine, share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jkv.reasoning.sharing.Sharing.find_similar", lambda self: encode([]))
        assert_neighbours_are_whole(engine, tickets, whole, type(error))


@pytest.mark.parametrize("method", ["dropped", "finish"])
def test_a_trace_that_cannot_be_recorded_ends_its_sample_alone(model, whole, method):
    engine = jkv.Engine(model, **SIZES, return_trace=True)
    tickets = submit(engine, r_kv(0))
    engine.step()

    def fail(*arguments):
        raise IndexError("the trace is full")

    setattr(engine.tickets[tickets[GUILTY]][0].row.records.trace, method, fail)
    assert_neighbours_are_whole(engine, tickets, whole, IndexError, "the trace is full")


def test_generate_and_a_rollout_return_the_others(model, whole, monkeypatch):
    def compact(self, row, sample, last):
        if is_poison(sample):
            raise DeviceError("compact")
        return plain(self, row, sample, last)

    plain = jkv.engine.runner.Runner._compact
    monkeypatch.setattr(jkv.engine.runner.Runner, "_compact", compact)
    out = jkv.generate(model, PROMPTS, r_kv(0), progress=False, page_size=4, max_running=4, **SETTINGS)
    rollout = jkv.Rollout(model, r_kv(0), max_prompt_tokens=32, max_new_tokens=20, max_running=4, page_size=4)
    drawn = rollout(PROMPTS, stop_ids=(), sampling=jkv.Sampling(temperature=0.0), progress=False)
    for result in (out, drawn):
        assert result.finish_reason == ["error" if i == GUILTY else "length" for i in range(4)]
        assert [tokens[:20].tolist() for i, tokens in enumerate(result.tokens) if i != GUILTY] == [
            *whole[:GUILTY],
            *whole[GUILTY + 1 :],
        ]
    assert not rollout.pending


@pytest.mark.parametrize("name", ["decode_chunk", "compact"])
def test_a_served_request_that_always_fails_ends_alone_and_the_service_goes_on(model, whole, name):
    engine = jkv.Engine(model, **SIZES)
    with_poison(engine, name, is_poison)
    with jkv.Service(engine) as service:
        service.pause().result(60)
        tickets = [service.submit(prompt, policy=r_kv(0), streams=True, **SETTINGS) for prompt in PROMPTS]
        service.resume().result(60)
        for i, ticket in enumerate(tickets):
            out = ticket.result(60)
            if i == GUILTY:
                assert out.finish_reason == ["error"]
                assert isinstance(out.samples[0].error, DeviceError)
                assert [event.finish_reason for event in ticket][-1] == "error"
            else:
                assert out.tokens[0].tolist() == [token for event in ticket for token in event.tokens] == whole[i]
        assert service.submit(PROMPTS[0], policy=r_kv(0), **SETTINGS).result(60).tokens[0].tolist() == whole[0]
        assert not service.failure
    engine.step()
    assert engine.runner.num_held_pages == 0


def test_a_callback_of_a_reply_that_exits_ends_no_service(model, whole):
    engine = jkv.Engine(model, **SIZES)
    with jkv.Service(engine) as service:
        service.pause().result(60)
        ticket = service.submit(PROMPTS[0], policy=r_kv(0), **SETTINGS)
        ticket.add_done_callback(lambda _: sys.exit(1))
        service.resume().result(60)
        assert ticket.result(60).tokens[0].tolist() == whole[0]
        with pytest.raises(SystemExit):
            service.call(lambda engine: sys.exit(2)).result(60)
        assert service.submit(PROMPTS[1], policy=r_kv(0), **SETTINGS).result(60).tokens[0].tolist() == whole[1]


@pytest.mark.usefixtures("short_prefills")
@pytest.mark.parametrize("how", ["update", "sleep"])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_prefill_that_fails_in_an_update_or_before_a_sleep_is_repaired_there(model, whole, how, is_before):
    """A long prompt is half prefilled when its engine is updated or put to sleep; its fault is not the caller's."""
    engine = jkv.Engine(model, **SIZES, prefill_tokens=1)
    others = [engine.submit(PROMPTS[i], policy=r_kv(i), **SETTINGS) for i in range(2)]
    engine.step()
    guilty = engine.submit([7] * 60, policy=r_kv(0), **SETTINGS | {"max_new_tokens": 1})
    engine.step()
    with_poison(engine, "prefill_chunk", lambda one: len(one.request.prompt) == 60, is_before)
    if how == "update":
        engine.update(engine.model.params)
    else:
        engine.sleep()
        engine.wake()
    engine.run()
    assert [sample.completion.tokens for sample in engine.take(others)] == whole[:2]
    assert engine.take([guilty])[0].completion.finish_reason == "error"
    assert_engine_serves(engine, whole)


def test_a_sample_that_ends_in_a_turn_that_fails_afterwards_has_its_last_event(model, whole):
    engine = jkv.Engine(model, **SIZES)
    events, fail = [], engine.runner.share

    def share():
        engine.runner.share = fail
        raise DeviceError("share")

    first = engine.submit(PROMPTS[0], policy=r_kv(0), **SETTINGS | {"max_new_tokens": 8})
    other = engine.submit(PROMPTS[1], policy=r_kv(0), **SETTINGS)
    engine.runner.share = share
    engine.outputs.emit_collected = lambda: setattr(engine.outputs, "emit_collected", emit)
    emit = type(engine.outputs).emit_collected.__get__(engine.outputs)
    engine.run(events.extend)
    assert [event.finish_reason for event in events if event.ticket == first][-1] == "length"
    assert [token for event in events if event.ticket == first for token in event.tokens] == whole[0][:8]
    assert engine.result(other).tokens[0].tolist() == whole[1]


def test_no_failed_sample_is_measured_or_learned_from(model):
    """Each of the library's own measurements that generates is refused, with the fault, where it would take what is left."""
    policy, rest = scored(np.nan), [5] * 20
    calls = {
        "complete": lambda: complete(jkv.generate(model, PROMPTS, policy=policy, progress=False, **SETTINGS)),
        "solve": lambda: evaluate.solve(
            model, [SimpleNamespace(prompt=PROMPTS[1], answer="1")], policy, progress=False, **SETTINGS
        ),
        "probe": lambda: probe.decode(model, [Probe("", PROMPTS[1], rest, np.arange(5))], policy, {}),
        "recall": lambda: recall.decode(model, [(PROMPTS[1], rest)], policy, {}),
    }
    for name, call in calls.items():
        with pytest.warns(UserWarning, match="has ended samples"), pytest.raises(RuntimeError, match="mine's scores") as caught:
            call()
        assert isinstance(caught.value.__cause__, ValueError), name
