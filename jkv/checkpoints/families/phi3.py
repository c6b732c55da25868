"""Phi-3 and Phi-4 (arXiv 2404.14219): stacked projections, and an optional partial rotary embedding."""

from jkv.checkpoints.family import TENSORS, Family, alike

STACKED = {
    **dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj.weight"),
    **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj.weight"),
}

FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    has_partial_rotary=True,
    rope_kinds=("default", "longrope"),
    kinds=alike,
    defaults={"num_key_value_heads": None, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    tensors=TENSORS | STACKED,
)
