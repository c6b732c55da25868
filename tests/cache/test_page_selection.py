"""Quest against NumPy: bounds of every page's keys, the pages of the largest bounds, and columns that replay the choice."""

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache import pool as pages
from jkv.cache.in_step_eviction import UNLIMITED
from jkv.cache.page_selection import bound, choose_pages

GROUPS = pytest.mark.parametrize("group", [1, 4, 7, *(pytest.param(group, marks=pytest.mark.slow) for group in (2, 6))])
KNOBS = {"max_new_tokens": 50, "stop_ids": (), "page_size": 4, "progress": False}


def test_of_pages_that_are_equal_up_to_rounding_the_earlier_are_read():
    errors = 1 + np.random.default_rng(0).uniform(-1e-6, 1e-6, (8, 6))
    worth = jnp.asarray(np.float32([-3.0, -3.0, 5.0, -3.0, -3.0, 0.0]) * errors, jnp.float32)
    table = jnp.tile(jnp.arange(1, 7, dtype=jnp.int32), (8, 1))
    choice = choose_pages(worth, table, jnp.full(8, 24, jnp.int32), 4, jnp.full(8, 4, jnp.int32))
    np.testing.assert_array_equal(choice.entry[:, :4], [[0, 1, 2, 5]] * 8)


@GROUPS
@pytest.mark.parametrize("over_group", ["max", "mean"])
def test_pages_of_the_largest_bounds_are_read_and_the_current_one_always(over_group, group):
    """Bounds by the definition, channel by channel: no logit of any key in the page exceeds them."""
    rng = np.random.default_rng(group)
    rows, max_pages, page, size = 5, 8, 4, 6
    query, key = rng.standard_normal((rows, group, size)), rng.standard_normal((rows, max_pages, page, size))
    bounds = np.stack([key.min(axis=2), key.max(axis=2)], axis=2)
    worth = np.zeros((rows, max_pages))
    for r, p in np.ndindex(rows, max_pages):
        of_heads = [sum(max(q * low, q * high) for q, low, high in zip(head, *bounds[r, p], strict=True)) for head in query[r]]
        assert (np.array(of_heads)[:, None] >= query[r] @ key[r, p].T - 1e-9).all()
        worth[r, p] = np.max(of_heads) if over_group == "max" else np.mean(of_heads)
    arrays = (jnp.asarray(x, jnp.float32) for x in (query, bounds))
    got = bound(*arrays, jnp.full(rows, over_group == "mean"))
    np.testing.assert_allclose(got, worth, atol=1e-5)

    length, num_pages = np.array([32, 29, 13, 4, 1]), np.array([3, 4, 2, 3, 1])
    table = np.arange(1, rows * max_pages + 1, dtype=np.int32).reshape(rows, max_pages)
    choice = choose_pages(got, jnp.asarray(table), *map(jnp.asarray, (length,)), page, jnp.asarray(num_pages))
    for r in range(rows):
        current = (length[r] - 1) // page
        others = np.argsort(-worth[r, :current], kind="stable")[: num_pages[r] - 1]
        expected = [*np.sort(others), current]
        assert np.flatnonzero(choice.is_read[r]).tolist() == expected
        assert choice.page_table[r, : len(expected)].tolist() == table[r, expected].tolist()
        assert choice.entry[r, : len(expected)].tolist() == expected
        assert int(choice.length[r]) == (len(expected) - 1) * page + length[r] - current * page
    everything = choose_pages(got, jnp.asarray(table), jnp.asarray(length), page, jnp.full(rows, UNLIMITED))
    np.testing.assert_array_equal(everything.length, length)
    np.testing.assert_array_equal(everything.page_table, table)


