"""Numbers that slots carry from one compaction to the next, whatever happens to their row in between."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.attention import OPEN_END
from jkv.engine.engine import Engine
from jkv.eviction import Needs
from jkv.policies.g_kv import RememberedImportance
from jkv.testing import TINY, TinyTokenizer, random_view, tiny_model

PROMPT, LIMIT, BUDGET, RECENT = list(range(1, 30)), 40, 16, 4


@dataclasses.dataclass(frozen=True)
class Survivals:
    """Keeps the slots that survived most compactions, and of equals the newest."""

    needs = Needs(carried=("halves", "survived"))

    def __call__(self, view):
        """The second number alone decides; the first is another, so that a mix-up shows."""
        survived = view.carried["survived"]
        carried = {"survived": survived + 1, "halves": view.carried["halves"] + 0.5}
        score = jnp.where(survived == 2 * view.carried["halves"], survived, -survived)
        return score - 1e-3 * view.age.astype(jnp.float32), carried


FIXED = jkv.Policy("fixed", jkv.Evict(Survivals(), recent=RECENT), jkv.Every(BUDGET, 8))
# It is not bounded, so its rows may be swapped out.
GROWING = jkv.Policy("growing", jkv.Evict(Survivals(), recent=RECENT, protect_prompt=True), jkv.Growing(8, 2, RECENT))


def expected_end(policy):
    """[T] when the rule drops each token, counted by hand."""
    held, end = dict.fromkeys(range(len(PROMPT)), 0), np.full(len(PROMPT) + LIMIT, OPEN_END)
    for generated in range(LIMIT):
        seen, target = len(PROMPT) + generated, policy.target(len(PROMPT), generated)
        if generated:
            held[seen - 1] = 0
        if target is not None and len(held) > target:
            pinned = len(PROMPT) if policy is GROWING else 0
            kept = sorted(held, key=lambda p: (p < pinned or p >= seen - RECENT, held[p], p))[-target:]
            end[list(held.keys() - kept)] = seen
            held = {p: held[p] + 1 for p in kept}
    return end


def run(policies, max_running, num_pages=1000, n=1):
    """The results of requests with these policies, and the statistics."""
    engine = Engine(
        tiny_model(tokenizer=TinyTokenizer()),
        max_running=max_running,
        max_slots=96,
        page_size=4,
        num_pages=num_pages,
        policies=[FIXED, GROWING, jkv.h2o(BUDGET)],
        chunk=8,
        return_trace=True,
        poison=True,
    )
    sampling = jkv.Sampling(temperature=1.0, seed=3)
    tickets = [engine.submit(PROMPT, policy, sampling, LIMIT, n=n, stop_ids=(), request=i) for i, policy in enumerate(policies)]
    engine.run()
    return [engine.result(ticket) for ticket in tickets], engine.stats


def assert_rule(out, policy):
    """Every sample, layer and KV head dropped the tokens of the rule at its times."""
    end = out.trace.end
    np.testing.assert_array_equal(end, np.broadcast_to(expected_end(policy), end.shape))


def test_a_row_knows_what_survived_and_starts_from_zero_after_another():
    """One row serves all requests, and h2o's vacant slots are among its slots."""
    policies = [FIXED, jkv.h2o(BUDGET), GROWING, FIXED]
    outs, _ = run(policies, max_running=1)
    for out, policy in zip(outs, policies, strict=True):
        if policy.name != "h2o":
            assert_rule(out, policy)


def test_samples_that_fork_from_a_compacted_prompt_know_what_survived():
    (out,), stats = run([FIXED], max_running=3, n=3)
    assert stats.forks == 3
    assert_rule(out, FIXED)


def test_swapped_rows_know_what_survived():
    outs, stats = run([GROWING] * 4, max_running=4, num_pages=80)
    assert stats.preemptions > 0
    for out in outs:
        assert_rule(out, GROWING)


