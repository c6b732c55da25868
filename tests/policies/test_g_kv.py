"""G-KV through several compactions of a pool, against plain NumPy loops that remember for themselves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache import attention
from jkv.cache import pool as pages
from jkv.engine import programs
from jkv.engine.state import empty_state
from jkv.eviction.evict import Limits
from jkv.testing import TINY, random_view

WINDOW, BUDGET, ROWS = 4, 20, 2
LAYERS, HEADS, GROUP, SIZE = TINY.num_layers, TINY.num_kv_heads, TINY.num_query_heads // TINY.num_kv_heads, TINY.head_size


@dataclasses.dataclass
class Token:
    """What one KV head holds of a token."""

    position: int
    key: np.ndarray
    remembered: float = 0.0


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def importance_of(tokens, query, decay):
    """The importance of all tokens before the window; query [G, W, H] oldest first, the newest token's last."""
    past, newest = len(tokens) - WINDOW, tokens[-1].position
    total = np.zeros(past)
    for w in range(WINDOW):
        seen = [token for token in tokens if token.position <= newest - (WINDOW - 1 - w)]
        shares = [softmax(np.array([token.key @ q / np.sqrt(SIZE) for token in seen])) for q in query[:, w]]
        total += np.max(shares, axis=0)[:past]
    mean = total / WINDOW
    return np.maximum(mean / mean.max(), [decay * token.remembered for token in tokens[:past]])


def redundancy_of(tokens, similarity):
    """The redundancy of all tokens before the window."""
    unit = [token.key / np.linalg.norm(token.key) for token in tokens]
    cosine = np.array([[0.0 if i == j else a @ b for j, b in enumerate(unit)] for i, a in enumerate(unit)])
    for row in cosine:
        alike = np.flatnonzero(row > similarity)
        if len(alike):
            row[alike[-1]] = 0.0
    redundancy = softmax(cosine.mean(axis=0))[: len(tokens) - WINDOW]
    return redundancy / redundancy.max()


def compacted(tokens, query, *, decay=0.8, importance=0.5, similarity=0.5, budget=BUDGET, sinks=0):
    """The tokens that stay, in order, with what each remembers."""
    past = len(tokens) - WINDOW
    remembered = importance_of(tokens, query, decay)
    score = importance * remembered - (1 - importance) * redundancy_of(tokens, similarity)
    score[[token.position < sinks for token in tokens[:past]]] = np.inf
    kept = sorted(np.argsort(-score, kind="stable")[: budget - WINDOW])
    return [Token(tokens[s].position, tokens[s].key, remembered[s]) for s in kept] + tokens[past:]


class Cache:
    """A pool of random tokens, and the same tokens by layer, row and KV head."""

    def __init__(self, policy, rng):
        self.policy, self.rng, self.length = policy, rng, [0] * ROWS
        self.state = empty_state(TINY, policy.needs, num_rows=ROWS, num_pages=80, max_pages=16, page_size=4, poison=True)
        self.tokens = {at: [] for at in np.ndindex(LAYERS, ROWS, HEADS)}
        self.query = {}

    def append(self, row, count):
        """Appends random tokens to a row, and draws its last queries."""
        pool, ring = self.state.cache.pool, np.array(self.state.cache.query_ring)
        rows, counts = jnp.asarray([row], jnp.int32), jnp.asarray([count], jnp.int32)
        pool, address = pages.reserve(pool, rows, counts, count)
        for layer in range(LAYERS):
            key, value = self.rng.standard_normal((2, 1, count, HEADS, SIZE)).astype(np.float32)
            pool = pages.append(pool, address[layer], jnp.asarray(key), jnp.asarray(value))
            for head in range(HEADS):
                keys = np.asarray(key[0, :, head], np.float64)
                self.tokens[layer, row, head] += [Token(self.length[row] + t, k) for t, k in enumerate(keys)]
        self.length[row] += count
        for w in range(WINDOW):
            ring[:, row, (self.length[row] - WINDOW + w) % WINDOW] = self.rng.standard_normal((LAYERS, HEADS * GROUP, SIZE))
        for layer in range(LAYERS):
            oldest_first = np.stack([ring[layer, row, (self.length[row] - WINDOW + w) % WINDOW] for w in range(WINDOW)], axis=1)
            for head in range(HEADS):
                self.query[layer, row, head] = oldest_first[GROUP * head : GROUP * (head + 1)].astype(np.float64)
        self.state = self.state._replace(cache=attention.Cache(pages.advance(pool, rows, counts), jnp.asarray(ring)))

    def compact(self, row, **settings):
        """Compacts a row, here and there."""
        evict = self.policy.evict
        limits = jnp.asarray([[evict.sinks], [evict.recent]], jnp.int32)
        budget, prompt = jnp.full((LAYERS, 1, HEADS), BUDGET, jnp.int32), jnp.zeros(1, jnp.int32)
        rows = jnp.asarray([row], jnp.int32)
        self.state, *_ = programs.compact(self.state, rows, budget, prompt, limits, evict.static, False)
        for layer, head in np.ndindex(LAYERS, HEADS):
            at = layer, row, head
            self.tokens[at] = compacted(self.tokens[at], self.query[at], sinks=evict.sinks, **settings)

    def check(self):
        """Both hold the same tokens, which remember the same."""
        pool = self.state.cache.pool
        position = np.stack([pages.positions(pool, layer, jnp.arange(ROWS)) for layer in range(LAYERS)])
        carried = np.asarray(pool.slot_data["carried 0"])
        for at, tokens in self.tokens.items():
            assert position[at][position[at] >= 0].tolist() == [token.position for token in tokens]
            np.testing.assert_allclose(carried[at][: len(tokens)], [token.remembered for token in tokens], rtol=1e-4, atol=1e-6)
            assert (carried[at][len(tokens) :] == 0).all()


