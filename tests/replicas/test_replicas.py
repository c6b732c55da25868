"""Replicas in threads: whatever the distribution, the tokens are those of one engine, in the order of the prompts."""

import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jkv
from jkv.replicas.threads import places_of
from tests.support.faults import with_failing_programs

PROMPTS = [[5, 1, 9], [3, 7] * 13 + [1], [4] * 8]
R_KV = jkv.r_kv(budget=16, interval=8, window=4)
SIZES = {"max_running": 3, "max_slots": 256, "page_size": 4, "return_trace": True}
SETTINGS = {"n": 4, "sampling": jkv.Sampling(seed=5), "max_new_tokens": 40, "stop_ids": ()}
LONG = SETTINGS | {"n": 3, "max_new_tokens": 200}


@pytest.fixture(scope="module")
def one(model):
    """Results of one engine of as many rows."""

    def generate(policy=R_KV, **settings):
        return jkv.generate(model, PROMPTS, policy=policy, **SIZES, **settings)

    return generate


@pytest.fixture(scope="module")
def replicas(model):
    with jkv.Replicas(model, num_replicas=2, policies=[R_KV, jkv.full()], **SIZES) as replicas:
        yield replicas


def assert_equal(got, expected):
    assert got.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_array_equal(got.logprobs, expected.logprobs)
    np.testing.assert_array_equal(got.trace.end, expected.trace.end)
    assert got.finish_reason == expected.finish_reason


@pytest.mark.parametrize("policy", [R_KV, jkv.full(), [R_KV, jkv.full(), R_KV]], ids=["r_kv", "full", "mixed"])
def test_tokens_and_traces_are_those_of_one_engine_in_the_order_of_the_prompts(replicas, one, policy):
    out = replicas.generate(PROMPTS, policy=policy, **SETTINGS)
    expected = one(policy, **SETTINGS)
    assert_equal(out, expected)
    assert [prompt.tolist() for prompt in out.prompts] == [prompt for prompt in PROMPTS for _ in range(4)]
    assert out.policies == expected.policies
    assert (out.stats.generated_tokens, out.stats.compactions) == (12 * 40, expected.stats.compactions)
    assert out.stats.seed == 5
    score = jkv.score(replicas_model(replicas), out, trace=out.trace)
    assert np.percentile(np.abs(score.logprobs - out.logprobs), 99) < 1e-5


def replicas_model(replicas):
    """The model with the weights in use, of the first replica."""
    return replicas._dispatcher.members[0].replica.engine.model


def test_samples_are_streamed_as_they_finish(replicas, one):
    expected, seen = one(**SETTINGS), []
    for index, out in replicas.stream(PROMPTS, **SETTINGS):
        assert out.tokens[0].tolist() == expected.tokens[index].tolist()
        seen.append(index)
    assert sorted(seen) == list(range(12))
    for _ in replicas.stream(PROMPTS, **LONG):
        break  # the others are cancelled
    assert_equal(replicas.generate(PROMPTS, **SETTINGS), expected)
    assert [load.items for load in replicas.loads] == [0, 0]
    assert [load.pages for load in replicas.loads] == [0, 0]


def test_many_threads_call_at_once(replicas, one):
    expected, got = one(**SETTINGS), {}

    def ask(i):
        got[i] = replicas.generate(PROMPTS[i], **SETTINGS).tokens.tolist()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row for i in range(3) for row in got[i]] == expected.tokens.tolist()


def in_the_middle(replicas, call):
    """A long call's result; `call` is made when every replica has decoded a few chunks of it."""
    out = {}
    thread = threading.Thread(target=lambda: out.update(it=replicas.generate(PROMPTS, **LONG)))
    thread.start()
    engines = [member.replica.engine for member in replicas._dispatcher.members.values()]
    while min(engine.stats.chunks for engine in engines) < 4:
        threading.Event().wait(0.001)
    call()
    thread.join()
    return out["it"]


def test_weights_that_come_in_the_middle_are_used_by_all_and_versions_ascend(model, one):
    """Also by an engine that is built anew, and by one whose weights were not all sent."""
    with jkv.Replicas(model, num_replicas=2, policies=[R_KV], **SIZES) as replicas:
        out = in_the_middle(replicas, lambda: replicas.update(jax.tree.map(lambda x: x * 1.01, model.params)))
        versions = out.policy_version
        assert set(versions.ravel().tolist()) == {0, 1}
        assert (np.diff(versions, axis=1) >= 0).all()
        replicas.update(model.params)
        assert replicas.version == 2
        after = replicas.generate(PROMPTS, **SETTINGS)
        assert (after.policy_version == 2).all()
        assert_equal(after, one(**SETTINGS))
        with pytest.raises(ValueError, match="finite"):
            replicas.update(jax.tree.map(lambda x: x * np.float32(np.nan), model.params))
        with pytest.raises(ValueError, match="shapes and dtypes"):
            replicas.update(jax.tree.map(lambda x: x[:1], model.params))
        assert replicas.version == 2