@pytest.mark.rounding
def test_g_kv_gives_the_same_tokens_after_a_swap():
    evict = jkv.Evict(RememberedImportance(RECENT, 0.8, 0.5, 0.5), recent=RECENT, protect_prompt=True)
    policy = jkv.Policy("remembers", evict, jkv.Growing(8, 2, RECENT))
    outs = []
    for num_pages in (80, 1000):
        knobs = {"max_running": 4, "num_pages": num_pages, "policies": [policy], "max_slots": 96, "page_size": 4, "chunk": 8}
        engine = Engine(tiny_model(), **knobs)
        tickets = [engine.submit(PROMPT, policy, max_new_tokens=LIMIT, stop_ids=(), request=i) for i in range(4)]
        engine.run()
        assert (engine.stats.preemptions > 0) == (num_pages < 1000)
        outs.append([engine.result(ticket) for ticket in tickets])
    for swapped, quiet in zip(*outs, strict=True):
        np.testing.assert_array_equal(swapped.logprobs, quiet.logprobs)


def test_the_numbers_are_counted_in_bytes():
    """4 bytes for each number, layer, KV head and slot of a row, in the planner and in the statistics.

    Of policies that share an engine, the one with the most numbers counts.
    """
    policies = [jkv.r_kv(64, window=16), jkv.g_kv(64)]
    plain, carrying = (jkv.plan("r1-qwen-1.5b", device="h100", policy=policy, length=8192).own for policy in policies)
    assert carrying.row_bytes - plain.row_bytes == 4 * 28 * 2 * carrying.max_slots
    sets = [[policies[0]], [policies[1]], [policies[1], FIXED], [FIXED, policies[1]]]
    engines = [Engine(tiny_model(), max_running=3, max_slots=96, num_pages=100, policies=each) for each in sets]
    plain, *carrying = (engine.runner.meter.row_bytes for engine in engines)
    of_one = 4 * 3 * TINY.num_layers * TINY.num_kv_heads * 96
    assert [each - plain for each in carrying] == [of_one, 2 * of_one, 2 * of_one]


ONE = Needs(carried=("last",))


@pytest.mark.parametrize(
    ("score", "needs", "words"),
    [
        (lambda view: view.carried["last"], ONE, r"pair.*Needs\(carried=\('last',\)\) and returns one array"),
        (lambda view: (view.key[..., 0],) * 2, Needs(), r"pair.*declares Needs\(\) and returns a pair"),
        (lambda view: (view.key[..., 0],) * 3, ONE, r"must return a pair.*tuple of 3"),
        (
            lambda view: (view.key[..., 0],) * 2,
            ONE,
            r'numbers to carry by their names, \(score, \{"last": ...\}\).*got \w*Array',
        ),
        (lambda view: (view.key[..., 0], {"first": view.key[..., 0]}), ONE, "got the names first"),
        (lambda view: (view.key[..., 0], {"last": 1.0}), ONE, r'float32 \[B, K, S\] as "last".*got float'),
        (lambda view: (view.key[..., 0], {"last": view.position}), ONE, r'as "last".*got int32'),
        (lambda view: (view.key[..., 0], {"last": view.key[..., :1]}), ONE, r'as "last".*got the shape'),
    ],
    ids=["one of two", "two of one", "three", "unnamed", "another name", "no array", "integers", "another shape"],
)
def test_a_score_that_does_not_keep_to_what_it_declares_is_refused(score, needs, words):
    policy = jkv.evict_by(score, budget=BUDGET, needs=needs)
    with pytest.raises(ValueError, match=words):
        policy.select(random_view(np.random.default_rng(0), carried_names=needs.carried))


@pytest.mark.parametrize("names", [True, "last", ["last"], ("a", "a"), ("not a name",), (1,)], ids=repr)
def test_numbers_to_carry_have_names(names):
    with pytest.raises(jkv.InputError, match=r'each once, such as carried=\("last", "longest"\); got'):
        Needs(carried=names)


def test_a_view_without_the_numbers_is_refused():
    view = random_view(np.random.default_rng(0), carried_names=("halves",))
    with pytest.raises(ValueError, match=r"the view has none. Pass CacheView\(carried=\)"):
        FIXED.select(view._replace(carried=None))
    with pytest.raises(ValueError, match="the view's carried= has no survived"):
        FIXED.select(view)


def test_an_engine_that_keeps_fewer_numbers_refuses_the_policy():
    engine = Engine(tiny_model(), max_running=1, max_slots=96, num_pages=100, policies=[jkv.g_kv(64)])
    with pytest.raises(
        ValueError, match=r"needs carried=\('halves', 'survived'\); this engine was built with carried=\('importance',\)"
    ):
        engine.submit(PROMPT, FIXED, max_new_tokens=4)
