"""SmolLM3 (2025, huggingface.co/blog/smollm3): a Llama without RoPE in every fourth layer (NoPE, arXiv 2501.18795)."""

from jkv.checkpoints.family import Family

FAMILY = Family("smollm3", "SmolLM3ForCausalLM", has_layers_without_rope=True, has_windows=True, is_read_from_gguf=False)
