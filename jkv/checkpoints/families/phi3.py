"""Phi-3 and Phi-4 (arXiv 2404.14219): stacked projections, and an optional partial rotary embedding."""

from jkv.checkpoints.family import TENSORS, Family

STACKED = {
    **dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj.weight"),
    **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj.weight"),
}

FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    has_partial_rotary=True,
    attention_kinds=lambda _: {"sliding_attention"},  # in every layer, if config.json has a sliding_window
    tensors=TENSORS | STACKED,
    strips_in_gguf=True,
)
