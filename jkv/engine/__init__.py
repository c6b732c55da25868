"""The engine: requests in, completions out, over one paged pool."""
