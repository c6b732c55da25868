"""Tokens that a request gives in place of draws (`jkv.RequestOptions.forced_tokens`)."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.engine.parts.base import Carried, Draw, Rows, Step, StepPart
from jkv.engine.scheduler import CHUNKS

MOST_STEPS = max(CHUNKS)


class ForcedTokens(StepPart):
    """The next chunk's forced tokens, -1 where a row draws its own; it carries the number of the step."""

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

    def begin(self, carried: Carried) -> Any:
        return jnp.int32(0)

    def draw(self, draw: Draw, carry: Any) -> Draw:
        return draw._replace(forced=jax.lax.dynamic_index_in_dim(self.token, carry, keepdims=False))

    def take(self, step: Step, carry: Any) -> tuple[Step, Any]:
        return step, carry + 1
