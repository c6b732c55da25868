"""Qwen3 (arXiv 2505.09388): the queries and keys of each head are normalised before RoPE."""

from jkv.checkpoints.family import Family, from_layer, kinds_by

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    says_qkv_bias=True,
    says_out_bias=True,
    qk_norm=True,
    has_windows=True,
    has_window_switch=True,
    kinds=kinds_by(from_layer),
    defaults={"head_dim": 128, "sliding_window": 4096},
    bias_switches=("mlp_bias",),
)
