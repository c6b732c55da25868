"""Experiments behind docs/results.md, run from a checkout: `research/README.md` says which command makes which table."""
