"""Packed batches: the numbers, the loss and the gradients of padded ones, with fewer tokens computed; and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.replay.packing import place_sequences
from jkv.rl import log_probs, make_batch, policy_loss
from jkv.testing import TINY, tiny_model
from tests.support.mixes import LOOSE, BreakingTokenizer

ADVANTAGES = np.linspace(-1, 1, 8, dtype=np.float32)
PROMPTS = [[5, 1, 9], [3, 7] * 8 + [1]]
KNOBS = {"max_new_tokens": 40, "page_size": 4, "progress": False, "return_trace": True, "n": 4, "stop_ids": [2]}
WINDOWED = tiny_model(1, dataclasses.replace(TINY, num_layers=4, window=6, window_layers=(0, 2)), BreakingTokenizer())
PLAIN = tiny_model(0, tokenizer=BreakingTokenizer())
CASES = {
    "full": (PLAIN, jkv.full(), {}),
    "r_kv": (PLAIN, jkv.r_kv(budget=12, interval=4, window=4), {}),
    "h2o": (PLAIN, jkv.h2o(budget=12), {}),
    "quest": (PLAIN, jkv.quest(budget=12), {}),  # columns that are not their token's own
    "shared": (PLAIN, jkv.reason_cache(include_prompt=True, **LOOSE), {}),
    "int8": (PLAIN, jkv.r_kv(budget=12, interval=4, window=4), {"kv_dtype": "int8"}),
    "windows": (WINDOWED, jkv.r_kv(budget=12, interval=4, window=4), {}),
}


def sample(case, policy=None, **more):
    model, own, options = CASES[case]
    return jkv.generate(
        model, PROMPTS, policy=policy or own, **{"sampling": jkv.Sampling(0.8, seed=1)} | KNOBS | options | more
    )


@pytest.mark.everyday(where=lambda case, replay: replay and case in ("int8", "shared", "windows"))
@pytest.mark.parametrize("replay", [False, True], ids=["dense", "replayed"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_padded_rows(case, replay):
    model, out = CASES[case][0], sample(case)
    assert len(set(out.lengths.tolist())) > 2  # ragged, or the test says little
    padded, packed = (make_batch(out, ADVANTAGES, replay=replay, pack=pack) for pack in (None, 64))
    assert packed.packing.token.size < padded.token.size
    assert packed.is_replayed == replay
    one, other = (jax.jit(log_probs)(model.params, batch) for batch in (padded, packed))
    np.testing.assert_allclose(one, other, atol=2e-5)
    loss = jax.jit(jax.value_and_grad(lambda params, batch: policy_loss(params, batch, mean="sequences")[0]))
    (value, gradient), (expected, wanted) = (loss(model.params, batch) for batch in (packed, padded))
    np.testing.assert_allclose(value, expected, atol=1e-5)
    size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4 * size), gradient, wanted)


def test_sequences_of_one_row_do_not_read_each_other():
    """Other tokens in the first sequence of each row change nothing in the later ones."""
    batch = make_batch(sample("windows"), ADVANTAGES, replay=True, pack=128)
    packing, mask = batch.packing, np.asarray(batch.mask)
    first = np.asarray(packing.columns.first)
    token = jnp.where(first == 0, 1 + packing.token % 20, packing.token)
    one, other = (np.asarray(log_probs(WINDOWED, batch.replace(packing=x))) for x in (packing, packing.replace(token=token)))
    is_later = first.reshape(-1)[np.asarray(packing.place)] > 0
    assert (mask & is_later).any()
    np.testing.assert_array_equal(one[mask & is_later], other[mask & is_later])
    assert (one != other)[mask & ~is_later].any()


def test_rows_of_other_settings_are_packed_apart_and_more_rows_change_nothing():
    out = dataclasses.replace(sample("full"), sampling=[jkv.Sampling(0.8), jkv.Sampling(1.0, top_k=20)] * 4)
    padded, packed = (make_batch(out, ADVANTAGES, pack=pack) for pack in (None, 128))
    np.testing.assert_allclose(*(log_probs(PLAIN, batch) for batch in (padded, packed)), atol=2e-5)
    both = np.asarray(packed.packing.settings.top_k)
    assert set(both) == {0, 20}
    wider = make_batch(out, ADVANTAGES, pack=(8, 128))
    assert wider.packing.token.shape == (8, 128)
    np.testing.assert_array_equal(*(np.asarray(log_probs(PLAIN, batch)) for batch in (packed, wider)))
    with pytest.raises(ValueError, match=r"take \d rows of 128 tokens; got pack=\(1, 128\)"):
        make_batch(out, ADVANTAGES, pack=(1, 128))


def test_lengths_fill_rows():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 200).tolist()
    rows = place_sequences(lengths, [0] * 200, 128)
    assert sorted(i for row in rows for i in row) == list(range(200))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 128
    assert len(rows) * 128 <= 1.1 * sum(lengths)


def test_what_cannot_be_packed_is_refused():
    out = sample("full")
    with pytest.raises(ValueError, match="room for the longest sequence, 57 tokens; got pack=20"):
        make_batch(out, ADVANTAGES, pack=20)
    with pytest.raises(ValueError, match="without penalties"):
        make_batch(sample("full", sampling=jkv.Sampling(presence_penalty=1.0)), ADVANTAGES, pack=64)
    moved = sample("full", policy=jkv.streaming_llm(budget=12, sinks=4, interval=4, positions="cache"))
    with pytest.raises(ValueError, match="without moved sinks"):
        make_batch(moved, ADVANTAGES, replay=True, pack=64)
    batch = make_batch(out, ADVANTAGES, pack=64)
    with pytest.raises(ValueError, match="trained as a whole, 8 rows; got 4"):
        log_probs(PLAIN, jax.tree.map(lambda x: x[:4], batch))
