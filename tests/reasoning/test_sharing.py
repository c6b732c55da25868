"""Which pages are shared: the arithmetic on the host, and refused settings."""

import dataclasses
import importlib.util
import math

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.pool import EMPTY
from jkv.engine.engine import Engine
from jkv.reasoning.sharing import Layout, Share, Sharing, SharingStats, Threshold, distances
from jkv.reasoning.thoughts import Filter
from jkv.testing import TinyTokenizer, tiny_model


def sharing_of(share, prompt, tokens, page_size=4, tokenizer=None):
    model = dataclasses.replace(tiny_model(), tokenizer=tokenizer or TinyTokenizer())
    one = Sharing(share, model, np.asarray(prompt, np.int32), page_size, SharingStats(), lambda: np.eye(32))
    one.append(tokens)
    one.find_similar()
    return one


THOUGHT = [4, 5, 6, 7, 8, 9, 10, 2]  # two pages of four
EVERYTHING = Share(Filter(0.0, 0.0, structure=False), threshold=1e9, match=1.0, interval=1)


def test_pairs_are_the_pages_of_similar_thoughts_ordinal_by_ordinal():
    one = sharing_of(EVERYTHING, [1, 1, 1, 1], THOUGHT * 3)
    pairs = [(pair.page, pair.kept) for pair in one.candidates(100)]
    assert pairs == [(3, 1), (4, 2), (5, 1), (6, 2), (5, 3), (6, 4)]
    assert one.candidates(100) == []  # each is returned once


def test_shifted_thoughts_have_no_tokens_in_common_slot_by_slot():
    shifted = sharing_of(EVERYTHING, [1, 1, 1], [*THOUGHT, 11, *THOUGHT])
    assert shifted.candidates(100) == []
    loose = sharing_of(dataclasses.replace(EVERYTHING, match=0.0), [1, 1, 1], [*THOUGHT, 11, *THOUGHT])
    assert loose.candidates(100)


def test_pairing_all_finds_pages_at_another_ordinal():
    """The second thought starts with one page that the first does not have."""
    tokens = [4, 5, 6, 7, 8, 9, 10, 2, *[11, 11, 11, 12], 4, 5, 6, 7, 8, 9, 10, 2]
    assert not sharing_of(EVERYTHING, [1] * 4, tokens).candidates(100)
    every = sharing_of(dataclasses.replace(EVERYTHING, pairing="all"), [1] * 4, tokens)
    assert [(pair.page, pair.kept) for pair in every.candidates(100)] == [(4, 1), (5, 2)]


def test_a_decision_uses_only_thoughts_that_are_an_interval_old():
    one = sharing_of(dataclasses.replace(EVERYTHING, interval=4), [1] * 4, THOUGHT * 2)
    assert one.candidates(20) == []  # the second thought ended at 16, and the token after it is not an interval old
    assert [(pair.page, pair.kept) for pair in one.candidates(21)] == [(3, 1), (4, 2)]


def test_prompt_pages_replace_others_only_when_asked_and_are_never_replaced():
    assert sharing_of(EVERYTHING, THOUGHT, THOUGHT).candidates(100) == []
    asked = sharing_of(dataclasses.replace(EVERYTHING, include_prompt=True), THOUGHT * 2, THOUGHT)
    assert [(pair.page, pair.kept) for pair in asked.candidates(100)] == [(4, 0), (5, 1), (4, 2), (5, 3)]


def test_the_nearest_is_shared_chains_lead_to_the_root_and_deferred_pairs_are_measured_again():
    one = sharing_of(EVERYTHING, [1] * 4, THOUGHT * 3)
    pairs = one.candidates(100)  # (3, 1) (4, 2) (5, 1) (6, 2) (5, 3) (6, 4)
    distance = np.array([0.5, 9.0, 0.4, 9.0, 0.3, 0.2])
    shared = one.decide(pairs, distance, distance, threshold=1.0)
    assert [(pair.page, pair.kept) for pair in shared] == [(3, 1), (6, 4)]  # 5 is nearest to 3, which was just replaced
    assert one.stats.deferred == 1
    assert one.layout.multiplicity[1] == one.layout.multiplicity[4] == 2
    again = one.candidates(101)
    assert [(pair.page, pair.kept) for pair in again] == [(5, 1)]
    one.decide(again, np.array([0.1]), np.array([0.1]), threshold=1.0)
    assert one.layout.multiplicity[1] == 3
    assert [one.layout.root[page] for page in (3, 5, 6)] == [1, 1, 4]
    assert one.layout.table == [0, 1, 2, 4]
    entries, weight = one.entries([0, 1, 2, 4, 5], 6)
    assert entries.tolist() == [0, 1, 2, 3, EMPTY, EMPTY]
    np.testing.assert_allclose(weight, np.log([1, 3, 1, 2, 1, 1]), rtol=1e-6)


