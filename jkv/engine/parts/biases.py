"""What a request adds to the logits of single tokens: biases, tokens that are never drawn, and ends that come too early."""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from jkv.engine.parts.base import Draw, Rows, StepPart
from jkv.engine.requests import MOST_ENDS


class Biases(StepPart):
    """A bias of each token, and the tokens that end a row but may not be drawn yet."""

    bias: Annotated[Any, "B V"]
    ends: Annotated[Any, "B E"]  # padded with V
    num_early: Annotated[Any, "B"]  # tokens of the next chunk that come before the row may end

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return any(request.has_biases for request in rows.requests)

    @classmethod
    def of(cls, rows: Rows) -> "Biases":
        size = rows.model.config.vocab_size
        bias, num_early = np.zeros((rows.num_rows, size), np.float32), np.zeros(rows.num_rows, np.int32)
        ends = np.full((rows.num_rows, MOST_ENDS), size, np.int32)
        for i, sample in rows.running.items():
            request = sample.request
            if request.allowed_ids:
                bias[i] = -np.inf
                bias[i, list(request.allowed_ids)] = 0
            for token, value in request.logit_bias:
                bias[i, token] += value
            if request.min_tokens:
                ends[i, : len(request.stop_ids)] = request.stop_ids
        return cls(bias, ends, num_early)

    def at(self, rows: Rows) -> "Biases":
        num_early = np.zeros(rows.num_rows, np.int32)
        for i, sample in rows.running.items():
            num_early[i] = max(0, sample.request.min_tokens - sample.generated)
        return self.replace(num_early=num_early)

    def draw(self, draw: Draw, carry: Any) -> Draw:
        row = jnp.arange(len(self.ends), dtype=jnp.int32)[:, None]
        is_end = jnp.zeros(self.bias.shape, bool).at[row, self.ends].set(True, mode="drop")
        is_early = draw.number < self.num_early[:, None]
        logits = draw.logits.astype(jnp.float32) + self.bias[:, None]
        return draw._replace(logits=jnp.where(is_early[..., None] & is_end[:, None], -jnp.inf, logits))
