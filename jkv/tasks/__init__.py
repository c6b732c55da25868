"""Tasks that small reasoners learn: problems, the tokenizer, the trainer."""
