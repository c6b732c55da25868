"""Llama 3.x (arXiv 2407.21783), and other models saved in its format: the plain decoder."""

from jkv.checkpoints.family import Family

FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    says_qkv_bias=True,
    says_out_bias=True,
    bias_switches=("mlp_bias",),
    defaults={"num_key_value_heads": None},
)
