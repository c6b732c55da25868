"""Qwen2 and Qwen2.5 (arXiv 2412.15115): biases on query, key and value."""

from jkv.checkpoints.family import Family

# transformers always adds these three biases and no others; it ignores the switches of config.json.
FAMILY = Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, has_windows=True, bias_switches=())
