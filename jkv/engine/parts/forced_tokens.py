"""Tokens that a request gives in place of draws (`jkv.RequestOptions.forced_tokens`)."""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from jkv.engine.parts.base import Draw, Rows, StepPart
from jkv.engine.scheduler import CHUNKS

MOST_STEPS = max(CHUNKS)


class ForcedTokens(StepPart):
    """The next chunk's forced tokens, -1 where a row draws its own."""

    token: Annotated[Any, "steps B"]

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return any(len(request.forced) for request in rows.requests)

    @classmethod
    def of(cls, rows: Rows) -> "ForcedTokens":
        return cls(np.full((MOST_STEPS, rows.num_rows), -1, np.int32))

    def at(self, rows: Rows) -> "ForcedTokens":
        forced = np.full((MOST_STEPS, rows.num_rows), -1, np.int32)
        for i, sample in rows.running.items():
            tokens = sample.request.forced[sample.generated : sample.generated + MOST_STEPS]
            forced[: len(tokens), i] = tokens
        return self.replace(token=forced)

    def draw(self, draw: Draw, carry: Any) -> Draw:
        row = jnp.arange(draw.number.shape[0], dtype=jnp.int32)[:, None]
        return draw._replace(forced=self.token.at[draw.number, row].get(mode="fill", fill_value=-1))
