"""A tiny model with all that Qwen3.5 has: recurrent states, an output gate, offset norms and a partial rotary embedding."""

import dataclasses

import jax

from jkv.model.delta_weights import DeltaNet
from jkv.model.params import Model
from jkv.model.weight_shapes import init_params
from jkv.testing import TINY, TinyTokenizer

SIZES = DeltaNet(num_key_heads=2, num_value_heads=4, key_size=8, value_size=12, taps=4)
CONFIG = dataclasses.replace(
    TINY,
    family="qwen3_5_text",
    num_layers=4,
    state_layers=(0, 2),
    delta_net=SIZES,
    rotary_size=4,
    qkv_bias=False,
    qk_norm=True,
    norm_offset=1.0,
    has_output_gate=True,
    tie_embeddings=False,
)


def recurrent_model(config=CONFIG, seed=2, scale=0.2):
    """A model with random weights, norms and biases included."""
    key = jax.random.key(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        if not name.endswith(("norm", "bias")):
            return leaf
        return leaf + 0.3 * jax.random.normal(jax.random.fold_in(key, len(name) + 31 * leaf.size), leaf.shape)

    params = init_params(config, key, scale=scale)
    return Model(jax.tree_util.tree_map_with_path(draw, params), TinyTokenizer(), name="tiny")
