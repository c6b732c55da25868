"""A tiny model with all that OLMo-3 has: later norms, norms over all heads, windows, and two kinds of RoPE."""

import dataclasses

import jax

from jkv.model.params import RopeScaling
from jkv.testing import TINY

CONFIG = dataclasses.replace(
    TINY,
    num_layers=4,
    window=6,
    window_layers=(0, 1, 3),
    family="olmo3",
    qkv_bias=False,
    tie_embeddings=False,
    all_heads_norm=True,
    norms_after=True,
    rope_theta=100.0,
    rope_scaling=RopeScaling("yarn", 8.0, 1.0, 1.0, 512, 2.0, 1.0, 1.5),
    window_theta=50.0,
    window_scaling=RopeScaling(),
)


def with_random_norms(model, seed=5):
    """The model with norms whose weights are not all equal."""
    key = jax.random.key(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        if not name.endswith("norm"):
            return leaf
        return leaf + 0.3 * jax.random.normal(jax.random.fold_in(key, len(name) + 31 * leaf.size), leaf.shape)

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(draw, model.params))
