"""Eviction inside a decode step (H2O, TOVA) against NumPy, which keeps plain lists and knows neither pages nor vacant slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache import pool as pages
from jkv.cache.attention import Cache, DecodeAttention, PrefillAttention
from jkv.cache.in_step_eviction import UNLIMITED, StepRules, choose_victim
from jkv.cache.pool import EMPTY
from jkv.eviction.scores import Recency
from jkv.testing import TINY, tiny_model
from tests.cache.test_pool import assert_allocator_is_consistent, snapshot

L, B, K, H = 2, 4, 2, 8
GROUPS = pytest.mark.parametrize("group", [1, 4, 7, *(pytest.param(group, marks=pytest.mark.slow) for group in (2, 6))])


def new_pool(max_pages=6, page_size=4):
    return pages.create(
        num_layers=L,
        num_rows=B,
        num_kv_heads=K,
        head_size=H,
        num_pages=L * B * K * max_pages,
        max_pages=max_pages,
        page_size=page_size,
        slot_data=("mass",),
        has_vacant_slots=True,
        poison=True,
    )


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


ROWS = [  # budget, sinks, recent, last_only, per layer: H2O, TOVA, TOVA that keeps the newest and two sinks, a full cache
    (9, 0, 4, False, False),
    (7, 0, 0, True, True),
    (8, 2, 1, True, True),
    (UNLIMITED, 0, 0, False, False),
]
RULES = StepRules(*(jnp.asarray(column) for column in zip(*ROWS, strict=True)))
RULES = RULES._replace(budget=jnp.tile(RULES.budget, (L, 1)))


class Lists:
    """What each row, layer and head keeps: position -> (key, mass)."""

    def __init__(self):
        self.kept = {cell: {} for cell in np.ndindex(L, B, K)}

    def step(self, layer, row, position, query, key, goes_on):
        """One token of a row in one layer: `query` [K, G, H], `key` [K, H]."""
        budget, sinks, recent, last_only, is_per_layer = ROWS[row]
        worth = {}
        for head in range(K):
            kept = self.kept[layer, row, head]
            kept[position] = (key[head], 0.0)
            keys = np.array([k for k, _ in kept.values()])
            mass = sum(softmax(keys @ q / np.sqrt(H)) for q in query[head])
            for p, new in zip(kept, mass, strict=True):
                kept[p] = (kept[p][0], new + (0.0 if last_only else kept[p][1]))
        for head in range(K):
            sharers = range(K) if is_per_layer else [head]
            worth[head] = {p: sum(self.kept[layer, row, h][p][1] for h in sharers) for p in self.kept[layer, row, head]}
        for head in range(K):
            open_to = [p for p in worth[head] if p >= sinks and position - p >= recent]
            if goes_on and len(worth[head]) > budget:
                del self.kept[layer, row, head][min(open_to, key=worth[head].get)]


@jax.jit
def decode_step(pool, query, key, value, is_active, goes_on):
    """A step of all rows, as the engine's program has it, on given queries, keys and values."""
    row, num_new = jnp.arange(B, dtype=jnp.int32), is_active.astype(jnp.int32)
    position = pool.logical_length
    pool, address = pages.reserve(pool, row, num_new, 1)
    length = pool.length + pages.num_growing(pool, row, num_new)
    unturned = jnp.ones((B, H // 2)), jnp.zeros((B, H // 2))
    attend = DecodeAttention(address, length, position, *unturned, RULES, None, None, goes_on)
    cache = Cache(pool, None, jnp.full_like(length, EMPTY))
    for layer in range(L):
        _, cache = attend(layer, query[layer], key[layer], value[layer], cache)
    return pages.vacate(pages.advance(cache.pool, row, num_new), cache.victim)


@GROUPS
def test_steps_drop_what_the_rules_say(group):
    rng = np.random.default_rng(group)
    pool, lists, goes_on = new_pool(), Lists(), np.ones(B, bool)
    for _ in range(24):
        query = rng.standard_normal((L, B, 1, K * group, H)) * 2
        key, value = rng.standard_normal((2, L, B, 1, K, H))
        is_active, goes_on = goes_on, goes_on & (rng.random(B) < 0.98)
        before = np.asarray(pool.logical_length)
        arrays = (jnp.asarray(x, jnp.float32) for x in (query, key, value))
        pool, dropped = decode_step(pool, *arrays, jnp.asarray(is_active), jnp.asarray(goes_on))
        for layer, row in np.ndindex(L, B):
            if is_active[row]:
                queries = query[layer, row, 0].reshape(K, group, H)
                lists.step(layer, row, int(before[row]), queries, key[layer, row, 0], goes_on[row])
        for layer in range(L):
            keys, _, position = pages.gather(pool, layer, jnp.arange(B, dtype=jnp.int32))
            mass = np.asarray(pool.slot_data["mass"][layer])
            for row, head in np.ndindex(B, K):
                kept = lists.kept[layer, row, head]
                at = {int(p): slot for slot, p in enumerate(position[row, head]) if p != EMPTY}
                assert set(at) == set(kept)
                assert int(dropped[layer, row, head]) not in kept
                for p, slot in at.items():
                    np.testing.assert_allclose(keys[row, head, slot], kept[p][0], atol=1e-6)
                    if is_active[row]:
                        np.testing.assert_allclose(mass[row, head, slot], kept[p][1], atol=1e-5)
        assert_allocator_is_consistent(snapshot(pool))
        if goes_on[1] and before[1] > 8:
            assert (np.asarray(pool.length)[:, 1] == 7 + 1).all()  # TOVA's budget and the vacant slot


@GROUPS
def test_prefill_adds_up_the_mass_of_all_prompt_queries(group):
    """In two padded chunks; the second reads what the first left."""
    rng = np.random.default_rng(group)
    query, (key, value) = rng.standard_normal((13, K * group, H)), rng.standard_normal((2, 13, K, H))
    pool, row = new_pool(), jnp.asarray([2], jnp.int32)
    for start, count, width in ((0, 8, 8), (8, 5, 8)):

        def padded(x, start=start, count=count, width=width):
            x = np.concatenate([x[start : start + count], np.full((width - count, *x.shape[1:]), 7.0)])
            return jnp.asarray(x[None], jnp.float32)

        num_new = jnp.asarray([count], jnp.int32)
        pool, address = pages.reserve(pool, row, num_new, width)
        position = start + jnp.arange(width, dtype=jnp.int32)[None]
        attend = PrefillAttention(address, row, position, num_new)
        _, cache = attend(1, padded(query), padded(key), padded(value), Cache(pool, None))
        pool = pages.advance(cache.pool, row, num_new)
    mass = np.asarray(pool.slot_data["mass"])
    expected = np.zeros((K, 13))
    for t, n in np.ndindex(13, K * group):
        expected[n // group, : t + 1] += softmax(key[: t + 1, n // group] @ query[t, n] / np.sqrt(H))
    np.testing.assert_allclose(mass[1, 2, :, :13], expected, atol=1e-5)
    assert (mass[1, 2, :, 13:] == 0).all()
    assert (mass[0] == 0).all()


def test_a_budget_that_is_a_multiple_of_the_page_takes_one_page_more_and_no_more(model):
    policy = jkv.h2o(budget=8)
    out = jkv.generate(model, [1, 2, 3], policy=policy, max_new_tokens=60, stop_ids=(), page_size=4, progress=False)
    shape = TINY.num_layers * TINY.num_kv_heads
    page, slots = 4 * (2 * TINY.head_size * 4 + 4), 16
    assert out.stats.peak_kv_bytes == shape * (3 * page + slots * 4 + 4)  # pages, each slot's mass, the vacant slot
    assert out.stats.evicted == out.stats.compactions == 3 + 59 - 8


@pytest.mark.everyday(where=lambda policy: policy.name != "tova")
@pytest.mark.parametrize("policy", [jkv.h2o(budget=12, recent=4), jkv.tova(budget=12), jkv.h2o(budget=12, interval=8)])
def test_samples_of_a_prompt_own_its_pages_and_drop_apart(policy, model):
    """Forks write into vacant slots, so a page left shared would show up in a sibling."""
    knobs = {"max_new_tokens": 40, "stop_ids": (), "page_size": 4, "progress": False}
    prompt, sampling = list(range(1, 30)), jkv.Sampling(seed=5)
    together = jkv.generate(model, prompt, policy=policy, n=4, sampling=sampling, return_trace=True, **knobs)
    assert together.stats.prefills == 1
    assert len({tuple(tokens) for tokens in together.tokens.tolist()}) == 4
    alone = jkv.generate(model, prompt, policy=policy, n=4, sampling=sampling, max_running=1, **knobs)
    np.testing.assert_array_equal(together.tokens, alone.tokens)
    replayed = jkv.score(model, together, trace=together.trace).logprobs
    np.testing.assert_allclose(replayed, together.logprobs, atol=1e-4)


def test_h2o_keeps_the_heavy_and_the_recent():
    rng = np.random.default_rng(0)
    shape = (2, 2, 30)
    mass = rng.random(shape)
    position = np.broadcast_to(np.arange(30, dtype=np.int32), shape)
    key = jnp.zeros((*shape, H))
    view = jkv.CacheView(key, key, jnp.asarray(position), mass=jnp.asarray(mass, jnp.float32))
    slots = np.asarray(jkv.h2o(budget=12, recent=5).select(view))
    for b, k in np.ndindex(2, 2):
        heavy = np.sort(np.argsort(-mass[b, k, :25])[:7])
        np.testing.assert_array_equal(slots[b, k, :12], [*heavy, *range(25, 30)])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.h2o(8, recent=9), "must hold its sinks and recent"),
        (lambda: jkv.h2o(8, interval=0), "at least 1 generated token"),
        (lambda: jkv.Policy("mine", jkv.Evict(Recency()), jkv.EachStep(8)), "cannot evict inside a decode step"),
        (lambda: jkv.h2o(8).select(jkv.CacheView(*[jnp.zeros((1, 1, 4, 8))] * 2, jnp.zeros((1, 1, 4), jnp.int32))), "mass="),
        (lambda: jkv.Engine(tiny_model(), max_slots=64).submit([1, 2], policy=jkv.h2o(8)), "policies="),
    ],
)
def test_what_cannot_be_is_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_of_slots_whose_mass_is_equal_up_to_rounding_the_lowest_goes():
    errors = 1 + np.random.default_rng(0).uniform(-1e-6, 1e-6, (8, 1, 6))
    mass = jnp.asarray(np.float32([0.1, 0.5, 0.25, 0.25, 0.25, 0.1]) * errors, jnp.float32)
    position = jnp.tile(jnp.arange(6, dtype=jnp.int32), (8, 1, 1))
    count = functools.partial(jnp.full, 8)
    no = jnp.zeros(8, bool)
    rules = StepRules(jnp.full((1, 8), 5, jnp.int32), count(1, jnp.int32), count(1, jnp.int32), no, no)
    np.testing.assert_array_equal(choose_victim(rules, 0, mass, position, count(5, jnp.int32), ~no), [[2]] * 8)
