"""Llama 3.x (arXiv 2407.21783), and other models saved in its format: the plain decoder."""

from jkv.checkpoints.family import Family

FAMILY = Family("llama", "LlamaForCausalLM", is_interleaved_in_gguf=True, defaults={"num_key_value_heads": None})
