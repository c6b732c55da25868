"""Replicas in actors of Ray (extra `ray`): `python -m pytest tests/replicas/test_actors.py -m slow -n 0`."""

import os
import signal
import threading

import jax
import numpy as np
import pytest

import jkv

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install jkv-cache[ray]")
from jkv.replicas import actors  # noqa: E402
from jkv.replicas.options import RayOptions  # noqa: E402
from jkv.replicas.worker import digests_of  # noqa: E402

pytestmark = pytest.mark.slow

PROMPTS = [[5, 1, 9], [3, 7] * 13 + [1], [4] * 8]
SIZES = {"max_running": 3, "max_slots": 2048, "page_size": 4, "return_trace": True}
SETTINGS = {"n": 3, "sampling": jkv.Sampling(seed=5), "stop_ids": ()}
SHORT, LONG = SETTINGS | {"max_new_tokens": 40}, SETTINGS | {"max_new_tokens": 400}
LONGER = SETTINGS | {"max_new_tokens": 1500}  # than weights take to come


def mine():
    """A user's policy, whose score other processes cannot import, so that it travels by value."""

    def nearest(view):
        return -jax.numpy.abs(view.position.astype(np.float32) - 17)

    nearest.__module__ = "__main__"
    return jkv.evict_by(nearest, budget=16, interval=8)


POLICY = mine()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def expected(model):
    """Results of one engine of as many rows."""
    return {
        key: jkv.generate(model, PROMPTS, policy=POLICY, **SIZES, **settings)
        for key, settings in {"short": SHORT, "long": LONG}.items()
    }


def make(model, count, sizes=SIZES, **options):
    return jkv.Replicas(model, num_replicas=count, carrier="ray", policies=[POLICY], ray=RayOptions(**options), **sizes)


def assert_equal(got, expected):
    assert got.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_array_equal(got.logprobs, expected.logprobs)
    np.testing.assert_array_equal(got.trace.end, expected.trace.end)


def replicas_of(replicas):
    return [member.replica for member in replicas._dispatcher.members.values() if member.replica is not None]


def in_the_middle(replicas, call, is_saved=False, settings=LONG):
    """A long call's result; `call` is made when every actor has decoded some of it, and a snapshot of it is there, if asked."""
    before = {replica: replica._num_chunks for replica in replicas_of(replicas)}

    def is_there():
        members = replicas._dispatcher.members.values()
        moved = all(replica._num_chunks > count + 3 for replica, count in before.items())
        return moved and (not is_saved or all(member.rows.numbers & member.numbers for member in members))

    out = {}
    thread = threading.Thread(target=lambda: out.update(it=replicas.generate(PROMPTS, **settings)))
    thread.start()
    while not is_there():
        assert thread.is_alive(), "the call is too short"
        threading.Event().wait(0.005)
    call()
    thread.join()
    return out["it"]


def in_actors(replicas, function):
    """What a function of each actor returns."""
    return ray.get([replica.actor.__ray_call__.remote(function) for replica in replicas_of(replicas)])


def num_compiled(_):
    from jkv.engine.clocks import COMPILING

    return COMPILING.count


def process_of(_):
    import os

    return os.getpid()


def test_3_2_and_1_actors_draw_the_tokens_of_one_engine(model, expected):
    with make(model, 3) as replicas:
        for left in (3, 2, 1):
            assert len(replicas_of(replicas)) == left
            assert_equal(replicas.generate(PROMPTS, **SHORT), expected["short"])
            if left > 1:
                replicas.retire(left - 1)
        compiled = in_actors(replicas, num_compiled)
        assert_equal(replicas.generate(PROMPTS, **SHORT), expected["short"])
        assert in_actors(replicas, num_compiled) == compiled, "the policy compiles once, although each item names it"


def num_chunks(actor):
    return actor.worker.num_chunks


