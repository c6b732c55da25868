"""Benchmarks of speed and memory; their figures lie in `results`."""
