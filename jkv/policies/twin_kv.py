"""TwinKV (arXiv 2608.27128): repairs what another policy keeps, so that a similar key stays for every evicted key."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jkv.checks import check_between, check_least
from jkv.errors import refused
from jkv.eviction.evict import Evict, largest, protection
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import default_recent
from jkv.eviction.view import CacheView, Numbers
from jkv.policies.around import inner
from pallas_kernels.largest_slots import ROUNDING

TILE = 128  # kept slots that all slots are compared with at once


@dataclasses.dataclass(frozen=True)
class Repaired:
    """1 for the slots that stay after the repair, 0 for others; see the rule of `twin_kv`.

    Attributes:
      evict: how the other policy chooses and protects slots.
      similarity: the least cosine of twins.
      apart: the largest distance, in tokens, at which two keys are not compared.
    """

    evict: Evict
    similarity: float
    apart: int

    def __post_init__(self) -> None:
        check_between(-1, 1, ", as a cosine does", similarity=self.similarity)
        check_least(0, " tokens", apart=self.apart)

    @property
    def needs(self) -> Needs:
        """What the other policy needs, and a comparison of all keys, which takes time."""
        return self.evict.needs | Needs(compares_keys=True)

    def __call__(self, view: CacheView) -> tuple[Float[Array, "B K S"], Numbers] | Float[Array, "B K S"]:
        assert view.budget is not None
        score, carried = self.evict.rate_and_carry(view)
        is_kept = largest(score, view.budget)
        likeness = nearest(view, is_kept, self.apart)
        is_twin = likeness > self.similarity - ROUNDING
        is_donor = is_kept & is_twin & ~self.evict.is_protected(view)
        is_orphan = view.is_filled & ~is_kept & ~is_twin
        swaps = jnp.minimum(is_donor.sum(axis=-1, dtype=jnp.int32), is_orphan.sum(axis=-1, dtype=jnp.int32))
        # Cosines from -1 to 1 are ties by an absolute difference if they are ranked as 1 to 3.
        leaves = largest(jnp.where(is_donor, 2 + likeness, -jnp.inf), swaps)
        enters = largest(jnp.where(is_orphan, 2 - likeness, -jnp.inf), swaps)
        repaired = jnp.where((is_kept & ~leaves) | enters, 1.0, 0.0)
        repaired = jnp.where(jnp.isnan(score), jnp.nan, repaired)
        return (repaired, carried) if self.needs.carried else repaired


def nearest(view: CacheView, is_kept: Bool[Array, "B K S"], apart: int) -> Float[Array, "B K S"]:
    """The largest cosine of each slot's key with a kept key more than `apart` tokens away; -1 if there is no such key."""
    key = jnp.where(view.is_filled[..., None], view.key.astype(jnp.float32), 0.0)
    unit = key / jnp.maximum(jnp.linalg.norm(key, axis=-1, keepdims=True), 1e-12)
    num_slots = view.position.shape[-1]
    size = min(TILE, num_slots)

    def compare(tile: Array, best: Array) -> Array:
        # The last tile begins where it ends with the slots, and may overlap the one before.
        other, place, is_other = (
            jax.lax.dynamic_slice_in_dim(x, tile * size, size, axis=2) for x in (unit, view.position, is_kept)
        )
        cosine = jnp.einsum("bksh,bkth->bkst", unit, other, precision="highest")
        is_far = jnp.abs(view.position[..., None] - place[:, :, None]) > apart
        return jnp.maximum(best, jnp.where(is_far & is_other[:, :, None], cosine, -1.0).max(axis=-1))

    return jax.lax.fori_loop(0, -(-num_slots // size), compare, jnp.full(view.position.shape, -1.0))


@recipe(
    "TwinKV",
    idea="repairs what another policy keeps: kept slots with a kept twin are swapped for evicted slots without one",
    arxiv="2608.27128",
)
def twin_kv(
    budget: int,
    interval: int = 128,
    around: str | Policy = "snap_kv",
    similarity: float = 0.85,
    apart: int = 32,
    sinks: int = 4,
    recent: int | None = None,
    protect_prompt: bool = False,
) -> Policy:
    """TwinKV with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    `around` is the policy whose choice is repaired: any policy with a score and scope "head", or the name of one that needs no
    file and evicts every `interval` tokens. The first `sinks` tokens, the last `recent` (by default 64, or a
    quarter of a budget below 256, or the other policy's window if that is longer) and, with `protect_prompt`, the prompt are
    never evicted.

    Rule:
      twins are keys with a cosine of `similarity` or more that are more than `apart` tokens apart
      a donor is an unprotected slot that the other policy keeps, and that has a kept twin
      an orphan is a slot that the other policy evicts, and that has no kept twin
      likeness = the largest cosine with a kept key more than `apart` tokens away
      orphans, the least likeness first, replace donors, the most likeness first, until there are no more orphans or donors

    Departures:
      - We wrote this from a port of the method (github.com/ruvnet/RuVector, issue 945) and the port's notes on the paper. The
        defaults of `similarity` and `apart` are the port's.
      - Keys are compared as they are cached, rotated for their positions.
      - As in the port, likeness is computed once, before the repair. So two donors that are each other's only twin may both be
        evicted, and two similar orphans may both be kept.

    Raises:
      ValueError: a setting out of its range, a policy without a score or with another scope, or a budget smaller than what is
        protected.

    >>> twin_kv(budget=512, around="r_kv").evict.recent
    64
    """
    other = inner(around, "twin_kv", budget=budget)
    if other.evict.scope != "head":
        rule = f"twin_kv needs an `around` with scope 'head'; {other.name} has scope {other.evict.scope!r}. Use 'head'."
        raise refused(rule, around="unsupported")
    recent = max(default_recent(budget), other.needs.window) if recent is None else recent
    guard = protection(other.needs.window, sinks, recent, protect_prompt)
    chosen = dataclasses.replace(other.evict, order="position", **guard)
    evict = dataclasses.replace(chosen, score=Repaired(chosen, similarity, apart))
    return dataclasses.replace(other, name="twin_kv", evict=evict, schedule=Every(budget, interval))
