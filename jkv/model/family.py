"""The record that describes a model family; `jkv.model.families` has one file per family.

All families run on one decoder, which reads the switches of `ModelConfig`. A `Family` defines which switches its config.json
sets, and how its checkpoints name and stack the weights. How a weight is split over a mesh follows from the axes of
`jkv.model.params.LayerParams`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

TENSORS = {  # field of Params or LayerParams -> tensor of a Llama checkpoint, in which matrices are transposed
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",  # this and the following have the prefix of the layer
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
}


def layer_types(config: Any) -> set[str]:
    """The kinds of attention in the `layer_types` of a transformers configuration; none without that field."""
    return set(getattr(config, "layer_types", None) or [])


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
      name: `model_type` in config.json.
      architecture: the class in `architectures` of config.json.
      config_type: the `model_type` of the transformers configuration that reads config.json; None means `name`.
      qkv_bias: whether query, key and value projections add a bias.
      qk_norm: whether queries and keys are normalised per head.
      has_partial_rotary: whether `partial_rotary_factor` is used; in other families transformers ignores it.
      has_experts: whether its feed-forward blocks are mixtures of experts.
      has_layers_without_rope: whether config.json lists layers whose queries and keys are not rotated (`no_rope_layers`).
      has_windows: whether its layers may have a sliding window, each by its entry of `layer_types`.
      bias_switches: fields of config.json that add biases which the decoder lacks.
      attention_kinds: the kinds of attention that a transformers configuration uses.
      tensors: field of `Params` or `LayerParams` -> its tensor in a checkpoint. Fields of one tensor are stacked in it by rows,
        in the order of the fields. A field of `Experts` has a tensor of each expert `{}`.
      layer_prefix: the prefix of the tensors of layer `{}`.
      is_read_from_gguf: whether GGUF files of it are read; their `general.architecture` is then its name.
      is_interleaved_in_gguf: whether GGUF files have the halves of each query and key head interleaved by rows.
      strips_in_gguf: whether the SentencePiece tokenizer of a GGUF file ignores spaces after special tokens.
    """

    name: str
    architecture: str
    config_type: str | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    has_partial_rotary: bool = False
    has_experts: bool = False
    has_layers_without_rope: bool = False
    has_windows: bool = False
    bias_switches: tuple[str, ...] = ("attention_bias", "mlp_bias")
    attention_kinds: Callable[[Any], set[str]] = layer_types
    tensors: Mapping[str, str] = dataclasses.field(default_factory=lambda: TENSORS)
    layer_prefix: str = "model.layers.{}."
    is_read_from_gguf: bool = True
    is_interleaved_in_gguf: bool = False
    strips_in_gguf: bool = False

    def tensor_of(self, leaf: str) -> str:
        """The tensor of a leaf of `Params` with a name such as `layers.0.query`."""
        _, layer, field = leaf.split(".", 2) if leaf.startswith("layers.") else ("", None, leaf)
        return ("" if layer is None else self.layer_prefix.format(layer)) + self.tensors[field]
