"""Conversations over a served engine: any number of threads and tasks, each with the tokens of its conversation alone."""

import asyncio
import gc
import threading

import numpy as np
import pytest

import jkv
from tests.support.faults import DeviceError, with_failing_programs
from tests.support.simulator import ROW, make_engine

R_KV = jkv.r_kv(budget=16, interval=8, window=4)
SETTINGS = {"policy": R_KV, "max_new_tokens": 9, "stop_ids": ()}
TURN = {"max_new_tokens": 7, "stop_ids": ()}
NEW = [[4, 9, 2], list(range(4, 24))]


def prompt_of(i):
    return np.random.default_rng(i).integers(4, 30, 5 + i).tolist()


@pytest.fixture(scope="module")
def whole(model):
    """The tokens of each conversation by itself."""
    engine, found = make_engine(model, 1, ROW), []
    for i in range(6):
        ticket = engine.submit(prompt_of(i), keep=True, **SETTINGS)
        engine.run()
        for new in NEW:
            ticket = engine.extend(ticket, new, **TURN)
            engine.run()
        found.append(engine.result(ticket).transcripts[0].tokens.tolist())
        engine.release(ticket)
    return found


@pytest.fixture
def service(model):
    engine = make_engine(model, 3, 2 * ROW)
    with jkv.Service(engine) as service:
        yield service
        gc.collect()
        service.call(lambda engine: None).result()
        assert len(engine.scheduler.kept_rows) == 0
        assert engine.runner.num_held_pages == 0
    assert not engine.tickets


def test_threads_talk_at_once(service, whole):
    got, errors = {}, []

    def talk(i):
        try:
            ticket = service.submit(prompt_of(i), keep=True, **SETTINGS)
            for new in NEW:
                ticket.result()
                ticket = ticket.extend(new, streams=i % 2 == 0, **TURN)
                tokens = [token for event in ticket for token in event.tokens] if i % 2 == 0 else None
                assert tokens in (None, ticket.result().tokens[0].tolist())
            got[i] = ticket.result().transcripts[0].tokens.tolist()
            ticket.close().result()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [got[i] for i in range(6)] == whole


def test_tasks_talk_at_once(service, whole):
    async def talk(i):
        ticket = service.submit(prompt_of(i), keep=True, **SETTINGS)
        for new in NEW:
            await ticket
            await asyncio.sleep(0.001 * i)
            ticket = ticket.extend(new, streams=True, **TURN)
            tokens = [token async for event in ticket for token in event.tokens]
            assert (await ticket).tokens[0].tolist() == tokens
        out = await ticket
        await ticket.close()
        return out.transcripts[0].tokens.tolist()

    async def everything():
        return await asyncio.gather(*map(talk, range(6)))

    assert asyncio.run(everything()) == whole


def test_a_ticket_that_nobody_holds_frees_its_rows(service):
    ticket = service.submit(prompt_of(1), keep=True, **SETTINGS)
    ticket.result()
    held = service.call(lambda engine: (len(engine.scheduler.kept_rows), engine.runner.num_held_pages)).result()
    assert held[0] == 1
    assert held[1] > 0
    del ticket
    gc.collect()
    held = service.call(lambda engine: (len(engine.scheduler.kept_rows), engine.runner.num_held_pages)).result()
    assert held == (0, 0)


def test_the_last_ticket_of_a_conversation_holds_it(service):
    ticket = service.submit(prompt_of(1), keep=True, **SETTINGS)
    ticket.result()
    ticket = ticket.extend(NEW[0], **TURN)
    ticket.result()
    gc.collect()
    assert service.call(lambda engine: len(engine.scheduler.kept_rows)).result() == 1
    last = ticket.extend(NEW[1], keep=False, **TURN)
    assert last.result().finish_reason == ["length"]
    with pytest.raises(ValueError, match=r"this one was not. Submit it again, with keep"):
        last.extend([5])


