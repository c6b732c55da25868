"""Scoring and replay: exact against the engine, wrong when the trace is wrong, differentiable, and small in memory."""

import contextlib
import dataclasses
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

import jkv
from jkv.cache.attention import OPEN_END
from jkv.model.sampling import PenaltyRows, SamplingRows
from jkv.model.weight_shapes import init_params
from jkv.replay.columns import Columns
from jkv.replay.score import UNEMBED_BLOCK, hidden_states, token_scores
from jkv.testing import TINY

PROMPTS = [[5, 1, 9], [3, 7] * 16 + [1]]
KNOBS = {"max_new_tokens": 64, "page_size": 4, "stop_ids": (), "progress": False, "return_trace": True}
POLICY = jkv.r_kv(budget=24, interval=16, window=4)


@pytest.fixture(scope="module")
def squeezed(model):
    return jkv.generate(model, PROMPTS, policy=POLICY, sampling=jkv.Sampling(temperature=0.8, seed=1), **KNOBS)


def gap(scores, out):
    return np.abs(np.asarray(scores.logprobs) - out.logprobs)


@pytest.mark.rounding
def test_dense_scoring_of_a_compressed_run_is_far_off_and_replay_is_exact(model, squeezed):
    replayed, dense = jkv.score(model, squeezed, trace=squeezed.trace), jkv.score(model, squeezed)
    assert np.percentile(gap(replayed, squeezed), 99) <= 1e-5
    assert gap(replayed, squeezed).max() <= 1e-4
    assert gap(dense, squeezed).max() > 0.1


@pytest.mark.parametrize("shift", [-1, 1], ids=["one too early", "one too late"])
def test_an_eviction_off_by_one_breaks_replay(model, squeezed, shift):
    end = squeezed.trace.end
    wrong = squeezed.trace.replace(end=np.where((end > 0) & (end < OPEN_END), end + shift, end))
    assert gap(jkv.score(model, squeezed, trace=wrong), squeezed).max() > 1e-3


@pytest.mark.rounding
@pytest.mark.parametrize(
    "sampling",
    [
        jkv.Sampling(temperature=0.0),
        jkv.Sampling(seed=1),
        jkv.Sampling(0.6, 0.9, seed=1),
        jkv.Sampling(top_k=4, min_p=0.05, seed=1),
        jkv.Sampling(0.7, seed=1, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=-0.1),
    ],
    ids=["greedy", "plain", "top_p", "top_k", "penalties"],
)
def test_scores_are_of_the_distribution_that_was_drawn_from(model, sampling):
    out = jkv.generate(model, PROMPTS, sampling=sampling, **KNOBS)
    assert gap(jkv.score(model, out), out).max() <= 1e-4
    assert gap(jkv.score(model, out, trace=out.trace), out).max() <= 1e-4


def test_bare_tokens_are_scored_with_prompts_and_lengths(model, squeezed):
    lengths = [64, 10]
    bare = jkv.score(model.params, squeezed.tokens, prompts=PROMPTS, lengths=lengths, sampling=squeezed.sampling[0]).logprobs
    whole = jkv.score(model, squeezed).logprobs
    np.testing.assert_allclose(bare[0], whole[0], atol=1e-5)
    np.testing.assert_allclose(bare[1, :10], whole[1, :10], atol=1e-5)
    assert (np.asarray(bare)[1, 10:] == 0).all()


@pytest.mark.rounding
def test_more_tokens_than_a_program_holds_are_scored_alike(model, squeezed):
    whole = jkv.score(model, squeezed, trace=squeezed.trace)
    apart = jkv.score(model, squeezed, trace=squeezed.trace, max_tokens=1)
    np.testing.assert_allclose(apart.logprobs, whole.logprobs, atol=1e-5)


def test_a_program_of_no_tokens_is_refused(model, squeezed):
    with pytest.raises(ValueError, match="max_tokens must be at least 1; got 0"):
        jkv.score(model, squeezed, max_tokens=0)


