"""One thread owns an engine: whatever threads and tasks ask of it, every request has the tokens that it has by itself."""

import asyncio
import contextlib
import dataclasses
import gc
import threading

import numpy as np
import pytest

import jkv
from tests.support.faults import DeviceError, with_failing_programs
from tests.support.simulator import ROW, make_engine

PROMPTS = [[5, 1, 9], [3, 7] * 13 + [1]]
R_KV = jkv.r_kv(budget=16, interval=8, window=4)
SETTINGS = {"policy": R_KV, "max_new_tokens": 20, "stop_ids": ()}
LONG = {"policy": R_KV, "max_new_tokens": 400, "stop_ids": ()}


@pytest.fixture(scope="module")
def whole(model):
    """The tokens of each request of `SETTINGS` by itself: [prompt][sample]."""
    engine = make_engine(model, 3, 3 * ROW)
    tickets = [engine.submit(prompt, n=8, sampling=jkv.Sampling(seed=5), **SETTINGS) for prompt in PROMPTS]
    engine.run()
    return [engine.result(ticket).tokens.tolist() for ticket in tickets]


@pytest.fixture
def engine(model):
    return make_engine(model, 3, 3 * ROW)


@pytest.fixture
def service(engine):
    with jkv.Service(engine) as service:
        yield service
    assert engine.is_idle
    assert engine.runner.num_held_pages == 0
    assert not engine.tickets


def submit(service, prompt, sample=0, **others):
    settings = SETTINGS | {"sampling": jkv.Sampling(seed=5), "first_sample": sample} | others
    return service.submit(PROMPTS[prompt], **settings)


def test_many_threads_have_the_tokens_of_each_request_by_itself(service, whole):
    got, errors = {}, []

    def ask(i):
        try:
            for sample in range(i, 8, 4):
                ticket = submit(service, i % 2, sample, streams=sample % 2 == 0)
                tokens = [token for event in ticket for token in event.tokens] if ticket.streams else None
                got[i % 2, sample] = ticket.result().tokens[0].tolist()
                assert tokens in (None, got[i % 2, sample])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(got) == 8
    assert all(tokens == whole[prompt][sample] for (prompt, sample), tokens in got.items())


def test_tasks_await_and_iterate(service, whole):
    async def ask(i):
        ticket = submit(service, i % 2, i, streams=True)
        tokens = [token async for event in ticket for token in event.tokens]
        out = await ticket
        assert out.tokens[0].tolist() == tokens
        return tokens

    async def everything():
        return await asyncio.gather(*(ask(i) for i in range(6)))

    assert asyncio.run(everything()) == [whole[i % 2][i] for i in range(6)]


def test_events_can_be_read_again_by_anyone(service):
    ticket = submit(service, 0, streams=True)
    first = list(ticket)
    assert list(ticket) == first
    assert first[-1].finish_reason == "length"
    with pytest.raises(ValueError, match="streams=True"):
        list(submit(service, 0))


def test_a_cancelled_request_keeps_its_tokens_and_others_go_on(service, whole):
    long, other = service.submit(PROMPTS[0], streams=True, **LONG), submit(service, 1, 1)
    events = iter(long)
    first = next(events)
    assert long.cancel()
    out = long.result()
    assert out.finish_reason == ["cancelled"]
    assert out.tokens[0, : len(first.tokens)].tolist() == first.tokens
    assert other.result().tokens[0].tolist() == whole[1][1]
    assert not long.cancel()


