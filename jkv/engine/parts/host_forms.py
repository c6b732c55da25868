"""Forms that the host follows token by token (`jkv.forms.host_walks`): grammars, and schemas that no small automaton has.

The host makes the mask of the next step when it has read the last token. So chunks have one step while a row has such a form
(`Scheduler`), and none is dispatched ahead of it (`Sample.can_plan`).
"""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jkv.engine.faults import blame
from jkv.engine.parts.base import Draw, Rows, StepPart
from jkv.engine.parts.forms import walk_of

BITS = 32


class HostForms(StepPart):
    """The tokens that each row may draw, as bits: token t is bit t % 32 of word t // 32."""

    allowed: Annotated[Any, "B W"]

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return any(request.form_on_host for request in rows.requests)

    @classmethod
    def of(cls, rows: Rows) -> "HostForms":
        return cls(np.full((rows.num_rows, -(-rows.model.config.vocab_size // BITS)), -1, np.int32))

    def at(self, rows: Rows) -> "HostForms":
        allowed = self.of(rows).allowed
        for i, sample in rows.running.items():
            if sample.request.form_on_host:
                with blame(sample):  # a grammar that reaches a limit ends its own request alone
                    walk: Any = walk_of(rows, sample).after(sample.completion.tokens)
                    allowed[i] = packed(walk.allowed(sample.request.stop_ids))
        return self.replace(allowed=allowed)

    def draw(self, draw: Draw, carry: Any) -> Draw:
        return draw._replace(logits=jnp.where(self.can_come(draw.logits.shape[-1])[:, None], draw.logits, -jnp.inf))

    def can_come(self, num_tokens: int) -> Bool[Array, "B V"]:
        """Which tokens each row may draw."""
        bits = (self.allowed[:, :, None] >> jnp.arange(BITS, dtype=jnp.int32)) & 1
        return bits.reshape(len(self.allowed), -1)[:, :num_tokens] == 1


def packed(allowed: np.ndarray) -> np.ndarray:
    """Flags as bits of words of int32, the first of them the lowest.

    >>> packed(np.array([True, False, True] + 30 * [False] + [True])).tolist()
    [5, 2]
    """
    flags = np.pad(allowed, (0, -len(allowed) % BITS))
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)