SETTINGS = [{}, {"decay": 1.0}, {"decay": 0.0}, {"importance": 0.9}, {"similarity": 0.2}, {"sinks": 3}]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "default")
def test_four_compactions_keep_and_remember_what_the_rule_says(settings):
    """Of two rows of other lengths, one of which is compacted less often."""
    cache = Cache(jkv.g_kv(BUDGET, window=WINDOW, **settings), np.random.default_rng(0))
    rule = {name: value for name, value in settings.items() if name != "sinks"}
    for turn, count in enumerate((37, 16, 9, 16)):
        for row in range(ROWS if turn % 2 == 0 else 1):
            cache.append(row, count + 3 * row)
            cache.compact(row, **rule)
            cache.check()


def test_what_is_kept_depends_on_compactions_long_ago():
    """The same tokens and queries with another decay: equal at first, and then not."""
    caches = [Cache(jkv.g_kv(BUDGET, window=WINDOW, decay=decay), np.random.default_rng(0)) for decay in (0.8, 0.0)]
    positions = []
    for _ in range(3):
        for cache, decay in zip(caches, (0.8, 0.0), strict=True):
            cache.append(0, 24)
            cache.compact(0, decay=decay)
        positions.append([[[token.position for token in tokens] for tokens in cache.tokens.values()] for cache in caches])
    assert positions[0][0] == positions[0][1]
    assert positions[1][0] != positions[1][1]
    assert positions[2][0] != positions[2][1]


@pytest.mark.parametrize("group", [1, 2, 7])
def test_a_view_with_any_group_is_scored_by_the_rule(group):
    policy = jkv.g_kv(BUDGET, window=WINDOW)
    view = random_view(np.random.default_rng(group), slots=60, group=group, carried_names=policy.needs.carried)
    slots = np.asarray(jax.jit(policy.select)(view))
    limits = Limits(jnp.zeros(2, jnp.int32), jnp.full(2, WINDOW, jnp.int32))
    key, query, position, carried = (
        np.asarray(x, np.float64) for x in (view.key, view.query, view.position, view.carried["importance"])
    )
    written = np.asarray(policy.evict.rate_and_carry(view, limits)[1]["importance"])
    for b, k in np.ndindex(slots.shape[:2]):
        size = int((position[b, k] >= 0).sum())
        tokens = [Token(int(position[b, k, s]), key[b, k, s], carried[b, k, s]) for s in range(size)]
        expected = compacted(tokens, query[b, group * k : group * (k + 1), -WINDOW:])
        kept = slots[b, k][slots[b, k] >= 0]
        assert position[b, k, kept].tolist() == [token.position for token in expected]
        np.testing.assert_allclose(written[b, k, kept[:-WINDOW]], [token.remembered for token in expected[:-WINDOW]], rtol=1e-4)
        assert (written[b, k, kept[-WINDOW:]] == 0).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decay": 1.5}, "decay must lie in"),
        ({"importance": -0.1}, "importance must lie in"),
        ({"similarity": 2.0}, "similarity must lie in"),
        ({"window": 0}, "window must be at least 1"),
        ({"recent": 3}, "recent must be at least the window, 16 tokens"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        jkv.g_kv(**{"budget": 64} | settings)
