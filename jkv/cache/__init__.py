"""The paged pool, and how a decode step reads, extends and trims it."""

DEFAULT_PAGE_SIZE = 16  # slots
