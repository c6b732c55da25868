"""OLMo-3 (arXiv 2512.13961): norms after attention and MLP, and over all heads of queries and keys; windows in most layers."""

from jkv.checkpoints.family import TENSORS, UNREAD, Family, every, kinds_by

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
    kinds=kinds_by(every(4)),
    defaults={"num_key_value_heads": None, "rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500_000.0},
    unread_fields=UNREAD,
    tensors=TENSORS | NORMS,
)
