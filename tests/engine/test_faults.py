"""Nothing that happens in the middle of a turn gives a wrong token, and what cannot go on says so."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import jkv
from jkv.engine import device_program
from jkv.engine.clocks import COMPILING
from jkv.engine.interrupts import deferred_interrupts
from tests.support.faults import ctrl_c, num_calls, with_failing_programs
from tests.support.mixes import BreakingTokenizer, Expected
from tests.support.simulator import ROW, Schedule, make_engine, simulate

PROMPTS = [[5, 1, 9], [3, 7] * 13 + [1]]
R_KV = jkv.r_kv(budget=16, interval=8, window=4)
SETTINGS = {"policy": R_KV, "max_new_tokens": 20, "stop_ids": ()}


@pytest.fixture(scope="module")
def expected(model):
    return Expected(model)


@pytest.mark.parametrize(
    ("start", "count"), [(0, 16), *(pytest.param(*long, marks=pytest.mark.slow) for long in ((0, 200), (10_000, 10_000)))]
)
def test_random_schedules_give_right_tokens_and_leave_nothing(model, expected, start, count):
    counts = simulate(model, expected, range(start, start + count))
    assert min(counts[name] for name in ("results", "interrupted", "failed", "told", "callback", "sleep", "update")) > 0


def generate(model):
    return jkv.generate(
        model, PROMPTS, n=2, sampling=jkv.Sampling(seed=5), page_size=4, max_running=3, progress=False, **SETTINGS
    )


@pytest.mark.parametrize("presses", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_generate_returns_what_there_is_wherever_ctrl_c_is_pressed(model, presses):
    """At every 29th call of its host loop; a press before the first turn is a KeyboardInterrupt, of which nothing is lost."""
    whole = generate(model)
    calls, partial = min(num_calls(lambda: generate(model)) for _ in range(2)), 0  # one of them may trace a program anew
    for at in range(presses, calls - presses, 29):
        with ctrl_c(at, presses) as where:
            try:
                out = generate(model)
            except KeyboardInterrupt:
                assert not {"Engine.step", "Engine.run", "Engine.take", "make_result"} & {*where}, where
                continue
        if not where:  # the number of calls varies a little
            assert at > 0.9 * calls
            continue
        partial += "cancelled" in out.finish_reason
        for i, reason in enumerate(out.finish_reason):
            length = out.lengths[i]
            assert out.tokens[i, :length].tolist() == whole.tokens[i, :length].tolist()
            assert reason == "cancelled" or (reason, length) == (whole.finish_reason[i], whole.lengths[i])
    assert partial > 3


@pytest.mark.parametrize("presses", [1, 3])
def test_a_rollout_continues_wherever_ctrl_c_is_pressed(model, presses):
    rollout = jkv.Rollout(model, R_KV, max_prompt_tokens=32, max_new_tokens=20, n=2, max_running=3, page_size=4)
    settings = {"n": 2, "seed": 5, "stop_ids": ()}
    whole = rollout(PROMPTS, **settings)
    calls = num_calls(lambda: rollout(PROMPTS, **settings))
    for at in range(0, calls - presses, 61):
        parts = []
        with ctrl_c(at, presses), contextlib.suppress(KeyboardInterrupt):  # raised before anything is queued, or afterwards
            parts.append(rollout(PROMPTS, **settings))
        parts.append(rollout.run() if rollout.pending or parts else rollout(PROMPTS, **settings))
        got = {
            (prompt, sample): part.tokens[i, : part.lengths[i]].tolist()
            for part in parts
            for i, (prompt, sample) in enumerate(zip(part.prompt_index.tolist(), part.sample_index.tolist(), strict=True))
        }
        assert got == {(i // 2, i % 2): whole.tokens[i, : whole.lengths[i]].tolist() for i in range(4)}
        assert not rollout.pending


def test_a_second_press_interrupts_a_callback_that_never_returns(model):
    engine = make_engine(model, 2, 2 * ROW)

    def hang(event):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        while True:
            pass

    hanging = engine.submit(PROMPTS[0], on_tokens=hang, **SETTINGS)
    other = engine.submit(PROMPTS[1], **SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.run()
    assert engine.result(hanging).finish_reason == ["error"]
    assert engine.result(other).finish_reason == ["length"]


def test_the_handler_that_was_there_receives_the_press(model):
    """As asyncio's own does; and where Ctrl-C is ignored, it is ignored here too."""
    heard, before = [], signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert not heard
        assert heard == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("is_before", [True, False], ids=["before_it_ran", "after_it_ran"])