def test_a_ticket_without_a_row_is_refused_by_the_reason(service, model):
    plain = service.submit(prompt_of(1), **SETTINGS)
    plain.result()
    with pytest.raises(ValueError, match=r"this one was not. Submit it again, with keep"):
        plain.extend([5])
    kept = service.submit(prompt_of(1), keep=True, **SETTINGS | {"max_new_tokens": 90})
    with pytest.raises(ValueError, match=r"this one still runs. Wait"):
        kept.extend([5])
    kept.cancel()
    kept.result()
    with pytest.raises(ValueError, match="this one ended by 'cancelled'"):
        kept.extend([5])
    kept = service.submit(prompt_of(1), keep=True, **SETTINGS)
    kept.result()
    for sample, rule in ((1, "one of"), (-1, "one of"), (True, "a whole number"), ("a", "a whole number")):
        with pytest.raises(ValueError, match=f"sample must be {rule}"):
            kept.extend([5], sample=sample)
    for tokens in ([], [10**6], "text"):
        with pytest.raises(ValueError, match="oken id"):
            kept.extend(tokens)
    with pytest.raises(ValueError, match="A conversation must fit"):
        kept.extend([5], max_new_tokens=10**6)
    later = kept.extend([5], **TURN)
    later.result()
    with pytest.raises(ValueError, match="it was extended"):
        kept.extend([5])
    later.close().result()
    with pytest.raises(ValueError, match="this one is closed"):
        later.extend([5])
    with jkv.Service(make_engine(model, 1, ROW)) as other, pytest.raises(ValueError, match="got a ticket of another one"):
        other.kept_row(kept)


def test_of_two_extensions_at_once_one_wins(service):
    kept = service.submit(prompt_of(1), keep=True, **SETTINGS)
    kept.result()
    service.pause("keep").result()
    first, second = kept.extend([5], **TURN), kept.extend([6], **TURN)
    service.resume().result()
    assert first.result().tokens.shape == (1, 7)
    with pytest.raises(ValueError, match="it was extended"):
        second.result()


def test_a_turn_that_waits_for_the_end_of_a_pause_holds_its_row(service, whole):
    ticket = service.submit(prompt_of(1), keep=True, **SETTINGS)
    ticket.result()
    service.pause("keep").result()
    ticket = ticket.extend(NEW[0], **TURN)
    gc.collect()
    service.resume().result()
    ticket.result()
    ticket = ticket.extend(NEW[1], **TURN)
    assert ticket.result().transcripts[0].tokens.tolist() == whole[1]


def test_a_running_request_that_is_closed_leaves_no_row(service):
    ticket = service.submit(prompt_of(1), keep=True, **SETTINGS | {"max_new_tokens": 60})
    ticket.close().result()
    assert ticket.result().finish_reason == ["length"]
    with pytest.raises(ValueError, match="this one is closed"):
        ticket.extend([5])


def test_a_request_that_is_closed_before_it_starts_leaves_no_row(service):
    service.pause("keep").result()
    ticket = service.submit(prompt_of(1), keep=True, **SETTINGS)
    ticket.close().result()
    service.resume().result()
    ticket.result()
    assert service.call(lambda engine: len(engine.scheduler.kept_rows)).result() == 0


def test_a_failed_program_ends_a_turn_with_an_error_and_not_the_service(model):
    engine = make_engine(model, 2, 2 * ROW)
    failing = with_failing_programs(engine)
    with jkv.Service(engine) as service:
        ticket = service.submit(prompt_of(1), keep=True, **SETTINGS)
        ticket.result()
        service.pause("keep").result()
        later = ticket.extend(NEW[1], **TURN)
        failing.fail(3, is_before=True)
        service.resume().result()
        out = later.result()
        assert out.finish_reason == ["error"]
        assert "Submit the whole conversation again" in str(out.samples[0].error)
        assert not isinstance(out.samples[0].error, DeviceError)
        assert service.submit(prompt_of(1), **SETTINGS).result().finish_reason == ["length"]
        assert service.call(lambda engine: engine.runner.num_held_pages).result() == 0
