"""AMS against plain NumPy loops: segments, quotas, credit and the order within a segment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.policies import make
from jkv.policies.ams import CREDIT, rank_in_segment, segments
from jkv.testing import random_view

WINDOW, BUDGET = 4, 40
SETTINGS = {"window": WINDOW, "share": 0.1, "shortest": 5, "longest": 20, "each": 2}


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def mass_of(key, query, position):
    """The share of each slot before the window of the attention of the last queries, pooled; query [G, W, H]."""
    past, total = len(key) - WINDOW, 0
    for w in range(WINDOW):
        seen = position <= position[-1] - (WINDOW - 1 - w)
        for q in query[:, w]:
            total = total + np.pad(softmax(key[seen] @ q / np.sqrt(key.shape[1])), (0, int((~seen).sum())))[:past]
    total = np.pad(total, 2)
    pooled = np.array([total[s : s + 5].sum() for s in range(past)])
    return pooled / pooled.sum()


def cut(mass, share, shortest, longest):
    """The segments, as pairs of first slot and end."""
    found, begin = [], 0
    for s in range(len(mass)):
        size = s + 1 - begin
        if size >= longest or (size >= shortest and mass[begin : s + 1].sum() >= share):
            found.append((begin, s + 1))
            begin = s + 1
    return found + ([(begin, len(mass))] if begin < len(mass) else [])


def chosen_by_turns(used, score, count, taken, settings):
    """The slots that segments take one by one; `taken` are protected, and count as taken when their turn comes."""
    found = cut(used, settings["share"], settings["shortest"], settings["longest"])
    queues = [sorted(range(a, b), key=lambda s: (-score[s], s)) for a, b in found]
    kept, turn = set(taken), [0] * len(found)
    while len(kept) < count:
        open_ones = [j for j, queue in enumerate(queues) if turn[j] < len(queue)]
        first = [j for j in open_ones if turn[j] < settings["each"]]
        if first:
            j = min(first, key=lambda j: (turn[j], queues[j][turn[j]]))
        else:
            j = max(open_ones, key=lambda j: used[slice(*found[j])].sum() / (turn[j] - settings["each"] + 0.5))
        kept.add(queues[j][turn[j]])
        turn[j] += 1
    return sorted(kept)


def first_parts(view):
    """Of each row and head: its filled slots in float64."""
    key, query, position = (np.asarray(x, np.float64) for x in (view.key, view.query, view.position))
    group = query.shape[1] // key.shape[1]
    for b, k in np.ndindex(position.shape[:2]):
        size = int((position[b, k] >= 0).sum())
        yield b, k, key[b, k, :size], query[b, group * k : group * (k + 1), -WINDOW:], position[b, k, :size]


@pytest.mark.parametrize("around", ["r_kv", "cur"])
@pytest.mark.parametrize("group", [1, 3])
def test_segments_share_the_budget_by_attention_and_credit(group, around):
    policy = jkv.ams(BUDGET, around=around, sinks=3, recent=8, **SETTINGS)
    other = make(around, {"budget": BUDGET} | ({"window": WINDOW} if around == "r_kv" else {}))
    view = random_view(np.random.default_rng(group), slots=120, group=group, carried_names=policy.needs.carried)
    slots = np.asarray(jax.jit(policy.select)(view))
    scores = np.asarray(jax.jit(other.evict.score)(view), np.float64)
    written = np.asarray(policy.evict.rate_and_carry(view)[1][CREDIT])
    remembered = np.asarray(view.carried[CREDIT], np.float64)
    for b, k, key, query, position in first_parts(view):
        mass = mass_of(key, query, position)
        past = len(mass)
        credit = 0.8 * remembered[b, k, :past] + 0.2 * mass
        used = 0.7 * mass + 0.3 * credit / credit.sum()
        protected = np.flatnonzero((position < 3) | (position > position[-1] - 8))
        expected = chosen_by_turns(used, scores[b, k], min(BUDGET, len(position)), protected, SETTINGS)
        assert slots[b, k][slots[b, k] >= 0].tolist() == expected
        np.testing.assert_allclose(written[b, k, :past], credit, rtol=1e-4, atol=1e-7)
        assert (written[b, k, past:] == 0).all()


@pytest.mark.parametrize(
    ("share", "shortest", "longest"), [(0.02, 32, 64), (0.1, 1, 500), (0.3, 7, 20), (0.0, 3, 9), (1.0, 1, 900)]
)
def test_segments_are_cut_where_the_mass_is_reached(share, shortest, longest):
    rng = np.random.default_rng(0)
    sizes, num_slots = (500, 333), 512
    mass = np.zeros((1, 2, num_slots), np.float32)
    for k, size in enumerate(sizes):
        mass[0, k, :size] = rng.dirichlet(np.full(size, 0.2))
    is_past = np.arange(num_slots) < np.array(sizes)[:, None]
    start, weight = jax.jit(segments, static_argnums=(2, 3, 4))(
        jnp.asarray(mass), jnp.asarray(is_past)[None], share, shortest, longest
    )
    for k, size in enumerate(sizes):
        for a, b in cut(mass[0, k, :size].astype(np.float64), share, shortest, longest):
            assert (np.asarray(start)[0, k, a:b] == a).all()
            np.testing.assert_allclose(np.asarray(weight)[0, k, a:b], mass[0, k, a:b].sum(), rtol=1e-5)
        assert (np.asarray(start)[0, k, size:] == num_slots).all()


def test_mass_that_is_the_share_up_to_rounding_ends_a_segment():
    """Fifty slots of .02 each, which float32 cannot write: five of them are .1, whichever way they are added."""
    start, _ = segments(jnp.full((1, 1, 50), 0.02), jnp.ones((1, 1, 50), bool), 0.1, 1, 50)
    np.testing.assert_array_equal(start[0, 0], 5 * (np.arange(50) // 5))


def test_slots_of_a_segment_are_ranked_by_score_and_infinite_scores_have_a_rank():
    score = jnp.asarray([[[1.0, 3.0, 3.0, -jnp.inf, 7.0, jnp.inf, 0.0, jnp.nan]]])
    start = jnp.asarray([[[0, 0, 0, 0, 4, 4, 4, 8]]], jnp.int32)
    rank = rank_in_segment(score, start, jnp.arange(8)[None, None] < 7)
    assert np.asarray(rank)[0, 0, :7].tolist() == [2, 0, 1, 3, 1, 0, 2]


def test_what_the_other_policy_has_besides_its_score_stays():
    policy = jkv.ams(64, around=jkv.r_kv(64, window=24, until="</think>"), window=8)
    assert policy.until == "</think>"
    assert policy.evict.recent == 24
    assert jkv.ams(64, around="g_kv").needs.carried == ("importance", CREDIT)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"around": jkv.full()}, "full has none"),
        ({"around": "nothing"}, "around must be one of"),
        ({"share": 1.5}, "share must lie in"),
        ({"mix": -0.1}, "mix must lie in"),
        ({"decay": 2.0}, "decay must lie in"),
        ({"shortest": 0}, "shortest must be at least 1"),
        ({"longest": 31}, "longest must be at least shortest, 32 slots"),
        ({"each": -1}, "each must be at least 0"),
        ({"recent": 3}, "recent must be at least the window"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        jkv.ams(**{"budget": 128} | settings)
