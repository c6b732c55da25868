"""Qwen3 with a mixture of experts in every layer or in some (arXiv 2505.09388), such as Qwen3-30B-A3B."""

from jkv.checkpoints.family import TENSORS, Family, alike

EXPERTS = {
    "experts.router": "mlp.gate.weight",
    "experts.gate": "mlp.experts.{}.gate_proj.weight",
    "experts.up": "mlp.experts.{}.up_proj.weight",
    "experts.down": "mlp.experts.{}.down_proj.weight",
}

FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    says_qkv_bias=True,
    says_out_bias=True,
    qk_norm=True,
    has_experts=True,
    has_window_switch=True,
    bias_switches=("mlp_bias",),
    kinds=alike,
    defaults={"sliding_window": 4096, "norm_topk_prob": False},
    tensors=TENSORS | EXPERTS,
)
