"""Estimates from sampled tokens against the whole distributions: unbiased at a fixed context, exact over a few completions."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.model.sampling import SamplingRows
from jkv.replay.columns import Columns
from jkv.rl import full_overlap, mismatch
from jkv.rl.overlap import sequence_overlap

NUM_DRAWS = 20_000


@pytest.fixture(scope="module")
def both(model, squeezed):
    """The distributions of the 30th token of the first long completion, with the full and the compressed cache: [V] each."""
    row = int(np.flatnonzero(squeezed.lengths > 30)[0])
    vocab = model.config.vocab_size
    tokens = np.repeat(squeezed.tokens[row : row + 1, :31], vocab, axis=0)
    tokens[:, 30] = np.arange(vocab)
    trace = squeezed.trace.part(np.full(vocab, row))
    knobs = {"prompts": [squeezed.prompts[row]] * vocab, "sampling": squeezed.sampling[row]}
    told = (np.exp(np.asarray(jkv.score(model, tokens, each, **knobs).logprobs)[:, 30]) for each in ("dense", trace))
    return row, *(np.float64(x) for x in told)


def test_at_a_fixed_context_importance_weights_and_overlap_are_unbiased(model, squeezed, both):
    row, dense, sampled = both
    np.testing.assert_allclose([dense.sum(), sampled.sum()], 1, atol=1e-5)
    exact = np.minimum(dense, sampled).sum()
    assert exact < 0.95  # the two differ
    drawn = np.random.default_rng(0).choice(len(sampled), NUM_DRAWS, p=sampled / sampled.sum())
    rho = dense[drawn] / sampled[drawn]
    found = mismatch(
        np.log(dense[drawn])[None],
        np.log(sampled[drawn])[None],
        np.ones((1, NUM_DRAWS), bool),
        least_overlap=0.0,
        least_ess=0.0,
    )
    assert abs(rho.mean() - 1) < 3 * rho.std() / NUM_DRAWS**0.5
    assert abs(found.overlap - exact) < 3 * np.minimum(rho, 1).std() / NUM_DRAWS**0.5
    chi2 = (dense**2 / sampled).sum() - 1
    assert abs(found.chi2 - chi2) < 3 * (rho**2).std() / NUM_DRAWS**0.5
    kl = (sampled * np.log(sampled / dense)).sum()
    assert abs(found.k1 - kl) < 3 * np.log(rho).std() / NUM_DRAWS**0.5
    assert abs(found.k3 - kl) < 3 * (rho - np.log(rho)).std() / NUM_DRAWS**0.5
    assert full_overlap(model, squeezed, rows=[row]).values[0, 30] == pytest.approx(exact, abs=1e-5)


def test_overlap_is_one_with_the_full_cache_and_less_with_a_compressed_one(model, squeezed):
    whole = jkv.generate(
        model, [[5, 1, 9]], n=2, max_new_tokens=20, stop_ids=(), sampling=jkv.Sampling(seed=0), return_trace=True,
        page_size=4, progress=False,
    )  # fmt: skip
    same = full_overlap(model, whole)
    np.testing.assert_allclose(same.values, 1, atol=1e-5)
    apart = full_overlap(model, squeezed, rows=3)
    assert apart.rows == (0, 1, 2)
    assert apart.mask.sum() == squeezed.lengths[:3].sum()
    assert 0 < apart.mean < 0.99
    assert 0 < apart.percentile(5.0) < apart.mean
    np.testing.assert_allclose(
        apart.values[:, 0], 1, atol=1e-5
    )  # nothing is evicted before the first token, but of long prompts
    assert not apart.values[~apart.mask].any()


def test_no_array_holds_the_distributions_of_all_tokens(model):
    n, total, vocab = 2, 512, 50_000
    ended = jax.ShapeDtypeStruct((n, model.config.num_layers, model.config.num_kv_heads, total), jnp.uint8)
    columns = Columns(jax.ShapeDtypeStruct((n, 256), jnp.int32), ended)
    row = jax.ShapeDtypeStruct((n,), jnp.float32)
    settings = SamplingRows(row, row, jax.ShapeDtypeStruct((n,), jnp.int32), row)
    wide = model.params.replace(embedding=jax.ShapeDtypeStruct((vocab, model.config.width), jnp.float32))
    token = jax.ShapeDtypeStruct((n, total), jnp.int32)
    text = str(jax.make_jaxpr(sequence_overlap)(wide, token, columns, settings))
    assert re.search(r"\[2,64,50000\]", text)
    for sizes in re.findall(r"\w+\d+\[([\d,]+)\]", text):
        told = [int(size) for size in sizes.split(",")]
        assert not (vocab in told and np.prod(told) > n * 64 * vocab)


@pytest.mark.parametrize(("rows", "words"), [(0, "at least one; got 0"), ([8], r"of the 8 samples.*got \[8\]")])
def test_rows_that_there_are_not_are_refused(model, squeezed, rows, words):
    with pytest.raises(ValueError, match=words):
        full_overlap(model, squeezed, rows=rows)


def test_a_result_without_a_trace_is_refused(model, squeezed):
    with pytest.raises(ValueError, match="return_trace=True"):
        full_overlap(model, dataclasses.replace(squeezed, trace=None))
