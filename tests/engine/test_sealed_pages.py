"""`kv_dtype="kvarn"`: sealed pages through every part of the engine, and in replay."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache import sealed_pages
from jkv.engine.chunk_inputs import PrefillPrograms
from jkv.engine.memory import window_bytes
from jkv.testing import TINY, TinyTokenizer, find_copies, tiny_model
from pallas_kernels import sealed
from pallas_kernels.sealed import SEALED
from tests.support import learned_sinks, programs
from tests.support.learned_sinks import with_random_vectors
from tests.support.mixes import assert_engine_is_consistent

CONFIG = dataclasses.replace(TINY, head_size=32, max_positions=512)
MODEL = tiny_model(config=CONFIG, tokenizer=TinyTokenizer())
RNG = np.random.default_rng(0)
PROMPTS = [[5, 1, 9], RNG.integers(4, 30, 75).tolist(), RNG.integers(4, 30, 33).tolist()]
NEW = RNG.integers(4, 30, 21).tolist()  # of a second turn
KNOBS = {"max_new_tokens": 70, "page_size": 16, "stop_ids": (), "progress": False, "poison": True, "kv_dtype": "kvarn"}
POLICIES = {
    "full": jkv.full(),
    "quest": jkv.quest(budget=48, dense_layers=1),
    "random": jkv.random(budget=80, interval=24, block=16, whole=True, sinks=1, recent=17),
}
EACH_POLICY = pytest.mark.parametrize("name", POLICIES)


def run(name="full", prompts=PROMPTS, model=MODEL, **settings):
    settings = {"sampling": jkv.Sampling(seed=1)} | KNOBS | settings
    return jkv.generate(model, prompts, policy=POLICIES[name], **settings)


def gap(out, trace, model=MODEL):
    """How far each token's log-probability is from the engine's."""
    scores = np.asarray(jkv.score(model, out, trace=trace).logprobs)
    return np.abs(scores - out.logprobs)[np.arange(out.tokens.shape[1]) < out.lengths[:, None]]


# Replay.


@pytest.mark.rounding
@pytest.mark.everyday(where=lambda name, kv_dtype: (name == "quest") == (kv_dtype == "kvarn-k4v4"))
@pytest.mark.parametrize("kv_dtype", SEALED)
@EACH_POLICY
def test_replay_reads_what_the_pool_read(name, kv_dtype):
    """A number at the border of two codes may get the other one in the replay: a row's gap is then what a code is worth."""
    out = run(name, kv_dtype=kv_dtype, return_trace=True)
    assert (out.stats.evicted > 0) == (name == "random")
    replayed, in_floats = gap(out, out.trace), gap(out, out.trace.replace(kv_format=None))
    assert np.percentile(replayed, 50) <= 1e-5
    assert np.percentile(replayed, 90) <= 1e-3
    assert np.percentile(in_floats, 50) > 1000 * np.percentile(replayed, 50)


