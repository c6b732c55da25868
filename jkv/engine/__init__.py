"""The only loop: requests in, completions out, over one pool."""
