"""The tasks of the tiny models, and their training."""
