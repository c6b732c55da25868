"""CAOTE (arXiv 2504.14051): keeps the tokens whose eviction would change the attention's output most."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.eviction.evict import Evict, protection
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import AttentionMass, default_recent
from jkv.eviction.view import CacheView
from pallas_kernels.largest_slots import ROUNDING


@dataclasses.dataclass(frozen=True)
class OutputError:
    """How far the attention's output moves without a slot; `mass` is the attention, whose sum over the slots is 1.

    A value that differs from the output by no more than rounding moves nothing: where one token repeats, all values are equal.
    """

    mass: AttentionMass

    @property
    def needs(self) -> Needs:
        """The queries of the attention."""
        return self.mass.needs

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        attention = self.mass(view)
        value = jnp.where(view.is_filled[..., None], view.value.astype(jnp.float32), 0.0)
        output = jnp.einsum("bks,bksh->bkh", attention, value, precision="highest")
        distance, size = (jnp.linalg.norm(x, axis=-1) for x in (value - output[:, :, None], value))
        distance = jnp.where(distance <= ROUNDING * size.max(axis=-1, keepdims=True), 0.0, distance)
        attention = jnp.minimum(attention, 1 - 1e-6)
        return attention / (1 - attention) * distance


@recipe("CAOTE", idea="keeps the tokens whose eviction would change the attention's output most", arxiv="2504.14051")
def caote(
    budget: int,
    interval: int = 64,
    window: int | None = None,
    sinks: int = 0,
    recent: int | None = None,
    protect_prompt: bool = False,
) -> Policy:
    """CAOTE with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    The attention is that of the last `window` queries (by default 64, or a quarter of a budget below 256). The first `sinks`
    tokens, the last `recent` (by default the window) and, with `protect_prompt`, the prompt are never evicted.

    Rule:
      score(s) = a(s) / (1 - a(s)) * |value of s - o|, which is how far o moves if s alone is evicted
      o = sum over s of a(s) * value of s, one for each KV head
      a = mean over the last `window` queries and their heads of
          softmax over the slots before the window of q . key / sqrt(H)

    Departures:
      - The paper takes the attention of another method, such as H2O, TOVA or SnapKV; this is SnapKV's without pooling, so that
        a is a distribution.
      - Several slots are evicted at a time, each scored as if it were the only one.

    Raises:
      ValueError: a setting out of its range, or a budget smaller than the window.

    >>> caote(budget=1024).evict.recent
    64
    """
    window = default_recent(budget) if window is None else window
    score = OutputError(AttentionMass(window, pooling="mean", over_group="mean"))
    return Policy("caote", Evict(score, **protection(window, sinks, recent, protect_prompt)), Every(budget, interval))
