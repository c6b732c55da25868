"""What each query read, and how probable tokens are under it."""
