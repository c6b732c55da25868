"""OLMo-3 (arXiv 2512.13961): norms after attention and MLP, and over all heads of queries and keys; windows in most layers."""

from jkv.checkpoints.family import TENSORS, Family

NORMS = {
    "attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "post_feedforward_layernorm.weight",
    "all_query_norm": "self_attn.q_norm.weight",
    "all_key_norm": "self_attn.k_norm.weight",
}

FAMILY = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    all_heads_norm=True,
    norms_after=True,
    has_windows=True,
    has_rope_by_kind=True,
    bias_switches=("attention_bias",),
    ignored_fields=frozenset({"attention_dropout"}),
    tensors=TENSORS | NORMS,
    is_read_from_gguf=False,
)
