"""What scores and parts declare that they need: one record, joined and checked, and refused by name if it is missing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.eviction import Needs
from jkv.eviction.scores import AccumulatedMass, AttentionMass, Recency
from jkv.policies.skip_kv import LessRepeated
from jkv.testing import random_gate, random_statistics, tiny_model

KNOBS = {"max_new_tokens": 40, "stop_ids": (), "page_size": 4, "progress": False}


def oldest(view):
    return -view.position.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Silent:
    """A score that declares nothing."""

    def __call__(self, view):
        return oldest(view)


@dataclasses.dataclass
class Thawed:
    """A score that is not frozen."""

    needs = Needs()

    def __call__(self, view):
        return oldest(view)


@dataclasses.dataclass(frozen=True)
class Wordy(Silent):
    """A score that declares its needs in words."""

    needs = "window"


class Loose:
    """A schedule that is no dataclass."""

    budget, is_bounded = 24, True

    def target(self, prompt, generated):
        return 24

    def steps_until_due(self, generated):
        return 1

    def most_slots(self, prompt, new):
        return 25


@dataclasses.dataclass(frozen=True)
class Half:
    """A schedule without an answer to all questions."""

    budget: int = 24


@dataclasses.dataclass(frozen=True)
class Unfielded(Loose):
    """A schedule whose budget cannot be replaced."""


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.Evict(Silent()), r"declares what it reads; Silent does not.*needs = jkv.Needs\(\)"),
        (lambda: jkv.evict_by(Silent(), budget=24), "declares what it reads; Silent does not"),
        (lambda: jkv.Evict(Wordy()), "declares what it reads; Wordy does not"),
        (lambda: jkv.evict_by(Thawed(), budget=24), "frozen dataclass; Thawed is not.*frozen=True"),
        (lambda: jkv.Evict(oldest), "frozen dataclass; oldest is not.*jkv.evict_by"),
        (lambda: jkv.Evict(Recency), "frozen dataclass; Recency is not"),
        (lambda: jkv.Evict(3), "int cannot be called"),
        (lambda: jkv.evict_by(Recency(), budget=24, needs=Needs()), "Leave needs= out"),
        (lambda: jkv.Policy("mine", jkv.Evict(Recency()), Loose()), "schedule is a frozen dataclass; mine's Loose is not"),
        (
            lambda: jkv.Policy("mine", jkv.Evict(Recency()), Half()),
            "mine's Half lacks is_bounded, target, steps_until_due, most",
        ),
        (lambda: jkv.Policy("mine", jkv.Evict(Recency()), Unfielded()), "mine's Unfielded does not. Write `budget: int`"),
        (lambda: Needs(window=-1), "at least 0; got -1"),
        (lambda: Needs(in_step="mean"), "in_step must be one of"),
    ],
)
def test_what_declares_nothing_is_refused_by_name_with_the_rule(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_the_needs_of_a_policy_are_those_of_its_parts_together():
    vector = jkv.SteeringVector(np.ones((2, 32), np.float32))
    expected = {
        jkv.full(): Needs(),
        jkv.snap_kv(64, window=5): Needs(window=5),
        jkv.r_kv(64): Needs(window=8, compares_keys=True),
        jkv.g_kv(64): Needs(window=16, carried=("importance",), compares_keys=True),
        jkv.ams(64, window=12, around="cur"): Needs(window=12, carried=("credit",)),
        jkv.twin_kv(64, around="g_kv"): Needs(window=16, carried=("importance",), compares_keys=True),
        jkv.h2o(64): Needs(mass=True),
        jkv.h2o(64, interval=8): Needs(mass=True),
        jkv.tova(64): Needs(window=1, mass=True),
        jkv.tova(64, interval=8): Needs(window=1),
        jkv.quest(64): Needs(bounds=True),
        jkv.streaming_llm(64, positions="cache"): Needs(moving_sinks=True),
        jkv.skip_kv(64, steer=vector): Needs(window=8, compares_keys=True, similarity=True, steering=True),
        jkv.expected_attention(64): Needs(window=64, rope=True),
        jkv.critical_kv(64): Needs(window=8, projected=True),
        jkv.tri_attention(64, random_statistics(tiny_model())): Needs(rope=True, calibration=True),
        jkv.learned_gate(random_gate(tiny_model()), 64): Needs(gate=True),
        jkv.learned_gate(random_gate(tiny_model()), threshold=0.0): Needs(gate=True),
        jkv.reason_cache(align_steps=True): Needs(sharing=True, aligning=True),
        jkv.chain(jkv.mem_share(), jkv.snap_kv(64)): Needs(window=8, sharing=True),
    }
    for policy, needs in expected.items():
        assert policy.needs == needs, policy
    assert Needs.of(expected) == Needs(64, True, ("importance",), *[True] * 11)
    assert Needs.of([]) == Needs()


def test_what_holds_of_one_score_does_not_hold_of_two():
    plain = AttentionMass(1, over_group="mean", candidates="all")
    assert (plain.needs.in_step, AccumulatedMass().needs.in_step, Recency().needs.keeps_window) == ("last", "sum", True)
    for score in (plain, AccumulatedMass(), Recency()):
        both = LessRepeated(score).needs
        assert (both.in_step, both.keeps_window, both.similarity) == ("", False, True)
        assert (both.window, both.mass) == (score.needs.window, score.needs.mass)


def test_an_engine_refuses_more_than_it_keeps_and_takes_what_costs_time_alone():
    kept = Needs(window=8)
    kept.check("r_kv", Needs(window=8, compares_keys=True))
    with pytest.raises(ValueError, match=r"mine needs window=9, mass=True; this engine was built with window=8, mass=False"):
        kept.check("mine", Needs(window=9, mass=True))


def test_a_plain_function_says_what_it_reads_and_gets_it(model):
    shapes = []

    def newest_query(view):
        shapes.append(None if view.query is None else view.query.shape[2])
        return oldest(view) if view.query is None else view.query[:, :1, -1, :1] + oldest(view)

    asks = jkv.evict_by(newest_query, budget=16, interval=8, needs=Needs(window=3))
    assert (asks.name, asks.needs) == ("newest_query", Needs(window=3))
    jkv.generate(model, [1, 2, 3], policy=asks, **KNOBS)
    assert set(shapes) == {3}
    shapes.clear()
    jkv.generate(model, [1, 2, 3], policy=jkv.evict_by(newest_query, budget=16, interval=8), **KNOBS)
    assert set(shapes) == {None}
    with pytest.raises(ValueError, match="reads the last 3 queries; the view has none"):
        asks.select(jkv.testing.random_view(np.random.default_rng(0))._replace(query=None))


SEEN = []


@dataclasses.dataclass(frozen=True)
class Looks:
    """A score that notes the budget that it sees: by layer and prompt."""

    needs = Needs()

    def __call__(self, view):
        jax.debug.callback(note, view.layer, view.prompt_length, view.budget)
        return oldest(view)


def note(layer, prompt_length, budget):
    rows = zip(layer, prompt_length, budget, strict=True)  # each batch row is one layer of one sequence
    SEEN.extend((int(of_layer), int(prompt), *map(int, of_row)) for of_layer, prompt, of_row in rows)


def test_a_score_sees_the_true_budget_of_each_layer_and_row(model):
    """Also in a layer that does not have as many slots yet: the first layer keeps three times as many as the last, once a row
    has seen twice the mean."""
    SEEN.clear()
    policies = [
        jkv.Policy("mine", jkv.Evict(Looks(), recent=4), jkv.Every(budget, 8), pyramid=1.5) for budget in (16, 16, 24, 40)
    ]
    prompts = [list(range(1, 1 + length)) for length in (3, 29, 30, 31)]
    jkv.generate(model, prompts, policy=policies, **KNOBS)
    jax.effects_barrier()
    expected = {
        (layer, len(prompt), *[int(budget)] * model.config.num_kv_heads)
        for prompt, policy in zip(prompts, policies, strict=True)
        for seen in (len(prompt), len(prompt) + KNOBS["max_new_tokens"])
        for layer, budget in enumerate(policy.budgets(policy.budget, model.config.num_layers, seen))
    }
    assert set(SEEN) == expected
    assert {budget for _, _, budget, _ in expected} == {10, 16, 22, 14, 24, 34, 40}


def test_select_shows_the_score_the_policys_own_budget_or_the_views():
    view = jkv.testing.random_view(np.random.default_rng(0))
    budgets = []
    policy = jkv.evict_by(lambda view: budgets.append(view.budget) or oldest(view), budget=20)
    policy.select(view)
    policy.select(view._replace(budget=jnp.asarray([[7, 8], [9, 10]], jnp.int32)))
    assert [np.asarray(budget).tolist() for budget in budgets] == [[[20, 20], [20, 20]], [[7, 8], [9, 10]]]


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (lambda view: None, r"must return float32 \[B, K, S\].*got NoneType"),
        (lambda view: view.key.sum(axis=(1, 3)), r"must return float32 \[B, K, S\].*got the shape \(\d+, \d+\)"),
        (
            lambda view: view.query.shape[2] * view.age,
            r"this view has no query, no mass.*needs=\): jkv\.Needs\(window=8\)",
        ),
    ],
    ids=["nothing", "a wrong shape", "queries that it does not declare"],
)
def test_a_function_that_is_no_score_says_so_by_its_name(model, score, words):
    policy = jkv.evict_by(score, budget=16, interval=8)
    with pytest.raises(ValueError, match=f"<lambda>.*{words}"):
        jkv.generate(model, [list(range(1, 30))], policy=policy, max_new_tokens=12, progress=False)
