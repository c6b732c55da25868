"""Sharing: which pages stand in for which, in the pool, in the trace, and whatever the traffic."""

import dataclasses
import importlib.util
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import programs
from jkv.engine import Engine
from jkv.pool import EMPTY
from jkv.sharing import Layout, Share, Sharing, SharingStats, Threshold, distances
from jkv.steps import Filter
from jkv.testing import TINY, TinyTokenizer, tiny_model
from tests.mixes import LOOSE, BreakingTokenizer
from tests.test_pool import assert_allocator_is_consistent

PAGE = 2
NEW = 60
LOOSE = LOOSE | {"interval": 4}
PLAIN = jkv.reason_cache(**LOOSE)
SHARING = {
    "plain": PLAIN,
    "with_the_prompt": jkv.reason_cache(include_prompt=True, **LOOSE),
    "aligned": jkv.reason_cache(align_steps=True, **LOOSE),
    "unbiased": jkv.reason_cache(bias=False, **LOOSE),
    "random": jkv.random_share(PLAIN),
    "then_r_kv": jkv.chain(PLAIN, jkv.r_kv(budget=44, interval=8, window=4)),
    "then_ada_kv": jkv.chain(PLAIN, jkv.ada_kv(budget=44, interval=8, window=4)),
}
PROMPTS = [[9, 5, 7, 8], [4, 5, 6, 7, 2, 4, 5, 6, 7, 2, 9], [12, 13] * 7 + [13]]


@pytest.fixture(scope="module")
def model():
    return tiny_model(tokenizer=BreakingTokenizer())


def make_engine(model, policies, rows=4, num_pages=None, max_slots=160):
    return Engine(
        model,
        max_running=rows,
        max_slots=max_slots,
        page_size=PAGE,
        policies=list(policies),
        num_pages=num_pages,
        chunk=8,
        return_trace=True,
        poison=True,
    )


def submit_all(engine, policy, n=2):
    return [engine.submit(prompt, policy, jkv.Sampling(seed=5), max_new_tokens=NEW, n=n, stop_ids=()) for prompt in PROMPTS]


def rows_of(engine):
    """The pool's positions and log-weights of each running row, slot by slot, on the host."""
    pool = jax.device_get(engine.state.cache.pool)
    for i, sample in engine.running.items():
        yield sample, pool.page_table[:, i], pool.length[:, i], pool.position, pool.slot_data["log_weight"][:, i]


def assert_layouts_are_the_pools(engine):
    """Every page of a row's table, in every layer and head, holds the tokens that its layout says, weighed as it says."""
    count = 0
    for sample, table, length, position, log_weight in rows_of(engine):
        sharing = sample.sharing
        if sharing is None or sharing.is_over or sample.is_finished:
            continue
        layout = sharing.layout
        assert (length == layout.num_slots).all()
        for entry, page in enumerate(layout.table):
            slots = slice(entry * PAGE, entry * PAGE + layout.count[page])
            held = position[table[..., entry]][..., : layout.count[page]]
            assert (held == layout.positions(page)).all()
            weight = math.log(layout.stands_for[page]) if sharing.share.bias else 0.0
            np.testing.assert_allclose(log_weight[..., slots], weight, rtol=1e-6)
            rest = log_weight[..., slots.stop : (entry + 1) * PAGE]
            assert (rest == (-np.inf if entry + 1 < len(layout.table) else 0.0)).all() or layout.count[page] == PAGE
        count += 1
    return count


@pytest.mark.parametrize("policy", SHARING.values(), ids=SHARING)
def test_what_the_host_knows_is_what_the_pool_holds_and_the_trace_replays(model, policy):
    engine = make_engine(model, [policy])
    tickets, seen = submit_all(engine, policy), 0
    while not engine.is_idle:
        engine.step()
        seen += assert_layouts_are_the_pools(engine)
        pool = jax.device_get(engine.state.cache.pool)
        assert_allocator_is_consistent(pool, [p.start.snapshot.seat for p in engine.prefixes.values() if p.start])
    assert seen > 20
    assert engine.stats.sharing.shared > 5
    assert int(engine.state.cache.pool.free_top) == engine.num_pages
    for ticket in tickets:
        out = engine.result(ticket)
        difference = np.abs(np.asarray(jkv.score(model, out, trace=out.trace).logprobs) - out.logprobs)
        assert np.percentile(difference, 99) <= 1e-5
        assert difference.max() <= 1e-4


