"""gpt-oss (arXiv 2508.10925): a learned sink for each query head, windows in alternate layers, biases, and experts in MXFP4.

The experts of a layer are in one tensor, their gates and ups interleaved by columns. Checkpoints of the makers have them in
MXFP4 (`jkv.checkpoints.checkpoint_tensors`), which transformers also writes in floats.
"""

from jkv.checkpoints.family import TENSORS, UNREAD, Family, every, kinds_by

EXPERTS = {
    "experts.router": "mlp.router.weight",
    "experts.router_bias": "mlp.router.bias",
    **dict.fromkeys(("experts.gate", "experts.up"), "mlp.experts.gate_up_proj"),
    **dict.fromkeys(("experts.gate_bias", "experts.up_bias"), "mlp.experts.gate_up_proj_bias"),
    "experts.down": "mlp.experts.down_proj",
    "experts.down_bias": "mlp.experts.down_proj_bias",
}

DEFAULTS = {
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}

FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    qkv_bias=True,
    out_bias=True,
    has_sinks=True,
    has_windows=True,
    has_experts=True,
    expert_width="intermediate_size",
    expert_bias=True,
    swiglu_limit=7.0,
    swiglu_alpha=1.702,
    bias_switches=(),
    kinds=kinds_by(every(2)),
    defaults=DEFAULTS,
    unread_fields=UNREAD,
    ignored_fields=frozenset({"experts_per_token", "initial_context_length"}),
    tensors=TENSORS | {"sink": "self_attn.sinks"} | EXPERTS,
    interleaved=frozenset({"experts.gate", "experts.up", "experts.gate_bias", "experts.up_bias"}),
    untransposed=frozenset({"experts.down", "experts.gate_bias", "experts.up_bias", "experts.down_bias"}),
    reads_mxfp4=True,
)