def test_rounding_decides_neither_which_of_equally_near_pages_replaces_one_nor_whether_it_is_near():
    """In a text that loops, all distances are equal, and a percentile of them is one of them."""
    every = dataclasses.replace(EVERYTHING, pairing="all", match=0.0)
    for seed in range(8):
        one = sharing_of(every, [1] * 4, THOUGHT * 2)
        pairs = one.candidates(100)  # (3, 1) (3, 2) (4, 1) (4, 2)
        distance = 0.25 * (1 + np.random.default_rng(seed).uniform(-1e-6, 1e-6, len(pairs)))
        shared = one.decide(pairs, distance, distance, threshold=float(np.median(distance)))
        assert [(pair.page, pair.kept) for pair in shared] == [(3, 1), (4, 1)]
        assert one.stats.near == 4


@pytest.mark.parametrize("metric", ["euclid", "cosine"])
def test_pages_that_are_equal_up_to_rounding_have_no_distance(metric):
    squares = np.array([[[[4.0, 4.0, 4e-12]] * 2], [[[4.0, 4.0, 4e-4]] * 2]])  # [I, L, 2, 3]: differences of 1e-6 and 1e-2
    got, relative = distances(Share(metric=metric), squares, np.array([4, 4]), 2)
    assert got[0] == relative[0] == 0
    assert got[1] > 0
    assert relative[1] == pytest.approx(1e-2)


def test_random_sharing_replaces_as_many_pages():
    """With every candidate accepted, random sharing replaces as many pages as sharing by distance."""
    rng = np.random.default_rng(0)
    texts = [[*rng.integers(4, 32, 15).tolist(), 2] for _ in range(6)]
    tokens = [token for i in rng.integers(0, 6, 60) for token in texts[i]]
    counts = {}
    for random in (None, 0, 1):
        one = sharing_of(dataclasses.replace(EVERYTHING, random=random, percentile=100.0, interval=16), [1] * 4, [])
        shared = 0
        for start in range(0, len(tokens), 16):
            one.append(tokens[start : start + 16])
            one.find_similar()
            pairs = one.candidates(start + 16)
            zeros = np.zeros(len(pairs))
            shared += len(one.decide(pairs, zeros, zeros, 1.0) if random is None else one.decide_at_random(pairs))
        counts[random] = shared
    assert counts[None] > 100
    assert counts[0] == counts[1] == counts[None]


def test_the_last_page_of_a_thought_is_shared_at_any_offset_of_the_decision():
    """Aligned thoughts of ten tokens take two and a half pages, each a candidate once, at any offset of the decisions."""
    share = dataclasses.replace(EVERYTHING, align_steps=True, interval=4)
    thought = [*range(4, 13), 2]
    for offset in range(12):
        one, pairs = sharing_of(share, [1] * 4, []), []
        tokens = [*[20] * offset, 2, *thought * 4, 4, 5]
        for start in range(0, len(tokens) + 12, 4):
            one.append(tokens[start : start + 4])
            one.find_similar()
            pairs += one.candidates(start + 4)
        halves = [pair for pair in pairs if one.layout.count[pair.page] == 2]
        assert len(halves) == 6, offset  # of four equal thoughts


def test_a_cap_refuses_pages_that_the_percentile_accepts():
    one = sharing_of(dataclasses.replace(EVERYTHING, cap=0.5), [1] * 4, THOUGHT * 2)
    pairs = one.candidates(100)
    assert one.decide(pairs, np.array([0.1, 0.1]), np.array([0.6, 0.4]), 1.0) == [pairs[1]]


