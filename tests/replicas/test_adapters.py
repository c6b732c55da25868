"""Adapters by name on replicas: each has all of them, also one that is started again, and rows keep theirs on the way."""

import threading

import jax
import numpy as np
import pytest

import jkv
from jkv.replicas.replica import Lost
from jkv.testing import adapted
from tests.replicas.test_replicas import in_the_middle

R_KV = jkv.r_kv(budget=16, interval=8, window=4)
SIZES = {"max_running": 2, "max_slots": 256, "page_size": 4, "policies": [jkv.full(), R_KV]}
PLACES = {"max_adapters": 3, "adapter_rank": 3}
PROMPTS = [[5, 1, 9], [7, 3], [4, 4, 8, 6]]
CALL = {"sampling": jkv.Sampling(temperature=0.8, seed=5), "max_new_tokens": 12, "stop_ids": (), "policy": R_KV}
LONG = CALL | {"max_new_tokens": 200, "n": 3}
NAMES = ("a", "b", None)


def weights_of(model, name):
    return adapted(model.params, rank=2 if name == "a" else 3, seed=ord(name))


@pytest.fixture
def replicas(model):
    with jkv.Replicas(model, num_replicas=2, **SIZES, **PLACES) as made:
        for name in "ab":
            made.add_adapter(name, weights_of(model, name))
        yield made


@pytest.fixture(scope="module")
def engine(model):
    """One engine that holds the same adapters."""
    made = jkv.Engine(model, **SIZES, **PLACES)
    for name in "ab":
        made.add_adapter(name, weights_of(model, name))
    return made


def one_engine(engine, names=NAMES, settings=CALL):
    """What it draws, by adapter."""
    found = {}
    for name in names:
        tickets = [engine.submit(prompt, adapter=name, **settings) for prompt in PROMPTS]
        engine.run()
        found[name] = [tokens.tolist() for ticket in tickets for tokens in engine.result(ticket).tokens]
    return found


def generated(replicas, name, settings=CALL):
    return replicas.generate(PROMPTS, adapter=name, **settings)


def engines(replicas):
    return [member.replica.engine for member in replicas._dispatcher.members.values() if member.replica]


def assert_all_hold(replicas, versions):
    """Every replica has the same adapters, with these versions, and the same numbers in each."""
    found = engines(replicas)
    assert len(found) == 2
    for one in found:
        assert one.version == replicas.version
        assert one.scheduler.versions == versions
        assert (*sorted(versions.keys() - {""}),) == one.adapters == replicas.adapters

    def of_name(one, name):
        stores = one.runner.adapters
        return [np.asarray(leaf[stores.place_of(name)]) for leaf in jax.tree.leaves(stores.stacks)]

    for name in replicas.adapters:
        for one, other in zip(*(of_name(one, name) for one in found), strict=True):
            np.testing.assert_array_equal(one, other)


def wait_for(condition):
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen in a minute")


def test_requests_with_adapters_draw_what_one_engine_draws_on_whichever_replica(replicas, engine):
    expected = one_engine(engine)
    assert len({str(tokens) for tokens in expected.values()}) == 3
    session, tickets = replicas.session(), {}
    for name in NAMES:
        groups = replicas.requests(PROMPTS, CALL | {"adapter": name})
        tickets[name] = [session.submit_requests(group) for group in groups]
    session.run()
    outs = {name: [session.result(ticket) for ticket in group] for name, group in tickets.items()}
    assert {name: [out.tokens[0].tolist() for out in group] for name, group in outs.items()} == expected
    versions = {name: {int(v) for out in group for v in out.policy_version[0]} for name, group in outs.items()}
    assert versions == {"a": {1}, "b": {2}, None: {0}}
    assert all(one.stats.tokens for one in engines(replicas))


def test_a_replica_that_is_started_again_has_every_adapter_with_its_version(replicas, engine, model):
    replicas.update_adapter("a", weights_of(model, "c"))
    replicas.add_adapter("c", weights_of(model, "a"))
    replicas.remove_adapter("b")
    versions = {"": 0, "a": 3, "c": 4}
    assert replicas.version == 5
    assert_all_hold(replicas, versions)

    def lose():
        member = replicas._dispatcher.members[0]
        member.replica._post(Lost(OSError("unplugged")))
        replicas.update_adapter("a", weights_of(model, "a"))  # while it starts
        replicas.add_adapter("b", weights_of(model, "b"))

    out = in_the_middle(replicas, lose)
    wait_for(lambda: len(engines(replicas)) == 2 and {one.version for one in engines(replicas)} == {7})
    assert_all_hold(replicas, {"": 0, "a": 6, "b": 7, "c": 4})
    assert set(out.policy_version.ravel().tolist()) == {0}
    expected = one_engine(engine)
    for name in NAMES:
        again = generated(replicas, name)
        assert again.tokens.tolist() == expected[name]
        assert set(again.policy_version.ravel().tolist()) == {{"a": 6, "b": 7, None: 0}[name]}
    replicas.update(model.params)
    assert_all_hold(replicas, dict.fromkeys(("", "a", "b", "c"), 8))


