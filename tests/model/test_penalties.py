"""Penalties against their definitions, token by token, and counts against plain counting."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.model.sampling import (
    Sampling,
    TokenCounts,
    count_next,
    count_tokens,
    counts_in_block,
    log_distribution,
    penalise,
    rows_of,
)

VOCAB = 40
PENALTIES = [
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.7),
    Sampling(presence_penalty=0.5),
    Sampling(presence_penalty=-2.0),
    Sampling(frequency_penalty=0.3),
    Sampling(repetition_penalty=1.1, presence_penalty=-0.4, frequency_penalty=2.0),
    Sampling(),
]
PENALISE = jax.jit(penalise)


def penalised(logits, prompt, completion, sampling):
    """The logits after the penalties, by their definitions, in float64."""
    out, times = np.array(logits, np.float64), collections.Counter(completion)
    for token in {*prompt, *completion}:
        out[token] *= 1 / sampling.repetition_penalty if out[token] > 0 else sampling.repetition_penalty
    for token, count in times.items():
        out[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return out


def texts_of(rng, num_rows):
    """Pairs of prompt and completion, in which some tokens come several times."""
    return [
        (rng.integers(0, VOCAB // 2, 1 + 3 * row).tolist(), rng.integers(5, VOCAB, row * 5).tolist()) for row in range(num_rows)
    ]


def test_penalties_are_what_their_definitions_say():
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((len(PENALTIES), VOCAB)) * 5).astype(np.float32)
    logits[:, 3], logits[:, 7] = -np.inf, 0.0
    texts = texts_of(rng, len(PENALTIES))
    counts = jax.tree.map(jnp.asarray, count_tokens(texts, VOCAB))
    got = PENALISE(jnp.asarray(logits), rows_of(PENALTIES).penalties, counts)
    for row, (sampling, text) in enumerate(zip(PENALTIES, texts, strict=True)):
        np.testing.assert_allclose(
            got[row], penalised(logits[row], *text, sampling), rtol=1e-6, atol=1e-6, err_msg=str(sampling)
        )


def test_a_row_without_penalties_is_the_same_bit_for_bit_among_rows_with_some():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((3, VOCAB)) * 10, jnp.bfloat16)
    counts = jax.tree.map(jnp.asarray, count_tokens(texts_of(rng, 3), VOCAB))
    settings = [PENALTIES[0], Sampling(0.7), PENALTIES[5]]
    program = jax.jit(log_distribution, static_argnums=2)
    among = program(logits, rows_of(settings), False, counts)
    np.testing.assert_array_equal(among[1], program(logits, rows_of([Sampling(0.7)] * 3), False)[1])
    assert (np.asarray(among)[::2] != np.asarray(program(logits, rows_of([Sampling()] * 3), False))[::2]).any()


def test_penalties_come_before_temperature_and_cuts():
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((1, VOCAB)) * 3).astype(np.float32)
    prompt, completion = [[int(logits.argmax())] * 3, [1, 1, 2]]
    counts = jax.tree.map(jnp.asarray, count_tokens([(prompt, completion)], VOCAB))
    cuts = {"temperature": 0.6, "top_p": 0.8, "top_k": 9}
    sampling = Sampling(**cuts, repetition_penalty=1.8, frequency_penalty=0.7)
    first = penalised(logits[0], prompt, completion, sampling).astype(np.float32)
    got = log_distribution(jnp.asarray(logits), rows_of([sampling]), True, counts)
    np.testing.assert_allclose(
        got[0], log_distribution(jnp.asarray(first[None]), rows_of([Sampling(**cuts)]), True)[0], atol=1e-5
    )


@pytest.mark.parametrize("processor", ["RepetitionPenaltyLogitsProcessor", "MinPLogitsWarper", "TopKLogitsWarper"])
def test_transformers_processors_agree(processor):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process

    logits = (np.random.default_rng(3).standard_normal((1, VOCAB)) * 3).astype(np.float32)
    tokens, name = [4, 9, 4, 11], {"R": "repetition_penalty", "M": "min_p", "T": "top_k"}[processor[0]]
    value = {"repetition_penalty": 1.4, "min_p": 0.1, "top_k": 5}[name]
    theirs = getattr(logits_process, processor)(value)(torch.tensor([tokens]), torch.tensor(logits))
    counts = jax.tree.map(jnp.asarray, count_tokens([(tokens[:2], tokens[2:])], VOCAB))
    ours = log_distribution(jnp.asarray(logits), rows_of([Sampling(**{name: value})]), True, counts)
    np.testing.assert_allclose(ours, torch.log_softmax(theirs, dim=-1).numpy(), atol=1e-5)


def test_tokens_are_counted_one_by_one_in_the_rows_that_have_one():
    generated = jnp.zeros((2, VOCAB), jnp.int32)
    for tokens, is_new in [((3, 4), (True, True)), ((3, 4), (True, False)), ((5, 0), (True, False))]:
        generated = count_next(generated, jnp.asarray(tokens), jnp.asarray(is_new))
    np.testing.assert_array_equal(generated, count_tokens([((), (3, 3, 5)), ((), (4,))], VOCAB).generated)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_counts_of_a_block_are_those_of_each_prefix(size):
    rng = np.random.default_rng(size)
    token, start = rng.integers(0, VOCAB, (3, 23)).astype(np.int32), np.array([1, 9, 22], np.int32)
    count = jax.jit(counts_in_block, static_argnums=3)
    for first in range(0, 23, size):
        position = np.arange(first, min(first + size, 23))
        padded = np.pad(position, (0, size - len(position)))  # with zeros, as blocks are
        block = count(token, start, jnp.asarray(np.tile(padded, (3, 1)), jnp.int32), VOCAB)
        for row, i in np.ndindex(3, len(position)):
            text = token[row, : start[row]].tolist(), token[row, start[row] : position[i] + 1].tolist()
            wanted = count_tokens([text], VOCAB)
            got = TokenCounts(block.is_prompted[row, 0], block.generated[row, i])
            jax.tree.map(np.testing.assert_array_equal, got, TokenCounts(wanted.is_prompted[0], wanted.generated[0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repetition_penalty": 0.0}, r"repetition_penalty must lie in \[0.01, 100\], 1 changes nothing; got 0.0"),
        ({"repetition_penalty": 1000}, "repetition_penalty must lie in"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must lie in"),
        ({"presence_penalty": 2.5}, r"presence_penalty must lie in \[-2, 2\], 0 changes nothing; got 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must lie in"),
        ({"frequency_penalty": "much"}, "frequency_penalty must be a number; got 'much'"),
    ],
    ids=str,
)
def test_penalties_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)