def test_a_replay_in_bfloat16_is_as_near_as_that_of_a_full_cache():
    """Each rounds differently from decoding. Replayed as a full cache, what was evicted is a hundred times further off."""
    model = jkv.load("tiny-reasoner", dtype=jnp.bfloat16)

    def gaps(policy):
        out = jkv.generate(
            model, ["b=3;c=7;d=b*c;?d"] * 2, policy, max_new_tokens=150, stop_ids=(), return_trace=True, progress=False,
            sampling=jkv.Sampling(seed=1),
        )  # fmt: skip
        assert out.stats.evicted or policy.name == "full"
        scores = [jkv.score(model, out, trace=trace).logprobs for trace in (out.trace, "dense")]
        return [np.abs(np.asarray(score) - out.logprobs) for score in scores]

    rounding, _ = gaps(jkv.full())
    replayed, dense = gaps(jkv.r_kv(budget=48, interval=16))
    assert rounding.mean() < 5e-3
    assert replayed.mean() < 5e-3
    assert dense.mean() >= 30 * replayed.mean()


@pytest.mark.rounding
def test_general_columns_with_sources_equal_the_short_form(model, squeezed):
    """A trace whose columns are shuffled is still the same attention."""
    trace = squeezed.trace
    order = np.random.default_rng(0).permutation(trace.end.shape[-1])
    shuffled = jkv.Trace.of(*(np.ascontiguousarray(field[..., order]) for field in (trace.source, trace.begin, trace.end)))
    np.testing.assert_allclose(
        jkv.score(model, squeezed, trace=shuffled).logprobs, jkv.score(model, squeezed, trace=trace).logprobs, atol=1e-5
    )


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["short_form", "general"])
def test_a_short_sample_s_trace_may_be_as_wide_as_a_long_one_s(model, is_shuffled):
    out = jkv.generate(model, [[1, 2], [3] * 60], max_new_tokens=8, page_size=4, stop_ids=(), return_trace=True, progress=False)
    trace = out.trace
    if is_shuffled:
        order = np.random.default_rng(0).permutation(trace.end.shape[-1])
        trace = jkv.Trace.of(*(np.ascontiguousarray(field[..., order]) for field in (trace.source, trace.begin, trace.end)))
    np.testing.assert_allclose(jkv.score(model, out, trace=trace, max_tokens=1).logprobs, out.logprobs, atol=1e-5)


@pytest.mark.rounding
def test_the_gradient_of_a_score_is_that_of_finite_differences(model, squeezed):
    direction = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), model.params)

    def total(step):
        moved = jax.tree.map(lambda x, d: x + step * d, model.params, direction)
        return jkv.score(moved, squeezed, trace=squeezed.trace).logprobs.sum()

    _, slope = jax.jvp(total, (jnp.float32(0),), (jnp.float32(1),))
    reverse = jax.grad(total)(jnp.float32(0))
    step = 2e-4
    measured = (total(jnp.float32(step)) - total(jnp.float32(-step))) / (2 * step)
    np.testing.assert_allclose(slope, reverse, rtol=1e-3)
    np.testing.assert_allclose(slope, measured, rtol=0.05)


@pytest.mark.parametrize("penalises", [False, True])
def test_no_array_is_quadratic_in_the_length_or_holds_all_logits(model, penalises):
    n, total = 2, 2048
    config = model.config
    shape = (n, config.num_layers, config.num_kv_heads, total)
    columns = Columns(jax.ShapeDtypeStruct((n, 256), jnp.int32), jax.ShapeDtypeStruct(shape, jnp.uint8))
    row = jax.ShapeDtypeStruct((n,), jnp.float32)
    start = jax.ShapeDtypeStruct((n,), jnp.int32)
    settings = SamplingRows(row, row, start, row, PenaltyRows(row, row, row) if penalises else None)
    embedding = jax.ShapeDtypeStruct((50_000, config.width), jnp.float32)
    wide = model.params.replace(embedding=embedding, config=dataclasses.replace(config, vocab_size=50_000))

    def gradient(params, token, columns, settings, start):
        run = lambda p: token_scores(p, token, columns, settings, start).log_prob.sum()  # noqa: E731
        return jax.value_and_grad(run)(params)

    text = str(jax.make_jaxpr(gradient)(wide, jax.ShapeDtypeStruct((n, total), jnp.int32), columns, settings, start))
    for shape_text in set(re.findall(r"\w+\d+\[([\d,]+)\]", text)):
        sizes = [int(size) for size in shape_text.split(",")]
        assert sizes.count(total) < 2, f"an array of shape {sizes} is quadratic in the length"
        assert not (50_000 in sizes and total in sizes), f"an array of shape {sizes} holds all logits"
        assert 50_000 not in sizes or np.prod(sizes) <= n * UNEMBED_BLOCK * 50_000, f"{sizes} holds more than a block of logits"


