"""Qwen2 and Qwen2.5 (arXiv 2412.15115): biases on query, key and value."""

from jkv.checkpoints.family import Family, from_layer, kinds_by

# transformers always adds these three biases and no others; it ignores the switches of config.json.
FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    qkv_bias=True,
    has_windows=True,
    has_window_switch=True,
    kinds=kinds_by(from_layer),
    defaults={"sliding_window": 4096},
    bias_switches=(),
)