def test_rows_of_a_retired_replica_go_on_and_are_not_drawn_again(model, one):
    with jkv.Replicas(model, num_replicas=2, policies=[R_KV], **SIZES) as replicas:
        engines = [member.replica.engine for member in replicas._dispatcher.members.values()]
        out = in_the_middle(replicas, lambda: replicas.retire(0))
        assert_equal(out, one(**LONG))
        drawn = sum(engine.stats.tokens for engine in engines)
        assert drawn == 9 * 200
        assert [load.replica for load in replicas.loads] == [1]


def test_items_of_an_engine_that_cannot_be_repaired_go_elsewhere(model, one):
    with jkv.Replicas(model, num_replicas=2, policies=[R_KV], restarts=0, **SIZES) as replicas:
        engine = replicas._dispatcher.members[0].replica.engine

        def ruin():
            engine.runner.reset = None  # after a failed program there is no pool any more
            with_failing_programs(engine).fail(0, True)

        out = in_the_middle(replicas, ruin)
        assert_equal(out, one(**LONG))
        assert [load.replica for load in replicas.loads] == [1]


def test_new_adapters_travel_alone(model):
    params = jkv.testing.adapted(model.params)
    with jkv.Replicas(params, num_replicas=2, policies=[R_KV], **SIZES) as replicas:
        sent = []
        put = replicas._carrier.put
        replicas._carrier.put = lambda leaves: sent.append(len(leaves)) or put(leaves)
        layer = params.layers[1]
        new = params.replace(layers=(params.layers[0], layer.replace(up=layer.up.replace(up=layer.up.up * 2))))
        replicas.update(new)
        assert sent == [1]
        out = replicas.generate(PROMPTS, **SETTINGS)
    assert_equal(out, jkv.generate(new, PROMPTS, policy=R_KV, **SIZES, **SETTINGS))


def devices(*shape):
    """Stand-ins, for arithmetic."""
    return np.arange(np.prod(shape)).reshape(shape)


def test_a_mesh_has_a_replica_for_each_row_of_data():
    class FakeMesh:
        axis_names, shape = ("tensor", "data"), {"tensor": 1, "data": 4}
        devices = devices(1, 4)

    assert places_of(FakeMesh(), None) == [0, 1, 2, 3]
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"))
    assert places_of(one, None) == jax.devices()[:1]
    assert places_of(None, 3) == jax.devices()[:1] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "got neither"),
        ({"num_replicas": 2, "mesh": "data"}, "got both"),
        ({"mesh": "tensor"}, 'axes "data" and "tensor"'),
        ({"num_replicas": 0}, "num_replicas must be at least 1"),
        ({"num_replicas": 2, "carrier": "mail"}, "carrier must be one of threads, ray"),
        ({"num_replicas": 2, "max_runing": 3}, "Did you mean max_running"),
        ({"num_replicas": 2, "policies": "full"}, "policies must be a list"),
        ({"carrier": "ray", "mesh": "data"}, "devices of its own process"),
    ],
)
def test_bad_settings_are_refused(model, settings, message):
    if "mesh" in settings:
        settings = settings | {"mesh": Mesh(np.array(jax.devices()[:1]), (settings["mesh"],))}
    with pytest.raises((ValueError, TypeError), match=message):
        jkv.Replicas(model, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": jkv.r_kv(budget=99)}, "policies once"),
        ({"max_new_tokens": 1000, "policy": jkv.full()}, "max_slots"),
        ({"stop_ids": range(9)}, "max_stop_ids"),
        ({"stop_strings": ["a"]}, "tokenizer"),
        ({"n": 0}, "at least 1"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_sent(replicas, settings, message):
    with pytest.raises(ValueError, match=message):
        replicas.generate(PROMPTS, **SETTINGS | settings)
    assert [load.items for load in replicas.loads] == [0, 0]


def test_texts_are_those_of_one_engine(one):
    model = jkv.testing.tiny_model(tokenizer=jkv.testing.TinyTokenizer())
    with jkv.Replicas(model, num_replicas=1, policies=[R_KV], **SIZES) as replicas:
        out = replicas.generate(PROMPTS, **SETTINGS)
    expected = jkv.generate(model, PROMPTS, policy=R_KV, **SIZES, **SETTINGS)
    assert out.text == expected.text
    assert out.reasoning == expected.reasoning
