"""Gemma 3 (arXiv 2503.19786): norms around attention and MLP, GeGLU, and windows with their own RoPE in five of six layers.

The text models (270M, 1B), and the text model inside of the checkpoints that also read images (4B, 12B, 27B). Their config.json
leaves out what is the default of transformers.
"""

from typing import Any

from jkv.checkpoints.family import MAX_LAYERS, TENSORS, THETA, UNREAD, Family, Multimodal, every, kinds_by
from jkv.checkpoints.json_files import Rule, at_least, integer, nullable
from jkv.model.params import ModelConfig

NORMS = {
    "after_attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "after_mlp_norm": "post_feedforward_layernorm.weight",
}
GEGLU = "gelu_pytorch_tanh"
DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": GEGLU,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,  # of the layers with a window
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
CAP = nullable(at_least(0.01, 1e6))
TEXT_RULES = {  # of Gemma 3 and 4
    "hidden_act": Rule(f"{GEGLU!r}, as hidden_activation", lambda value: value == GEGLU),
    "hidden_activation": Rule(repr(GEGLU), lambda value: value == GEGLU),
    "final_logit_softcapping": CAP,
}
PREFIXES = {  # as transformers 4 and 5 write them
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


def reads(config: Any) -> dict[str, Any]:
    """Switches of `ModelConfig` from a transformers configuration."""
    scalar = config.query_pre_attn_scalar
    return {
        "attention_scale": 0.0 if scalar == config.head_dim else scalar**-0.5,
        "final_softcap": float(config.final_logit_softcapping or 0.0),
    }


def writes(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json for these switches."""
    return {
        "query_pre_attn_scalar": round(config.attention_scale**-2) if config.attention_scale else config.head_size,
        "final_logit_softcapping": config.final_softcap or None,
    }


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    qk_norm=True,
    has_windows=True,
    has_rope_by_kind=True,
    switches={"norms_around": True, "norm_offset": 1.0, "activation": "gelu_tanh", "scales_embedding": True},
    reads=reads,
    writes=writes,
    rules=TEXT_RULES
    | {
        "query_pre_attn_scalar": integer(1, 1 << 20),
        "attn_logit_softcapping": Rule("null, because attention has no soft cap here", lambda value: value is None),
        "use_bidirectional_attention": Rule("false: the model must be causal", lambda value: not value),
        "rope_local_base_freq": THETA,
        "sliding_window_pattern": integer(1, MAX_LAYERS),
    },
    defaults=DEFAULTS,
    activation_field="hidden_activation",
    activations=(GEGLU,),
    multimodal=Multimodal(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        frozenset({"boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image", "vision_config"}),
        PREFIXES,
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
    num_foreign_tokens=1,  # <image_soft_token>, in the tokenizer of the 1B and 270M models too
    bias_switches=("attention_bias",),
    kinds=kinds_by(lambda config, layer: every(config.sliding_window_pattern)(config, layer)),
    unread_fields=UNREAD,
    ignored_fields=frozenset({"_sliding_window_pattern"}),
    tensors=TENSORS | NORMS,
)