@pytest.mark.parametrize("failing", range(8))
def test_a_failed_step_is_repaired_with_the_same_tokens_and_what_is_finished_stays(model, failing, is_before):
    engine, quiet = (make_engine(model, 2, 2 * ROW) for _ in range(2))
    short, *rest = (engine.submit(PROMPTS[0], max_new_tokens=3), engine.submit(PROMPTS[1], n=3, **SETTINGS))
    quiet.submit(PROMPTS[0], max_new_tokens=3)
    ticket = quiet.submit(PROMPTS[1], n=3, **SETTINGS)
    quiet.run()
    programs, told = with_failing_programs(engine), []
    engine.tickets[rest[0]][0].on_tokens = lambda event: told.extend(event.tokens)
    engine.step()
    programs.fail(failing, is_before)
    engine.run()
    assert programs.failing is None
    engine.result(short)
    out, whole = engine.result(rest[0]), quiet.result(ticket)
    np.testing.assert_array_equal(out.tokens, whole.tokens)
    np.testing.assert_array_equal(out.logprobs, whole.logprobs)
    assert told == whole.tokens[0].tolist()  # each once
    engine.step()
    assert engine.runner.num_held_pages == 0


def fail():
    raise MemoryError


def test_an_engine_that_cannot_be_repaired_says_so_in_every_call(model, monkeypatch):
    """The program that frees the last rows fails: no request is unfinished, but the pool is lost; then there is no other."""
    engine = jkv.Engine(model, max_running=2, max_slots=64, page_size=4, chunk=2)
    ticket = engine.submit([1, 2, 3], max_new_tokens=20, stop_ids=())
    engine.step()
    engine.cancel(ticket)
    programs = with_failing_programs(engine)
    programs.fail(0, False)
    engine.step()
    assert engine.result(ticket).finish_reason == ["cancelled"]
    assert engine.runner.num_held_pages == 0
    engine.submit([1, 2, 3], max_new_tokens=20, stop_ids=())
    engine.step()
    programs.fail(0, False)
    monkeypatch.setattr(engine.runner, "wake", fail)
    with pytest.raises(MemoryError):
        engine.step()
    monkeypatch.undo()
    for call in (engine.step, engine.run, engine.sleep, engine.wake, lambda: list(engine.stream()), lambda: engine.submit([1])):
        with pytest.raises(RuntimeError, match=r"reset\(\)"):
            call()
    engine.reset()
    engine.run()


@pytest.mark.parametrize("is_before", [True, False])
def test_a_prompt_whose_pages_were_about_to_be_freed_is_prefilled_again(model, is_before):
    """The scheduler has already counted the pages of a shared prompt as freed when the program that frees them fails."""
    engine = make_engine(model, 1, ROW)
    ticket = engine.submit(PROMPTS[1], policy=jkv.full(), max_new_tokens=8, n=3, stop_ids=())
    engine.step()  # the first sample is finished, and two wait
    programs = with_failing_programs(engine)
    programs.fail(0, is_before)
    engine.sleep()  # its first program frees the prompt's pages
    assert programs.failing is None
    engine.wake()
    engine.run()
    out = engine.result(ticket)
    assert out.finish_reason == ["length"] * 3
    assert (out.tokens == out.tokens[0]).all()


@pytest.mark.parametrize("seed", [10287, 13333, 25])
def test_a_schedule_that_once_failed(model, expected, seed):
    """A call on an idle engine whose pool was lost; a sample that finished in the turn whose sharing failed; a shared prompt
    that was to be freed in a turn that failed.
    """
    simulate(model, expected, [seed])


def test_a_rollout_goes_on_after_a_program_failed(model):
    rollout = jkv.Rollout(model, R_KV, max_prompt_tokens=32, max_new_tokens=20, max_running=3, page_size=4, return_trace=True)
    settings = {"n": 3, "seed": 1, "stop_ids": (), "return_trace": True}
    whole = rollout(PROMPTS, **settings)
    with_failing_programs(rollout.engine).fail(7, False)
    out = rollout(PROMPTS, **settings)
    np.testing.assert_array_equal(out.tokens, whole.tokens)
    np.testing.assert_allclose(jkv.score(model, out, trace=out.trace).logprobs, out.logprobs, atol=2e-5)


def test_events_start_again_after_other_weights(model):
    engine = make_engine(model, 2, 2 * ROW)
    ticket, events = engine.submit(PROMPTS[0], **SETTINGS), []
    first = engine.step()
    engine.update(dataclasses.replace(model.params, embedding=model.params.embedding[::-1]))
    engine.reset()
    engine.run(events.extend)
    told = [token for event in events for token in event.tokens]
    assert first[0].tokens != told[: len(first[0].tokens)]
    assert told == engine.result(ticket).tokens[0].tolist()


