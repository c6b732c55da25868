"""Qwen3 (arXiv 2505.09388): each head's query and key are normalised before they are rotated."""

from jkv.model.family import Family

FAMILY = Family("qwen3", "Qwen3ForCausalLM", qk_norm=True)
