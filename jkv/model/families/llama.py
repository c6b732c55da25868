"""Llama 3.x (arXiv 2407.21783), and what else is saved as it: the plain decoder."""

from jkv.model.family import Family

FAMILY = Family("llama", "LlamaForCausalLM")