@pytest.mark.parametrize("together", [1, 7, 100])
def test_a_threshold_is_set_again_by_the_last_distances_at_fixed_counts(together):
    """However many are measured at once: the threshold is a function of the distances alone."""
    rng = np.random.default_rng(0)
    distances = np.concatenate([rng.random(50), 5 + rng.random(50)])
    threshold = Threshold(Share(percentile=80.0, warm_up=20, refresh=15))
    for begin in range(0, 100, together):
        some = distances[begin : begin + together].tolist()
        threshold.observe(some, some)
    last = 20 + (100 - 20) // 15 * 15
    assert threshold.value == np.percentile(distances[last - 20 : last], 80)
    assert threshold.value > 5


def test_the_threshold_is_the_percentile_of_the_warm_up_and_stays():
    rule = Share(percentile=80.0, warm_up=10)
    threshold = Threshold(rule)
    threshold.observe(*[[float(x) for x in range(7)]] * 2)
    assert threshold.value is None
    threshold.observe(*[[7.0, 8.0, 9.0, 1000.0]] * 2)
    assert threshold.value == np.percentile(range(10), 80)
    threshold.observe([0.0] * 50, [0.0] * 50)
    assert threshold.value == np.percentile(range(10), 80)
    assert Threshold(Share(percentile=100.0)).value == math.inf
    assert Threshold(Share(threshold=0.25)).value == 0.25


@pytest.mark.parametrize("compare_on", ["rotated", "raw", "values"])
@pytest.mark.parametrize("metric", ["euclid", "cosine"])
def test_distances_are_the_papers_formula(compare_on, metric):
    """Eq. 5 of ReasonCache on whole arrays: [layers, tokens, heads, size] of two pages."""
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 2, 3, 5, 2, 4))  # [page, L, tokens, K, H]
    got, _ = distances(
        Share(compare_on=compare_on, metric=metric),
        np.stack(
            [
                np.stack([(x[0] ** 2).sum((1, 2, 3)), (x[1] ** 2).sum((1, 2, 3)), ((x[0] - x[1]) ** 2).sum((1, 2, 3))], -1)
                for x in (key, value)
            ],
            axis=1,
        )[None],
        np.array([5]),
        2,
    )
    parts = [value, value] if compare_on == "values" else [key, value]
    expected = []
    for layer in range(3):
        if metric == "euclid":
            expected.append(sum(np.linalg.norm(x[0, layer] - x[1, layer]) for x in parts) / (2 * 5 * 2))
        else:
            flat = [(x[0, layer].ravel(), x[1, layer].ravel()) for x in parts]
            expected.append(np.mean([1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in flat]))
    np.testing.assert_allclose(got, [np.mean(expected)], rtol=1e-12)


@pytest.mark.parametrize("page_size", [1, 2, 4, 5])
def test_aligned_thoughts_start_pages_and_no_row_is_more_than_half_vacant(page_size):
    rng = np.random.default_rng(page_size)
    share = dataclasses.replace(EVERYTHING, align_steps=True)
    for _ in range(50):
        prompt, tokens = rng.integers(0, 32, rng.integers(1, 9)).tolist(), rng.integers(0, 32, 40).tolist()
        tokens = [2 if rng.random() < 0.3 else token for token in tokens]
        one = sharing_of(share, prompt, tokens, page_size)
        layout = one.layout
        assert layout.num_slots <= share.most_slots(len(prompt) + len(tokens))
        assert sum(layout.count) == len(prompt) + len(tokens)
        is_break = [False] * (len(prompt) - 1) + [True] + [token < 4 for token in tokens]
        for page, first in enumerate(layout.first):
            if page and layout.count[page - 1] < page_size:
                assert is_break[first - 1]  # a page is closed early only where a thought ended


def test_pages_within_a_span():
    layout = Layout(4, 10)
    assert list(layout.pages_within(0, 10)) == [0, 1, 2]
    assert list(layout.pages_within(1, 9)) == [1]
    assert list(layout.pages_within(4, 8)) == [1]
    assert list(layout.pages_within(5, 7)) == []


