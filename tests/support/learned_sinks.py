"""A tiny model with all that gpt-oss has: sinks, biases, windows, and experts with bounded values."""

import dataclasses

import jax

from jkv.testing import TINY

CONFIG = dataclasses.replace(
    TINY,
    num_layers=3,
    window=6,
    window_layers=(0,),
    family="gpt_oss",
    tie_embeddings=False,
    out_bias=True,
    has_sinks=True,
    num_experts=4,
    num_active_experts=2,
    mlp_width=16,
    normalises_experts=True,
    expert_bias=True,
    swiglu_limit=1.5,
    swiglu_alpha=1.702,
)


def with_random_vectors(model, seed=7):
    """The model with biases and sinks that are not zero."""
    key = jax.random.key(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        if not name.endswith(("bias", "sink")):
            return leaf
        scale = 1.5 if name.endswith("sink") else 0.3
        return scale * jax.random.normal(jax.random.fold_in(key, len(name) + 31 * leaf.size), leaf.shape)

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(draw, model.params))
