"""Sequences of tokens that a completion may not hold: the last token of each is not drawn after the others."""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jkv.engine.parts.base import Carried, Draw, Rows, Step, StepPart
from jkv.engine.requests import LONGEST_BAD_WORD, MOST_BAD_WORDS

ANY, NOTHING = -2, -1  # any token, and one that no token is


class BadWords(StepPart):
    """The sequences of each row; it carries the last tokens of its completion."""

    before: Annotated[Any, "B I W"]  # begins with ANY where a sequence is shorter
    last: Annotated[Any, "B I"]  # V where there is no sequence

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return any(request.bad_words for request in rows.requests)

    @classmethod
    def of(cls, rows: Rows) -> "BadWords":
        before = np.full((rows.num_rows, MOST_BAD_WORDS, LONGEST_BAD_WORD - 1), ANY, np.int32)
        last = np.full((rows.num_rows, MOST_BAD_WORDS), rows.model.config.vocab_size, np.int32)
        for i, sample in rows.running.items():
            for j, (*others, end) in enumerate(sample.request.bad_words):
                before[i, j, before.shape[2] - len(others) :] = others
                last[i, j] = end
        return cls(before, last)

    @classmethod
    def carried(cls, rows: Rows) -> dict[str, Any]:
        latest = np.full((rows.num_rows, LONGEST_BAD_WORD - 1), NOTHING, np.int32)
        for i, sample in rows.running.items():
            if sample.request.bad_words and (tokens := sample.completion.tokens[-latest.shape[1] :]):
                latest[i, -len(tokens) :] = tokens
        return {"latest": latest}

    def begin(self, carried: Carried) -> Any:
        return carried.latest

    def draw(self, draw: Draw, carry: Any) -> Draw:
        comes = ((self.before == ANY) | (self.before == carry[:, None])).all(axis=-1)
        row, size = jnp.arange(len(comes), dtype=jnp.int32)[:, None], draw.logits.shape[-1]
        is_bad = jnp.zeros((len(comes), size), bool).at[row, jnp.where(comes, self.last, size)].set(True, mode="drop")
        return draw._replace(logits=jnp.where(is_bad[:, None], -jnp.inf, draw.logits))

    def take(self, step: Step, carry: Any) -> tuple[Step, Any]:
        longer = jnp.concatenate([carry[:, 1:], step.token[:, :1]], axis=1)
        return step, jnp.where(step.is_active[:, None], longer, carry)

    def end(self, carry: Any) -> dict[str, Array]:
        return {"latest": carry}
