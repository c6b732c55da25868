"""Adapters by request: a row has the bits of its own adapter whatever its neighbours have, and shares no pages with others."""

import dataclasses

import jax
import numpy as np
import pytest

import jkv
from jkv.checkpoints.adapters import with_adapters
from jkv.engine.clocks import COMPILING
from jkv.model.adapter_stacks import adapters_of
from jkv.testing import TINY, adapted, tiny_model

PROMPT = [5, 6, 7, 8] * 5 + [9, 4]
POLICY = jkv.r_kv(budget=24, interval=8, window=4)
SIZES = {"max_running": 3, "max_slots": 64, "page_size": 4, "policies": [jkv.full(), POLICY], "return_trace": True}
PLACES = {"max_adapters": 3, "adapter_rank": 3, "prefix_cache": True}
RANKS = {"a": 2, "b": 3}
UNTIED = tiny_model(config=dataclasses.replace(TINY, tie_embeddings=False))


def weights_of(model, name):
    """The weights of a model with one of the adapters, or without."""
    return adapted(model.params, RANKS[name], seed=ord(name)) if name else model.params


@pytest.fixture(scope="module")
def model():
    return UNTIED


@pytest.fixture(scope="module")
def engine(model, short_prefills):
    made = jkv.Engine(model, **SIZES, **PLACES)
    for name in RANKS:
        made.add_adapter(name, weights_of(model, name))
    return made


def submit(engine, names, **settings):
    """One prompt with each adapter."""
    given = {"max_new_tokens": 17, "stop_ids": (), "sampling": jkv.Sampling(temperature=0.7, seed=3)} | settings
    return [engine.submit(PROMPT, adapter=name, **given) for name in names]


def run(engine, names, **settings):
    """The results of these requests, in one batch."""
    tickets = submit(engine, names, **settings)
    engine.run()
    return [engine.result(ticket) for ticket in tickets]


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("policy", [jkv.full(), POLICY], ids=["full", "r_kv"])
def test_a_row_has_the_bits_of_its_own_adapter_whatever_its_neighbours_have(model, engine, policy):
    names = "a", None, "b"
    mixed = run(engine, names, policy=policy)
    assert len({tuple(out.tokens[0]) for out in mixed}) == 3
    assert_same_bits(mixed, [run(engine, [name], policy=policy)[0] for name in names])
    for name, out in zip(names, mixed, strict=True):
        own = dataclasses.replace(model, params=weights_of(model, name))
        np.testing.assert_allclose(jkv.score(own, out, trace=out.trace).logprobs, out.logprobs, atol=1e-5)
    assert (mixed[0].samples[0].compactions > 0) == (policy is POLICY)


def test_another_adapter_compiles_nothing(model, engine):
    first, second, third = *(adapted(model.params, 1, seed=seed) for seed in (7, 8)), weights_of(model, "a")
    run(engine, ["a", "b", None])
    before = COMPILING.count
    engine.add_adapter("c", first)
    engine.update_adapter("a", second)
    run(engine, ["a", "c"])
    engine.remove_adapter("c")
    engine.update_adapter("a", third)
    run(engine, ["a", "b", None])
    assert COMPILING.count == before
    assert engine.adapters == ("a", "b")


def test_pages_of_a_prompt_are_reused_with_its_own_adapter_alone(model, engine):
    def cached(*names):
        outs = run(engine, names, max_new_tokens=2)
        return [out.samples[0].cached_tokens for out in outs]

    for name in RANKS:
        engine.update_adapter(name, weights_of(model, name))  # what other tests have cached is of no use any more
    engine.update(model.params)
    forks = engine.stats.forks
    assert cached("a", "b", None) == [0, 0, 0]
    assert engine.stats.forks == forks
    assert cached("b", None, "a") == [16, 16, 16]
    engine.update_adapter("a", adapted(model.params, seed=5))
    assert cached("b", None, "a") == [16, 16, 0]
    engine.remove_adapter("a")
    engine.add_adapter("a", weights_of(model, "a"))
    assert cached("a") == [0]
    engine.update(model.params)
    assert cached("a", "b", None) == [0, 0, 0]


def test_an_update_while_rows_decode_changes_its_own_rows_alone(model, engine):
    names, limit = ("b", None, "a"), 24
    expected = run(engine, names, max_new_tokens=limit)
    tickets = submit(engine, names, max_new_tokens=limit)
    engine.step()
    drawn = len(engine.tickets[tickets[2]][0].completion.tokens)
    version = engine.version
    engine.update_adapter("a", adapted(model.params, seed=5))
    engine.run()
    *others, out = [engine.result(ticket) for ticket in tickets]
    assert_same_bits(others, expected[:2])
    assert 0 < drawn < limit - 1
    np.testing.assert_array_equal(out.tokens[0, :drawn], expected[2].tokens[0, :drawn])
    assert np.abs(out.logprobs - expected[2].logprobs).max() > 1e-3
    old = expected[2].policy_version[0, 0]  # also of the token whose logits were there before the update
    assert out.policy_version[0].tolist() == [old] * (drawn + 1) + [version + 1] * (limit - 1 - drawn)
    assert others[1].policy_version.tolist() == expected[1].policy_version.tolist()
    engine.update_adapter("a", weights_of(model, "a"))
    assert_same_bits(run(engine, ["a"], max_new_tokens=limit), expected[2:])


