"""Programs that another thread compiles: only the request that needs them waits, and its tokens are those of any engine."""

import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.engine import ahead_of_time
from jkv.engine.clocks import COMPILING
from tests.support.foreseen import compile_later
from tests.support.simulator import ROW, make_engine

R_KV = jkv.r_kv(budget=16, interval=8, window=4)
PROMPT = [5, 1, 9]
ASKED = {"policy": R_KV, "max_new_tokens": 20, "stop_ids": (), "sampling": jkv.Sampling(seed=5)}
PENALISED = ASKED | {"sampling": jkv.Sampling(seed=5, presence_penalty=0.5)}
KINDS = {
    "plain": ASKED,
    "penalties": PENALISED,
    "greedy": ASKED | {"sampling": jkv.Sampling(temperature=0.0)},
    "biases": ASKED | {"logit_bias": {3: 1.0}, "min_tokens": 4},
    "logprobs": ASKED | {"model_logprobs": True, "top_logprobs": 3},
    "forced": ASKED | {"forced_tokens": [3, 4]},
    "full": ASKED | {"policy": jkv.full()},
    "pieces": ASKED | {"prompt_piece": 2},
    "samples": ASKED | {"n": 3},
    "samples, in steps": ASKED | {"n": 3, "policy": jkv.streaming_llm(budget=16)},
    "kept": ASKED | {"keep": True},
}


class Compiler:
    """Compiles when it is let, or fails; in another thread than the caller's."""

    def __init__(self, monkeypatch):
        self.may_go, self.asked, self.names, self.error = threading.Event(), threading.Event(), [], None
        compile_apart = ahead_of_time.compile_apart

        def run(program, fixed, shapes):
            self.names.append(program.__name__)
            self.asked.set()
            assert self.may_go.wait(300)
            if self.error is not None:
                raise self.error
            return compile_apart(program, fixed, shapes)

        monkeypatch.setattr(ahead_of_time, "compile_apart", run)


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler(monkeypatch)
    yield compiler
    compiler.may_go.set()


@pytest.fixture
def service(model):
    engine = make_engine(model, 3, 3 * ROW)
    with jkv.Service(engine, compiles_apart=True) as service:
        yield service
    assert engine.is_idle
    assert engine.runner.num_held_pages == 0
    assert not isinstance(engine.runner.programs, ahead_of_time.Apart)


def alone(model, prompt, **asked):
    engine = make_engine(model, 3, 3 * ROW)
    ticket = engine.submit(prompt, **asked)
    engine.run()
    return engine.result(ticket)


def test_others_go_on_while_a_request_waits_for_its_programs(model, service, compiler):
    compiler.may_go.set()
    service.submit(PROMPT, **ASKED).result()
    compiler.may_go.clear()
    compiler.asked.clear()
    waits = service.submit(PROMPT, streams=True, **PENALISED)
    assert compiler.asked.wait(60)
    for _ in range(2):  # whole requests begin and end meanwhile
        events = list(service.submit(PROMPT, streams=True, **ASKED))
        assert sum(len(event.tokens) for event in events) == 20
        assert len(events) > 1
    assert not waits.done()
    assert waits.number < 0
    compiler.may_go.set()
    np.testing.assert_array_equal(waits.result().tokens, alone(model, PROMPT, **PENALISED).tokens)


def watch(service, monkeypatch):
    """The programs that are called from now on, and whether they are compiled by then."""
    apart = service.call(lambda engine: engine.runner.programs).result()
    called, call = [], apart._call

    def watched(name, *args, **settings):
        is_known = apart.knows(name, args, settings)
        called.append((name, is_known))
        return call(name, *args, **settings)

    monkeypatch.setattr(apart, "_call", watched)
    return called


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_foreseen_is_what_is_called(model, service, kind, monkeypatch, caplog):
    """Nothing of a request's prefill, compaction and first chunks compiles in the owner's thread."""
    called = watch(service, monkeypatch)
    found = service.submit([3, 7] * 13 + [1], **KINDS[kind]).result()
    np.testing.assert_array_equal(found.tokens, alone(model, [3, 7] * 13 + [1], **KINDS[kind]).tokens)
    moves = {"samples": ("detach", "fork"), "kept": ("detach",)}.get(kind.split(",")[0], ())
    foreseen = [one for one in called if one[0] in ("prefill_chunk", "compact", "decode_chunk", *moves)]
    assert set(moves) <= {name for name, _ in foreseen}
    assert {"prefill_chunk", "decode_chunk"} <= {name for name, _ in foreseen}
    assert all(is_known for _, is_known in foreseen), foreseen
    assert not caplog.records


