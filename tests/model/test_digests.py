"""Digests of models: every number counts, and how weights are kept does not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.testing import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=0)


def changed(params, path, value):
    """The weights with one number changed."""
    leaves, tree = jax.tree.flatten(params)
    leaves[path] = leaves[path].at[(-1,) * leaves[path].ndim].add(value)
    return jax.tree.unflatten(tree, leaves)


def test_a_change_of_any_weight_s_last_number_changes_the_digest(model):
    known = {model.digests["weights"]}
    for i, leaf in enumerate(jax.tree.leaves(model.params)):
        other = dataclasses.replace(model, params=changed(model.params, i, 1e-3))
        assert other.digest == model.digest or leaf.size <= 64 or leaf.ndim == 1  # which reads the first numbers alone
        known.add(other.digests["weights"])
        assert {**other.digests, "weights": None} == {**model.digests, "weights": None}
    assert len(known) == 1 + len(jax.tree.leaves(model.params))


def test_numbers_that_trade_places_change_the_digest(model):
    embedding = model.params.embedding
    swapped = embedding.at[1].set(embedding[2]).at[2].set(embedding[1])
    other = dataclasses.replace(model, params=model.params.replace(embedding=swapped))
    assert other.digests["weights"] != model.digests["weights"]


def test_the_digest_does_not_depend_on_how_weights_are_kept(model):
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    as_floats = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)
    assert jkv.Model(rounded).digests == jkv.Model(as_floats).digests
    assert jkv.Model(rounded).digests["weights"] != model.digests["weights"]
    assert jkv.Model(jkv.join_weights(model.params)).digests == jkv.Model(model.params).digests
    in_codes = jkv.Model(jkv.quantise_weights(model.params, "int8")).digests
    assert in_codes["weights"] != model.digests["weights"]


def test_the_tokenizer_and_the_configuration_have_digests_of_their_own():
    model, again = (checkpoint.load("tiny-reasoner") for _ in range(2))
    assert again.digests == model.digests
    again.tokenizer.add_tokens(["another"])
    other = dataclasses.replace(model, tokenizer=again.tokenizer)
    assert [name for name in other.digests if other.digests[name] != model.digests[name]] == ["tokenizer"]
    chats = checkpoint.load("tiny-reasoner").tokenizer
    chats.chat_template = "{{ messages }}"
    assert dataclasses.replace(model, tokenizer=chats).digests["tokenizer"] != model.digests["tokenizer"]
    config = dataclasses.replace(model.config, end_ids=(7,))
    other = dataclasses.replace(model, params=model.params.replace(config=config))
    assert [name for name in other.digests if other.digests[name] != model.digests[name]] == ["config"]


def test_padding_that_a_caller_asked_for_is_no_other_tokenizer():
    model = checkpoint.load("tiny-reasoner")
    before = model.digests["tokenizer"]
    model.tokenizer(["b=3;", "b=3;c=7;"], padding=True)
    assert dataclasses.replace(model).digests["tokenizer"] == before


def test_policies_with_other_steering_vectors_have_other_definitions():
    one, other = (jkv.seal(jkv.SteeringVector(np.full((2, 8), value, np.float32))) for value in (1.0, 2.0))
    assert one.definition != other.definition
    assert one.definition == jkv.seal(jkv.SteeringVector(np.full((2, 8), 1.0, np.float32))).definition