def test_a_rollout_on_actors_rests_sleeps_and_takes_new_weights(model):
    limits = {"max_prompt_tokens": 32, "max_new_tokens": 200, "n": 3}
    call = {"seed": 5, "stop_ids": (), "max_new_tokens": 120}
    one = jkv.Rollout(model, POLICY, **limits, **SIZES)
    with make(model, 2) as replicas:
        rollout = jkv.Rollout(replicas, **limits)
        out, alone = rollout(PROMPTS, return_trace=True, **call), one(PROMPTS, return_trace=True, **call)
        assert_equal(out, alone)
        np.testing.assert_array_equal(out.mask, alone.mask)
        rollout.submit(PROMPTS, **call)
        first = rollout.run(until_done=1)
        before = in_actors(replicas, num_chunks)
        threading.Event().wait(1)
        assert in_actors(replicas, num_chunks) == before
        rollout.sleep(forget_weights=True)
        rollout.update(model.params)
        rest = rollout.run()
        assert len(first.lengths) + len(rest.lengths) == 9
        for part in (first, rest):
            for tokens, prompt, sample in zip(part.tokens, part.prompt_index, part.sample_index, strict=True):
                assert tokens.tolist() == alone.tokens[3 * prompt + sample].tolist()
        assert rollout.version == 1


@pytest.fixture
def restored(monkeypatch):
    """The items whose rows actors were sent."""
    sent, restore = [], actors.RayReplica.restore

    def noted(self, items, rows):
        sent.extend(items)
        restore(self, items, rows)

    monkeypatch.setattr(actors.RayReplica, "restore", noted)
    return sent


def test_rows_of_a_retired_actor_go_on(model, expected, restored):
    with make(model, 2) as replicas:
        replicas.generate(PROMPTS, **SHORT)
        assert_equal(in_the_middle(replicas, lambda: replicas.retire(1)), expected["long"])
        assert restored
        assert len(replicas_of(replicas)) == 1


@pytest.mark.parametrize("chunks", [0, 3], ids=["without snapshots", "with snapshots"])
def test_tokens_of_a_killed_actor_are_not_lost(model, expected, chunks, restored):
    with make(model, 2, snapshot_chunks=chunks) as replicas:
        replicas.generate(PROMPTS, **SHORT)
        processes = in_actors(replicas, process_of)
        out = in_the_middle(replicas, lambda: os.kill(processes[0], signal.SIGKILL), is_saved=bool(chunks))
        assert_equal(out, expected["long"])
        assert bool(restored) == bool(chunks)

        while len(replicas_of(replicas)) < 2:
            threading.Event().wait(0.05)
        assert processes[0] not in in_actors(replicas, process_of)
        out = in_the_middle(replicas, lambda: replicas.update(jax.tree.map(lambda x: x * 1.01, model.params)), settings=LONGER)
        assert set(out.policy_version.ravel().tolist()) == {0, 1}
        assert (np.diff(out.policy_version, axis=1) >= 0).all()

        os.kill(in_actors(replicas, process_of)[1], signal.SIGKILL)
        replicas.update(model.params)  # a machine that is lost during an update
        out = replicas.generate(PROMPTS, **SHORT)
        assert (out.policy_version == 2).all()
        assert_equal(out, expected["short"])


def versions_of(actor):
    return actor.worker.engine.version, dict(actor.worker.engine.scheduler.versions)


def test_actors_have_adapters_also_one_that_is_started_again(model):
    sizes = SIZES | {"max_adapters": 2, "adapter_rank": 2}
    adapted = [jkv.testing.adapted(model.params, 2, seed=seed) for seed in range(3)]
    one = jkv.Engine(model, policies=[POLICY], **sizes)
    one.add_adapter("a", adapted[1])
    tickets = [one.submit(prompt, policy=POLICY, adapter="a", **SHORT) for prompt in PROMPTS]
    one.run()
    expected = [tokens.tolist() for ticket in tickets for tokens in one.result(ticket).tokens]
    with make(model, 2, sizes) as replicas:
        replicas.add_adapter("a", adapted[0])
        replicas.add_adapter("b", adapted[2])
        processes = in_actors(replicas, process_of)
        os.kill(processes[0], signal.SIGKILL)
        replicas.update_adapter("a", adapted[1])
        replicas.remove_adapter("b")
        while len(replicas_of(replicas)) < 2 or processes[0] in in_actors(replicas, process_of):
            threading.Event().wait(0.05)
        assert in_actors(replicas, versions_of) == [(4, {"": 0, "a": 3})] * 2
        out = replicas.generate(PROMPTS, adapter="a", **SHORT)
        assert out.tokens.tolist() == expected
        assert set(out.policy_version.ravel().tolist()) == {3}