def test_a_replay_that_forgets_what_stands_for_two_is_noticed(model):
    """Without the columns of pages read again, and with pages that end one query early, the log-probabilities are others."""
    engine = make_engine(model, [PLAIN])
    ticket = submit_all(engine, PLAIN)[0]
    engine.run()
    out = engine.result(ticket)
    again = out.trace.begin > out.trace.source
    ended = out.trace.end < 2**31 - 1
    assert again.any()
    once = out.trace._replace(end=np.where(again, out.trace.begin, out.trace.end))
    early = out.trace._replace(end=out.trace.end - (ended & ~again))
    for wrong in (once, early):
        assert np.abs(np.asarray(jkv.score(model, out, trace=wrong).logprobs) - out.logprobs).max() > 1e-3


@pytest.mark.parametrize("policy", SHARING.values(), ids=SHARING)
def test_a_row_gives_the_same_alone_in_a_crowd_and_after_preemption(model, policy):
    """With a known threshold, nothing depends on the neighbours: other chunks, forks, and a pool too small for all."""
    alone = []
    for prompt in PROMPTS:
        engine = make_engine(model, [policy], rows=1)
        tickets = [
            engine.submit(prompt, policy, jkv.Sampling(seed=5), max_new_tokens=NEW, stop_ids=(), first_sample=i) for i in (0, 1)
        ]
        engine.run()
        alone += [engine.result(ticket) for ticket in tickets]
    crowd = make_engine(model, [policy, jkv.full()], rows=6, num_pages=2 * 2 * 160 // PAGE, max_slots=160)  # one full row's
    crowd.submit([8, 8, 8], jkv.full(), max_new_tokens=33, stop_ids=())  # a neighbour that ends at odd places
    tickets = submit_all(crowd, policy)
    crowd.run()
    together = [(crowd.tickets[t][i].completion) for t in tickets for i in range(2)]
    assert sum(one.shared for one in together) > 0
    for one, completion in zip(alone, together, strict=True):
        assert completion.tokens == one.tokens[0].tolist()
        np.testing.assert_allclose(completion.log_probs, one.logprobs[0], atol=1e-5)
        assert completion.shared == one.samples[0].shared
    if not policy.is_bounded:
        assert crowd.stats.preemptions > 0
    assert int(crowd.state.cache.pool.free_top) == crowd.num_pages


def test_pages_that_are_shared_are_free_for_others(model):
    """The pool holds fewer pages at the end of a row that shared than the full cache's, and never more than it claimed."""
    held = {}
    for policy in (jkv.full(), PLAIN):
        engine = make_engine(model, [PLAIN], rows=1)
        engine.submit(PROMPTS[1], policy, jkv.Sampling(seed=5), max_new_tokens=NEW, stop_ids=())
        while not engine.is_idle:
            engine.step()
            if engine.running:
                held[policy.name] = engine.num_pages - int(engine.state.cache.pool.free_top)
                assert held[policy.name] <= engine._claimed()
    shared_pages = engine.stats.sharing.shared
    assert shared_pages > 2
    assert held["reason_cache"] <= held["full"] - (shared_pages - 2) * 4  # two layers, two heads; some in the last chunk


def test_nothing_compiles_for_other_texts_or_thresholds(model):
    engine = make_engine(model, SHARING.values())
    for policy in SHARING.values():
        submit_all(engine, policy)
    engine.run()
    names = ("decode_chunk", "take_pages", "measure_pages")
    before = [getattr(programs, name)._cache_size() for name in names]
    other = jkv.reason_cache(**LOOSE | {"threshold": 0.4, "strict": 0.5, "match": 0.1})
    for prompt in ([5, 6, 7], [2] * 9, list(range(4, 30))):
        engine.submit(prompt, other, jkv.Sampling(seed=1), max_new_tokens=50, stop_ids=())
    engine.run()
    assert [getattr(programs, name)._cache_size() for name in names] == before


def test_an_encoder_that_fails_ends_its_own_request_alone(model):
    """The other row goes on, and gives what it gives without the neighbour; what there was of the first is kept, and exact."""
    calls = []

    def encode(text):
        calls.append(text)
        if len(calls) == 2:
            raise RuntimeError("out of reach")
        return [1.0, len(text)]

    bad = jkv.reason_cache(**LOOSE | {"encoder": encode})
    engine = make_engine(model, [bad, PLAIN], rows=2)
    arguments = {"sampling": jkv.Sampling(seed=5), "max_new_tokens": NEW, "stop_ids": ()}
    first, second = engine.submit(PROMPTS[1], bad, **arguments), engine.submit(PROMPTS[0], PLAIN, **arguments)
    engine.run()
    out, other = engine.result(first), engine.result(second)
    assert out.finish_reason == ["error"]
    assert "out of reach" in str(out.samples[0].error)
    assert 0 < out.lengths[0] < NEW
    np.testing.assert_allclose(jkv.score(model, out, trace=out.trace).logprobs, out.logprobs, atol=1e-4)
    alone = make_engine(model, [PLAIN], rows=2)
    ticket = alone.submit(PROMPTS[0], PLAIN, **arguments)
    alone.run()
    np.testing.assert_array_equal(alone.result(ticket).tokens, other.tokens)
    assert int(engine.state.cache.pool.free_top) == engine.num_pages


def test_a_filter_slower_than_the_device_is_counted_as_a_wait(model):
    def encode(text):
        time.sleep(0.5)  # a chunk takes milliseconds
        return [1.0]

    slow = jkv.reason_cache(**LOOSE | {"encoder": encode})
    engine = make_engine(model, [slow], rows=1)
    engine.submit(PROMPTS[1], slow, jkv.Sampling(seed=5), max_new_tokens=24, stop_ids=())
    engine.run()
    assert engine.stats.sharing.filter.steps > 0
    assert engine.stats.sharing.filter_waits > 0
    assert engine.stats.sharing.filter_seconds > 0.4


def test_a_results_statistics_stay_as_they_were(model):
    engine = make_engine(model, [PLAIN], rows=1)
    tickets = submit_all(engine, PLAIN, n=1)
    engine.run()
    before = engine.result(tickets[0]).stats
    shared = before.sharing.shared
    submit_all(engine, PLAIN)
    engine.run()
    assert before.sharing.shared == shared < engine.stats.sharing.shared


# The host's arithmetic.


def sharing_of(share, prompt, tokens, page_size=4, tokenizer=None):
    model = dataclasses.replace(tiny_model(), tokenizer=tokenizer or TinyTokenizer())
    one = Sharing(share, model, np.asarray(prompt, np.int32), page_size, SharingStats(), lambda: np.eye(32))
    one.append(tokens)
    one.look()
    return one


STEP = [4, 5, 6, 7, 8, 9, 10, 2]  # two pages of four
EVERYTHING = Share(Filter(0.0, 0.0, structure=False), threshold=1e9, match=1.0, interval=1)


def test_pairs_are_the_pages_of_alike_steps_ordinal_by_ordinal():
    one = sharing_of(EVERYTHING, [1, 1, 1, 1], STEP * 3)
    pairs = [(pair.page, pair.kept) for pair in one.candidates(100)]
    assert pairs == [(3, 1), (4, 2), (5, 1), (6, 2), (5, 3), (6, 4)]
    assert one.candidates(100) == []  # each is told once


def test_shifted_steps_have_no_tokens_in_common_place_by_place():
    shifted = sharing_of(EVERYTHING, [1, 1, 1], [*STEP, 11, *STEP])
    assert shifted.candidates(100) == []
    loose = sharing_of(dataclasses.replace(EVERYTHING, match=0.0), [1, 1, 1], [*STEP, 11, *STEP])
    assert loose.candidates(100)


def test_every_pairing_finds_what_stands_at_another_ordinal():
    """The second step begins one page later than the first's text."""
    tokens = [4, 5, 6, 7, 8, 9, 10, 2, *[11, 11, 11, 12], 4, 5, 6, 7, 8, 9, 10, 2]
    assert not sharing_of(EVERYTHING, [1] * 4, tokens).candidates(100)
    every = sharing_of(dataclasses.replace(EVERYTHING, pairing="all"), [1] * 4, tokens)
    assert [(pair.page, pair.kept) for pair in every.candidates(100)] == [(4, 1), (5, 2)]


def test_only_what_was_there_an_interval_ago_is_decided_on():
    one = sharing_of(dataclasses.replace(EVERYTHING, interval=4), [1] * 4, STEP * 2)
    assert one.candidates(20) == []  # the second step ended at 16, and the token after it is not an interval old
    assert [(pair.page, pair.kept) for pair in one.candidates(21)] == [(3, 1), (4, 2)]


def test_pages_of_the_prompt_stand_in_only_when_asked_and_never_leave():
    assert sharing_of(EVERYTHING, STEP, STEP).candidates(100) == []
    asked = sharing_of(dataclasses.replace(EVERYTHING, include_prompt=True), STEP * 2, STEP)
    assert [(pair.page, pair.kept) for pair in asked.candidates(100)] == [(4, 0), (5, 1), (4, 2), (5, 3)]


def test_the_nearest_is_shared_chains_lead_to_the_root_and_what_went_is_measured_again():
    one = sharing_of(EVERYTHING, [1] * 4, STEP * 3)
    pairs = one.candidates(100)  # (3, 1) (4, 2) (5, 1) (6, 2) (5, 3) (6, 4)
    distance = np.array([0.5, 9.0, 0.4, 9.0, 0.3, 0.2])
    shared = one.decide(pairs, distance, distance, threshold=1.0)
    assert [(pair.page, pair.kept) for pair in shared] == [(3, 1), (6, 4)]  # 5 is nearest to 3, which has just left
    assert one.stats.deferred == 1
    assert one.layout.stands_for[1] == one.layout.stands_for[4] == 2
    again = one.candidates(101)
    assert [(pair.page, pair.kept) for pair in again] == [(5, 1)]
    one.decide(again, np.array([0.1]), np.array([0.1]), threshold=1.0)
    assert one.layout.stands_for[1] == 3
    assert [one.layout.root[page] for page in (3, 5, 6)] == [1, 1, 4]
    assert one.layout.table == [0, 1, 2, 4]
    entries, weight = one.entries([0, 1, 2, 4, 5], 6)
    assert entries.tolist() == [0, 1, 2, 3, EMPTY, EMPTY]
    np.testing.assert_allclose(weight, np.log([1, 3, 1, 2, 1, 1]), rtol=1e-6)


def test_at_random_as_many_pages_leave_as_would():
    """Every candidate near enough: what leaves at random is as much as what leaves by likeness, though it is other pages."""
    rng = np.random.default_rng(0)
    texts = [[*rng.integers(4, 32, 15).tolist(), 2] for _ in range(6)]
    tokens = [token for i in rng.integers(0, 6, 60) for token in texts[i]]
    counts = {}
    for random in (None, 0, 1):
        one = sharing_of(dataclasses.replace(EVERYTHING, random=random, percentile=100.0, interval=16), [1] * 4, [])
        shared = 0
        for start in range(0, len(tokens), 16):
            one.append(tokens[start : start + 16])
            one.look()
            pairs, none = one.candidates(start + 16), np.zeros(0)
            none = np.zeros(len(pairs))
            shared += len(one.decide(pairs, none, none, 1.0) if random is None else one.decide_at_random(pairs))
        counts[random] = shared
    assert counts[None] > 100
    assert counts[0] == counts[1] == counts[None]


def test_a_steps_last_page_is_shared_wherever_the_decision_falls():
    """Aligned steps of ten tokens: two pages and a half, all of which are candidates once, whatever the moment of deciding."""
    share = dataclasses.replace(EVERYTHING, align_steps=True, interval=4)
    step = [*range(4, 13), 2]
    for offset in range(12):
        one, pairs = sharing_of(share, [1] * 4, []), []
        tokens = [*[20] * offset, 2, *step * 4, 4, 5]
        for start in range(0, len(tokens) + 12, 4):
            one.append(tokens[start : start + 4])
            one.look()
            pairs += one.candidates(start + 4)
        halves = [pair for pair in pairs if one.layout.count[pair.page] == 2]
        assert len(halves) == 6, offset  # of four equal steps


def test_a_cap_refuses_what_the_percentile_takes():
    one = sharing_of(dataclasses.replace(EVERYTHING, cap=0.5), [1] * 4, STEP * 2)
    pairs = one.candidates(100)
    assert one.decide(pairs, np.array([0.1, 0.1]), np.array([0.6, 0.4]), 1.0) == [pairs[1]]


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


def test_the_engine_measures_what_the_pool_holds(model):
    """The distances of a run's pairs, from the pool's arrays, for rotated and for raw keys."""
    for compare_on in ("rotated", "raw"):
        policy = jkv.reason_cache(**LOOSE | {"threshold": 0.0, "compare_on": compare_on})
        engine = make_engine(model, [policy], rows=1)
        engine.submit(PROMPTS[0], policy, jkv.Sampling(seed=5), max_new_tokens=NEW, stop_ids=())
        seen = []
        while not engine.is_idle:
            engine.step()
            if engine.running:
                sample = engine.running[0]
                state = jax.device_get(engine.state.cache.pool)
        sharing_stats = engine.stats.sharing
        assert sharing_stats.candidates > 3
        # Nothing was shared at distance 0, so page p of the row is entry p: every distance can be had from the last state.
        twin = Sharing(policy.share, model, np.asarray(PROMPTS[0], np.int32), PAGE, SharingStats(), lambda: np.eye(32))
        for token in sample.completion.tokens:
            twin.append([token])
            twin.look()
            if twin.generated % 4 == 0:
                seen += twin.candidates(twin.generated)
        table, kv = state.page_table[:, 0], np.asarray(state.kv, np.float64)
        for got, pair in zip(sharing_stats.thresholds[policy.share].distances, seen, strict=False):
            one, other = (kv[table[..., page]] for page in (pair.page, pair.kept))  # [L, K, 2, page, H]
            key_apart = one[:, :, 0] - other[:, :, 0]
            if compare_on == "raw":
                frequency = TINY.rope_theta ** (-np.arange(0, 8, 2) / 8)
                unturned = []
                for content, page in ((one, pair.page), (other, pair.kept)):
                    angle = -twin.layout.positions(page)[:, None] * frequency
                    low, high = content[:, :, 0, :, :4], content[:, :, 0, :, 4:]
                    turned = (low + 1j * high) * np.exp(1j * angle)
                    unturned.append(np.concatenate([turned.real, turned.imag], axis=-1))
                key_apart = unturned[0] - unturned[1]
            value_apart = one[:, :, 1] - other[:, :, 1]
            norms = [np.sqrt((x**2).sum(axis=(1, 2, 3))) for x in (key_apart, value_apart)]
            np.testing.assert_allclose(got, (norms[0] + norms[1]).mean() / (2 * PAGE * 2), rtol=1e-4)


@pytest.mark.parametrize("page_size", [1, 2, 4, 5])
def test_aligned_steps_start_pages_and_no_row_is_more_than_half_empty(page_size):
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
                assert is_break[first - 1]  # a page is left early only where a step ended


def test_layout_inside():
    layout = Layout(4, 10)
    assert list(layout.inside(0, 10)) == [0, 1, 2]
    assert list(layout.inside(1, 9)) == [1]
    assert list(layout.inside(4, 8)) == [1]
    assert list(layout.inside(5, 7)) == []


# Bad input.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strict": 0.5, "soft": 0.6}, "0 <= soft <= strict <= 1"),
        ({"strict": 1.5}, "strict"),
        ({"percentile": 0}, r"in \(0, 100\]"),
        ({"percentile": 101}, r"in \(0, 100\]"),
        ({"warm_up": 0}, "at least 1"),
        ({"interval": 0}, "at least 1"),
        ({"match": 1.5}, "match"),
        ({"cap": -1.0}, "cap"),
        ({"threshold": math.nan}, "threshold"),
        ({"compare_on": "keys"}, "compare_on"),
        ({"metric": "l1"}, "metric"),
        ({"pairing": "none"}, "pairing"),
        ({"encoder": "bert"}, "encoder"),
        ({"random": -1}, "seed >= 0"),
        ({"encoder": "sentence:"}, "encoder is"),
        ({"warm_up": "many"}, "reason_cache's warm_up must be a whole number"),
    ],
)
def test_bad_settings_are_refused_when_the_policy_is_built(settings, words):
    with pytest.raises(ValueError, match=words):
        jkv.random_share(seed=settings["random"]) if "random" in settings else jkv.reason_cache(**settings)