def test_a_task_that_is_cancelled_cancels_its_request(service):
    async def leave():
        ticket = service.submit(PROMPTS[0], **LONG)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.sleep(60)), 0.01)
        task = asyncio.ensure_future(asyncio.wait_for(ticket, 60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(ticket.result)

    assert asyncio.run(leave()).finish_reason == ["cancelled"]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_stops_turns_and_a_resume_continues(service, engine, whole, mode):
    ticket = submit(service, 0, 2, streams=True, max_new_tokens=400 if mode == "abort" else 20)
    next(iter(ticket))
    service.pause(mode).result()
    if mode != "keep":
        assert ticket.done()
    count = engine.stats.chunks
    later, dropped = submit(service, 1, 3), submit(service, 1, 4)
    assert dropped.cancel()
    assert dropped.result().finish_reason == ["cancelled"]
    service.call(lambda engine: None).result()
    assert engine.stats.chunks == count
    assert not later.done()
    service.resume().result()
    assert later.result().tokens[0].tolist() == whole[1][3]
    tokens = ticket.result().tokens[0].tolist()[:20]
    assert tokens == whole[0][2][: len(tokens)]
    assert ticket.result().finish_reason == ["cancelled" if mode == "abort" else "length"]


def test_a_pause_after_a_pause_answers_both(service):
    ticket = submit(service, 0)
    service.pause("keep").result()
    waiting = service.pause("wait")
    service.pause("keep").result(60)
    waiting.result(60)
    service.resume()
    assert ticket.result().finish_reason == ["length"]


def test_an_idle_service_runs_nothing_and_wakes_at_a_request(service, engine):
    turns, step = [], engine.step
    service.call(lambda engine: setattr(engine, "step", lambda: (turns.append(1), step())[1])).result()
    threading.Event().wait(0.2)
    assert not turns
    submit(service, 0).result()
    count = len(turns)
    threading.Event().wait(0.2)
    assert len(turns) == count > 0


def test_new_weights_serve_from_the_next_turn_on(service, model, whole):
    params = dataclasses.replace(model.params, embedding=model.params.embedding[::-1])
    assert submit(service, 0, 1).result().tokens[0].tolist() == whole[0][1]
    service.update(params).result()
    assert submit(service, 0, 1).result().tokens[0].tolist() != whole[0][1]
    with pytest.raises(ValueError, match="finite"):
        service.update(dataclasses.replace(params, embedding=params.embedding * np.float32("nan"))).result()
    assert service.engine.runner.version == 1


@pytest.mark.parametrize("failing", range(0, 12, 3))
def test_requests_start_again_after_a_device_program_failed_with_the_same_tokens(service, engine, whole, failing):
    programs = with_failing_programs(engine)
    first = submit(service, 0, 0)
    first.result()
    service.pause().result()
    tickets = [submit(service, i % 2, i, streams=True) for i in range(4)]
    programs.fail(failing, failing % 2 == 0)
    service.resume()
    for i, ticket in enumerate(tickets):
        assert [token for event in ticket for token in event.tokens] == whole[i % 2][i]
        assert ticket.result().tokens[0].tolist() == whole[i % 2][i]
    assert programs.failing is None


def test_a_call_that_breaks_the_engine_is_repaired(service, whole):
    def break_off(engine):
        with engine.guard.changing("test"):
            raise DeviceError("broken")

    with pytest.raises(DeviceError, match="broken"):
        service.call(break_off).result()
    assert submit(service, 1, 2).result().tokens[0].tolist() == whole[1][2]


@pytest.mark.parametrize("behind", ["cancel", "pause", "submit", "close"])
def test_what_is_queued_behind_such_a_call_finds_a_repaired_engine(service, whole, behind):
    running, waits = submit(service, 0, 1), threading.Event()

    def break_off(engine):
        waits.wait(60)
        with engine.guard.changing("test"):
            raise DeviceError("broken")

    broken = service.call(break_off)
    if behind == "cancel":
        running.cancel()
    elif behind == "pause":
        paused = service.pause("abort")
    elif behind == "submit":
        later = submit(service, 1, 2)
    else:
        running.close()
    waits.set()
    with pytest.raises(DeviceError, match="broken"):
        broken.result(60)
    if behind in ("cancel", "pause"):
        assert running.result(60).finish_reason == ["cancelled"]
    else:
        assert running.result(60).tokens[0].tolist() == whole[0][1]
    if behind == "pause":
        paused.result(60)
        service.resume().result(60)
    if behind == "submit":
        assert later.result(60).tokens[0].tolist() == whole[1][2]
    assert submit(service, 1, 2).result(60).tokens[0].tolist() == whole[1][2]
    assert not service.failure


def test_requests_without_weights_end_with_the_reason_and_the_service_goes_on(service, model, whole):
    service.call(lambda engine: (engine.sleep(forget_weights=True), engine.wake())).result()
    with pytest.raises(ValueError, match=r"Call update\(params\)"):
        submit(service, 1, 2).result(60)
    service.update(model.params).result()
    assert submit(service, 1, 2).result(60).tokens[0].tolist() == whole[1][2]


def test_requests_wait_for_an_engine_that_sleeps(service, whole):
    service.call(lambda engine: engine.sleep()).result()
    ticket = submit(service, 1, 2)
    with pytest.raises(TimeoutError):
        ticket.result(0.1)
    service.call(lambda engine: engine.wake()).result()
    assert ticket.result().tokens[0].tolist() == whole[1][2]


def test_an_engine_that_cannot_be_repaired_ends_the_service_with_the_reason(model, monkeypatch):
    engine = make_engine(model, 3, 3 * ROW)
    with_failing_programs(engine).fail(2, False)
    monkeypatch.setattr(engine, "reset", lambda: 1 / 0)
    service = jkv.Service(engine)
    tickets = [submit(service, 0, i) for i in range(4)]
    for ticket in tickets:
        with pytest.raises(RuntimeError, match="could not be repaired: ZeroDivisionError"):
            ticket.result(60)
    with pytest.raises(RuntimeError, match="could not be repaired"):
        submit(service, 0)
    assert "ZeroDivisionError" in service.failure


def test_bad_requests_are_refused_where_they_are_made(service):
    for prompt, settings, words in [
        ([], {}, "at least one token"),
        ([99], {}, "Token ids must lie in"),
        ([1], {"n": 0}, "n must be at least 1"),
        ([[1], [2]], {}, "one prompt at a time"),
    ]:
        with pytest.raises(ValueError, match=words):
            service.submit(prompt, **settings)
    with pytest.raises(ValueError, match="one of keep, wait, abort"):
        service.pause("now")


def test_other_threads_are_refused_while_it_is_served(service, engine):
    for call in (engine.step, engine.run, engine.reset, lambda: engine.submit([1], max_new_tokens=3)):
        with pytest.raises(RuntimeError, match="was called by MainThread while the owner of the engine runs it"):
            call()
    with pytest.raises(RuntimeError, match="serve\\(\\) was called"):
        jkv.Service(engine)


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_closed_service_gives_the_engine_back(model, mode):
    engine = make_engine(model, 3, 3 * ROW)
    service = jkv.Service(engine)
    ticket = submit(service, 0)
    service.close(mode).result()
    assert ticket.result().finish_reason == ["length" if mode == "wait" else "cancelled"]
    with pytest.raises(RuntimeError, match="closed"):
        submit(service, 0)
    service.close().result()
    service.__exit__()
    engine.run()
    assert engine.runner.num_held_pages == 0


@pytest.mark.parametrize("paused", ["", "keep", "wait"])
def test_a_close_that_waits_finishes_what_was_submitted_also_during_a_pause(engine, whole, paused):
    service = jkv.Service(engine)
    running = submit(service, 0, 1)
    if paused:
        service.pause(paused)
    waiting = submit(service, 1, 2)
    closing = service.close("wait")
    closing.result(60)
    assert [ticket.result(0).tokens[0].tolist() for ticket in (running, waiting)] == [whole[0][1], whole[1][2]]
    engine.run()  # the thread has let go of it


def test_a_pause_that_aborts_is_answered_while_the_engine_sleeps(service, engine):
    ticket = submit(service, 0, **LONG)
    service.call(jkv.Engine.sleep).result(60)
    service.pause("abort").result(60)
    assert ticket.result(0).finish_reason == ["cancelled"]
    service.call(jkv.Engine.wake).result(60)
    service.resume().result(60)


@pytest.mark.parametrize("command", [jkv.Service.pause, jkv.Service.close])
def test_a_pause_and_a_close_that_are_cancelled_before_they_begin_do_nothing(engine, whole, command):
    service, begin = jkv.Service(engine), threading.Event()
    busy = service.call(lambda engine: begin.wait(60))
    reply = command(service)
    assert reply.cancel()
    begin.set()
    assert busy.result(60)
    assert submit(service, 0, 1).result(60).tokens[0].tolist() == whole[0][1]
    assert not service.is_paused
    service.close().result(60)


def test_all_who_close_a_service_are_answered(engine):
    service, begin = jkv.Service(engine), threading.Event()
    service.call(lambda engine: begin.wait(60))
    replies = [service.close() for _ in range(3)]
    begin.set()
    assert [reply.result(60) for reply in replies] == [None] * 3


@pytest.mark.parametrize("mode", ["keep", "wait", "abort", "resume"])
def test_neither_a_pause_nor_a_resume_breaks_off_a_close_that_waits(engine, whole, mode):
    service = jkv.Service(engine)
    ticket = submit(service, 0, 1)
    closing = service.close("wait")
    with contextlib.suppress(RuntimeError):  # it may be closed already
        (service.resume if mode == "resume" else lambda: service.pause(mode))()
    closing.result(60)
    assert ticket.result(0).tokens[0].tolist() == whole[0][1]


def test_the_end_of_a_block_keeps_the_promise_of_a_close_that_waits(engine, whole):
    with jkv.Service(engine) as service:
        ticket = submit(service, 0, 1)
        service.close("wait")
    assert ticket.result(0).tokens[0].tolist() == whole[0][1]


def test_a_close_that_aborts_breaks_off_one_that_waits(engine):
    service = jkv.Service(engine)
    ticket = service.submit(PROMPTS[0], sampling=jkv.Sampling(seed=5), streams=True, **LONG)
    next(iter(ticket))
    waiting, _ = service.close("wait"), service.close("abort").result(60)
    assert ticket.result(0).finish_reason == ["cancelled"]
    waiting.result(0)


def test_a_forgotten_service_ends_its_thread(model):
    service, before = jkv.Service(make_engine(model, 3, 3 * ROW)), threading.active_count()
    del service
    gc.collect()
    assert threading.active_count() == before - 1