def test_a_sleeping_and_a_reset_engine_keep_their_adapters(model, engine):
    expected = run(engine, ["a", "b", None])
    tickets = submit(engine, ["a", "b", None])
    engine.step()
    engine.sleep()
    engine.wake()
    engine.step()
    engine.reset()
    engine.run()
    assert_same_bits([engine.result(ticket) for ticket in tickets], expected)


def test_a_turn_goes_on_with_the_adapter_of_its_conversation(model, engine):
    ticket = engine.submit(PROMPT, adapter="a", max_new_tokens=6, stop_ids=(), keep=True)
    engine.run()
    with pytest.raises(ValueError, match="got adapter='b'"):
        engine.extend(ticket, [4, 5], adapter="b")
    with pytest.raises(ValueError, match="no request uses; 1 sample use 'a'"):
        engine.remove_adapter("a")
    later = engine.extend(ticket, [4, 5], max_new_tokens=5, stop_ids=(), keep=False)
    engine.run()
    out = engine.result(later)
    own = dataclasses.replace(model, params=weights_of(model, "a"))
    np.testing.assert_allclose(jkv.score(own, out).logprobs, out.logprobs, atol=1e-5)
    engine.result(ticket)


def test_an_adapter_in_use_stays_and_its_rows_go_on(engine):
    expected = run(engine, ["b"])
    (ticket,) = submit(engine, ["b"])
    for _ in range(2):
        with pytest.raises(ValueError, match="no request uses; 1 sample use 'b'"):
            engine.remove_adapter("b")
        engine.step()
    engine.run()
    assert_same_bits([engine.result(ticket)], expected)


@pytest.mark.usefixtures("short_prefills")
def test_places_cost_nothing_before_an_adapter_is_there(model):
    """No weights are copied, no program is another, and a row has the bits of an engine without places, afterwards too."""
    base = dataclasses.replace(model, params=jkv.join_weights(model.params))
    plain, engine = jkv.Engine(base, **SIZES), jkv.Engine(base, **SIZES, **PLACES | {"prefix_cache": False})
    for one, other in zip(*(jax.tree.leaves(params) for params in (base.params, engine.model.params)), strict=True):
        assert one.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()
    expected = run(plain, [None, None])
    compiled = COMPILING.count
    assert_same_bits(run(engine, [None, None]), expected)
    assert COMPILING.count == compiled
    tickets = submit(engine, [None, None], max_new_tokens=24)
    engine.step()
    for name in RANKS:
        engine.add_adapter(name, weights_of(model, name))
    later = submit(engine, ["a"])[0]
    engine.run()
    assert_same_bits([engine.result(ticket) for ticket in tickets], run(plain, [None, None], max_new_tokens=24))
    for out, name in ((engine.result(later), "a"), *zip(run(engine, ["b", None]), ["b", None], strict=True)):
        own = dataclasses.replace(model, params=weights_of(model, name))
        np.testing.assert_allclose(jkv.score(own, out, trace=out.trace).logprobs, out.logprobs, atol=1e-5)


@pytest.mark.usefixtures("short_prefills")
def test_a_base_of_joined_codes_takes_adapters_and_rows_guess(model):
    base, given = jkv.join_weights(jkv.quantise_weights(model.params, "int8")), weights_of(model, "a")
    sizes = {"max_running": 2, "max_slots": 64, "page_size": 4, "max_adapters": 1, "adapter_rank": 2}
    engine = jkv.Engine(base, **sizes, speculate="ngram")
    engine.add_adapter("a", given)
    outs = run(engine, ["a", None], sampling=None)
    for params, out in zip((with_adapters(base, adapters_of(given)), base), outs, strict=True):
        np.testing.assert_allclose(jkv.score(params, out).logprobs, out.logprobs, atol=1e-4)
    assert engine.stats.drafted > 0


