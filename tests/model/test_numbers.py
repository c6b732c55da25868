"""Hard numbers: narrow weights, huge logits, tiny temperatures, odd shapes, infinity in the middle of a generation.

The reference is a decoder in NumPy's float64. What it cannot be compared with has a finish reason that says what happened, or
is refused before anything compiles.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.model.sampling import log_distribution, rows_of
from jkv.model.weight_shapes import init_params
from jkv.testing import TINY

PROMPT = [1, 7, 3, 30]
KNOBS = {"stop_ids": (), "page_size": 4, "progress": False}


def make_model(dtype=jnp.float32, scale=0.3, **fields):
    return jkv.Model(init_params(dataclasses.replace(TINY, **fields), jax.random.key(0), scale=scale, dtype=dtype))


def reference_logits(params, tokens):
    """The logits of each next token, in float64: [T, V]."""
    config, wide = params.config, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    size, half, count = config.head_size, config.head_size // 2, len(tokens)
    angle = np.arange(count)[:, None] * config.rope_theta ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def norm(x, weight):
        return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.norm_epsilon)

    def rotate(x):
        return np.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], axis=-1)

    hidden = wide.embedding[tokens]
    for layer in wide.layers:
        normed = norm(hidden, layer.attention_norm)
        query, key, value = (
            (normed @ getattr(layer, name) + getattr(layer, f"{name}_bias")).reshape(count, -1, size)
            for name in ("query", "key", "value")
        )
        query, key = rotate(query), rotate(key)
        key, value = (np.repeat(x, config.group_size, axis=1) for x in (key, value))
        logits = np.einsum("qnh,knh->nqk", query, key) / np.sqrt(size)
        logits = np.where(np.tri(count, dtype=bool), logits, -np.inf)
        weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
        mixed = np.einsum("nqk,knh->qnh", weight / weight.sum(axis=-1, keepdims=True), value)
        hidden = hidden + mixed.reshape(count, -1) @ layer.out
        normed = norm(hidden, layer.mlp_norm)
        gate = normed @ layer.gate
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ layer.up)) @ layer.down
    return norm(hidden, wide.final_norm) @ wide.embedding.T


def reference_log_probs(params, tokens):
    """The log-probabilities of each next token, in float64: [T, V]."""
    logits = reference_logits(params, tokens)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


SHAPES = [
    *({"head_size": size} for size in (8, 16, 32, 64, 80, 96, 128, 256)),
    {"num_layers": 1},
    {"vocab_size": 1},
    {"vocab_size": 2},
    {"num_query_heads": 1, "num_kv_heads": 1},
    {"num_query_heads": 8, "num_kv_heads": 1, "width": 8, "mlp_width": 1},
]


@pytest.mark.everyday(where=lambda shape: shape.get("head_size") not in (16, 32, 96, 128))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_is_what_float64_says(shape):
    model = make_model(**shape)
    prompt = [token % model.config.vocab_size for token in PROMPT]
    out = jkv.generate(model, prompt, max_new_tokens=12, **KNOBS)
    wanted = reference_log_probs(model.params, [*prompt, *out.tokens[0]])[len(prompt) - 1 : -1]
    assert out.finish_reason == ["length"]
    np.testing.assert_array_equal(out.tokens[0], wanted.argmax(axis=-1))
    np.testing.assert_allclose(out.logprobs[0], wanted.max(axis=-1), atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.02), ("bfloat16", 0.15)])
@pytest.mark.parametrize("policy", [None, jkv.r_kv(budget=8, interval=4, window=2)], ids=["full", "r_kv"])
def test_narrow_weights_are_near_what_float64_says_of_them(dtype, tolerance, policy):
    model = make_model(jnp.dtype(dtype))
    out = jkv.generate(model, PROMPT, policy=policy, max_new_tokens=16, **KNOBS)
    assert out.finish_reason == ["length"]
    assert np.isfinite(out.logprobs).all()
    if policy is None:
        wanted = reference_log_probs(model.params, [*PROMPT, *out.tokens[0]])[len(PROMPT) - 1 : -1]
        picked = np.take_along_axis(wanted, out.tokens[0][:, None], axis=-1)[:, 0]
        np.testing.assert_allclose(out.logprobs[0], picked, atol=tolerance)
        assert (wanted.max(axis=-1) - picked < 2 * tolerance).all()


def expected(logits, temperature, top_p):
    """The distribution of a row in float64."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    order = np.argsort(-scaled, kind="stable")
    share = np.exp(scaled[order]) / np.exp(scaled).sum()
    kept = order[: 1 + int((np.cumsum(share) < np.float64(np.float32(top_p))).sum())] if top_p < 1 else order
    floor = scaled[kept].min()
    out = np.where(scaled >= floor, np.exp(scaled), 0)
    return out / out.sum()


