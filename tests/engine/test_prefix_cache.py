"""The prefix cache: which prompts it keeps, and that rows that start from it give the same bits as rows that do not."""

import dataclasses

import jax
import numpy as np
import pytest

import jkv
from jkv.engine import chunk_inputs, mesh, programs
from jkv.engine.prefix_cache import PrefixCache, can_reuse, piece_for
from tests.engine.test_engine import play
from tests.support.mixes import POLICIES, BreakingTokenizer, Expected, assert_engine_is_consistent, make_engine

SIZES = (4, 8, 16)  # of prefill programs here, so that short prompts have pieces
PIECE = SIZES[-1]
RNG = np.random.default_rng(3)
BASE = RNG.integers(4, 30, 3 * PIECE + 2).tolist()
PROMPTS = [BASE[:cut] + RNG.integers(4, 30, more).tolist() for cut, more in ((50, 9), (50, 15), (32, 0), (50, 30), (20, 6))]
FOUND = [0, 48, 16, 48, 16]  # of each prompt after those before it: the last token is always computed
ALL = [*POLICIES, jkv.r_kv(budget=104, interval=8, window=4), jkv.snap_kv(budget=104, when="prefill", window=4)]
KNOBS = {"max_running": 2, "max_slots": 128, "page_size": 4, "poison": True}
R_KV = jkv.r_kv(budget=32, interval=8, window=4, protect_prompt=False)


@pytest.fixture(autouse=True)
def short_programs(monkeypatch):
    monkeypatch.setattr(chunk_inputs, "OF_CPU", chunk_inputs.PrefillPrograms(SIZES, 8))


# The index by itself.


class Reference:
    """A plain list of prompts' beginnings, the least recently used first."""

    def __init__(self):
        self.held = []

    def find(self, beginnings):
        count = 0
        while count < len(beginnings) and beginnings[count] in self.held:
            count += 1
        self.use(beginnings[:count])
        return count

    def use(self, beginnings):
        for one in reversed(beginnings):
            self.held.remove(one)
            self.held.append(one)

    def add(self, beginnings, num_new):
        self.held.extend(beginnings[len(beginnings) - num_new :])
        self.use(beginnings)

    def evict(self, in_use):
        free = [one for one in self.held if one not in in_use]
        if free:
            self.held.remove(free[0])
        return free[:1]


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_agree_with_a_plain_list(seed):
    rng, cache, reference = np.random.default_rng(seed), PrefixCache(2, 3), Reference()
    for _ in range(300):
        prompt = rng.integers(0, 2, int(rng.integers(0, 9))).astype(np.int32)
        salt, version = str(rng.choice(["", "a"])), int(rng.integers(2))
        beginnings = [(salt, version, *prompt[:end].tolist()) for end in range(2, len(prompt) + 1, 2)]
        keys = cache.keys_of(prompt, salt, version)
        assert len(keys) == len(beginnings)
        if rng.random() < 0.7:
            found = cache.find(keys)
            assert found == reference.find(beginnings)
            end = int(rng.integers(found, len(keys) + 1))
            cache.add(keys[:end], beginnings[found:end])
            reference.add(beginnings[:end], end - found)
        else:
            count = int(rng.integers(len(keys) + 1))
            expected = reference.evict(beginnings[:count])
            assert cache.evict(keys[:count]) == bool(expected)
            assert cache.take_evicted() == expected
        assert list(cache._pages.values()) == reference.held
        assert all(one[:-2] in reference.held for one in reference.held if len(one) > 4), "a piece without the one before it"
        assert cache.num_pages == 3 * len(reference.held)
    cache.evict_all()
    assert len(cache.take_evicted()) == len(reference.held)
    assert cache.num_pages == 0


def test_a_cache_without_pieces_keeps_nothing():
    cache = PrefixCache()
    assert cache.keys_of(np.arange(9), "", 0) == ()
    assert cache.find(()) == cache.num_pages == 0
    assert not cache.evict()


@pytest.mark.parametrize("page_size", [1, 4, 12, 16, 128])
def test_a_piece_ends_where_a_prefill_program_and_a_page_end(page_size):
    piece = piece_for(256, page_size)
    assert piece % 256 == piece % page_size == 0


# In the engine.


def results(engine, prompts, policy, **settings):
    """One request after the other."""
    outs = []
    for prompt in prompts:
        ticket = engine.submit(prompt, policy=policy, **{"max_new_tokens": 20, "stop_ids": ()} | settings)
        engine.run()
        outs.append(engine.result(ticket))
    return outs


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert one.finish_reason == other.finish_reason


