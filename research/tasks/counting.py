"""Counting: five digits are given, and each digit that follows should be one more than the digit before it.

A task that a model of a few thousand weights learns from rewards alone, in minutes on a CPU: for tests and examples of
reinforcement learning. A completion is right as far as it goes, so random weights get some reward.
"""

from typing import Any

import jax
import numpy as np

from jkv.engine.results import Result
from jkv.model.params import Model, ModelConfig
from jkv.model.weight_shapes import init_params

NUM_DIGITS, PROMPT_TOKENS = 10, 5
CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=16,  # the digits, and six tokens that are never right
    width=64,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_size=16,
    mlp_width=128,
    max_positions=1024,
    qk_norm=True,
    tie_embeddings=True,
)


def start(seed: int) -> Model:
    """Random weights, whose next token is nearly any of the sixteen."""
    return Model(init_params(CONFIG, jax.random.key(seed)), name="counting")


def draw(rng: np.random.Generator, count: int) -> tuple[list[np.ndarray], list[None]]:
    """Prompts of five digits, and no answers: a completion is judged by itself."""
    return list(rng.integers(NUM_DIGITS, size=(count, PROMPT_TOKENS), dtype=np.int32)), [None] * count


def reward(out: Result, answers: Any = None) -> np.ndarray:
    """The share of each completion's adjacent tokens that are digits of which the second is one more than the first: [N].

    After a 9 nothing is right, so counting on from 0 gets 0.9 at most in the long run. A completion of one token gets 0.
    """
    first, second = out.tokens[:, :-1], out.tokens[:, 1:]
    is_pair = np.arange(first.shape[1]) < out.lengths[:, None] - 1
    is_right = is_pair & (second == first + 1) & (second < NUM_DIGITS)
    return is_right.sum(axis=1) / np.maximum(out.lengths - 1, 1)