def test_a_rollout_takes_an_adapter_by_name(model):
    rollout = jkv.Rollout(model, max_prompt_tokens=16, max_new_tokens=8, n=2, max_running=2, page_size=4, max_adapters=1)
    rollout.add_adapter("a", weights_of(model, "a"))
    out = rollout([PROMPT[:9]], adapter="a", seed=1, return_trace=True)
    own = dataclasses.replace(model, params=weights_of(model, "a"))
    np.testing.assert_allclose(jkv.score(own, out, trace=out.trace).logprobs, out.logprobs, atol=1e-5)
    with pytest.raises(ValueError, match="got 'b', and this engine has 'a'"):
        rollout([PROMPT[:9]], adapter="b")
    rollout([PROMPT[:9]], adapter="a", seed=1, return_trace=True)
    before = COMPILING.count
    rollout.update_adapter("a", adapted(model.params, seed=5))
    later = rollout([PROMPT[:9]], adapter="a", seed=1, return_trace=True)
    assert COMPILING.count == before
    changed = dataclasses.replace(model, params=adapted(model.params, seed=5))
    np.testing.assert_allclose(jkv.score(changed, later, trace=later.trace).logprobs, later.logprobs, atol=1e-5)
    versions = {int(x.policy_version[x.mask].max()) for x in (out, later)}
    assert versions == {1, 2} == {rollout.version - 1, rollout.version}
    rollout.submit([PROMPT[:9]], adapter="a")
    with pytest.raises(ValueError, match="no request uses; 2 samples use 'a'"):
        rollout.remove_adapter("a")
    rollout.cancel()
    rollout.remove_adapter("a")
    with pytest.raises(ValueError, match="this engine has none"):
        rollout([PROMPT[:9]], adapter="a")


def query_of(change):
    """Changes one matrix of an adapter."""

    def changed(params):
        layer = params.layers[0]
        return params.replace(layers=(layer.replace(query=change(layer.query)), *params.layers[1:]))

    return changed


HOSTILE = {
    "max_adapters=3; all places are taken": ("d", lambda params: params),
    "printable, of 1 to 256": ("\n", lambda params: params),
    "a new name; got 'a' again": ("a", lambda params: params),
    "name must be a text": (3, lambda params: params),
    "at most rank 3, the engine's adapter_rank; got 4": ("new", lambda params: adapted(UNTIED.params, 4)),
    "shapes .* and .*, got": ("new", query_of(lambda one: one.replace(down=one.down[1:]))),
    "finite numbers": ("new", query_of(lambda one: one.replace(up=one.up.at[0, 0].set(np.nan)))),
    "have a low-rank adapter; got none": ("new", lambda params: UNTIED.params),
    "unembedding; got embedding": ("new", lambda params: params.replace(embedding=params.unembedding)),
    "folder of peft, or jkv.Params": ("new", lambda params: {"query": 1}),
    "adapter_config.json": ("new", lambda params: "no/such/folder"),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_what_is_no_adapter_of_the_engine_is_refused_and_changes_nothing(model, engine, message):
    name, change = HOSTILE[message]
    before, version = jax.tree.map(np.asarray, engine.runner.adapters.stacks), engine.version
    others = [] if "all places" not in message else ["x"]
    for other in others:
        engine.add_adapter(other, weights_of(model, "a"))
    with pytest.raises(ValueError, match=message):
        engine.add_adapter(name, change(adapted(model.params)))
    for other in others:
        engine.remove_adapter(other)
    assert engine.adapters == ("a", "b")
    if not others:
        assert engine.version == version
        jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, engine.runner.adapters.stacks))


def test_an_unknown_adapter_is_refused_by_its_name(model, engine):
    for call in (engine.remove_adapter, lambda name: engine.update_adapter(name, model.params)):
        with pytest.raises(ValueError, match=r"got 'aa', and this engine has 'a', 'b'\. Did you mean a\?"):
            call("aa")
    with pytest.raises(ValueError, match="got 'c', and this engine has 'a', 'b'"):
        engine.submit(PROMPT, adapter="c")
    with pytest.raises(ValueError, match="adapter must be a text or None"):
        engine.submit(PROMPT, adapter=3)
    with pytest.raises(ValueError, match="reads the output projection"):
        engine.submit(PROMPT, adapter="a", policy=jkv.critical_kv(budget=24, window=4))
    assert engine.is_idle


def test_an_engine_without_places_refuses_adapters(model):
    plain = jkv.Engine(model, max_running=1, max_slots=64, page_size=4)
    with pytest.raises(ValueError, match="this engine has none"):
        plain.submit(PROMPT, adapter="a")
    with pytest.raises(ValueError, match="got max_adapters=0"):
        plain.add_adapter("a", weights_of(model, "a"))
    with pytest.raises(ValueError, match="a model without an adapter"):
        jkv.Engine(weights_of(model, "a"), max_adapters=1)
    with pytest.raises(ValueError, match="max_adapters"):
        jkv.Engine(model, max_adapters=-1)
    with pytest.raises(ValueError, match="adapter_rank"):
        jkv.Engine(model, max_adapters=1, adapter_rank=0)


def test_an_adapter_leaves_and_comes_back_while_rows_of_cancelled_samples_are_there(model, engine):
    expected = run(engine, ["b"])
    for at_step in range(3):
        tickets, (other,) = submit(engine, ["a", "a"]), submit(engine, ["b"])
        for _ in range(at_step):
            engine.step()
        for ticket in tickets:
            engine.cancel(ticket)
        version = engine.version
        engine.remove_adapter("a")
        assert engine.version == version + 1
        engine.add_adapter("a", weights_of(model, "a"))
        engine.run()
        assert_same_bits([engine.result(other)], expected)
        for ticket in tickets:
            engine.result(ticket)
    assert run(engine, ["a"])[0].policy_version.max() == engine.version
