"""Adapters for other libraries: lm-evaluation-harness and tunix."""
