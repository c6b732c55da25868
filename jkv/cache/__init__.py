"""The paged pool, and how a decode step reads, extends and trims it."""