LOGITS = {
    "plain": [2.0, 1.0, 0.5, -1.0],
    "1e5": [1e5, 9.9e4, -1e5, 0.0],
    "near": [3e3, 3e3 - 1e-3, -3e3, 0.0],
    "equal": [7.0, 7.0, 7.0, 7.0],
    "as large as float32": [3e38, -3e38, 0.0, 1e38],
    "out of reach": [1.0, -np.inf, 0.0, -np.inf],
    "one token": [5.0],
}


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 1e-9, 1e-38, 1e-45])
def test_a_distribution_is_what_float64_says(name, temperature, top_p):
    logits = np.array(LOGITS[name], np.float32)
    program = jax.jit(log_distribution, static_argnums=2)
    got = np.exp(program(jnp.asarray(logits)[None], rows_of([jkv.Sampling(temperature, top_p)]), top_p < 1)[0])
    np.testing.assert_allclose(got, expected(logits, temperature, top_p), atol=1e-5)


@pytest.mark.parametrize("logit", [np.nan, np.inf])
def test_a_distribution_of_what_is_no_number_is_none(logit):
    rows = rows_of([jkv.Sampling(top_p=0.5)])
    assert np.isnan(log_distribution(jnp.asarray([[1.0, logit, 0.0]]), rows, True)).any()


@pytest.mark.parametrize(
    "sampling", [jkv.Sampling(temperature=1e-6, seed=1), jkv.Sampling(top_p=1e-9, seed=1), jkv.Sampling(top_p=1e-45, seed=1)]
)
@pytest.mark.parametrize("factor", [1.0, 1e5])
def test_the_narrowest_draws_are_greedy(sampling, factor):
    params = make_model().params
    model = jkv.Model(params.replace(final_norm=params.final_norm * factor))
    greedy, drawn = (jkv.generate(model, PROMPT, sampling=each, max_new_tokens=8, **KNOBS) for each in (None, sampling))
    np.testing.assert_array_equal(drawn.tokens, greedy.tokens)
    assert np.isfinite(drawn.logprobs).all()
    assert drawn.finish_reason == ["length"]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 30, 31])
def test_a_prompt_at_a_limit_of_pages_or_positions_is_what_float64_says(length):
    model = make_model(max_positions=32)
    prompt = (PROMPT * 8)[:length]
    out = jkv.generate(model, prompt, **KNOBS)
    assert out.lengths.tolist() == [32 - length]
    wanted = reference_log_probs(model.params, [*prompt, *out.tokens[0]])[length - 1 : -1]
    np.testing.assert_array_equal(out.tokens[0], wanted.argmax(axis=-1))


@pytest.mark.parametrize("length", [32, 33, 1000])
def test_a_prompt_beyond_the_positions_is_refused(length):
    with pytest.raises(ValueError, match="must fit the model's 32 positions"):
        jkv.generate(make_model(max_positions=32), [1] * length, **KNOBS)


def test_infinity_in_the_middle_ends_a_sample_with_nan_and_no_other():
    """Token 7 overflows float16; a row that reads it after some steps ends, and one beside it goes on as by itself."""
    params = make_model(jnp.float16, tie_embeddings=False).params
    layer = params.layers[0]
    # Channel 0 feeds itself, a little for its usual values, and beyond float16 for the largest.
    layer = layer.replace(
        gate=layer.gate.at[:, 0].set(0).at[0, 0].set(3),
        up=layer.up.at[:, 0].set(0).at[0, 0].set(3),
        down=layer.down.at[0].set(0).at[0, 0].set(0.2),
    )
    params = params.replace(layers=(layer, *params.layers[1:]))
    plain = jkv.generate(jkv.Model(params), [PROMPT, [4, 5]], max_new_tokens=24, **KNOBS)
    healthy = plain.tokens[1].tolist()
    bad = next(token for token in plain.tokens[0].tolist()[2:] if token not in (*PROMPT, *plain.tokens[0][:2], *healthy, 4, 5))
    model = jkv.Model(params.replace(embedding=params.embedding.at[bad].set(0).at[bad, 0].set(65_504)))
    out = jkv.generate(model, [PROMPT, [4, 5]], max_new_tokens=24, **KNOBS)
    first = plain.tokens[0].tolist().index(bad)
    assert out.finish_reason == ["nan", "length"]
    assert out.tokens[0, : first + 1].tolist() == plain.tokens[0, : first + 1].tolist()
    assert out.lengths[0] == first + 2  # the token whose distribution is no number is the last
    assert np.isfinite(out.logprobs[0, : first + 1]).all()
    assert out.tokens[1].tolist() == healthy
    np.testing.assert_array_equal(out.logprobs[1], plain.logprobs[1])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"head_size": 7}, "an even number of channels"),
        ({"num_query_heads": 3}, "must be a multiple of"),
        ({"rotary_size": 3}, "even"),
    ],
)
def test_a_shape_that_no_decoder_has_is_refused_before_anything_compiles(fields, words):
    with pytest.raises(ValueError, match=words):
        jkv.generate(make_model(**fields), PROMPT, **KNOBS)
