"""Qwen3.5 and Qwen3.6, dense (2026): three of four layers have a recurrent state, every fourth has gated full attention.

The layers with a state are in `jkv.model.delta_net`. Attention rotates a quarter of a head's channels, and its output is
multiplied by a sigmoid. Checkpoints of the makers are multimodal; of these the text model is read. Text has the same three
positions for all sections of their RoPE (`mrope_section`), which is then plain.
"""

from typing import Any

from jkv.checkpoints.family import FULL, MAX_LAYERS, SHARE, TENSORS, UNREAD, Family, Multimodal, every, kinds_by
from jkv.checkpoints.json_files import Rule, integer, nullable
from jkv.model.delta_weights import DeltaNet
from jkv.model.params import ModelConfig

RECURRENT = "linear_attention"  # a kind of layers
SIZES = {  # field of `DeltaNet` -> field of config.json
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
DELTA = {
    **dict.fromkeys(("delta.query", "delta.key", "delta.value"), "linear_attn.in_proj_qkv.weight"),
    **dict.fromkeys(("delta.query_taps", "delta.key_taps", "delta.value_taps"), "linear_attn.conv1d.weight"),
    "delta.rate": "linear_attn.in_proj_b.weight",
    "delta.decay": "linear_attn.in_proj_a.weight",
    "delta.decay_bias": "linear_attn.dt_bias",
    "delta.log_decay": "linear_attn.A_log",
    "delta.gate": "linear_attn.in_proj_z.weight",
    "delta.norm": "linear_attn.norm.weight",
    "delta.out": "linear_attn.out_proj.weight",
}


DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def only(value: Any) -> Rule:
    """The rule of a field with one meaning here."""
    return Rule(repr(value), lambda given: type(given) is type(value) and given == value)


def reads(config: Any) -> dict[str, Any]:
    """Switches of `ModelConfig` from a transformers configuration.

    Raises:
      ValueError: another kind of layer, no layer with full attention, or heads that do not divide.
    """
    states = tuple(layer for layer, kind in enumerate(config.layer_types) if kind == RECURRENT)
    sizes = DeltaNet(**{field: getattr(config, name) for field, name in SIZES.items()})
    if others := {*config.layer_types} - {RECURRENT, FULL}:
        raise ValueError(f"layer_types must be {RECURRENT} or {FULL}, got {sorted(others)}")
    if len(states) == config.num_hidden_layers:
        raise ValueError("a layer must have full attention, for policies to act on, got a recurrent state in all of them")
    if sizes.num_value_heads % sizes.num_key_heads:
        raise ValueError(
            "linear_num_value_heads must be a multiple of linear_num_key_heads, got "
            f"{sizes.num_value_heads} and {sizes.num_key_heads}"
        )
    return {"state_layers": states, "delta_net": sizes if states else None}


def writes(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json for these switches."""
    sizes = {} if config.delta_net is None else {name: getattr(config.delta_net, field) for field, name in SIZES.items()}
    return sizes | {
        "layer_types": [RECURRENT if layer in config.state_layers else FULL for layer in range(config.num_layers)],
        "partial_rotary_factor": (config.rotary_size or config.head_size) / config.head_size,
    }


FAMILY = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    qk_norm=True,
    has_partial_rotary=True,
    switches={"norm_offset": 1.0, "has_output_gate": True},
    reads=reads,
    writes=writes,
    rules={
        **{name: integer(1, 1 << 12) for name in SIZES.values()},
        "linear_conv_kernel_dim": integer(2, 64),
        "full_attention_interval": integer(1, MAX_LAYERS),  # transformers reads it where there are no layer_types
        "partial_rotary_factor": nullable(SHARE),
        "attn_output_gate": only(True),
        "mamba_ssm_dtype": only("float32"),  # of the states
        "output_gate_type": only("swish"),  # of the layers with a state
        "mlp_only_layers": only([]),
    },
    multimodal=Multimodal(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        frozenset(
            {
                *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
                "language_model_only",
            }
        ),
        {"model.language_model.": "model."},
        ("model.visual.", "mtp."),  # mtp.: a head that predicts several tokens
    ),
    bias_switches=("attention_bias",),
    kinds=kinds_by(lambda config, layer: every(config.full_attention_interval, RECURRENT)(config, layer)),
    state_kind=RECURRENT,
    defaults=DEFAULTS,
    unread_fields=UNREAD - {"partial_rotary_factor"},
    ignored_fields=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
    tensors=TENSORS | DELTA,
    untransposed=frozenset({"delta.query_taps", "delta.key_taps", "delta.value_taps"}),
)