def test_a_sentence_encoder_without_its_library_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "jkv\[sentence\]"'):
        jkv.reason_cache(encoder="sentence:all-MiniLM-L6-v2")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.chain(jkv.reason_cache(), jkv.h2o(budget=64)), r"reason_cache\+h2o cannot share pages"),
        (lambda: jkv.chain(jkv.tova(budget=64), jkv.mem_share()), r"tova\+mem_share cannot share pages"),
        (lambda: jkv.chain(jkv.reason_cache(), jkv.quest(budget=64)), "choose what to read"),
        (lambda: jkv.chain(jkv.reason_cache(), jkv.streaming_llm(64, positions="cache")), "move its sinks"),
        (lambda: jkv.chain(jkv.reason_cache(align_steps=True), jkv.r_kv(64)), "align_steps"),
        (lambda: jkv.chain(jkv.reason_cache(), jkv.mem_share()), "one policy for each part"),
        (lambda: jkv.chain(), "takes policies"),
        (lambda: jkv.chain("r_kv"), "takes policies"),
        (lambda: jkv.random_share(jkv.full()), "like a policy that shares"),
    ],
)
def test_what_cannot_go_together_is_refused_by_name(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_a_model_without_text_or_without_blank_lines_is_refused():
    with pytest.raises(ValueError, match="no tokenizer"):
        jkv.generate(tiny_model(), [[1, 2]], policy=jkv.reason_cache())

    class Unbroken(TinyTokenizer):
        pieces = tuple(piece.strip() or "x" for piece in TinyTokenizer.pieces)

    with pytest.raises(ValueError, match="blank lines"):
        jkv.generate(tiny_model(tokenizer=Unbroken()), [[1, 2]], policy=jkv.reason_cache())
    with pytest.raises(ValueError, match="no tokenizer"):  # told when the engine is built, not by the first request
        Engine(tiny_model(), policies=[jkv.full(), jkv.reason_cache(align_steps=True)])
    with pytest.raises(ValueError, match="sharing=True"):
        Engine(tiny_model(tokenizer=TinyTokenizer())).submit([1, 2], jkv.reason_cache())


def test_scores_see_how_many_a_slot_stands_for():
    """A key that stands for two draws the mass of two equal keys."""
    rng = np.random.default_rng(0)
    key, query = rng.standard_normal((1, 1, 7, 8)).astype(np.float32), rng.standard_normal((1, 2, 2, 8)).astype(np.float32)
    twice = np.concatenate([key[:, :, :1], key], axis=2)  # the first key, once more in front
    mass = jkv.policies.scores.AttentionMass(window=2, candidates="all")
    weight = jnp.zeros((1, 1, 7)).at[..., 0].set(math.log(2))
    position = jnp.arange(8, dtype=jnp.int32)[None, None]
    double = mass(jkv.CacheView(jnp.asarray(twice), jnp.asarray(twice), position, jnp.asarray(query)))
    single = mass(jkv.CacheView(jnp.asarray(key), jnp.asarray(key), position[..., 1:], jnp.asarray(query), log_weight=weight))
    np.testing.assert_allclose(single[..., 1:], double[..., 2:], rtol=1e-5)
    np.testing.assert_allclose(single[..., 0], double[..., :2].sum(axis=-1), rtol=1e-5)