def cached(outs):
    return [out.samples[0].cached_tokens for out in outs]


@pytest.fixture(scope="module", params=[None, "int8"])
def pair(request, model):
    """Two engines, without and with the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_inputs, "OF_CPU", chunk_inputs.PrefillPrograms(SIZES, 8))
        model = dataclasses.replace(model, tokenizer=BreakingTokenizer())
        settings = {**KNOBS, "policies": ALL, "kv_dtype": request.param, "return_trace": True}
        return [jkv.Engine(model, **settings, prefix_cache=on) for on in (False, True)]


@pytest.mark.everyday
@pytest.mark.everyday(where=lambda pair, policy: pair is None and policy.name == "r_kv")  # whose score reads queries
@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.made_by)
def test_rows_that_start_from_the_cache_give_the_same_bits(pair, policy):
    whole, part = pair
    part.update(part.model.params)  # nothing is left of other policies
    part.reset_stats()
    expected, got = (results(engine, PROMPTS, policy) for engine in pair)
    assert_same_bits(got, expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.trace.end, other.trace.end)
    assert cached(got) == (FOUND if can_reuse(policy) else [0] * len(PROMPTS))
    assert part.stats.prefix_queries == sum(map(len, PROMPTS))
    assert part.stats.prefix_hits == sum(cached(got)) == sum(out.stats.cached_tokens for out in got)
    assert part.runner.num_held_pages == part.scheduler.prefix_cache.num_pages
    assert whole.runner.num_held_pages == 0
    assert_engine_is_consistent(part)


@pytest.mark.everyday(where=lambda policy, size: policy.name == "r_kv")
@pytest.mark.parametrize("size", [3, 4])  # a piece has 12 tokens, or a page's 4: shorter than a prefill program
@pytest.mark.parametrize("policy", [jkv.full(), R_KV, jkv.quest(budget=32)], ids=lambda policy: policy.name)
def test_short_pieces_find_more_and_change_only_rounding(model, policy, size):
    whole, part = (jkv.Engine(model, **KNOBS, policies=[policy], prefix_cache=on, prefix_piece=size) for on in (False, True))
    expected, got = (results(engine, PROMPTS, policy) for engine in (whole, part))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    begun = [0, 50, 31, 50, 20]  # tokens that each prompt shares with those before it; the last is always computed
    piece, rest = size * 4 if size == 3 else size, part.scheduler.prefix_cache.rest
    assert cached(got) == [min(n, len(prompt) - rest) // piece * piece for n, prompt in zip(begun, PROMPTS, strict=True)]
    assert part.runner.num_held_pages == part.scheduler.prefix_cache.num_pages


@pytest.mark.everyday(where=lambda policy: policy.name == "r_kv")
@pytest.mark.parametrize("policy", [jkv.full(), R_KV, jkv.quest(budget=32)], ids=lambda policy: policy.name)
def test_pages_of_int4_are_reused_bit_for_bit(policy):
    model = jkv.testing.tiny_model(config=dataclasses.replace(jkv.testing.TINY, head_size=32))
    pair = [jkv.Engine(model, **KNOBS, policies=[policy], kv_dtype="int4", prefix_cache=on) for on in (False, True)]
    expected, got = (results(engine, PROMPTS, policy) for engine in pair)
    assert_same_bits(got, expected)
    assert cached(got) == FOUND


@pytest.fixture(scope="module")
def engines(model):
    """Rows -> an engine with the cache, whose pool holds far less than full rows. One runs ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_inputs, "OF_CPU", chunk_inputs.PrefillPrograms((4, 8), 8))
        pages = {3: 64, 8: 80}
        made = {
            rows: make_engine(model, rows, pages[rows], return_trace=True, ahead=rows > 3, prefix_cache=True) for rows in pages
        }
        return made, Expected(model)


@pytest.mark.rounding
def test_random_mixes_change_no_request_and_lose_no_page(engines):
    """Requests of all policies arrive, are cancelled and preempted in a pool too small for what the cache would keep."""
    engines, expected = engines
    rng = np.random.default_rng(5)
    for i in range(12):
        engine = engines[(3, 8)[i % 2]]
        play(engine, rng, expected)
        assert_engine_is_consistent(engine)
        assert engine.runner.num_held_pages == engine.scheduler.prefix_cache.num_pages
        if i % 6 > 3:
            engine.update(engine.model.params)
            assert engine.runner.num_held_pages == 0
    stats = [engine.stats for engine in engines.values()]
    assert sum(one.prefix_hits for one in stats) > 0
    assert sum(one.preemptions for one in stats) > 0


