"""Models on disk: Hugging Face folders, GGUF files, jkv's own; their weights, configurations, tokenizers and templates."""