def test_tokens_without_prompts_and_foreign_traces_are_refused(model, squeezed):
    with pytest.raises(ValueError, match="needs `prompts`"):
        jkv.score(model, squeezed.tokens)
    with pytest.raises(ValueError, match="one prompt, one length"):
        jkv.score(model, squeezed.tokens, prompts=PROMPTS[:1])
    other = squeezed.trace.part(slice(1))
    with pytest.raises(ValueError, match=r"here \(2, 2, 2\); got \(1, 2, 2\)"):
        jkv.score(model, squeezed, trace=other)


@pytest.mark.parametrize(
    ("prompt", "token", "words"),
    [
        ("text", 1, "takes token ids; prompt 0 is text"),
        ([], 1, "prompt 0 is empty"),
        ([1, 99], 1, r"must lie in \[0, 32\); prompt 0 holds 99"),
        ([1], -3, "tokens holds -3"),
    ],
)
def test_tokens_that_cannot_be_scored_are_refused(prompt, token, words, model):
    with pytest.raises(ValueError, match=words):
        jkv.score(model, np.array([[token]]), prompts=[prompt])


def test_a_result_without_a_trace_is_not_replayed_silently(model):
    out = jkv.generate(model, [[5, 1, 9]], policy=jkv.r_kv(budget=12, interval=4, window=4), max_new_tokens=4, progress=False)
    with pytest.raises(ValueError, match=r"got None\. Generate with return_trace=True, or leave trace out"):
        jkv.score(model, out, trace=out.trace)
    np.testing.assert_array_equal(jkv.score(model, out, trace="dense").logprobs, jkv.score(model, out).logprobs)


def test_a_trace_of_a_shorter_text_is_refused(model):
    long, short = (
        jkv.generate(model, [[1, 2, 3]], max_new_tokens=tokens, stop_ids=(), return_trace=True, progress=False)
        for tokens in (20, 9)
    )
    with pytest.raises(ValueError, match=r"row 0 has 23, and the trace 12\. Pass the trace"):
        jkv.score(model, long, trace=short.trace)


def test_a_trace_of_a_longer_text_is_refused_for_a_result_and_taken_for_its_first_tokens(model):
    long, short = (
        jkv.generate(model, [[1, 2, 3]], max_new_tokens=tokens, stop_ids=(), return_trace=True, progress=False)
        for tokens in (20, 9)
    )
    with pytest.raises(ValueError, match=r"row 0 has 12, and the trace 23\. Pass the trace"):
        jkv.score(model, short, trace=long.trace)
    first = jkv.score(model, long.tokens[:, :9], trace=long.trace, prompts=long.prompts, sampling=long.sampling)
    whole = jkv.score(model, long, trace=long.trace)
    np.testing.assert_allclose(first.logprobs, whole.logprobs[:, :9], atol=1e-5)


def test_a_gradient_keeps_one_stream_of_each_layer():
    """With `remat`, a layer more costs its hidden state; not its norm besides, and nothing that it computes."""
    tokens, kept = 40, {}
    for num_layers in (2, 4):
        config = dataclasses.replace(TINY, num_layers=num_layers)
        params = init_params(config, jax.random.key(0))
        columns = Columns(jnp.full((1, 256), tokens), jnp.zeros((1, num_layers, config.num_kv_heads, tokens), jnp.uint8))
        token = jnp.arange(tokens)[None] % 50
        lines = io.StringIO()
        with contextlib.redirect_stdout(lines):
            print_saved_residuals(lambda given, *rest: hidden_states(given, *rest, remat=True).sum(), params, token, columns)
        kept[num_layers] = sum(f"[1,{tokens}," in line for line in lines.getvalue().splitlines())
    assert kept[4] - kept[2] == 2