def test_cached_pages_are_evicted_before_a_row_is_preempted_or_waits(model):
    """The pool holds three rows of this length: two that run, and what the cache keeps of others in between."""
    engine = jkv.Engine(model, **KNOBS, num_pages=3 * 4 * 20, prefix_cache=True, prefill_tokens=96)
    prompts = [np.random.default_rng(i).integers(4, 30, 48).tolist() for i in range(8)]
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=32, stop_ids=())
    engine.run()
    assert engine.stats.preemptions == 0
    assert engine.stats.row_steps == engine.stats.tokens  # both rows were always full
    assert 0 < engine.scheduler.prefix_cache.num_pages <= engine.num_pages
    assert_engine_is_consistent(engine)


@pytest.mark.parametrize("change", ["update", "reset", "sleep", "clear"])
def test_nothing_is_reused_after(model, change):
    engine = jkv.Engine(model, **KNOBS, prefix_cache=True)
    first = results(engine, PROMPTS[:2], None)
    assert cached(first) == FOUND[:2]
    if change == "update":
        engine.update(jax.tree.map(lambda x: x * 1.5, model.params))
    elif change == "reset":
        engine.reset()
    elif change == "clear":
        engine.clear_prefix_cache()
    else:
        engine.sleep()
        engine.clear_prefix_cache()  # which has nothing to free
        engine.wake()
    assert engine.runner.num_held_pages == engine.scheduler.prefix_cache.num_pages == 0
    again = results(engine, PROMPTS[:2], None)
    assert cached(again) == FOUND[:2]
    if change == "update":
        other = dataclasses.replace(model, params=engine.model.params)
        assert_same_bits(again, results(jkv.Engine(other, **KNOBS), PROMPTS[:2], None))


def test_new_weights_while_a_row_reads_cached_pages_leave_its_pages_alone(model):
    engine = jkv.Engine(model, **KNOBS, prefix_cache=True)
    results(engine, PROMPTS[:1], None)
    ticket = engine.submit(PROMPTS[1], max_new_tokens=40, stop_ids=())
    engine.step()
    engine.update(engine.model.params)
    assert engine.scheduler.prefix_cache.num_pages > 0  # of the row that runs
    later = engine.submit(PROMPTS[1], max_new_tokens=40, stop_ids=())
    engine.run()
    outs = [engine.result(ticket), engine.result(later)]
    assert [out.samples[0].cached_tokens for out in outs] == [48, 0]
    assert_same_bits(outs, results(jkv.Engine(model, **KNOBS), [PROMPTS[1]] * 2, None, max_new_tokens=40))
    assert_engine_is_consistent(engine)


def test_a_clear_while_a_row_reads_cached_pages_lets_no_later_prompt_start_from_them(model):
    engine, settings = jkv.Engine(model, **KNOBS, prefix_cache=True), {"max_new_tokens": 20, "stop_ids": ()}
    results(engine, PROMPTS[:1], None)
    ticket = engine.submit(PROMPTS[1], **settings)
    engine.step()
    engine.clear_prefix_cache()
    assert engine.scheduler.prefix_cache.num_pages > 0  # of the row that runs
    outs = []
    for _ in range(2):
        later = engine.submit(PROMPTS[1], **settings)
        engine.run()
        outs.append(engine.result(later))
    outs.append(engine.result(ticket))
    assert [out.samples[0].cached_tokens for out in outs] == [0, 48, 48]
    assert_same_bits(outs, outs[:1] * 3)
    assert_engine_is_consistent(engine)


@pytest.mark.everyday
@pytest.mark.parametrize(("policies", "found"), [([], 48), ([R_KV], 32)], ids=["full", "window"])
def test_the_queries_that_a_score_reads_are_computed_again(model, policies, found):
    """Of 50 tokens 48 are held; with a window of 4, prefill must pass the last four."""
    whole, part = (jkv.Engine(model, **KNOBS, policies=policies, return_trace=True, prefix_cache=on) for on in (False, True))
    expected, got = (results(engine, [BASE[:50]] * 2, policies[0] if policies else None) for engine in (whole, part))
    assert cached(got) == [0, found]
    assert_same_bits(got, expected)
    np.testing.assert_array_equal(got[1].trace.end, expected[1].trace.end)


