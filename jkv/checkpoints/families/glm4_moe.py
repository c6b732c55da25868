"""GLM-4.5 (arXiv 2508.06471) and its successors of the same architecture: the router of DeepSeek-V3, and partial RoPE.

The first layers have no experts; in the others every token also goes through a shared block. GLM-4.5 normalises the queries and
keys of each head, GLM-4.5-Air does not.
"""

from jkv.checkpoints.family import TENSORS, UNREAD, Family

EXPERTS = {
    "experts.router": "mlp.gate.weight",
    "experts.choice_bias": "mlp.gate.e_score_correction_bias",
    "experts.gate": "mlp.experts.{}.gate_proj.weight",
    "experts.up": "mlp.experts.{}.up_proj.weight",
    "experts.down": "mlp.experts.{}.down_proj.weight",
}
SHARED = {
    "gate": "mlp.shared_experts.gate_proj.weight",
    "up": "mlp.shared_experts.up_proj.weight",
    "down": "mlp.shared_experts.down_proj.weight",
}

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}

FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    says_qkv_bias=True,
    says_qk_norm=True,
    has_partial_rotary=True,
    has_experts=True,
    expert_count="n_routed_experts",
    routes_by_sigmoid=True,
    bias_switches=(),
    defaults=DEFAULTS,
    unread_fields=UNREAD - {"partial_rotary_factor"},
    ignored_fields=frozenset({"num_mtp_layers", "num_nextn_predict_layers"}),
    tensors=TENSORS | EXPERTS,
    tensors_beside_experts=SHARED,
    prediction_tensor="eh_proj.weight",
)