def test_bounds_follow_what_is_appended_and_start_anew_with_a_page():
    """Chunks that end inside pages, a page used by another row before, a fork's copy of the last page."""
    shape = {"num_layers": 1, "num_rows": 3, "num_kv_heads": 2, "head_size": 3, "num_pages": 24, "max_pages": 4}
    pool = pages.create(**shape, page_size=4, has_bounds=True, poison=True)
    rng = np.random.default_rng(0)

    def append(pool, row, count):
        key = jnp.asarray(rng.standard_normal((1, 5, 2, 3)) * 10, jnp.float32)
        row, num_new = jnp.asarray([row], jnp.int32), jnp.asarray([count], jnp.int32)
        pool, address = pages.reserve(pool, row, num_new, 5)
        return pages.advance(pages.append(pool, address[0], key, key), row, num_new)

    def assert_bounds(pool, rows):
        for row in rows:
            key, _, position = pages.gather(pool, 0, jnp.asarray([row], jnp.int32))
            for head in range(2):
                filled = int((position[0, head] >= 0).sum())
                for page in range(-(-filled // 4)):
                    mine = np.asarray(key[0, head, page * 4 : min(filled, page * 4 + 4)])
                    got = np.asarray(pool.bounds[pool.page_table[0, row, head, page]])
                    np.testing.assert_array_equal(got, [mine.min(axis=0), mine.max(axis=0)])

    for row, count in ((0, 5), (1, 3), (0, 2), (1, 5), (0, 4)):
        pool = append(pool, row, count)
        assert_bounds(pool, [0, 1])
    pool = pages.fork(pool, pages.block_table_of(pool, jnp.int32(0)), jnp.asarray([2], jnp.int32))
    pool = append(append(pool, 2, 4), 0, 2)
    assert_bounds(pool, [0, 1, 2])
    pool = append(pages.release(pool, jnp.asarray([0, 2], jnp.int32)), 0, 5)
    assert_bounds(pool, [0, 1])


@pytest.mark.parametrize("policy", [jkv.quest(16, dense_layers=2), jkv.quest(8), jkv.quest(12, 1, "mean")], ids=repr)
def test_replay_gives_the_log_probabilities_and_reading_less_changes_them(policy, model):
    prompts = [list(range(1, 22)), [4, 4, 9]]
    out = jkv.generate(model, prompts, policy=policy, return_trace=True, n=2, sampling=jkv.Sampling(seed=1), **KNOBS)
    replayed = np.asarray(jkv.score(model, out, trace=out.trace).logprobs)
    np.testing.assert_allclose(replayed, out.logprobs, atol=1e-4)
    assert np.percentile(np.abs(replayed - out.logprobs), 99) <= 1e-5
    if policy.read.num_dense(2) < 2:  # of the model's two
        assert np.abs(np.asarray(jkv.score(model, out).logprobs) - out.logprobs).max() > 1e-2
    planted = out.trace.replace(end=np.where(out.trace.end < 2**31 - 1, out.trace.end + 1, out.trace.end))
    if policy.read.num_dense(2) < 2:
        assert np.abs(np.asarray(jkv.score(model, out, trace=planted).logprobs) - out.logprobs).max() > 1e-3


def test_the_dense_layers_are_in_proportion_to_the_depth():
    """Two of the 32 layers that the authors' code was written for; half of a small model would hide the choice of pages."""
    assert [jkv.quest(16).read.num_dense(layers) for layers in (2, 4, 15, 16, 28, 32, 64)] == [0, 0, 0, 2, 2, 2, 2]
    assert [jkv.quest(16, dense_layers=3).read.num_dense(layers) for layers in (2, 32)] == [2, 3]


def test_it_frees_nothing_and_its_bounds_are_counted(model):
    prompt = list(range(1, 22))
    full, quest = (jkv.generate(model, prompt, policy=policy, **KNOBS).stats for policy in (jkv.full(), jkv.quest(8)))
    assert quest.evicted == quest.compactions == 0
    held = full.peak_kv_bytes // (4 * (2 * 8 * 4 + 4))  # pages of 4 slots, keys and values of 8 float32, and a position
    assert quest.peak_kv_bytes == full.peak_kv_bytes + held * 2 * 8 * 4


def test_a_row_put_aside_and_brought_back_reads_the_same_pages(model):
    """Two rows in a pool that holds little more than one: bounds must come back with the pages."""
    prompts, policy = [list(range(1, 22)), list(range(9, 25))], jkv.quest(8, dense_layers=0)
    alone = jkv.generate(model, prompts, policy=policy, max_running=2, **KNOBS)
    tight = jkv.generate(model, prompts, policy=policy, max_running=2, num_pages=2 * 2 * 26, chunk=4, **KNOBS)
    assert tight.stats.preemptions > 0
    np.testing.assert_array_equal(tight.tokens, alone.tokens)
    np.testing.assert_array_equal(tight.logprobs, alone.logprobs)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.quest(0), "budget must be a number of slots"),
        (lambda: jkv.quest(64, dense_layers=-1), "dense_layers"),
        (lambda: jkv.quest(64, over_group="sum"), "over_group must be"),
        (lambda: jkv.Policy("both", jkv.h2o(8).evict, jkv.h2o(8).schedule, read=jkv.Read(8)), "cannot evict and choose"),
        (lambda: jkv.quest(8).select(jkv.testing.random_view(np.random.default_rng(0))), "evicts nothing"),
        (lambda: jkv.Engine(jkv.testing.tiny_model(), max_slots=64).submit([1], jkv.quest(8), max_new_tokens=9), "policies="),
    ],
)
def test_what_cannot_be_is_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
