"""Muon orthogonalises what it should, and a run may begin with the weights of a smaller vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.checkpoints import loading as checkpoint
from jkv.model.params import ModelConfig
from jkv.model.weight_shapes import init_params
from research.tasks import trail_vocabulary, vocabulary
from research.tasks.first_weights import extend
from research.tasks.optimizers import MUON_SCALE, make_optimizer, orthogonal

CONFIG = ModelConfig("qwen2", 96, 16, 1, 2, 1, 8, 32, 256, qkv_bias=True, tie_embeddings=True)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Training code runs as users run it: optax is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("shape", [(16, 16), (32, 16), (16, 32)], ids=str)
def test_an_orthogonal_matrix_has_singular_values_near_1(shape):
    matrix = jax.random.normal(jax.random.key(0), shape) * jnp.logspace(-1, 1, shape[1])
    values = np.linalg.svd(orthogonal(matrix), compute_uv=False) / max(1, shape[1] / shape[0]) ** 0.5
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_muon_steps_by_orthogonal_matrices_in_layers_and_by_adam_elsewhere():
    params = init_params(CONFIG, jax.random.key(0))
    gradient = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape, leaf.dtype), params)
    optimizer = make_optimizer("muon", ((0, 0.1), (10, 0.1)), weight_decay=0.0)
    update, _ = optimizer.update(gradient, optimizer.init(params), params)
    values = np.linalg.svd(update.layers[0].query, compute_uv=False)
    assert 0.5 * 0.1 * MUON_SCALE < values.min() <= values.max() < 1.3 * 0.1 * MUON_SCALE
    for leaf, slope in ((update.embedding, gradient.embedding), (update.final_norm, gradient.final_norm)):
        np.testing.assert_allclose(leaf, -0.1 * np.sign(slope), atol=1e-3)  # Adam's first step


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match='"adamw" or "muon"; got \'sgd\''):
        make_optimizer("sgd", ((0, 0.1), (1, 0.1)), 0.0)


def test_weights_of_a_smaller_vocabulary_are_kept_and_names_lean_to_those_that_are_looked_up():
    old, tokenizer = checkpoint.load("tiny-reasoner").params, trail_vocabulary.make_tokenizer()
    config = dataclasses.replace(old.config, vocab_size=trail_vocabulary.SIZE)
    params = extend("tiny-reasoner", config, tokenizer, jax.random.key(0))
    used = len((*vocabulary.SPECIAL, *vocabulary.WORDS, *vocabulary.PAIRS))
    np.testing.assert_array_equal(params.embedding[:used], old.embedding[:used].astype(jnp.float32))
    assert params.embedding.shape == (trail_vocabulary.SIZE, config.width)
    np.testing.assert_array_equal(params.layers[0].query, old.layers[0].query.astype(jnp.float32))
    rows = {name: params.embedding[tokenizer.convert_tokens_to_ids(name)] for name in ("b=", "b>", "b+", "c=")}
    unit = {name: row / jnp.linalg.norm(row) for name, row in rows.items()}
    own, other = (min(float(unit[name] @ unit[new]) for new in ("b>", "b+")) for name in ("b=", "c="))
    assert own > 0.5
    assert own > 2 * other
    with pytest.raises(ValueError, match="must have the width and layers"):
        extend("tiny-reasoner", dataclasses.replace(config, width=128), tokenizer, jax.random.key(0))
    with pytest.raises(ValueError, match="and at most its tokens"):
        extend("tiny-reasoner", dataclasses.replace(config, vocab_size=64), tokenizer, jax.random.key(0))


def test_weights_of_the_same_vocabulary_are_taken_as_they_are(tmp_path):
    tokenizer = trail_vocabulary.make_tokenizer()
    config = dataclasses.replace(CONFIG, vocab_size=trail_vocabulary.SIZE)
    old = init_params(config, jax.random.key(1))
    checkpoint.export(old, tokenizer, tmp_path / "model", jnp.float32)
    params = extend(str(tmp_path / "model"), config, tokenizer, jax.random.key(0))
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(old), strict=True):
        np.testing.assert_array_equal(ours, theirs)
