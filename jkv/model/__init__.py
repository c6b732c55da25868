"""The decoder, its weights in memory, and sampling."""
