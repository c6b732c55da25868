"""A learning experiment: GRPO on compressed rollouts of a tiny model."""
