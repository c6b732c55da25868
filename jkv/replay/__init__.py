"""Traces of what each query read, and log-probabilities of tokens that replay them."""