def test_one_thread_at_a_time(model):
    """Two threads step one engine until all is finished: a call works, or is refused; no token is wrong or lost."""
    engine, quiet = (make_engine(model, 3, 3 * ROW) for _ in range(2))
    tickets = [engine.submit(PROMPTS[i % 2], first_sample=i, **SETTINGS) for i in range(6)]
    others = [quiet.submit(PROMPTS[i % 2], first_sample=i, **SETTINGS) for i in range(6)]
    quiet.run()
    refused, problems = [], []

    def drive():
        while not engine.is_idle:
            try:
                engine.step()
            except RuntimeError as error:
                refused.append(str(error))
            except BaseException as error:
                problems.append(error)
                return

    threads = [threading.Thread(target=drive, name=f"driver {i}") for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert all("one thread at a time; step() was called by driver" in message for message in refused)
    for ticket, other in zip(tickets, others, strict=True):
        assert engine.result(ticket).tokens.tolist() == quiet.result(other).tokens.tolist()


def test_a_second_thread_is_refused_by_name(model):
    engine, messages = make_engine(model, 2, 2 * ROW), []

    def on_tokens(event):
        def call():
            for method in (engine.step, engine.run, engine.sleep, engine.reset, lambda: engine.cancel(ticket)):
                with pytest.raises(RuntimeError) as caught:
                    method()
                messages.append(str(caught.value))

        thread = threading.Thread(target=call, name="the web server")
        thread.start()
        thread.join()

    ticket = engine.submit(PROMPTS[0], on_tokens=on_tokens, **SETTINGS)
    engine.run()
    assert engine.result(ticket).finish_reason == ["length"]
    assert len(messages) >= 5
    assert "was called by the web server while MainThread runs it" in messages[0]


def test_a_fork_is_refused(model, monkeypatch):
    engine = make_engine(model, 2, 2 * ROW)
    ticket = engine.submit(PROMPTS[0], **SETTINGS)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (engine.step, engine.run, lambda: engine.result(ticket), engine.reset):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call()
        assert "fork" in str(caught.value) or "not finished" in str(caught.value)


def test_an_event_loop_serves_requests_through_one_lock(model):
    engine, lock = make_engine(model, 3, 3 * ROW), asyncio.Lock()

    async def ask(i):
        async with lock:
            ticket = engine.submit(PROMPTS[i % 2], first_sample=i, **SETTINGS)
        while not all(sample.is_finished for sample in engine.tickets[ticket]):
            async with lock:
                await asyncio.to_thread(engine.step)
        async with lock:
            return engine.result(ticket).tokens[0].tolist()

    async def serve():
        return await asyncio.gather(*(ask(i) for i in range(6)))

    got = asyncio.run(serve())
    quiet = make_engine(model, 3, 3 * ROW)
    tickets = [quiet.submit(PROMPTS[i % 2], first_sample=i, **SETTINGS) for i in range(6)]
    quiet.run()
    assert got == [quiet.result(ticket).tokens[0].tolist() for ticket in tickets]


LONG_LIFE = """
import jkv
from jkv.engine import device_program
device_program.MOST_SHARE = 0.03
model = jkv.testing.tiny_model()
most, cleared = 0, 0
for i in range(24):
    out = jkv.generate(model, [1, 2, 3], max_new_tokens=6, page_size=4, num_pages=64 + 2 * i, stop_ids=(), progress=False)
    first = out.tokens.tolist() if i == 0 else first
    assert out.tokens.tolist() == first
    most = max(most, device_program.num_mappings())
print(most)
"""


@pytest.mark.skipif(not device_program.most_mappings(), reason="no limit of mappings here")
def test_programs_of_many_engines_do_not_pile_up():
    """Without letting go, 24 engines of different pools hold thousands of mappings more than one."""
    out = subprocess.run([sys.executable, "-c", LONG_LIFE], capture_output=True, text=True, check=True, env=os.environ)
    assert int(out.stdout) < 0.03 * device_program.most_mappings() + 16 * 130 + 500


@pytest.mark.parametrize(("share", "are_cleared"), [(0.24, False), (0.26, True)])
def test_programs_stay_as_long_as_there_is_room(monkeypatch, share, are_cleared):
    cleared = []
    monkeypatch.setattr(device_program, "_checked", COMPILING.count - device_program.CHECK_EVERY)
    monkeypatch.setattr(device_program, "most_mappings", lambda: 65_530)
    monkeypatch.setattr(device_program, "num_mappings", lambda: int(share * 65_530))
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(True))
    assert device_program.let_programs_go() == are_cleared == bool(cleared)
    assert not device_program.let_programs_go()  # has looked a moment ago


PLANTED = {
    "a reset queues rows as they are": (
        "jkv.engine.scheduler.Scheduler.restart",
        lambda self, samples: [self.add(sample) for sample in samples],
    ),
    "a prompt stays in the pool that was lost": ("jkv.engine.samples.Prefix.forget", lambda self: None),
    "an engine without a pool goes on": ("jkv.engine.interrupts.Guard.check", lambda self: None),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(model, expected, monkeypatch, bug):
    monkeypatch.setattr(*PLANTED[bug])
    with pytest.raises(BaseException) as caught:  # noqa: PT011 -- whatever it breaks first
        simulate(model, expected, range(200, 230))
    assert any("schedule" in note for note in caught.value.__notes__)


def test_a_schedule_repeats(model, expected):
    assert Schedule(model, expected, 3).run() == Schedule(model, expected, 3).run()


def test_a_panic_of_the_tokenizer_refuses_the_prompt_and_nothing_else(model):
    class PanicException(BaseException):
        """As the tokenizers library raises it."""

    class Panicking(BreakingTokenizer):
        def encode(self, text, **settings):
            if "!" in text:
                raise PanicException("called `Result::unwrap()` on an `Err` value")
            return [1, 2]

    named = dataclasses.replace(model, tokenizer=Panicking())
    with pytest.raises(ValueError, match="must encode every prompt; it failed at prompt 1"):
        jkv.generate(named, ["fine", "a!"], max_new_tokens=2, progress=False)