def test_rows_of_a_retired_replica_keep_their_adapter(replicas, engine, monkeypatch):
    expected = one_engine(engine, ["b"], LONG)["b"]
    monkeypatch.setattr("tests.replicas.test_replicas.LONG", LONG | {"adapter": "b"})
    monkeypatch.setattr("tests.replicas.test_replicas.PROMPTS", PROMPTS)
    found = engines(replicas)
    out = in_the_middle(replicas, lambda: replicas.retire(0))
    assert out.tokens.tolist() == expected
    assert sum(one.stats.tokens for one in found) == 9 * 200  # none is drawn again


def test_an_update_in_the_middle_is_used_by_all_and_others_do_not_notice(replicas, engine, model, monkeypatch):
    monkeypatch.setattr("tests.replicas.test_replicas.PROMPTS", PROMPTS)
    for name, seen in (("a", {1, 3}), ("b", {2})):
        monkeypatch.setattr("tests.replicas.test_replicas.LONG", LONG | {"adapter": name})
        replicas.reset_stats()
        for one in engines(replicas):
            one.reset_stats()
        out = in_the_middle(replicas, lambda: replicas.update_adapter("a", weights_of(model, "c")))
        versions = out.policy_version
        assert set(versions.ravel().tolist()) == seen
        assert (np.diff(versions, axis=1) >= 0).all()
        if name == "b":
            assert out.tokens.tolist() == one_engine(engine, ["b"], LONG)["b"]


def test_what_is_refused_changes_nothing_and_unfinished_samples_keep_their_adapter(replicas, engine, model):
    expected, version = one_engine(engine), replicas.version
    nan = jax.tree.map(lambda x: x * np.nan, weights_of(model, "a"))
    cases = {
        "a new name; got 'a' again": lambda: replicas.add_adapter("a", weights_of(model, "a")),
        "printable, of 1 to 256": lambda: replicas.add_adapter("\n", weights_of(model, "a")),
        "at most rank 3": lambda: replicas.add_adapter("c", adapted(model.params, 4)),
        "finite numbers": lambda: replicas.update_adapter("a", nan),
        "got none": lambda: replicas.update_adapter("a", model.params),
        "adapter_config.json": lambda: replicas.add_adapter("c", "no/such/folder"),
        "got 'c', and this engine has 'a', 'b'": lambda: replicas.update_adapter("c", weights_of(model, "a")),
        "got 'd', and this engine has 'a', 'b'": lambda: replicas.remove_adapter("d"),
        "got 'e', and this engine has 'a', 'b'": lambda: generated(replicas, "e"),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
    sessions = [replicas.session() for _ in range(2)]
    tickets = [one.submit_requests(group) for one in sessions for group in replicas.requests(PROMPTS, CALL | {"adapter": "a"})]
    sessions[0].step()  # the first has sent its samples, and the second has not
    with pytest.raises(ValueError, match=r"no request uses; \d samples use 'a'"):
        replicas.remove_adapter("a")
    for one in sessions:
        one.run()
    outs = [sessions[i // 3].result(ticket) for i, ticket in enumerate(tickets)]
    assert [out.tokens[0].tolist() for out in outs] == expected["a"] * 2
    assert replicas.version == version
    assert_all_hold(replicas, {"": 0, "a": 1, "b": 2})
    replicas.remove_adapter("a")
    with pytest.raises(ValueError, match="got 'a', and this engine has 'b'"):
        generated(replicas, "a")
    assert generated(replicas, "b").tokens.tolist() == expected["b"]


def test_an_adapter_leaves_after_samples_that_were_cancelled(replicas):
    for at_step in range(3):
        session = replicas.session()
        ticket = session.submit_requests(
            [one for group in replicas.requests(PROMPTS, LONG | {"adapter": "a"}) for one in group]
        )
        for _ in range(at_step):
            session.step()
        session.cancel(ticket)
        replicas.remove_adapter("a")
        assert [one.adapters for one in engines(replicas)] == [("b",)] * 2
        replicas.add_adapter("a", adapted(replicas.model.params, 2, seed=at_step))


def test_replicas_that_sleep_take_adapters_and_a_rollout_has_them(replicas, model):
    given = {"max_prompt_tokens": 8, "max_new_tokens": 12, "n": 2}
    one = jkv.Rollout(model, R_KV, **given, page_size=4, **PLACES)
    one.add_adapter("b", weights_of(model, "b"))
    expected = one(PROMPTS, adapter="b", seed=4)
    rollout = jkv.Rollout(replicas, R_KV, **given)
    rollout.sleep()
    rollout.remove_adapter("b")
    rollout.update_adapter("a", weights_of(model, "b"))
    rollout.wake()
    out = rollout(PROMPTS, adapter="a", seed=4)
    assert out.tokens.tolist() == expected.tokens.tolist()
    assert set(out.policy_version[out.mask].tolist()) == {4}


def test_replicas_without_places_refuse_adapters(model):
    with jkv.Replicas(model, num_replicas=1, max_running=1, max_slots=64, page_size=4) as plain:
        for call in (plain.add_adapter, plain.update_adapter):
            with pytest.raises(ValueError, match="got max_adapters=0"):
                call("a", weights_of(model, "a"))
        with pytest.raises(ValueError, match="got max_adapters=0"):
            plain.remove_adapter("a")
        with pytest.raises(ValueError, match="this engine has none"):
            plain.generate(PROMPTS, adapter="a")
