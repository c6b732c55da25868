"""A steering vector from a model and its own traces (SEAL): checking and switching thoughts less the others."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.errors import refused
from jkv.model import decoder
from jkv.model.params import Model, Params
from jkv.reasoning.steering import SteeringVector, label, marks_of
from jkv.reasoning.token_text import BREAK
from jkv.replay.columns import dense_columns
from jkv.replay.other_groups import with_other_groups
from jkv.replay.score import ReplayAttention, round_up

KINDS = ("check", "switch", "go on")


def extract(model: Model, prompts: Sequence[Any], completions: Sequence[Any]) -> SteeringVector:
    """The mean of checking and switching thoughts minus the mean of the others, at every layer's input.

    A thought is represented by the hidden state of the token that it follows, the one that holds a blank line, while the model
    thinks; what comes before the first such token is no thought. `prompts` and `completions` are token ids, one each a sample.

    Raises:
      ValueError: traces without thoughts of both kinds, or a model without a tokenizer.
    """
    marks = marks_of(model.tokenizer, model.config.vocab_size)
    sums = np.zeros((model.config.num_layers, len(KINDS), model.config.width))
    counts = np.zeros(len(KINDS), int)
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = np.concatenate([prompt, completion]).astype(np.int32)
        padded = np.zeros(round_up(len(tokens)), np.int32)
        padded[: len(tokens)] = tokens
        indicator = np.zeros((len(KINDS), len(padded)), np.float32)
        for at, thought in thoughts(model.tokenizer, tokens, marks.is_break, marks.think):
            indicator[KINDS.index(label(thought)), at] = 1
        counts += indicator.sum(axis=1).astype(int)
        sums += np.asarray(class_sums(model.params, jnp.asarray(padded), jnp.asarray(indicator)), np.float64)
    found = dict(zip(KINDS, map(str, counts.tolist()), strict=True))
    if counts[:2].sum() == 0 or counts[2] == 0:
        rule = f"Extraction needs thoughts that check or switch, and others; got {found}. Use more or longer traces."
        raise refused(rule, prompts="invalid")
    vector = sums[:, :2].sum(axis=1) / counts[:2].sum() - sums[:, 2] / counts[2]
    return SteeringVector(vector.astype(np.float32), {"model": model.name, "traces": str(len(prompts))} | found)


def thoughts(
    tokenizer: Any, tokens: np.ndarray, is_break: np.ndarray, think: np.ndarray, is_thinking: bool = False
) -> Iterator[tuple[int, str]]:
    """The place of the token before each finished thought that is not blank, and its text; `is_thinking` at the start."""
    opened = -1
    for at, token in enumerate(tokens.tolist()):
        if token == think[0]:
            is_thinking, opened = True, -1
        ends = token == think[1] or is_break[token]
        if ends and opened >= 0:
            text = tokenizer.decode(tokens[opened + 1 : at + bool(is_break[token])].tolist()).split(BREAK)[0]
            if text.strip():
                yield opened, text
        if token == think[1]:
            is_thinking = False
        if ends:
            opened = at if is_thinking else -1


@jax.jit
def class_sums(params: Params, token: Int[Array, " T"], indicator: Float[Array, "C T"]) -> Float[Array, "L C D"]:
    """Sums of the hidden states that enter each layer, over classes of tokens."""
    sums = []

    def enter(layer: int, hidden: Float[Array, "1 T D"]) -> Float[Array, "1 T D"]:
        sums.append(jnp.einsum("ct,td->cd", indicator, hidden[0].astype(jnp.float32)))
        return hidden

    position = jnp.arange(token.shape[0], dtype=jnp.int32)[None]
    dense = ReplayAttention(position, dense_columns(params.config, 1, token.shape[0]), None)
    attend = with_other_groups(params.config, dense, position)
    decoder.forward(params, token[None], position, attend, None, enter)
    return jnp.stack(sums)
