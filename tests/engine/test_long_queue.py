"""What waits costs a turn nothing: a turn, new weights and a reset take the same operations however many samples are queued."""

import sys

import jax
import numpy as np
import pytest

import jkv

ROWS, FEW, MANY = 3, 40, 400
SIZES = {"max_running": ROWS, "max_slots": 64, "page_size": 4, "num_pages": 400, "prefill_tokens": 8}
SETTINGS = {"sampling": jkv.Sampling(seed=5), "max_new_tokens": 20, "stop_ids": ()}
R_KV = jkv.r_kv(budget=16, interval=8, window=4)


def operations(call):
    """How many bytecodes of this package a call executes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "/jkv/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def costs(engine, model, prompt, num_queued):
    """The operations of turns, of new weights and of a reset, where so many samples wait behind rows that run."""
    for i in range(ROWS + num_queued):
        engine.submit(prompt(i), **SETTINGS)
    calls = [engine.step] * 3 + [lambda: engine.update(model.params), engine.step, engine.reset] + [engine.step] * 5
    counts = [operations(call) for call in calls]
    assert len(engine.scheduler.waiting) > num_queued - FEW / 2
    for ticket in list(engine.tickets):
        engine.cancel(ticket)
        engine.take([ticket])
    engine.step()
    assert engine.runner.num_held_pages == 0
    return counts


PROMPTS = {
    "of other prompts": lambda i: [5 + i % 8, 7 + i // 8 % 8, *[9] * 10, 5 + i // 64],
    "of one prompt": lambda i: [5] * 12,
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("options", [{}, {"prefix_cache": True}], ids=["plain", "with a prefix cache"])
def test_a_turn_an_update_and_a_reset_cost_the_same_however_many_wait(model, prompt, options):
    engine = jkv.Engine(model, **SIZES, **options)
    costs(engine, model, prompt, FEW)  # compiles
    few, many = (costs(engine, model, prompt, number) for number in (FEW, MANY))
    np.testing.assert_allclose(many, few, rtol=0.05)  # some operations depend on the clock


def test_a_run_of_a_rollout_costs_the_same_however_many_are_pending(model):
    rollout = jkv.Rollout(model, R_KV, max_prompt_tokens=16, max_new_tokens=20, **SIZES)

    def cost(number):
        rollout.submit([PROMPTS["of other prompts"](i) for i in range(ROWS + number)], seed=5, stop_ids=())
        counts = [operations(lambda: rollout.run(max_steps=1, progress=False)) for _ in range(6)]
        counts.append(operations(lambda: rollout.run(until_done=1, progress=False)))
        assert rollout.pending > number - FEW
        rollout.cancel()
        return counts

    cost(FEW)
    few, many = cost(FEW), cost(MANY)
    np.testing.assert_allclose(many, few, rtol=0.05)  # some operations depend on the clock


def test_waiting_samples_that_have_started_are_few_and_found(model):
    """Swapped-out rows and later turns of conversations: what a reset starts again without going through the queue."""
    engine = jkv.Engine(model, **SIZES)
    first = engine.submit([5] * 12, **SETTINGS, keep=True)
    while not engine.tickets[first][0].is_finished:
        engine.step()
    running = [engine.submit([6 + i] * 12, **SETTINGS) for i in range(ROWS)]
    waiting = [engine.submit([10] * 12, **SETTINGS) for _ in range(20)]
    later = engine.extend(first, [7, 8], max_new_tokens=4, stop_ids=())
    engine.step()
    engine.sleep()
    assert {sample.ticket for sample in engine.scheduler.parked} == {*running, later}
    engine.wake()
    engine.reset()
    engine.run()
    results = {ticket: engine.result(ticket) for ticket in [*running, *waiting, later]}
    assert {result.finish_reason[0] for result in results.values()} == {"length"}
    expected = jkv.generate(model, [10] * 12, **SIZES, **SETTINGS)
    np.testing.assert_array_equal(results[waiting[0]].tokens, expected.tokens)
    assert not engine.scheduler.parked
    assert not engine.scheduler.started
    assert jax.tree.leaves(engine.scheduler.prefixes) == []
