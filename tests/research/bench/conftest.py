"""A model small enough for benchmarks at sizes of a test."""

import pytest

MODEL = """
family = "qwen2"
vocab_size = 64
width = 32
num_layers = 2
num_query_heads = 4
num_kv_heads = 2
head_size = 8
mlp_width = 64
max_positions = 4096
qkv_bias = true
"""


@pytest.fixture
def shape(tmp_path):
    """A file that describes a model small enough."""
    path = tmp_path / "model.toml"
    path.write_text(MODEL)
    return path
