"""Page sharing in the engine: pool and trace agree with the layout of each row, whatever the traffic."""

import dataclasses
import math
import time

import jax
import numpy as np
import pytest

import jkv
from jkv.engine import programs
from jkv.engine.engine import Engine
from jkv.reasoning.sharing import Sharing, SharingStats
from jkv.testing import TINY, tiny_model
from tests.cache.test_pool import assert_allocator_is_consistent
from tests.support.mixes import LOOSE, BreakingTokenizer

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
    pool = jax.device_get(engine.runner.state.cache.pool)
    for i, sample in engine.scheduler.running.items():
        yield sample, pool.page_table[:, i], pool.length[:, i], pool.position, pool.slot_data["log_weight"][:, i]


def assert_layouts_are_the_pools(engine):
    """Every page of a row's table, in every layer and head, holds the tokens of its layout, with its multiplicity."""
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
            weight = math.log(layout.multiplicity[page]) if sharing.share.bias else 0.0
            np.testing.assert_allclose(log_weight[..., slots], weight, rtol=1e-6)
            rest = log_weight[..., slots.stop : (entry + 1) * PAGE]
            assert (rest == (-np.inf if entry + 1 < len(layout.table) else 0.0)).all() or layout.count[page] == PAGE
        count += 1
    return count


@pytest.mark.rounding
@pytest.mark.everyday(where=lambda policy: policy not in (SHARING["with_the_prompt"], SHARING["then_r_kv"]))
@pytest.mark.parametrize("policy", SHARING.values(), ids=SHARING)
def test_host_layout_pool_and_trace_agree(model, policy):
    engine = make_engine(model, [policy])
    tickets, seen = submit_all(engine, policy), 0
    while not engine.is_idle:
        engine.step()
        seen += assert_layouts_are_the_pools(engine)
        pool = jax.device_get(engine.runner.state.cache.pool)
        assert_allocator_is_consistent(
            pool, [p.row.snapshot.block_table for p in engine.scheduler.prefixes.values() if p.row.snapshot]
        )
    assert seen > 20
    assert engine.stats.sharing.shared > 5
    assert int(engine.runner.state.cache.pool.free_top) == engine.num_pages
    for ticket in tickets:
        out = engine.result(ticket)
        difference = np.abs(np.asarray(jkv.score(model, out, trace=out.trace).logprobs) - out.logprobs)
        assert np.percentile(difference, 99) <= 1e-5
        assert difference.max() <= 1e-4


def test_a_replay_without_the_multiplicity_of_pages_is_noticed(model):
    """Without the columns of pages read again, and with pages that end one query early, the log-probabilities are others."""
    engine = make_engine(model, [PLAIN])
    ticket = submit_all(engine, PLAIN)[0]
    engine.run()
    out = engine.result(ticket)
    again = out.trace.begin > out.trace.source
    ended = out.trace.end < 2**31 - 1
    assert again.any()
    once = out.trace.replace(end=np.where(again, out.trace.begin, out.trace.end))
    early = out.trace.replace(end=out.trace.end - (ended & ~again))
    for wrong in (once, early):
        assert np.abs(np.asarray(jkv.score(model, out, trace=wrong).logprobs) - out.logprobs).max() > 1e-3


