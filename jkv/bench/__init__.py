"""Benchmarks and evaluations: what a policy costs and saves, measured; the figures lie in `results`."""
