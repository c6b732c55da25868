"""Qwen3 (arXiv 2505.09388): the queries and keys of each head are normalised before RoPE."""

from jkv.checkpoints.family import Family

FAMILY = Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, has_windows=True)