WRONG = {
    "other codes": {"key_bits": 8},
    "smaller pages": {"page": 32},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_replay_by_another_rule_is_far_off(change):
    out = run(return_trace=True)
    wrong = out.trace.replace(kv_format=dataclasses.replace(out.trace.kv_format, **change))
    assert np.percentile(gap(out, out.trace), 50) <= 1e-5
    assert np.percentile(gap(out, wrong), 50) > 1e-3


def test_a_replay_that_reads_a_record_one_query_early_is_far_off(monkeypatch):
    out, early = run(return_trace=True), sealed_pages.is_record_from
    monkeypatch.setattr("jkv.replay.sealed.is_record_from", lambda position, page: early(position, page) - 1)
    jax.clear_caches()
    apart = gap(out, out.trace)
    jax.clear_caches()
    assert np.percentile(apart, 50) > 1e-5
    assert apart.max() > 1e-2


def test_rollouts_and_training_read_sealed_pages():
    settings = {"max_prompt_tokens": 80, "max_new_tokens": 32, "n": 2, "page_size": 16}
    out = jkv.Rollout(MODEL, POLICIES["full"], kv_dtype="kvarn", **settings)(PROMPTS, return_trace=True)
    assert out.trace.kv_format == dataclasses.replace(SEALED["kvarn"], page=16)
    batch = jkv.rl.make_batch(out, np.ones(6, np.float32), replay=True)
    gradient = jax.grad(lambda params: jkv.rl.log_probs(params, batch).sum())(MODEL.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert any((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(gradient.layers[0].key))


@pytest.mark.parametrize("kind", ["sinks", "windows"])
def test_learned_sinks_and_windows_stand_beside_sealed_pages(kind):
    windows = {"num_layers": 3, "window": 6, "window_layers": (1,)}
    config = learned_sinks.CONFIG if kind == "sinks" else dataclasses.replace(CONFIG, **windows)
    config = dataclasses.replace(config, head_size=16, max_positions=512)
    model = tiny_model(2, config, TinyTokenizer())
    model = with_random_vectors(model) if kind == "sinks" else model
    out = run(model=model, return_trace=True, kv_dtype="kvarn-k4v4")
    assert np.percentile(gap(out, out.trace, model), 50) <= 1e-5
    assert np.percentile(gap(out, out.trace.replace(kv_format=None), model), 50) > 1e-4


# What is read depends on positions alone.


def test_tokens_do_not_depend_on_chunks_pieces_or_neighbours(monkeypatch):
    out = run(n=2)
    other = run(n=2, chunk=4, max_running=2, ahead=True)
    np.testing.assert_array_equal(other.tokens, out.tokens)
    np.testing.assert_allclose(other.logprobs, out.logprobs, atol=1e-5)
    np.testing.assert_array_equal(run(prompts=PROMPTS[1:2], n=2).tokens, out.tokens[2:4])
    monkeypatch.setattr("jkv.engine.chunk_inputs.OF_CPU", PrefillPrograms((16, 64), 8))
    in_pieces = run(n=2)
    np.testing.assert_array_equal(in_pieces.tokens, out.tokens)
    apart = np.abs(in_pieces.logprobs - out.logprobs)  # a number at the border of two codes may get the other one
    assert np.percentile(apart, 90) <= 1e-5
    assert np.percentile(apart, 95) <= 1e-4
    assert apart.max() <= 2e-3


@pytest.mark.rounding
@pytest.mark.everyday(where=lambda start: start in (16, 33, 47))
@pytest.mark.parametrize("start", [1, 15, 16, 17, 31, 32, 33, 47, 48, 64, 80])
def test_prefill_and_decode_read_the_same(start):
    """A text whose first tokens are the prompt, and whose others are forced, wherever the prompt ends."""
    text = np.random.default_rng(7).integers(4, 30, 100).tolist()
    one = run(prompts=[text[:start]], forced_tokens=text[start:], max_new_tokens=100 - start)
    other = run(prompts=[text[:1]], forced_tokens=text[1:], max_new_tokens=99)
    np.testing.assert_allclose(one.logprobs[0], other.logprobs[0, start - 1 :], atol=1e-4)


def test_the_first_page_and_a_row_of_two_pages_are_floats():
    """No token reads a record before the third page is there."""
    short, plain = (run(prompts=[[5, 1, 9]], max_new_tokens=44, kv_dtype=one) for one in ("kvarn", None))
    np.testing.assert_array_equal(short.tokens, plain.tokens)
    np.testing.assert_allclose(short.logprobs, plain.logprobs, atol=1e-5)
    long, plain = (run(prompts=PROMPTS[1:2], max_new_tokens=4, kv_dtype=one) for one in ("kvarn", None))
    assert np.abs(long.logprobs[0] - plain.logprobs[0]).max() > 1e-3


# Rows that move.


@pytest.mark.everyday(where=lambda name: name == "full")
@EACH_POLICY
def test_forks_and_swaps_keep_every_bit(name):
    ample, tight = (run(name, n=2, max_running=4, max_new_tokens=48, num_pages=pages, max_slots=128) for pages in (150, 70))
    assert (tight.stats.preemptions > 0) == (name != "random")
    np.testing.assert_array_equal(ample.tokens, tight.tokens)
    np.testing.assert_array_equal(ample.logprobs, tight.logprobs)


@pytest.mark.everyday(where=lambda name: name == "random")
@EACH_POLICY
def test_the_allocator_is_consistent_at_every_turn_and_rows_sleep(name):
    def outcome(sleeps):
        engine = jkv.Engine(
            MODEL, max_running=2, max_slots=160, page_size=16, policies=[POLICIES[name]], poison=True, kv_dtype="kvarn"
        )
        tickets = [engine.submit(prompt, policy=POLICIES[name], max_new_tokens=60, stop_ids=(), n=2) for prompt in PROMPTS[:2]]
        turn = 0
        while not engine.is_idle:
            engine.step()
            assert_engine_is_consistent(engine)
            if sleeps and (turn := turn + 1) in (2, 5):
                engine.sleep()
                engine.wake()
        return [engine.result(ticket) for ticket in tickets]

    for one, other in zip(outcome(True), outcome(False), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_kept_row_continues_as_the_whole_conversation_would(is_swapped):
    engine = jkv.Engine(MODEL, max_running=2, max_slots=256, page_size=16, poison=True, kv_dtype="kvarn")
    ticket = engine.submit(PROMPTS[1], max_new_tokens=13, stop_ids=(), keep=True)
    engine.run()
    first = engine.result(ticket)
    other = engine.submit(PROMPTS[2], max_new_tokens=40, stop_ids=())  # takes its row of the batch
    if is_swapped:
        assert engine.scheduler.kept_rows.swap_out()
    engine.run()
    engine.take([other])
    ticket = engine.extend(ticket, NEW, max_new_tokens=30, stop_ids=())
    engine.run()
    second = engine.result(ticket)
    whole = [*PROMPTS[1], *first.tokens[0].tolist(), *NEW]
    plain = run(prompts=[whole], sampling=jkv.Sampling(temperature=0.0), max_new_tokens=30)
    np.testing.assert_array_equal(second.tokens, plain.tokens)
    apart = np.abs(second.logprobs - plain.logprobs)
    # Chunks of other lengths round otherwise, so a number at the border of two codes of a page that is sealed may get the other
    # one, which all later tokens read. A page of another row is 0.1 and more off.
    assert np.quantile(apart, 0.1) <= 1e-4
    assert apart.max() <= 5e-3


# Random eviction of whole pages.


@pytest.mark.parametrize("sinks", [1, 20])
def test_random_drops_the_same_whole_pages_as_in_floats(sinks):
    policy = jkv.random(budget=96, interval=24, block=16, whole=True, sinks=sinks, recent=17)
    forced = np.random.default_rng(2).integers(4, 30, (3, 90)).tolist()
    settings = {"policy": policy, "forced_tokens": forced, "return_trace": True, **KNOBS, "max_new_tokens": 90}
    records, floats = (jkv.generate(MODEL, PROMPTS, **settings | {"kv_dtype": one}) for one in ("kvarn", None))
    np.testing.assert_array_equal(records.trace.end, floats.trace.end)
    end = records.trace.end[1]
    blocks = end[..., : end.shape[-1] // 16 * 16].reshape(*end.shape[:2], -1, 16)
    assert (blocks == blocks[..., :1]).all()  # whole pages
    assert (blocks[..., : 1 + (sinks > 16), 0] > 1000).all()
    assert ((blocks < 1000).any(axis=(2, 3))).all()


def test_a_compaction_moves_no_byte():
    policy = POLICIES["random"]
    engine = jkv.Engine(MODEL, max_running=1, max_slots=160, page_size=16, policies=[policy], kv_dtype="kvarn", chunk=8)
    ticket = engine.submit(PROMPTS[1], policy=policy, max_new_tokens=60, stop_ids=())
    seen = []
    while not engine.is_idle:
        engine.step()
        pool = engine.runner.state.cache.pool
        seen.append((np.asarray(pool.page_table[0, 0, 0]).tolist(), np.asarray(pool.kv.key).copy()))
    assert engine.result(ticket).stats.compactions == 2
    for (before, old), (after, new) in itertools.pairwise(seen):
        stayed = [page for page in before if page and page in after][1:-1]  # the newest one is sealed meanwhile
        np.testing.assert_array_equal(old[stayed], new[stayed])


# Compiled programs.


@pytest.mark.parametrize(
    "name", ["decode-full", "decode-quest", "prefill", "prefill-quest", "release", "fork", "detach", "attach", "write_pages"]
)
def test_no_program_copies_the_pool_or_makes_floats_of_it(name):
    program, config = programs.PROGRAMS[name], dataclasses.replace(TINY, head_size=64)
    needs = dataclasses.replace(program.needs, window=0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = programs.shapes_of(
        config, dtype=jnp.float32, page_size=64, sharding=sharding, needs=needs, kv_dtype="kvarn", num_rows=64, slots=4096
    )
    compiled = program.trace(shapes).lower().compile()
    tail = shapes.state.cache.tail.kv
    jkv.testing.assert_no_pool_copy(compiled, shapes.state.cache.pool)
    assert not find_copies(compiled.as_text(), tail.shape)


# What is counted, and what is refused.


def test_bytes_of_pages_and_floats_are_counted():
    engine = jkv.Engine(MODEL, max_running=3, max_slots=160, page_size=16, kv_dtype="kvarn")
    form, of_floats = engine.options.kv_format, window_bytes(MODEL.params, 3, 16, engine.options.kv_format)
    assert engine.page_bytes == sealed.page_bytes(32, "float32", form, 16) + 16 * 4
    assert of_floats == 3 * 2 * 2 * (3 * 16) * 2 * 32 * 4  # rows, layers, heads, slots, key and value, channels, bytes
    assert 0 <= engine.runner.meter.row_bytes - of_floats < 2 * engine.runner.state.cache.tail.kv[0].nbytes
    kv = engine.runner.state.cache.pool.kv
    assert sum(x.nbytes for x in jax.tree.leaves(kv)) == (engine.num_pages + 1) * sealed.page_bytes(32, "float32", form, 16)
    engine = jkv.Engine(
        MODEL, max_running=3, max_slots=160, page_size=16, kv_dtype="kvarn", kv_memory=of_floats + 10 * engine.page_bytes
    )
    assert engine.num_pages == 10
    with pytest.raises(ValueError, match=r"kv_memory must hold the floats of pages that are not sealed, .* lower max_running"):
        jkv.Engine(MODEL, max_running=3, max_slots=160, page_size=16, kv_dtype="kvarn", kv_memory=of_floats)


def test_a_long_row_takes_less_than_a_third_of_float16():
    """All that a row of 16,384 tokens takes: pages, tables, and the floats of pages that are not sealed."""
    config = dataclasses.replace(CONFIG, head_size=128, max_positions=16_384)
    device = jkv.DEVICES["h200"]
    row, plain = (jkv.plan(config, device, length=16_384, kv_dtype=one).own.row_bytes for one in ("kvarn", None))
    assert plain / row > 3.2
    assert jkv.plan(config, device, kv_dtype="kvarn").page_size == 128
    assert jkv.plan(config, device, kv_dtype="kvarn").kernels["sealed_attention"] == "gpu"
    assert "sealed_attention" not in jkv.plan(config, device, kv_dtype="int8").kernels


REFUSED = {
    "r_kv": jkv.r_kv(budget=64),
    "h2o": jkv.h2o(budget=64),
    "cut blocks": jkv.random(budget=64, block=16),
    "other blocks": jkv.random(budget=160, block=32, whole=True, sinks=1, recent=33),
    "no first page": jkv.random(budget=80, block=16, whole=True, recent=17),
    "no second page": jkv.random(budget=80, block=16, whole=True, sinks=1, recent=16),
    "reason_cache": jkv.reason_cache(),
    "chain": jkv.chain(jkv.reason_cache(), jkv.r_kv(budget=64)),
}


@pytest.mark.parametrize("policy", REFUSED.values(), ids=REFUSED)
def test_policies_that_would_write_to_sealed_pages_are_refused_by_name(policy):
    what = f"{re.escape(policy.name)} (drops slots|shares)"
    why = f'kv_dtype="kvarn" seals full pages.*{what}.*Use kv_dtype="int8".*jkv.quest.*recent=17'
    for call in (
        lambda: jkv.generate(MODEL, PROMPTS, policy=policy, **KNOBS),
        lambda: jkv.Engine(MODEL, policies=[policy], page_size=16, kv_dtype="kvarn"),
        lambda: jkv.Engine(MODEL, page_size=16, kv_dtype="kvarn").submit(PROMPTS[0], policy=policy),
        lambda: jkv.Rollout(MODEL, policy, kv_dtype="kvarn", page_size=16, max_prompt_tokens=8, max_new_tokens=8),
        lambda: jkv.plan(CONFIG, "h100", policy, page_size=16, kv_dtype="kvarn", length=256, prompt=16),
    ):
        with pytest.raises(ValueError, match=why):
            call()


def test_settings_that_cannot_be_are_refused_by_name():
    with pytest.raises(ValueError, match='kv_dtype="kvarn" has pages of 16, 32, 64, 128 slots; got page_size=24'):
        jkv.generate(MODEL, PROMPTS, **KNOBS | {"page_size": 24})
    with pytest.raises(ValueError, match=r'prefix_cache keeps prompts in the pool, and kv_dtype="kvarn" .*Leave it off'):
        jkv.Engine(MODEL, kv_dtype="kvarn", prefix_cache=True)
    with pytest.raises(ValueError, match="head size must be 16, 32, 64, 128 and so on; got 8"):
        jkv.generate(tiny_model(config=dataclasses.replace(CONFIG, head_size=8)), PROMPTS, **KNOBS)
    with pytest.raises(ValueError, match=r"random\(block=16, whole=True\) keeps whole .* up to 48 slots.*got budget=47"):
        jkv.random(budget=47, block=16, whole=True, sinks=1, recent=17)
    wide = dataclasses.replace(CONFIG, head_size=128)
    with pytest.raises(ValueError, match=r'on a TPU needs heads of 128 channels.*; got 32. Use kv_dtype="int8"'):
        jkv.plan(CONFIG, "v5e", kv_dtype="kvarn", length=256, prompt=16)
    with pytest.raises(ValueError, match=r"on a TPU needs pages of 128 slots.*; got page_size=64. Leave page_size out"):
        jkv.plan(wide, "v5e", kv_dtype="kvarn", page_size=64, length=256, prompt=16)
    assert jkv.plan(wide, "v5e", kv_dtype="kvarn", length=256, prompt=16).kernels["sealed_attention"] == "tpu"
    assert jkv.EngineOptions(kv_dtype="kvarn").kv_format.page == 128