# Bad input.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strict": 0.5, "soft": 0.6}, "0 <= soft <= strict <= 1"),
        ({"strict": 1.5}, "strict"),
        ({"percentile": 0}, r"in \(0, 100\]"),
        ({"percentile": 101}, r"in \(0, 100\]"),
        ({"warm_up": 0}, "at least 1"),
        ({"refresh": 0}, "refresh must be at least 1"),
        ({"interval": 0}, "at least 1"),
        ({"match": 1.5}, "match"),
        ({"cap": -1.0}, "cap"),
        ({"threshold": math.nan}, "threshold"),
        ({"compare_on": "keys"}, "compare_on"),
        ({"metric": "l1"}, "metric"),
        ({"pairing": "none"}, "pairing"),
        ({"encoder": "bert"}, "encoder"),
        ({"random": -1}, "random must be at least 0"),
        ({"encoder": "sentence:"}, "encoder must be"),
        ({"warm_up": "many"}, "reason_cache's warm_up must be a whole number"),
    ],
)
def test_bad_settings_are_refused_when_the_policy_is_built(settings, words):
    with pytest.raises(ValueError, match=words):
        jkv.random_share(seed=settings["random"]) if "random" in settings else jkv.reason_cache(**settings)


def test_a_sentence_encoder_without_its_library_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "jkv-cache\[sentence\]"'):
        jkv.reason_cache(encoder="sentence:all-MiniLM-L6-v2")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.chain(jkv.reason_cache(), jkv.h2o(budget=64)), r"reason_cache\+h2o cannot share pages"),
        (lambda: jkv.chain(jkv.tova(budget=64), jkv.mem_share()), r"tova\+mem_share cannot share pages"),
        (lambda: jkv.chain(jkv.reason_cache(), jkv.quest(budget=64)), "choose pages to read"),
        (lambda: jkv.chain(jkv.reason_cache(), jkv.streaming_llm(64, positions="cache")), "move its sinks"),
        (lambda: jkv.chain(jkv.reason_cache(align_steps=True), jkv.r_kv(64)), "align_steps"),
        (lambda: jkv.chain(jkv.reason_cache(), jkv.mem_share()), "one policy for each part"),
        (lambda: jkv.chain(), "takes policies"),
        (lambda: jkv.chain("r_kv"), "takes policies"),
        (lambda: jkv.random_share(jkv.full()), "like= must be a policy that shares"),
    ],
)
def test_parts_that_exclude_each_other_are_refused_by_name(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_a_model_without_text_or_without_blank_lines_is_refused():
    with pytest.raises(ValueError, match="no tokenizer"):
        jkv.generate(tiny_model(), [[1, 2]], policy=jkv.reason_cache())

    class Unbroken(TinyTokenizer):
        pieces = tuple(piece.strip() or "x" for piece in TinyTokenizer.pieces)

    with pytest.raises(ValueError, match="blank lines"):
        jkv.generate(tiny_model(tokenizer=Unbroken()), [[1, 2]], policy=jkv.reason_cache())
    with pytest.raises(ValueError, match="no tokenizer"):  # raised when the engine is built, not by the first request
        Engine(tiny_model(), policies=[jkv.full(), jkv.reason_cache(align_steps=True)])
    with pytest.raises(ValueError, match="sharing=True"):
        Engine(tiny_model(tokenizer=TinyTokenizer())).submit([1, 2], jkv.reason_cache())


def test_scores_count_the_multiplicity_of_a_slot():
    """A key of multiplicity two receives the mass of two equal keys."""
    rng = np.random.default_rng(0)
    key, query = rng.standard_normal((1, 1, 7, 8)).astype(np.float32), rng.standard_normal((1, 2, 2, 8)).astype(np.float32)
    twice = np.concatenate([key[:, :, :1], key], axis=2)  # the first key, once more in front
    mass = jkv.eviction.scores.AttentionMass(window=2, candidates="all")
    weight = jnp.zeros((1, 1, 7)).at[..., 0].set(math.log(2))
    position = jnp.arange(8, dtype=jnp.int32)[None, None]
    double = mass(jkv.CacheView(jnp.asarray(twice), jnp.asarray(twice), position, jnp.asarray(query)))
    single = mass(jkv.CacheView(jnp.asarray(key), jnp.asarray(key), position[..., 1:], jnp.asarray(query), log_weight=weight))
    np.testing.assert_allclose(single[..., 1:], double[..., 2:], rtol=1e-5)
    np.testing.assert_allclose(single[..., 0], double[..., :2].sum(axis=-1), rtol=1e-5)
