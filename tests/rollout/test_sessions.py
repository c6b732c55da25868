"""Several threads use one rollout: each has the samples that it would have by itself, and they run in one batch."""

import threading

import jax
import numpy as np
import pytest

from jkv.model.weight_shapes import init_params
from tests.rollout.test_rollout import PROMPTS, R_KV, by_sample, make_rollout
from tests.support.faults import with_failing_programs

SECONDS = 120  # after which a test that hangs fails


@pytest.fixture(scope="module")
def rollout(model):
    return make_rollout(model, R_KV)


def in_threads(*functions):
    """What each function returned or raised; all run at once."""
    out, start = [None] * len(functions), threading.Barrier(len(functions))

    def run(i, function):
        start.wait()
        try:
            out[i] = function()
        except BaseException as error:
            out[i] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return out


def test_calls_of_many_threads_run_in_one_batch_with_the_samples_of_each_call_by_itself(rollout):
    calls = [lambda seed=seed: rollout(PROMPTS[seed % 4], n=1, seed=seed, stop_ids=()) for seed in range(6)]
    alone, steps = [], 0
    for call in calls:
        alone.append(call())
        steps += rollout.engine.stats.steps
    together = in_threads(*calls)
    assert [by_sample(out) for out in together] == [by_sample(out) for out in alone]
    assert [out.prompt_index.tolist() for out in together] == [[0]] * 6
    assert rollout.engine.stats.steps <= steps / 2  # four rows, not one after the other
    assert rollout.num_pending == 0
    assert not rollout.engine.tickets


def test_a_session_sees_its_own_samples_alone(rollout):
    first, second = rollout.session(), rollout.session()
    expected = [by_sample(rollout(PROMPTS[i], n=2, seed=i, stop_ids=())) for i in range(2)]
    first.submit(PROMPTS[0], n=2, seed=0, stop_ids=())
    second.submit(PROMPTS[1], n=2, seed=1, stop_ids=())
    assert (first.pending, second.pending, rollout.pending, rollout.num_pending) == (2, 2, 0, 4)
    part = first.run(max_steps=8)
    assert len(part.lengths) == 0
    assert by_sample(second.run()) == expected[1]
    with pytest.raises(ValueError, match="2 are pending with return_trace=False"):
        second.submit(PROMPTS[1], return_trace=True)
    assert by_sample(first.run()) == expected[0]
    assert rollout.num_pending == 0


def test_an_update_comes_between_two_turns_of_another_thread(model):
    rollout = make_rollout(model, R_KV)
    other, begun = init_params(model.config, jax.random.key(17), scale=0.3), threading.Event()
    step = rollout.engine.step
    rollout.engine.step = lambda: (begun.set(), step())[1]

    def update():
        begun.wait(SECONDS)
        rollout.update(other)

    out, _ = in_threads(lambda: rollout(PROMPTS, n=2, seed=0, stop_ids=()), update)
    versions = out.policy_version[out.mask]
    assert set(versions.tolist()) <= {0, 1}
    assert all((np.diff(row[mask]) >= 0).all() for row, mask in zip(out.policy_version, out.mask, strict=True))
    assert (rollout(PROMPTS[:1], n=1).policy_version[:, 0] == 1).all()


def test_threads_wait_while_another_one_has_put_the_pool_to_sleep(model):
    rollout = make_rollout(model, R_KV)
    expected = by_sample(rollout(PROMPTS, n=2, seed=3, stop_ids=()))
    begun, woken = threading.Event(), []
    step = rollout.engine.step
    rollout.engine.step = lambda: (begun.set(), step())[1]

    def trainer():
        begun.wait(SECONDS)
        rollout.sleep()
        steps = rollout.engine.stats.steps
        assert not threading.Event().wait(0.5)
        woken.append(rollout.engine.stats.steps == steps)
        rollout.wake()

    out, error = in_threads(lambda: rollout(PROMPTS, n=2, seed=3, stop_ids=()), trainer)
    assert error is None
    assert woken == [True]
    assert by_sample(out) == expected


def test_a_failed_program_costs_no_thread_a_token(model):
    rollout = make_rollout(model)
    calls = [lambda seed=seed: rollout(PROMPTS[seed], n=2, seed=seed, stop_ids=()) for seed in range(2)]
    expected = [by_sample(call()) for call in calls]
    programs = with_failing_programs(rollout.engine)
    programs.fail(3, False)
    assert [by_sample(out) for out in in_threads(*calls)] == expected
    assert programs.failing is None
    assert rollout.num_pending == 0
