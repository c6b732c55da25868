"""Stepping: a prompt has a step and a digit, and each digit that follows should be the last one plus the step, modulo 10.

A task about what evictions do to learning by rewards. The first weights have practised on random digits, whose successors
follow from the step in the prompt alone, so they attend to it at every token. Once it is evicted, they guess one of three. The
last two digits would do as well, but with the full cache nothing is gained by reading them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jkv.engine.results import Result
from jkv.model import decoder
from jkv.model.params import Model, Params
from jkv.model.weight_shapes import init_params
from research.tasks.counting import CONFIG, NUM_DIGITS
from research.tasks.train import packed_attention

NUM_STEPS, PROMPT_TOKENS = 3, 2  # the steps 1, 2 and 3 are the tokens after the digits
UPDATES, ROWS, LENGTH = 300, 32, 64  # of the practice
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


@functools.cache
def start(seed: int) -> Model:
    """Weights after the practice: nearly always right where they can read the step."""
    params = init_params(CONFIG, jax.random.key(seed))
    state, rng = OPTIMIZER.init(params), np.random.default_rng(seed)
    for _ in range(UPDATES):
        step = rng.integers(NUM_STEPS, size=(ROWS, 1), dtype=np.int32)
        digits = rng.integers(NUM_DIGITS, size=(ROWS, LENGTH - 1), dtype=np.int32)
        params, state = practise(params, state, np.concatenate([NUM_DIGITS + step, digits], axis=1))
    return Model(params, name="stepping")


@jax.jit
def practise(params: Params, state: Any, token: Int[Array, "B T"]) -> tuple[Params, Any]:
    """One update on rows of a step and random digits."""
    is_seen = jnp.broadcast_to(jnp.tri(token.shape[1], dtype=bool), (*token.shape, token.shape[1]))
    position = jnp.broadcast_to(jnp.arange(token.shape[1]), token.shape)
    successor = (token + token[:, :1] - NUM_DIGITS + 1) % NUM_DIGITS

    def loss(params: Params) -> Float[Array, ""]:
        hidden, _ = decoder.forward(params, token, position, packed_attention, is_seen)
        log_probs = jax.nn.log_softmax(decoder.unembed(params, hidden))
        return -jnp.take_along_axis(log_probs, successor[..., None], axis=-1)[:, 1:].mean()

    with jax.numpy_dtype_promotion("standard"):  # optax multiplies counts by rates, which strict promotion refuses
        change, state = OPTIMIZER.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, change), state


def draw(rng: np.random.Generator, count: int) -> tuple[list[np.ndarray], list[int]]:
    """Prompts of a step and a digit, and their steps."""
    steps = rng.integers(1, NUM_STEPS + 1, size=count)
    digits = rng.integers(NUM_DIGITS, size=count)
    return [
        np.array([NUM_DIGITS + step - 1, digit], np.int32) for step, digit in zip(steps, digits, strict=True)
    ], steps.tolist()


def reward(out: Result, steps: Any) -> np.ndarray:
    """The share of each completion's tokens that are the token before, or the prompt's digit, plus the step: [N]."""
    before = np.concatenate([np.array([[prompt[-1]] for prompt in out.prompts], np.int32), out.tokens[:, :-1]], axis=1)
    is_token = np.arange(out.tokens.shape[1]) < out.lengths[:, None]
    is_right = is_token & (out.tokens == (before + np.asarray(steps)[:, None]) % NUM_DIGITS)
    return is_right.sum(axis=1) / np.maximum(out.lengths, 1)