@pytest.mark.rounding
@pytest.mark.everyday(where=lambda policy: policy in (SHARING["with_the_prompt"], SHARING["random"], SHARING["then_r_kv"]))
@pytest.mark.parametrize("policy", SHARING.values(), ids=SHARING)
def test_a_row_gives_the_same_by_itself_in_a_batch_and_after_preemption(model, policy):
    """With a known threshold, nothing depends on other rows: other chunks, forks, and a pool too small for all."""
    alone = []
    for prompt in PROMPTS:
        engine = make_engine(model, [policy], rows=1)
        tickets = [
            engine.submit(prompt, policy, jkv.Sampling(seed=5), max_new_tokens=NEW, stop_ids=(), first_sample=i) for i in (0, 1)
        ]
        engine.run()
        alone += [engine.result(ticket) for ticket in tickets]
    batch = make_engine(model, [policy, jkv.full()], rows=6, num_pages=2 * 2 * 160 // PAGE, max_slots=160)  # one full row's
    batch.submit([8, 8, 8], jkv.full(), max_new_tokens=33, stop_ids=())  # another row that ends at odd places
    tickets = submit_all(batch, policy)
    batch.run()
    together = [(batch.tickets[t][i].completion) for t in tickets for i in range(2)]
    assert sum(one.shared for one in together) > 0
    for one, completion in zip(alone, together, strict=True):
        assert completion.tokens == one.tokens[0].tolist()
        np.testing.assert_allclose(completion.log_probs, one.logprobs[0], atol=1e-5)
        assert completion.shared == one.samples[0].shared
    if not policy.is_bounded:
        assert batch.stats.preemptions > 0
    assert int(batch.runner.state.cache.pool.free_top) == batch.num_pages


def test_pages_that_are_shared_are_free_for_others(model):
    """The pool holds fewer pages at the end of a row that shared than the full cache's, and never more than it reserved."""
    held = {}
    for policy in (jkv.full(), PLAIN):
        engine = make_engine(model, [PLAIN], rows=1)
        engine.submit(PROMPTS[1], policy, jkv.Sampling(seed=5), max_new_tokens=NEW, stop_ids=())
        while not engine.is_idle:
            engine.step()
            if engine.scheduler.running:
                held[policy.name] = engine.num_pages - int(engine.runner.state.cache.pool.free_top)
                assert held[policy.name] <= engine.scheduler.reserved
    shared_pages = engine.stats.sharing.shared
    assert shared_pages > 2
    assert held["reason_cache"] <= held["full"] - (shared_pages - 2) * 4  # two layers, two heads; some in the last chunk


def test_nothing_compiles_for_other_texts_or_thresholds(model):
    engine = make_engine(model, SHARING.values())
    for policy in SHARING.values():
        submit_all(engine, policy)
    engine.run()
    names = ("decode_chunk", "take_pages", "measure_pages")
    before = [getattr(programs, name).num_compiled() for name in names]
    other = jkv.reason_cache(**LOOSE | {"threshold": 0.4, "strict": 0.5, "match": 0.1})
    for prompt in ([5, 6, 7], [2] * 9, list(range(4, 30))):
        engine.submit(prompt, other, jkv.Sampling(seed=1), max_new_tokens=50, stop_ids=())
    engine.run()
    assert [getattr(programs, name).num_compiled() for name in names] == before


def test_an_encoder_that_fails_ends_only_its_own_request(model):
    """The other row continues, with the tokens that it has by itself; the tokens of the first are kept, and exact."""
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
    assert int(engine.runner.state.cache.pool.free_top) == engine.num_pages


def test_a_filter_slower_than_the_device_is_counted_as_a_wait(model, monkeypatch):
    decode_chunk, chunks, seconds = programs.decode_chunk, [], []

    def watched(*args, **options):
        state, outputs, carried = decode_chunk(*args, **options)
        chunks.append(outputs.token)
        return state, outputs, carried

    def encode(text):
        """Takes until the device is done with its chunk."""
        began = time.perf_counter()
        jax.block_until_ready(chunks[-1])
        seconds.append(time.perf_counter() - began)
        return [1.0]

    monkeypatch.setattr(programs, "decode_chunk", watched)

    slow = jkv.reason_cache(**LOOSE | {"encoder": encode})
    engine = make_engine(model, [slow], rows=1)
    engine.submit(PROMPTS[1], slow, jkv.Sampling(seed=5), max_new_tokens=24, stop_ids=())
    engine.run()
    assert engine.stats.sharing.filter.steps > 0
    assert engine.stats.sharing.filter_waits > 0
    assert engine.stats.sharing.filter_seconds >= sum(seconds) > 0


def test_a_results_statistics_stay_as_they_were(model):
    engine = make_engine(model, [PLAIN], rows=1)
    tickets = submit_all(engine, PLAIN, n=1)
    engine.run()
    before = engine.result(tickets[0]).stats
    shared = before.sharing.shared
    submit_all(engine, PLAIN)
    engine.run()
    assert before.sharing.shared == shared < engine.stats.sharing.shared


def test_the_engine_measures_what_the_pool_holds():
    """The distances of a run's pairs, from the pool's arrays, for rotated and for raw keys, and with a layer without RoPE."""
    for compare_on, without in (("rotated", ()), ("raw", ()), ("raw", (1,))):
        config = dataclasses.replace(TINY, layers_without_rope=without)
        model = tiny_model(config=config, tokenizer=BreakingTokenizer())
        policy = jkv.reason_cache(**LOOSE | {"threshold": 0.0, "compare_on": compare_on})
        engine = make_engine(model, [policy], rows=1)
        engine.submit(PROMPTS[0], policy, jkv.Sampling(seed=5), max_new_tokens=NEW, stop_ids=())
        seen = []
        while not engine.is_idle:
            engine.step()
            if engine.scheduler.running:
                sample = engine.scheduler.running[0]
                state = jax.device_get(engine.runner.state.cache.pool)
        sharing_stats = engine.stats.sharing
        assert sharing_stats.candidates > 3
        # Nothing was shared at distance 0, so page p of the row is entry p: the last state gives every distance.
        twin = Sharing(policy.share, model, np.asarray(PROMPTS[0], np.int32), PAGE, SharingStats(), lambda: np.eye(32))
        for token in sample.completion.tokens:
            twin.append([token])
            twin.find_similar()
            if twin.generated % 4 == 0:
                seen += twin.candidates(twin.generated)
        table, kv = state.page_table[:, 0], np.asarray(state.kv, np.float64)
        for got, pair in zip(sharing_stats.thresholds[policy.share].distances, seen, strict=False):
            one, other = (kv[table[..., page]] for page in (pair.page, pair.kept))  # [L, K, 2, page, H]
            key_apart = one[:, :, 0] - other[:, :, 0]
            if compare_on == "raw":
                frequency = np.tile(TINY.rope_theta ** (-np.arange(0, 8, 2) / 8), (TINY.num_layers, 1, 1, 1))
                frequency[list(without)] = 0
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
