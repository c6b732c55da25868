"""What is never evicted, on every policy that evicts: the first tokens, the last ones, and the prompt."""

import inspect

import numpy as np
import pytest

import jkv
from jkv.policies import POLICIES
from jkv.testing import TinyTokenizer, tiny_model
from tests.support.policies import build as build_small

KNOBS = {"stop_ids": (), "page_size": 4, "progress": False, "max_new_tokens": 60, "return_trace": True}
PROMPT = list(range(1, 12))
EVICTING = [name for name, build in POLICIES.items() if "protect_prompt" in inspect.signature(build).parameters]


@pytest.fixture(scope="module")
def model():
    return tiny_model(tokenizer=TinyTokenizer())


def build(name, **settings):
    """A policy with compactions in short texts."""
    own = {"interval": 1 if name in ("h2o", "tova") else 8, "protect_prompt": False, "ends": (1, 5, 9), "beta": 1.2}
    return build_small(name, tiny_model(), **own | settings)


def held_to_the_end(out, row):
    """[L, K, T] which tokens of a sample its last token could read."""
    total = len(PROMPT) + KNOBS["max_new_tokens"]
    is_read = out.trace.end[row] >= total - 1  # the last token's own compaction changes nothing that is read
    held = np.zeros((*is_read.shape[:2], total), bool)
    for layer, head, column in np.argwhere(is_read & (out.trace.source[row] < total)):
        held[layer, head, out.trace.source[row][layer, head, column]] = True
    return held


@pytest.fixture(scope="module")
def runs(model):
    """Every policy, as it is and with protection, in one batch."""
    protected = [build(name, sinks=3, protect_prompt=True) for name in EVICTING]
    with_sinks = [build(name, sinks=3) for name in EVICTING]
    policies = [*map(build, EVICTING), *with_sinks, *protected]
    return jkv.generate(model, [PROMPT] * len(policies), policy=policies, **KNOBS)


def test_every_policy_with_a_budget_takes_protection():
    assert set(EVICTING) == {name for name in POLICIES if "budget" in inspect.signature(POLICIES[name]).parameters} - {
        "quest",
        "random_attention",  # always
    }


@pytest.mark.parametrize("name", EVICTING)
def test_sinks_and_the_prompt_stay(runs, name):
    i, count = EVICTING.index(name), len(EVICTING)
    plain, sinks, prompt = (held_to_the_end(runs, i + k * count) for k in range(3))
    with_sinks = ("streaming_llm", "cur", "vase", "key_diff", "lag_kv", "expected_attention", "foresight", "learned_gate")
    own = 4 if name in with_sinks else 0
    assert sinks[..., :3].all()
    assert not plain[..., own : len(PROMPT)].all()  # without it, something of the prompt goes
    assert not sinks[..., max(3, own) : len(PROMPT)].all()
    assert prompt[..., : len(PROMPT)].all()
    assert not prompt.all(axis=(0, 1)).all()  # and something else goes


def test_protected_runs_are_replayed(model, runs):
    difference = np.abs(np.asarray(jkv.score(model, runs, trace=runs.trace).logprobs) - runs.logprobs)
    assert np.percentile(difference, 99) <= 1e-5


@pytest.mark.parametrize(
    "name", [name for name in EVICTING if {"window", "recent"} <= {*inspect.signature(POLICIES[name]).parameters}]
)
def test_more_than_the_window_may_stay_and_not_less(model, name):
    assert build(name, recent=9).evict.recent == 9
    with pytest.raises(ValueError, match="recent must be at least the window, 4 tokens, which get no score; got 3"):
        build(name, recent=3)


@pytest.mark.parametrize("name", EVICTING)
def test_a_prompt_that_the_budget_cannot_hold_is_refused_with_the_arithmetic(model, name):
    with pytest.raises(ValueError, match=r"never drops the prompt.*prompt 0 has 40 tokens, the budget is 24 slots"):
        jkv.generate(model, [7] * 40, policy=build(name, protect_prompt=True), max_new_tokens=4, progress=False)


def test_a_pyramid_must_hold_the_prompt_in_its_last_layer(model):
    policy = jkv.pyramid_kv(budget=24, window=4, protect_prompt=True, beta=2)
    with pytest.raises(ValueError, match="24 slots on average, and 14 in the last layer"):
        jkv.generate(model, list(range(12)), policy=policy, max_new_tokens=4, progress=False)
