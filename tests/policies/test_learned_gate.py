"""The policy of learned gates: what it keeps of a view, its settings, and the threshold schedule."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.eviction import Needs
from jkv.policies.learned_gate import GateValue
from jkv.testing import random_gate, random_view, tiny_model

GATE = random_gate(tiny_model())


def kept(policy, view):
    """The positions that stay, by row and head."""
    slots, position = np.asarray(jax.jit(policy.select)(view)), np.asarray(view.position)
    return {(b, k): position[b, k, slots[b, k][slots[b, k] >= 0]].tolist() for b, k in np.ndindex(slots.shape[:2])}


def slots_of(view, b, k):
    """Position, age and gate of each filled slot."""
    position, gate = np.asarray(view.position)[b, k], np.asarray(view.gate)[b, k]
    newest = np.asarray(view.position)[b].max()
    return [(int(p), int(newest - p), float(g)) for p, g in zip(position, gate, strict=True) if p >= 0]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_threshold_keeps_exactly_what_is_not_below_it_or_is_young_or_protected(seed):
    view = random_view(np.random.default_rng(seed), slots=60)
    policy = jkv.learned_gate(GATE, threshold=0.3, window=5, sinks=2)
    for (b, k), positions in kept(policy, view).items():
        assert positions == [p for p, age, gate in slots_of(view, b, k) if gate >= 0.3 or age < 5 or p < 2]
    everything = jkv.learned_gate(GATE, threshold=0.3, window=5, sinks=2, protect_prompt=True)
    for (b, k), positions in kept(everything, view).items():
        assert positions == [p for p, age, gate in slots_of(view, b, k) if gate >= 0.3 or age < 5 or p < 3]


def test_a_gate_that_equals_the_threshold_stays():
    view = random_view(np.random.default_rng(0))
    view = view._replace(gate=jnp.where(view.is_filled, jnp.float32(0.1), jnp.nan))
    count = np.asarray(view.is_filled).sum(axis=-1)
    for threshold, expected in ((0.1, count), (math.nextafter(0.1, 1), count), (0.1001, np.minimum(count, 4))):
        slots = np.asarray(jax.jit(jkv.learned_gate(GATE, threshold=threshold, window=4, sinks=0).select)(view))
        np.testing.assert_array_equal((slots >= 0).sum(axis=-1), expected)


@pytest.mark.parametrize("scope", ["head", "compete"])
def test_a_budget_keeps_the_largest_gates(scope):
    view = random_view(np.random.default_rng(2), slots=60)
    policy = jkv.learned_gate(GATE, 20, window=5, sinks=2, scope=scope)
    found = kept(policy, view)
    for b in range(2):
        best = {k: sorted(slots_of(view, b, k), key=lambda x: (x[0] >= 2 and x[1] >= 5, -x[2])) for k in range(2)}
        if scope == "head":
            for k in range(2):
                assert found[b, k] == sorted(p for p, _, _ in best[k][:20])
        else:  # how many each head has is `Evict`'s to say; which ones, the gate's
            assert len(found[b, 0]) + len(found[b, 1]) == min(40, sum(map(len, best.values())))
            for k in range(2):
                assert found[b, k] == sorted(p for p, _, _ in best[k][: len(found[b, k])])


def test_defaults_are_those_of_the_gates_authors():
    model = tiny_model()
    for name, window in {"dms": 512, "linear": 128, "mlp": 128, "fast": 8}.items():
        policy = jkv.learned_gate(random_gate(model, name), threshold=0.0)
        assert policy.schedule == jkv.Threshold(0.0, window, 128)
        assert (policy.evict.sinks, policy.evict.recent, policy.evict.scope) == (4, window, "head")
        assert not policy.is_bounded
        assert policy.budget is None
        assert jkv.learned_gate(random_gate(model, name), 64).evict.recent == min(window, 16)
    assert jkv.learned_gate(GATE, 64).schedule == jkv.Every(64, 128)
    assert jkv.learned_gate(GATE, 64).needs == Needs(gate=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "exactly one of a budget .* got budget=None, threshold=None"),
        ({"budget": 64, "threshold": 0.0}, "exactly one of a budget .* got budget=64, threshold=0.0"),
        ({"budget": 64, "scope": "layer"}, "scope must be one of head, compete; got 'layer'"),
        ({"threshold": 0.0, "scope": "compete"}, "no fixed budget, so layers or heads cannot divide it"),
        ({"threshold": math.nan}, r"threshold must lie in .*got nan"),
        ({"threshold": "0"}, "learned_gate's threshold must be a number or None; got '0'"),
        ({"threshold": 0.0, "window": 0}, "window must be at least 1"),
        ({"threshold": 0.0, "interval": 0}, "interval must be at least 1"),
        ({"budget": 8, "window": 9, "sinks": 0}, "budget must hold its sinks and recent slots, 0 . 9 = 9; got budget=8"),
        ({"budget": 0}, "budget must be a number of slots"),
    ],
)
def test_settings_out_of_their_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        jkv.learned_gate(GATE, **settings)


def other_parts(evict=None, schedule=None, gate=GATE):
    return jkv.Policy("mine", evict or jkv.Evict(GateValue()), schedule or jkv.Threshold(0.0, 4), calibration=gate)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: other_parts(schedule=jkv.EachStep(64)), "mine cannot evict inside a decode step"),
        (
            lambda: other_parts(evict=jkv.Evict(GateValue(), scope="layer")),
            "each KV head's scores with a threshold; got scope 'l",
        ),
        (lambda: other_parts(gate=None), r"needs both a calibration \(or a gate\) and a score that reads it"),
        (lambda: other_parts(gate=jkv.testing.random_statistics(tiny_model())), "and a score that reads it, or neither"),
        (lambda: other_parts(evict=jkv.random(8).evict), "and a score that reads it, or neither"),
        (lambda: jkv.Policy("mine", jkv.random(8).evict, jkv.Threshold(True, 4)), "threshold must be a number.*got True"),
        (lambda: jkv.Threshold(math.nan, 4), "threshold must be a number.*got nan"),
        (lambda: jkv.Gate((np.ones((2, 2)),)), "must be one of DmsGate, KVzapLinearGate.*got"),
    ],
    ids=["in steps", "scope", "no gate", "statistics", "unread", "truth", "nan", "tuple"],
)
def test_parts_that_exclude_each_other_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_a_view_without_gates_is_refused():
    view = random_view(np.random.default_rng(0))._replace(gate=None)
    with pytest.raises(
        ValueError, match=r"reads what its gate computed of each slot; the view has none. Pass CacheView\(gate=\)"
    ):
        jkv.learned_gate(GATE, 16).select(view)


def test_any_score_may_have_a_threshold():
    """The threshold is the schedule's: here the age decides, so that a window without a budget is left."""
    policy = jkv.Policy("young", jkv.Evict(jkv.streaming_llm(64).evict.score, sinks=1), jkv.Threshold(70.0, 3, 8))
    model = tiny_model()
    out = jkv.generate(model, list(range(1, 30)), policy, max_new_tokens=60, stop_ids=(), page_size=4, return_trace=True)
    dropped = out.trace.end[0] < 2**31 - 1
    np.testing.assert_array_equal(np.flatnonzero(dropped.any(axis=(0, 1))), np.arange(1, 70))
    assert (dropped == dropped[:1, :1]).all()


def test_a_schedule_says_when_and_at_least_how_many():
    schedule = jkv.Threshold(-4, 128, 32)
    assert [schedule.target(10, generated) for generated in (0, 1, 31, 32, 64)] == [128, None, None, 128, 128]
    assert [schedule.steps_until_due(generated) for generated in (0, 1, 31, 32)] == [32, 31, 1, 32]
    assert schedule.most_slots(10, 1000) == 1010
