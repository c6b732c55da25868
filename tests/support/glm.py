"""A tiny model with all that GLM-4.5 has: a first layer without experts, grouped and biased choices, and a shared block."""

import dataclasses

import jax

from jkv.testing import TINY

CONFIG = dataclasses.replace(
    TINY,
    num_layers=3,
    family="glm4_moe",
    tie_embeddings=False,
    qk_norm=True,
    rotary_size=TINY.head_size // 2,
    num_experts=8,
    num_active_experts=3,
    mlp_width=16,
    normalises_experts=True,
    num_dense_layers=1,
    dense_width=48,
    shared_width=32,
    routes_by_sigmoid=True,
    num_expert_groups=4,
    num_active_groups=2,
    route_scale=1.5,
)


def with_random_biases(model, seed=11):
    """The model with biases that are not zero."""
    key = jax.random.key(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        if not name.endswith("bias"):
            return leaf
        return 0.2 * jax.random.normal(jax.random.fold_in(key, len(name) + 31 * leaf.size), leaf.shape)

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(draw, model.params))