def test_what_a_prompt_needs_of_which_the_cache_has_some_is_foreseen(model, monkeypatch):
    knobs = {"max_running": 2, "max_slots": 256, "page_size": 4, "policies": [R_KV], "prefix_cache": True, "prefix_piece": 8}
    prompt = [3, 7] * 65  # of two prefill programs, and of a smaller one where 120 tokens are found
    with jkv.Service(jkv.Engine(model, **knobs), compiles_apart=True) as service:
        service.submit(PROMPT, **ASKED).result()
        compile_later(service)
        called = watch(service, monkeypatch)
        first, again = (service.submit(prompt, **ASKED).result() for _ in range(2))
    assert [one.samples[0].cached_tokens for one in (first, again)] == [0, 120]
    moves = {"hold_pages", "adopt_pages"}
    foreseen = [one for one in called if one[0] in ("prefill_chunk", "compact", "decode_chunk", *moves)]
    assert moves <= {name for name, _ in foreseen}
    assert all(is_known for _, is_known in foreseen), foreseen


def test_swaps_are_foreseen_and_no_request_waits_for_them(model, monkeypatch):
    asked = ASKED | {"policy": jkv.full(), "max_new_tokens": 48}
    with jkv.Service(make_engine(model, 3, ROW), compiles_apart=True) as service:
        service.submit(PROMPT, **asked).result()
        compile_later(service)
        called = watch(service, monkeypatch)
        outs = [ticket.result() for ticket in [service.submit(PROMPT, **asked) for _ in range(3)]]
        assert sum(out.samples[0].preemptions for out in outs)
    swaps = {"snapshot_row", "read_pages", "attach", "write_pages"}
    assert swaps <= {name for name, _ in called}
    assert all(is_known for name, is_known in called if name in swaps), called
    for out in outs:
        np.testing.assert_array_equal(out.tokens, alone(model, PROMPT, **asked).tokens)


def test_a_program_that_does_not_compile_ends_its_request_alone(service, compiler):
    compiler.may_go.set()
    service.submit(PROMPT, **ASKED).result()
    compiler.error = RuntimeError("no room")
    with pytest.raises(RuntimeError, match="no room"):
        service.submit(PROMPT, **PENALISED).result()
    assert service.submit(PROMPT, **ASKED).result().lengths[0] == 20
    compiler.error = None
    assert service.submit(PROMPT, **PENALISED).result().lengths[0] == 20


def test_two_requests_that_wait_together_run_together(model, service, compiler):
    both = {"biases": PENALISED, "plain": KINDS["logprobs"]}
    tickets = [service.submit(PROMPT, **asked) for asked in both.values()]
    assert compiler.asked.wait(60)
    compiler.may_go.set()
    for ticket, asked in zip(tickets, both.values(), strict=True):
        np.testing.assert_array_equal(ticket.result().tokens, alone(model, PROMPT, **asked).tokens)


def test_one_that_waits_may_be_cancelled_or_closed(service, compiler):
    ticket = service.submit(PROMPT, **ASKED)
    assert compiler.asked.wait(60)
    ticket.cancel()
    assert ticket.result().finish_reason == ["cancelled"]
    last = service.submit(PROMPT, **ASKED)
    closed = service.close("wait")
    compiler.may_go.set()
    closed.result()
    assert last.result().lengths[0] == 20


def test_seconds_of_another_thread_stop_no_clock(service, compiler):
    compiler.may_go.set()
    before, count = COMPILING.seconds, COMPILING.count
    with COMPILING.elsewhere():
        COMPILING.listen("/jax/core/compile/backend_compile_duration", 100.0)
    assert (COMPILING.seconds, COMPILING.count) == (before, count + 1)


def test_weights_of_another_form_are_another_program(model):
    apart = ahead_of_time.Apart(Programs(), lambda: None)
    in_bytes = jkv.quantise_weights(model.params, "int8")
    assert apart.run(model.params, np.zeros(2)) is apart.run(model.params, np.ones(2))
    assert apart.knows("run", (jax.tree.map(jnp.copy, model.params), np.zeros(2)), {})
    for others in ((in_bytes, np.zeros(2)), (model.params, np.zeros(3)), (model.params, np.zeros(2, np.int8))):
        assert not apart.knows("run", others, {})
    assert apart.knows("run", (model.params, np.zeros(2)), {})
    apart.close()


class Programs:
    """One program, which returns the last weights."""

    class Run:
        static = ()

        def __call__(self, params, x):
            return self

        __signature__ = inspect.signature(lambda params, x: None)

    run = Run()
