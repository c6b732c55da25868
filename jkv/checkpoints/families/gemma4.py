"""Gemma 4 (2026, ai.google.dev/gemma): layers with a window have heads of another size and number than those without.

Layers with full attention may have no value projection: their values are the products with the key matrix, which get a norm of
their own and no RoPE. Only a quarter of their pairs of channels turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jkv.checkpoints.families.gemma3 import GEGLU, NORMS, PREFIXES, TEXT_RULES
from jkv.checkpoints.family import (
    EVEN,
    FULL,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_VOCAB,
    TENSORS,
    UNREAD,
    WINDOWED,
    Family,
    Multimodal,
    every,
    kinds_by,
)
from jkv.checkpoints.json_files import SWITCH, Rule, integer, nullable
from jkv.model.params import ModelConfig

INPUTS = {
    "layer_inputs.embedding": "model.embed_tokens_per_layer.weight",
    "layer_inputs.projection": "model.per_layer_model_projection.weight",
    "layer_inputs.norm": "model.per_layer_projection_norm.weight",
    "input_gate": "per_layer_input_gate.weight",
    "input_out": "per_layer_projection.weight",
    "input_norm": "post_per_layer_input_norm.weight",
    "layer_scale": "layer_scalar",
}
EXPERTS = {
    "mlp_out_norm": "post_feedforward_layernorm_1.weight",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_out_norm": "post_feedforward_layernorm_2.weight",
    "experts.router": "router.proj.weight",
    "experts.router_scale": "router.scale",
    "experts.expert_scale": "router.per_expert_scale",
    **dict.fromkeys(("experts.gate", "experts.up"), "experts.gate_up_proj"),
    "experts.down": "experts.down_proj",
}
DEFAULTS = {
    "hidden_activation": GEGLU,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "attention_k_eq_v": False,
    "final_logit_softcapping": None,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "rope_parameters": {
        WINDOWED: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
HEADS = {"head_dim": EVEN, "num_key_value_heads": integer(1, 1 << 12)}
OF_LAYERS = Rule(
    "an object with head_dim and num_key_value_heads of some layers",
    lambda value: (
        isinstance(value, dict)
        and len(value) <= MAX_LAYERS
        and all(layer.isdecimal() and layer.isascii() and len(layer) < 5 for layer in value)
        and all(isinstance(one, dict) and one.keys() <= HEADS.keys() for one in value.values())
        and all(HEADS[name].holds(number) for one in value.values() for name, number in one.items())
    ),
)


def kinds(config: Any) -> Sequence[str]:
    """The kind of attention of each layer; the last has full attention whatever config.json says, as in transformers."""
    return [*kinds_by(every(6))(config)[:-1], FULL]


def heads_of(config: Any, layer: int) -> tuple[int, int]:
    """The size of a layer's heads, and the number of its KV heads."""
    own = {"head_dim": config.head_dim, "num_key_value_heads": config.num_key_value_heads}
    if config.per_layer_config is not None:
        own |= config.per_layer_config.get(str(layer), {})
    elif config.layer_types[layer] == FULL:
        own["head_dim"] = config.global_head_dim
        if config.attention_k_eq_v and config.num_global_key_value_heads is not None:
            own["num_key_value_heads"] = config.num_global_key_value_heads
    return own["head_dim"], own["num_key_value_heads"]


def reads(config: Any) -> dict[str, Any]:
    """Switches of `ModelConfig` from a transformers configuration.

    Raises:
      ValueError: layers of one kind with different heads, or a part that is not supported.
    """
    heads: dict[str, set[tuple[int, int]]] = {FULL: set(), WINDOWED: set()}
    for layer, kind in enumerate(config.layer_types):
        heads.setdefault(kind, set()).add(heads_of(config, layer))
    several = [kind for kind, found in heads.items() if len(found) > 1]
    if several:
        raise ValueError(f"layers of one kind must have the same heads, got several in {', '.join(several)}")
    owners = config.num_hidden_layers - config.num_kv_shared_layers
    lonely = set(config.layer_types[max(owners, 0) :]) - set(config.layer_types[: max(owners, 0)])
    if lonely or owners < 1:
        raise ValueError(
            f"num_kv_shared_layers={config.num_kv_shared_layers} must leave a layer of each kind that stores keys and values, "
            f"got none of {', '.join(sorted(lonely))} among the first {max(owners, 0)}"
        )
    inputs, tokens = config.hidden_size_per_layer_input, config.vocab_size_per_layer_input
    if inputs and tokens != config.vocab_size:
        raise ValueError(f"vocab_size_per_layer_input must be vocab_size={config.vocab_size}, got {tokens}")
    experts = {name: getattr(config, name) or 0 for name in ("num_experts", "top_k_experts", "moe_intermediate_size")}
    if config.enable_moe_block and not (0 < experts["top_k_experts"] <= experts["num_experts"] and min(experts.values())):
        raise ValueError(f"top_k_experts must be at most num_experts, and all of them positive, got {experts}")
    (head_size, kv_heads), of_windows = min(heads[FULL]), min(heads[WINDOWED], default=(0, 0))
    return {
        "head_size": head_size,
        "num_kv_heads": kv_heads,
        "window_head_size": 0 if of_windows[0] == head_size else of_windows[0],
        "window_kv_heads": 0 if of_windows[1] == kv_heads else of_windows[1],
        "keys_are_values": config.attention_k_eq_v,
        "num_sharing_layers": config.num_kv_shared_layers,
        "sharing_mlp_width": 2 * config.intermediate_size if shares_widely(config) else 0,
        "layer_input_width": inputs,
        "final_softcap": float(config.final_logit_softcapping or 0.0),
    } | (experts_of(experts, config.intermediate_size) if config.enable_moe_block else {})


