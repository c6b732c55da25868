"""Mistral, Mistral-Small and Magistral (arXiv 2310.06825) of versions without a sliding window."""

from jkv.checkpoints.family import Family, alike

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    bias_switches=(),
    is_read_from_gguf=False,  # they say that it is a llama
    kinds=alike,
    defaults={"sliding_window": 4096},
)
