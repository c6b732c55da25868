"""What traces show of a model: redundancy, and steering vectors."""
