"""Tiny models with all that Gemma 3 and Gemma 4 have."""

import dataclasses

from jkv.model.params import RopeScaling
from jkv.testing import TINY, tiny_model
from tests.support.olmo3 import with_random_norms

GEMMA3 = dataclasses.replace(
    TINY,
    num_layers=4,
    window=6,
    window_layers=(0, 1, 3),
    family="gemma3_text",
    qkv_bias=False,
    qk_norm=True,
    norms_around=True,
    norm_offset=1.0,
    attention_scale=6**-0.5,
    activation="gelu_tanh",
    scales_embedding=True,
    final_softcap=12.0,
    rope_theta=100.0,
    rope_scaling=RopeScaling("linear", 4.0),
    window_theta=50.0,
    window_scaling=RopeScaling(),
)
GEMMA4 = dataclasses.replace(
    GEMMA3,
    family="gemma4_text",
    head_size=16,
    num_kv_heads=1,
    window_head_size=8,
    window_kv_heads=2,
    norm_offset=0.0,
    attention_scale=1.0,
    value_norm=True,
    keys_are_values=True,
    has_layer_scale=True,
    window_layers=(0, 2),
    rope_scaling=RopeScaling("proportional", share=0.25),
)
EXPERTS = dataclasses.replace(  # as the 26B-A4B has them
    GEMMA4,
    num_experts=4,
    num_active_experts=2,
    mlp_width=16,
    shared_width=GEMMA4.mlp_width,
    norms_experts=True,
    normalises_experts=True,
)
SHARING = dataclasses.replace(  # as E2B and E4B do: layers 4 and 5 read the keys and values of 2 and 3
    GEMMA4,
    num_layers=6,
    window_layers=(0, 2, 4),
    num_kv_heads=2,
    window_kv_heads=0,
    keys_are_values=False,
    num_sharing_layers=2,
    sharing_mlp_width=96,
    layer_input_width=8,
)


def random_model(config, tokenizer=None):
    """A model whose norms and layer scales are not all equal, and whose attention is not too sharp for float32."""
    model = with_random_norms(tiny_model(1, config, tokenizer))
    layers = [
        layer.replace(
            query_norm=0.5 * layer.query_norm,
            layer_scale=None if layer.layer_scale is None else (0.8 + 0.05 * index) * layer.layer_scale,
        )
        for index, layer in enumerate(model.params.layers)
    ]
    return dataclasses.replace(model, params=model.params.replace(layers=tuple(layers)))
