"""Weights and versions agree: whatever ends an update in the middle, no replica has other weights than its version's."""

import jax
import numpy as np
import pytest

import jkv
from jkv.replicas.replicas import Replicas
from jkv.replicas.worker import digests_of
from tests.support.interrupted import interrupted_at

PROMPT = [5, 1, 9]
SIZES = {"max_running": 2, "max_slots": 64, "page_size": 4}
SETTINGS = {"sampling": jkv.Sampling(seed=5), "max_new_tokens": 8, "stop_ids": ()}


@pytest.fixture
def replicas(model):
    with jkv.Replicas(model, num_replicas=2, **SIZES) as replicas:
        yield replicas


def scaled(model, factor):
    return jax.tree.map(lambda leaf: leaf * np.float32(factor), model.params)


def engines(replicas):
    return [member.replica.engine for member in replicas._dispatcher.members.values() if member.replica]


def assert_all_use(replicas, params):
    """All replicas have these weights, under the newest version, and so have those that would be started now."""
    for engine in engines(replicas):
        assert engine.version == replicas.version
        np.testing.assert_array_equal(digests_of(engine.model.params), digests_of(params))
    model, newest, digests = replicas._carrier._weights
    assert newest.version == replicas.version
    for one in (digests, digests_of(model.params)):
        np.testing.assert_array_equal(one, digests_of(params))


def test_an_update_that_is_interrupted_anywhere_and_called_again_brings_its_weights(replicas, model):
    line, is_interrupted = 0, True
    while is_interrupted:
        params = scaled(model, 1 + line / 64)
        is_interrupted = interrupted_at(line, [Replicas.update], lambda params=params: replicas.update(params))
        replicas.update(params)
        assert_all_use(replicas, params)
        line += 1
    assert line > 8
    out = replicas.generate(PROMPT, **SETTINGS)
    assert (out.policy_version == replicas.version).all()
    assert out.tokens.tolist() == jkv.generate(params, PROMPT, **SIZES, **SETTINGS).tokens.tolist()


def test_after_an_interrupted_update_samples_have_the_weights_of_their_version(replicas, model):
    """Without a second call: the old weights under the old version, or the new ones under the new version."""
    weights, line, is_interrupted = {0: model.params}, 0, True
    while is_interrupted:
        params, before = scaled(model, 1.5 + line / 64), replicas.version
        is_interrupted = interrupted_at(line, [Replicas.update], lambda params=params: replicas.update(params))
        assert replicas.version - before in (0, 1)
        if replicas.version > before:
            weights[replicas.version] = params
        out = replicas.generate(PROMPT, n=2, **SETTINGS)
        assert (out.policy_version == replicas.version).all()
        assert_all_use(replicas, weights[replicas.version])
        line += 1


@pytest.mark.parametrize("failing", ["put", "use"])
def test_an_update_that_failed_once_sends_everything(replicas, model, monkeypatch, failing):
    carrier, sent = replicas._carrier, []
    put = carrier.put

    def refuse(_):
        raise OSError("no room in the object store")

    params = scaled(model, 1.25)
    with monkeypatch.context() as patch:
        patch.setattr(carrier, failing, refuse)
        with pytest.raises(OSError, match="no room"):
            replicas.update(params)
    assert_all_use(replicas, model.params)
    monkeypatch.setattr(carrier, "put", lambda leaves: sent.append(len(leaves)) or put(leaves))
    replicas.update(params)
    assert_all_use(replicas, params)
    replicas.update(params)
    assert sent == [len(jax.tree.leaves(params)), 0]


def test_a_replica_that_receives_other_weights_than_were_sent_is_started_again(replicas, model, monkeypatch):
    worker = replicas._dispatcher.members[0].replica
    update = worker.update
    without_first = lambda change: change._replace(content={i: leaf for i, leaf in change.content.items() if i})  # noqa: E731
    monkeypatch.setattr(worker, "update", lambda change: update(without_first(change)))
    params = scaled(model, 1.25)
    replicas.update(params)
    out = replicas.generate([PROMPT] * 4, **SETTINGS)
    assert replicas._dispatcher._restarts == {0: 0, 1: 1}
    expected = jkv.generate(params, [PROMPT] * 4, **SIZES, **SETTINGS)
    assert out.tokens.tolist() == expected.tokens.tolist()


def test_where_no_replica_has_the_weights_that_were_sent_none_samples(replicas, model, monkeypatch):
    monkeypatch.setattr(replicas._carrier, "put", lambda leaves: {})
    with pytest.raises(RuntimeError, match="must use the weights that were sent as version 1"):
        replicas.update(scaled(model, 1.25))
    with pytest.raises(RuntimeError, match="All replicas are lost"):
        replicas.generate(PROMPT, **SETTINGS)


def test_weights_forgotten_after_an_interrupted_update_come_back_whole(replicas, model):
    params, line, is_interrupted = model.params, 0, True
    while is_interrupted:
        is_interrupted = interrupted_at(line, [Replicas.update], lambda: replicas.update(scaled(model, 1.25)))
        replicas.sleep(forget_weights=True)
        replicas.update(params)
        replicas.wake()
        assert_all_use(replicas, params)
        line += 4
