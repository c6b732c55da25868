"""SnapKV, PyramidKV, Ada-KV and RPC against independent NumPy implementations, written from the rules with plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.eviction.policy import compacted
from jkv.eviction.schedules import AfterPrompt, Every, Growing
from jkv.eviction.scores import Recency
from jkv.testing import random_view

GROUPS = pytest.mark.parametrize("group", [1, *(pytest.param(group, marks=pytest.mark.slow) for group in (2, 4, 6)), 7])
BUDGET, WINDOW, POOL = 20, 4, 5


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def heads_of(view, group):
    """Each row and KV head: its key, position and query group, empty slots cut off."""
    key, query, position = (np.asarray(x, np.float64) for x in (view.key, view.query, view.position))
    for b, k in np.ndindex(position.shape[:2]):
        size = int((position[b, k] >= 0).sum())
        yield b, k, key[b, k, :size], position[b, k, :size], query[b, group * k : group * k + group, -WINDOW:]


def largest_logit_mass(key, query):
    """The decode rule: the group's largest logit, one softmax over the slots before the window, max over neighbours."""
    past = len(key) - WINDOW
    logits = np.einsum("gwh,sh->gws", query, key[:past]) / np.sqrt(key.shape[-1])
    mass = np.mean([softmax(row) for row in logits.max(axis=0)], axis=0)
    return np.array([mass[max(0, s - POOL // 2) : s + POOL // 2 + 1].max() for s in range(past)])


def causal_mass(key, query):
    """The prefill rule: each query head's softmax over all that each query saw, mean over them and over neighbours."""
    size, past = len(key), len(key) - WINDOW
    mass = np.zeros(past)
    for head in query:
        for w, q in enumerate(head):
            seen = past + w + 1
            mass += softmax(key[:seen] @ q / np.sqrt(key.shape[-1]))[:past] / (len(query) * WINDOW)
    padded = np.concatenate([np.zeros(POOL // 2), mass, np.zeros(POOL // 2)])
    assert len(mass) == size - WINDOW
    return np.array([padded[s : s + POOL].mean() for s in range(past)])


def thought_mass(key, query, prompt):
    """RPC's: the softmax over the slots between prompt and window alone, neighbours averaged with zeros beyond the ends."""
    span = key[prompt : len(key) - WINDOW]
    mass = np.mean([softmax(span @ q / np.sqrt(key.shape[-1])) for head in query for q in head], axis=0)
    padded = np.concatenate([np.zeros(POOL // 2), mass, np.zeros(POOL // 2)])
    return np.array([padded[s : s + POOL].mean() for s in range(len(span))])


def kept(slots):
    slots = np.asarray(slots)
    return slots[slots >= 0]


@GROUPS
@pytest.mark.parametrize(("when", "rule"), [("decode", largest_logit_mass), ("prefill", causal_mass)])
def test_snap_kv_keeps_the_best_by_its_rule_and_the_window(when, rule, group):
    view = random_view(np.random.default_rng(group), slots=60, group=group)
    slots = jax.jit(jkv.snap_kv(BUDGET, when=when, window=WINDOW, pool=POOL).select)(view)
    for b, k, key, _, query in heads_of(view, group):
        past = len(key) - WINDOW
        best = np.argsort(-rule(key, query), kind="stable")[: BUDGET - WINDOW]
        np.testing.assert_array_equal(kept(slots[b, k]), np.concatenate([np.sort(best), np.arange(past, len(key))]))


@GROUPS
@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_ada_kv_gives_each_head_a_blend_of_what_it_wins_and_of_its_budget(group, floor):
    """Its authors' arithmetic, head by head; theirs rounds each head, so a head may differ by one slot, and the sum may not."""
    view = random_view(np.random.default_rng(group + 10), slots=200, group=group, heads=3)
    slots = jax.jit(jkv.ada_kv(BUDGET, window=WINDOW, pool=POOL, floor=floor).select)(view)
    base, scores, sizes = BUDGET - WINDOW, {}, set()
    for b, k, key, _, query in heads_of(view, group):
        scores[b, k] = largest_logit_mass(key, query)
    for b in range(len(view.key)):
        of_heads = [scores[b, k] for k in range(3)]
        winners = np.argsort(-np.concatenate(of_heads), kind="stable")[: 3 * base]
        won = np.bincount(winners // len(of_heads[0]), minlength=3)
        wanted = np.round((1 - floor) * won + int(floor * base))
        got = [kept(slots[b, k]) for k in range(3)]
        assert sum(map(len, got)) == 3 * BUDGET
        for k in range(3):
            assert abs(len(got[k]) - WINDOW - wanted[k]) <= 1
            best = np.sort(np.argsort(-of_heads[k], kind="stable")[: len(got[k]) - WINDOW])
            np.testing.assert_array_equal(got[k], [*best, *range(len(of_heads[k]), len(of_heads[k]) + WINDOW)])
        sizes.add(tuple(map(len, got)))
    assert (floor == 1.0) == (sizes == {(BUDGET,) * 3})


@GROUPS
def test_ada_kv_may_rank_the_heads_of_a_layer_together_after_a_floor(group):
    view = random_view(np.random.default_rng(group + 10), slots=200, group=group, heads=3)
    slots = jax.jit(jkv.ada_kv(BUDGET, window=WINDOW, pool=POOL, floor=0.4, safeguard="floor").select)(view)
    by_row = {}
    for b, k, key, _, query in heads_of(view, group):
        score = np.concatenate([largest_logit_mass(key, query), np.full(WINDOW, np.inf)])
        best = np.argsort(-score, kind="stable")
        by_row.setdefault(b, []).extend((-np.inf if i < 8 else -score[s], k, i, s) for i, s in enumerate(best))
    sizes = set()
    for b, entries in by_row.items():
        chosen = sorted(entries)[: 3 * BUDGET]
        for k in range(3):
            mine = sorted(s for _, head, _, s in chosen if head == k)
            sizes.add((b, len(mine)))
            assert kept(slots[b, k]).tolist() == mine
    assert len(sizes) > len(by_row), "the heads of every row kept equally many: the test shows nothing"


@GROUPS
@pytest.mark.parametrize("scope", ["layer", "head"])
def test_rpc_keeps_prompt_window_and_the_best_of_the_thought(scope, group):
    rng = np.random.default_rng(group + 20)
    size, prompt = 50, 7
    key = rng.standard_normal((1, 2, size, 8))
    query = rng.standard_normal((1, 2 * group, WINDOW, 8))
    view = jkv.CacheView(
        jnp.asarray(key, jnp.float32),
        jnp.asarray(key, jnp.float32),
        jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (1, 2, size)),
        jnp.asarray(query, jnp.float32),
        budget=jnp.full((1, 2), BUDGET + prompt),
        prompt_length=jnp.asarray([prompt]),
    )
    slots = jax.jit(jkv.rpc(interval=32, window=WINDOW, pool=POOL, scope=scope).select)(view)
    scores = np.array([thought_mass(key[0, k], query[0, group * k : group * k + group], prompt) for k in range(2)])
    if scope == "layer":
        scores[:] = scores.mean(axis=0)
    for k in range(2):
        best = prompt + np.sort(np.argsort(-scores[k], kind="stable")[: BUDGET - WINDOW])
        np.testing.assert_array_equal(kept(slots[0, k]), [*range(prompt), *best, *range(size - WINDOW, size)])


@GROUPS
@pytest.mark.parametrize("keep_newest", [False, True])
def test_tova_keeps_what_the_newest_query_attends_to_most_over_all_heads(keep_newest, group):
    rng = np.random.default_rng(group + 30)
    size = 40
    key = rng.standard_normal((1, 2, size, 8))
    key[0, :, -1] = -np.sign(rng.standard_normal(8)) * 3  # the newest token hardly attends to itself
    query = rng.standard_normal((1, 2 * group, WINDOW, 8))
    query[0, :, -1] = -key[0, 0, -1] * 0.1
    view = jkv.CacheView(
        jnp.asarray(key, jnp.float32),
        jnp.asarray(key, jnp.float32),
        jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (1, 2, size)),
        jnp.asarray(query, jnp.float32),
    )
    mass = np.mean([softmax(key[0, n // group] @ query[0, n, -1] / np.sqrt(8)) for n in range(2 * group)], axis=0)
    mass[-1] = np.inf if keep_newest else mass[-1]
    expected = np.sort(np.argsort(-mass, kind="stable")[:BUDGET])
    assert (size - 1 in expected) == keep_newest
    slots = jax.jit(jkv.tova(BUDGET, recent=int(keep_newest)).select)(view)
    np.testing.assert_array_equal(np.asarray(slots)[0, :, :BUDGET], [expected, expected])


def test_tova_decides_after_every_token(model):
    """Every step past the budget drops one, also in a chunk of many: as many compactions as tokens beyond it."""
    out = jkv.generate(model, [1, 2, 3], policy=jkv.tova(8), max_new_tokens=20, stop_ids=(), page_size=4, progress=False)
    assert out.stats.compactions == out.stats.evicted == 3 + 19 - 8


def test_rpc_released_counts_the_newest_query_twice_and_the_oldest_not_at_all():
    view = random_view(np.random.default_rng(3), slots=60, budget=30)
    doubled = jnp.concatenate([view.query[:, :, -WINDOW + 1 :], view.query[:, :, -1:]], axis=2)
    policy, released = (jkv.rpc(interval=32, window=WINDOW, scope="head", released=flag) for flag in (False, True))
    np.testing.assert_array_equal(jax.jit(released.select)(view), jax.jit(policy.select)(view._replace(query=doubled)))
    assert (np.asarray(jax.jit(released.select)(view)) != np.asarray(jax.jit(policy.select)(view))).any()


def test_rpc_triggers_and_grows_as_the_paper_says():
    """P = 4096, R = 32, c = 4: first at t = 4128; 32,768 tokens end at the prompt and 11,264 slots."""
    schedule = Growing(interval=4096, ratio=4, window=32)
    due = [t for t in range(13_000) if schedule.target(100, t) is not None]
    assert due == [4128, 8224, 12320]
    assert [schedule.target(100, t) - 100 for t in due] == [1056, 2080, 3104]
    assert schedule.most_slots(100, 32_768) == 100 + 11_264
    assert Growing(interval=1024, ratio=4, window=32).most_slots(100, 32_768) == 100 + 8_960
    for generated in range(10_000):
        assert generated + schedule.steps_until_due(generated) == next(t for t in due if t > generated)


@pytest.mark.parametrize(
    "schedule", [Every(20, 8), AfterPrompt(20), Growing(16, 4, 4), Growing(8, 8, 2)], ids=lambda s: type(s).__name__
)
def test_a_row_never_fills_more_than_its_schedule_says(schedule):
    for prompt, new in np.ndindex(50, 90):
        filled = most = min(prompt, schedule.target(prompt, 0) or prompt)
        for generated in range(1, new + 1):
            filled += 1
            most = max(most, filled)
            filled = min(filled, schedule.target(prompt, generated) or filled)
        assert most <= schedule.most_slots(prompt, new)
        if new > 60 and not isinstance(schedule, AfterPrompt):
            assert most == schedule.most_slots(prompt, new)


@pytest.mark.parametrize("budget", [9, 64, 1000])
@pytest.mark.parametrize("layers", [1, 2, 3, 28])
def test_a_pyramid_of_budgets_adds_up_and_falls_in_even_steps(layers, budget):
    policy = jkv.pyramid_kv(budget=budget)
    budgets = policy.budgets(budget, layers)
    assert budgets.sum() == layers * budget
    assert budgets.min() >= 8
    assert (np.diff(budgets) <= 1).all()  # rounding apart
    if layers > 1 and budget == 1000:
        np.testing.assert_allclose(budgets, 8 + 992 * np.linspace(1.95, 0.05, layers), atol=1)


def pyramid_of_its_authors(budget, window, beta, num_layers, seen):
    """Slots of each layer, window included, as PyramidKV's code gives them; whole-numbered steps between layers."""
    mean = budget - window
    least = mean // beta
    most = 2 * mean - least
    if most >= seen - window:
        most = seen - window
        least = 2 * mean - most
    if seen < 2 * mean:
        return np.full(num_layers, min(seen, budget))
    step = (most - least) // (num_layers - 1)
    return window + most - step * np.arange(num_layers)


@pytest.mark.parametrize("budget", [40, 108, 356])
@pytest.mark.parametrize("layers", [4, 28])
def test_a_pyramid_grows_with_the_sequence_as_its_authors_does(budget, layers):
    policy = jkv.pyramid_kv(budget=budget)
    for seen in range(budget, 4 * budget):
        wanted = pyramid_of_its_authors(budget, 8, 20, layers, seen)
        got = policy.budgets(budget, layers, seen)
        assert got.sum() == layers * budget
        np.testing.assert_allclose(got, wanted, atol=layers + 1)  # their steps are rounded down
    assert policy.budgets(budget, layers, 10**9).tolist() == policy.budgets(budget, layers).tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [20, 108])
def test_a_pyramids_reservation_holds_its_pages_at_every_length(budget, page_size):
    policy, layers = jkv.pyramid_kv(budget=budget, interval=16), 6
    for prompt in (1, 30, 200, 250):
        for new in (10, 150, 500):
            most = policy.most_pages(prompt, new, layers, 2, page_size)
            filled = compacted(policy, np.full(layers, prompt), prompt, 0)
            for generated in range(1, new):
                filled = filled + 1
                assert policy.num_pages(filled, 2, page_size) <= most
                assert filled.max() <= policy.widest(prompt, new, layers, 2)
                assert (filled <= policy.most_slots(prompt, new, layers)).all()
                filled = compacted(policy, filled, prompt, generated)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.snap_kv(64, when="always"), "when must be one of"),
        (lambda: jkv.snap_kv(8, window=9), "must hold its sinks and recent"),
        (lambda: jkv.snap_kv(64, pool=2), "odd number"),
        (lambda: jkv.pyramid_kv(64, beta=0.5), "beta must be at least 1"),
        (lambda: jkv.ada_kv(64, floor=1.5), "floor must lie in"),
        (lambda: jkv.ada_kv(64, safeguard="none"), "safeguard must be one of"),
        (lambda: jkv.rpc(scope="query"), "scope must be one of"),
        (lambda: jkv.rpc(interval=8, ratio=9), "ratio must lie in"),
        (lambda: jkv.rpc(window=0), "at least 1"),
        (lambda: jkv.Policy("mine", jkv.Evict(Recency()), Growing(16, 4, 4)), "protect_prompt=True"),
        (
            lambda: jkv.Policy("mine", jkv.Evict(Recency(), scope="compete", protect_prompt=True), Growing(16, 4, 4)),
            "no fixed budget",
        ),
        (lambda: jkv.Policy("mine", jkv.Evict(Recency())), "needs both evict"),
        (lambda: jkv.Policy("mine", jkv.Evict(Recency()), Every(64), pyramid=1.9), "next to nothing"),
    ],
)
def test_settings_out_of_range_are_refused_when_the_policy_is_built(build, words):
    with pytest.raises(ValueError, match=words):
        build()