def shares_widely(config: Any) -> bool:
    """Whether feed-forward blocks of layers that share keys and values are twice as wide."""
    return config.use_double_wide_mlp and config.num_kv_shared_layers > 0


def experts_of(fields: Mapping[str, int], width: int) -> dict[str, Any]:
    """The switches of `ModelConfig` for experts beside a feed-forward block of this width."""
    return {
        "num_experts": fields["num_experts"],
        "num_active_experts": fields["top_k_experts"],
        "mlp_width": fields["moe_intermediate_size"],
        "shared_width": width,
        "norms_experts": True,
        "normalises_experts": True,
    }


def writes(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json for these switches."""
    own = config.in_windows
    return {
        "head_dim": own.head_size,
        "num_key_value_heads": own.num_kv_heads,
        "global_head_dim": config.head_size,
        "num_global_key_value_heads": config.num_kv_heads if config.keys_are_values else None,
        "attention_k_eq_v": config.keys_are_values,
        "final_logit_softcapping": config.final_softcap or None,
        "num_kv_shared_layers": config.num_sharing_layers,
        "use_double_wide_mlp": config.sharing_mlp_width > 0,
        "hidden_size_per_layer_input": config.layer_input_width,
        "vocab_size_per_layer_input": config.vocab_size,
        "enable_moe_block": config.num_experts > 0,
        "num_experts": config.num_experts or None,
        "top_k_experts": config.num_active_experts or None,
        "moe_intermediate_size": config.mlp_width if config.num_experts else None,
        "intermediate_size": config.shared_width or config.mlp_width,
    }


FAMILY = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    qk_norm=True,
    has_windows=True,
    has_rope_by_kind=True,
    rope_kinds=("default", "linear", "llama3", "longrope", "proportional", "yarn"),
    switches={
        "norms_around": True,
        "norm_offset": 0.0,
        "activation": "gelu_tanh",
        "scales_embedding": True,
        "attention_scale": 1.0,
        "value_norm": True,
        "has_layer_scale": True,
    },
    reads=reads,
    writes=writes,
    rules=TEXT_RULES
    | {
        "global_head_dim": EVEN,
        "num_global_key_value_heads": nullable(integer(1, 1 << 12)),
        "per_layer_config": nullable(OF_LAYERS),
        "attention_k_eq_v": SWITCH,
        "use_bidirectional_attention": Rule("null or 'vision': text must be causal", lambda value: value in (None, "vision")),
        "hidden_size_per_layer_input": integer(0, 1 << 16),
        "vocab_size_per_layer_input": integer(0, MAX_VOCAB),
        "num_kv_shared_layers": integer(0, MAX_LAYERS),
        "use_double_wide_mlp": SWITCH,
        "enable_moe_block": SWITCH,
        "num_experts": nullable(integer(0, MAX_EXPERTS)),
        "top_k_experts": nullable(integer(0, MAX_EXPERTS)),
        "moe_intermediate_size": nullable(integer(0, 1 << 20)),
    },
    activation_field="hidden_activation",
    activations=(GEGLU,),
    multimodal=Multimodal(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        frozenset(
            {
                *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "vision_soft_tokens_per_image"),
                *("boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id", "vision_config", "audio_config"),
            }
        ),
        PREFIXES,
        ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    ),
    bias_switches=("attention_bias",),
    kinds=kinds,
    defaults=DEFAULTS,
    unread_fields=UNREAD,
    tensors=TENSORS | NORMS | EXPERTS | INPUTS,
    untransposed=frozenset({"experts.gate", "experts.up", "layer_inputs.embedding"}),
)
