"""How prompts are cut, and what prefill waits for."""

import jax
import numpy as np
import pytest

import jkv
from jkv.engine import prefill
from jkv.engine.samples import Start
from jkv.testing import tiny_model


@pytest.mark.parametrize("length", [1, 16, 17, 256, 257, 1024, 1025, 3000])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_chunks_hold_every_token_once_in_programs_of_few_sizes(platform, length):
    prompt, sizes = np.arange(1, length + 1, dtype=np.int32), prefill.sizes_for(platform)
    pieces = list(prefill.chunks(prompt, sizes))
    assert {token.shape for token, _ in pieces} <= {(1, size) for size in sizes}
    assert np.concatenate([token[0, : count[0]] for token, count in pieces]).tolist() == prompt.tolist()
    assert not any(token[0, count[0] :].any() for token, count in pieces)
    assert len(pieces) == -(-length // (256 if platform == "cpu" else 1024))


def test_gpus_without_kernels_take_short_chunks():
    assert prefill.sizes_for("cuda", (7, 5)) == prefill.sizes_for("cpu")
    assert prefill.sizes_for("cuda", (9, 0))[-1] == prefill.LARGE


def test_prompts_in_longer_chunks_give_the_same_text(monkeypatch):
    prompt = np.random.default_rng(0).integers(4, 30, 700).tolist()
    settings = {"policy": jkv.r_kv(64, 16), "max_new_tokens": 24, "stop_ids": ()}
    expected = jkv.generate(tiny_model(), prompt, **settings)
    monkeypatch.setattr("jkv.engine.prefill.sizes_for", lambda *_: (16, 64, 256, 1024))
    got = jkv.generate(tiny_model(), prompt, **settings)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-5)
    assert got.stats.peak_kv_bytes == expected.stats.peak_kv_bytes


def test_nothing_is_read_from_the_device_before_a_chunk_of_decode_steps(monkeypatch):
    """Prefill and fork of several prompts are dispatched without a wait; the peak of memory is read with the chunk."""
    engine = jkv.Engine(tiny_model(), max_running=4, max_slots=128)
    for seed in range(2):
        engine.submit(np.random.default_rng(seed).integers(4, 30, 40).tolist(), max_new_tokens=4, stop_ids=(), n=2)
    unread, read = [], engine.runner.read

    def watched(flight):
        unread.append(len(engine.runner._held))
        monkeypatch.undo()
        return read(flight)

    monkeypatch.setattr(engine.runner, "read", watched)
    for name in ("device_get", "block_until_ready"):
        monkeypatch.setattr(jax, name, lambda *_: pytest.fail("waits for the device"))
    monkeypatch.setattr(Start, "page_table", property(lambda _: pytest.fail("waits for the device")))
    engine.run()
    assert unread == [2]
    assert engine.runner._held == []
    assert engine.stats.peak_kv_bytes > 0


def test_a_prefill_that_failed_is_forgotten_with_its_pool():
    """Reading its result would raise again, in the first turn after a reset."""
    engine = jkv.Engine(tiny_model(), max_running=1, max_slots=64)
    engine.runner._held.append(jax.numpy.zeros(()))
    engine.runner._held[0].delete()
    engine.reset()
    ticket = engine.submit([4, 5, 6], max_new_tokens=4, stop_ids=())
    engine.run()
    assert len(engine.result(ticket).tokens[0]) == 4