@pytest.mark.parametrize("other", [jkv.h2o(budget=60), jkv.r_kv(budget=60, interval=4, window=8)], ids=["h2o", "r_kv"])
def test_a_row_forks_from_no_prefill_that_skipped_what_it_reads(model, other):
    """Requests of the full cache and of another policy share a prefill where the prompt stays whole; here one is cached."""

    def run(keeps):
        engine = jkv.Engine(model, **KNOBS, policies=[other], return_trace=True, prefix_cache=keeps)
        results(engine, PROMPTS[:1], None)
        settings = {"max_new_tokens": 24, "stop_ids": ()}
        tickets = [engine.submit(PROMPTS[0], policy=policy, **settings) for policy in (None, other)]
        engine.run()
        return [engine.result(ticket) for ticket in tickets]

    expected, got = run(False), run(True)
    assert_same_bits(got, expected)
    np.testing.assert_array_equal(got[1].trace.end, expected[1].trace.end)
    assert expected[1].samples[0].compactions > 0 or expected[1].samples[0].evicted > 0
    assert got[0].samples[0].cached_tokens == 48


def test_a_request_that_does_not_fit_yet_leaves_the_cache_as_it_is(model):
    """The pool holds 50 pages for each layer and head: a row and the next one take 27 at first, and the cache 12."""
    engine = jkv.Engine(model, **KNOBS, num_pages=4 * 50, prefix_cache=True)
    results(engine, [BASE[:49]], None, max_new_tokens=1)
    cache = engine.scheduler.prefix_cache
    keys = cache.keys_of(np.asarray(BASE[:49]), "", engine.scheduler.version)
    assert (cache.find(keys), cache.num_pages) == (3, 4 * 12)
    for _ in range(2):
        engine.submit(RNG.integers(4, 30, 90).tolist(), max_new_tokens=38, stop_ids=())
    engine.step()
    assert len(engine.scheduler.running) == len(engine.scheduler.waiting) == 1
    assert cache.find(keys) == 3
    engine.run()


def test_requests_of_another_salt_share_nothing(model):
    engine, outs = jkv.Engine(model, **KNOBS, prefix_cache=True), []
    for salts, found in (("ab", [0, 0]), ("a", [48])):  # the first two wait together, and do not share a prefill either
        tickets = [engine.submit(PROMPTS[0], cache_salt=salt, max_new_tokens=4) for salt in salts]
        engine.run()
        outs += [engine.result(ticket) for ticket in tickets]
        assert [out.samples[0].cached_tokens for out in outs[-len(salts) :]] == found
    assert engine.stats.forks == 0
    assert_same_bits(outs[1:], outs[:-1])  # a salt changes no tokens
    for wrong in (3, None, b"a"):
        with pytest.raises(ValueError, match="cache_salt must be a text"):
            engine.submit(PROMPTS[0], cache_salt=wrong)


def test_prefill_computes_the_rest_alone_and_compiles_nothing_more(model, monkeypatch):
    engine, computed = jkv.Engine(model, **KNOBS, prefix_cache=True), []
    chunk = programs.prefill_chunk
    results(
        engine, [RNG.integers(4, 30, 63).tolist(), RNG.integers(4, 30, 52).tolist(), RNG.integers(4, 30, 37).tolist()], None
    )
    results(engine, PROMPTS[:2], None)
    before = {name: getattr(programs, name).num_compiled() for name in mesh.PROGRAMS}

    def counted(params, state, row, token, count, gate, **settings):
        computed.append(int(count[0]))
        return chunk(params, state, row, token, count, gate, **settings)

    monkeypatch.setattr(programs, "prefill_chunk", counted)
    results(engine, [BASE[:50] + [4] * 7, BASE[:50] + [5] * 9], None)
    assert computed == [9, 11]
    monkeypatch.undo()
    assert {name: getattr(programs, name).num_compiled() for name in mesh.PROGRAMS} == before


def test_samples_of_one_prompt_count_its_cached_tokens_and_share_its_pages(model):
    engine = jkv.Engine(model, **KNOBS, prefix_cache=True)
    results(engine, PROMPTS[:1], None)
    (out,) = results(engine, PROMPTS[1:2], None, n=3)
    assert [sample.cached_tokens for sample in out.samples] == [48] * 3
    assert_same_bits([out], results(jkv.Engine(model, **KNOBS), PROMPTS[1:2], None, n=3))
