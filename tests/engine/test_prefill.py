"""How prompts are cut, and what prefill waits for."""

import dataclasses

import jax
import numpy as np
import pytest

import jkv
from jkv.engine import chunk_inputs
from jkv.engine.row import Row
from jkv.testing import tiny_model
from tests.support.mixes import BreakingTokenizer


@pytest.mark.parametrize("length", [1, 16, 17, 256, 257, 1024, 1025, 3000])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_chunks_hold_every_token_once_in_programs_of_few_sizes(platform, length):
    prompt, programs = np.arange(1, length + 1, dtype=np.int32), chunk_inputs.prefill_programs(platform)
    pieces, sizes = list(chunk_inputs.chunks(prompt, programs)), programs.sizes
    assert {token.shape for token, _ in pieces} <= {(1, size) for size in sizes}
    assert np.concatenate([token[0, : count[0]] for token, count in pieces]).tolist() == prompt.tolist()
    assert not any(token[0, count[0] :].any() for token, count in pieces)
    assert all(count[0] == token.shape[1] for token, count in pieces[:-1])
    assert len(pieces) <= -(-length // sizes[-1]) + 3


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_programs_of_a_prompt_pass_few_tokens_more_than_it_has(platform):
    """257 tokens were 1,024 on a GPU."""
    programs, lengths = chunk_inputs.prefill_programs(platform), range(1, 4097)
    passed = [sum(chunk_inputs.cut(length, programs)) / length for length in lengths]
    assert np.mean(passed) < 1.2
    assert platform == "cuda" or np.mean(passed[16:256]) < 1.2
    assert max(passed[128:]) < 2
    largest = programs.sizes[-1]
    full = 100_000 // largest
    assert chunk_inputs.cut(100_000, programs)[:full] == (largest,) * full


def test_gpus_without_kernels_take_short_chunks():
    assert chunk_inputs.prefill_programs("cuda", (7, 5)).sizes[-1] == 256
    assert chunk_inputs.prefill_programs("cuda", (9, 0)).sizes[-1] == chunk_inputs.LARGE


def test_the_largest_program_may_be_a_smaller_one():
    programs = chunk_inputs.prefill_programs("tpu", largest=64)
    assert programs == ((16, 64), 170)
    assert chunk_inputs.cut(200, programs) == (64, 64, 64, 16)
    with pytest.raises(ValueError, match=r"largest_prefill must be one of \(16, 64, 128\).* got 100"):
        jkv.Engine(tiny_model(), largest_prefill=100)


def test_prompts_in_longer_chunks_give_the_same_text(monkeypatch):
    prompt = np.random.default_rng(0).integers(4, 30, 700).tolist()
    settings = {"policy": jkv.r_kv(64, 16), "max_new_tokens": 24, "stop_ids": ()}
    expected = jkv.generate(tiny_model(), prompt, **settings)
    monkeypatch.setattr("jkv.engine.chunk_inputs.prefill_programs", lambda *_: chunk_inputs.OF_KERNELS)
    got = jkv.generate(tiny_model(), prompt, **settings)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-5)
    assert got.stats.peak_kv_bytes == expected.stats.peak_kv_bytes


@pytest.mark.rounding
@pytest.mark.parametrize("policy", [None, jkv.r_kv(64, 16), jkv.h2o(48)], ids=repr)
def test_a_piece_reads_few_pages_more_than_its_row_has(monkeypatch, policy):
    """The engine's rows may be far longer than the prompt, whose pieces gather no more than four times what they read.

    C++ for a CPU gathers nothing, but for policies that need the mass of slots, and so needs no program for longer rows.
    """
    named, widths = dataclasses.replace(tiny_model(), tokenizer=BreakingTokenizer()), []
    prompt = np.random.default_rng(0).integers(4, 30, 300).tolist()
    settings = {"policies": [policy or jkv.full()], "max_slots": 2048, "page_size": 4, "max_running": 1, "poison": True}

    def run(kernels):
        engine = jkv.Engine(named, **settings, return_trace=True, kernels=kernels)
        chunk = engine.runner.programs.prefill_chunk
        monkeypatch.setattr(engine.runner, "programs", Watched(engine.runner.programs, chunk, widths))
        ticket = engine.submit(prompt, policy=policy, max_new_tokens=12, stop_ids=(), sampling=jkv.Sampling(seed=1))
        engine.run()
        return engine.result(ticket)

    expected = run("reference")  # 1,024 slots
    monkeypatch.setattr(chunk_inputs, "LEAST_SLOTS", 16)
    for kernels in ("reference", None):
        got = run(kernels)
        np.testing.assert_array_equal(got.tokens, expected.tokens)
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-5)
        replayed = np.asarray(jkv.score(named, got, trace=got.trace).logprobs)
        assert np.percentile(np.abs(replayed - got.logprobs), 99) <= 1e-5
    gathered = [256, 256, 256, 64, 64, 256]
    assert widths == gathered + (gathered[3:] if policy == jkv.h2o(48) else [None] * 3)


class Watched:
    """The programs, of which prefill notes how many pages it reads."""

    def __init__(self, programs, chunk, widths):
        self.programs, self.chunk, self.widths = programs, chunk, widths

    def __getattr__(self, name):
        return getattr(self.programs, name)

    def prefill_chunk(self, *args, num_pages, **options):
        self.widths.append(num_pages)
        return self.chunk(*args, num_pages=num_pages, **options)


def test_nothing_is_read_from_the_device_before_a_chunk_of_decode_steps(monkeypatch):
    """Prefill and fork of several prompts are dispatched without a wait; the peak of memory is read with the chunk."""
    engine = jkv.Engine(tiny_model(), max_running=4, max_slots=128)
    for seed in range(2):
        engine.submit(np.random.default_rng(seed).integers(4, 30, 40).tolist(), max_new_tokens=4, stop_ids=(), n=2)
    unread, read = [], engine.runner.read

    def watched(flight):
        unread.append(len(engine.runner.held))
        monkeypatch.undo()
        return read(flight)

    monkeypatch.setattr(engine.runner, "read", watched)
    for name in ("device_get", "block_until_ready"):
        monkeypatch.setattr(jax, name, lambda *_: pytest.fail("waits for the device"))
    monkeypatch.setattr(Row, "page_table", property(lambda _: pytest.fail("waits for the device")))
    engine.run()
    assert unread == [2]
    assert engine.runner.held == []
    assert engine.stats.peak_kv_bytes > 0


def test_a_prefill_that_failed_is_forgotten_with_its_pool():
    """Reading its result would raise again, in the first turn after a reset."""
    engine = jkv.Engine(tiny_model(), max_running=1, max_slots=64)
    engine.runner.held.append(jax.numpy.zeros(()))
    engine.runner.held[0].delete()
    engine.reset()
    ticket = engine.submit([4, 5, 6], max_new_tokens=4, stop_ids=())
    engine.run()
    assert len(engine.result(ticket).tokens[0]) == 4