@pytest.mark.parametrize("chunks", [0, 3], ids=["without snapshots", "with snapshots"])
def test_the_only_actor_is_killed_and_the_next_one_answers_its_requests_with_their_adapter(model, chunks, restored):
    sizes = SIZES | {"max_adapters": 2, "adapter_rank": 2}
    adapted = {name: jkv.testing.adapted(model.params, 2, seed=ord(name)) for name in "ab"}
    one = jkv.Engine(model, policies=[POLICY], **sizes)
    one.add_adapter("a", adapted["a"])
    tickets = [one.submit(prompt, policy=POLICY, adapter="a", **LONG) for prompt in PROMPTS]
    one.run()
    expected = [one.result(ticket) for ticket in tickets]
    with make(model, 1, sizes, snapshot_chunks=chunks) as replicas:
        for name in "ba":
            replicas.add_adapter(name, adapted[name])
        replicas.generate(PROMPTS, adapter="a", **SHORT)
        (process,) = in_actors(replicas, process_of)
        settings = LONG | {"adapter": "a"}
        out = in_the_middle(replicas, lambda: os.kill(process, signal.SIGKILL), bool(chunks), settings)
        assert [process] != in_actors(replicas, process_of)
        assert out.tokens.tolist() == [tokens.tolist() for part in expected for tokens in part.tokens]
        np.testing.assert_array_equal(out.logprobs, np.concatenate([part.logprobs for part in expected]))
        assert set(out.policy_version.ravel().tolist()) == {2}
        assert bool(restored) == bool(chunks)
        assert in_actors(replicas, versions_of) == [(2, {"": 0, "b": 1, "a": 2})]


def test_an_actor_that_does_not_answer_is_replaced(model, expected):
    with make(model, 2) as replicas:
        replicas.generate(PROMPTS, **SHORT)
        processes = in_actors(replicas, process_of)
        replicas._carrier._watch.timeout = 5.0
        out = in_the_middle(replicas, lambda: os.kill(processes[1], signal.SIGSTOP))
        assert_equal(out, expected["long"])
        assert replicas._dispatcher._restarts == {0: 1, 1: 0}


def test_what_cannot_work_says_why(model):
    lock = threading.Lock()
    policy = jkv.evict_by(lambda view: view.position.astype(np.float32) if lock else None, budget=16, interval=8)
    with pytest.raises(
        ValueError, match=r"sent to actors by pickle, and .* cannot be: TypeError: cannot pickle '_thread.lock'"
    ):
        jkv.Replicas(model, num_replicas=1, carrier="ray", policies=[policy])
    with pytest.raises(ValueError, match="An actor needs tensor=3 devices; it has 1"):
        make(model, 1, tensor=3)
    with pytest.raises(RuntimeError, match=r"did not start in 3 seconds. Ray has .* left"):
        make(model, 1, actor={"num_cpus": 64}, timeout=3.0)


def digests(actor):
    from jkv.replicas.worker import digests_of

    return actor.worker.engine.version, digests_of(actor.worker.engine.model.params).tolist()


def test_an_update_ended_by_ctrl_c_and_called_again_brings_its_weights(model):
    """The press comes at once, or after up to a third of a second: before, while and after the actors take the weights."""
    with make(model, 2) as replicas:
        for i in range(12):
            params = jax.tree.map(lambda leaf, i=i: leaf * np.float32(1 + (i + 1) / 64), model.params)
            press = threading.Timer(i * 0.03, lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                press.start()
                replicas.update(params)
                while press.is_alive():
                    press.join(0.01)
                threading.Event().wait(0.05)
            except KeyboardInterrupt:
                pass
            replicas.update(params)
            expected = replicas.version, digests_of(params).tolist()
            assert in_actors(replicas, digests) == [expected] * 2
