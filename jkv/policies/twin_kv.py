"""TwinKV (arXiv 2608.27128): repairs what another policy keeps, so that no key goes without one like it that stays."""

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
    """1 for the slots that stay after the repair, 0 for others: the docstring of `twin_kv` has the rule.

    Attributes:
      evict: how the other policy chooses slots, with what it protects.
      similarity: the cosine from which on two keys are twins.
      apart: the distance in tokens up to which two keys are none.
    """

    evict: Evict
    similarity: float
    apart: int

    def __post_init__(self) -> None:
        check_between(-1, 1, ", as a cosine does", similarity=self.similarity)
        check_least(0, " tokens", apart=self.apart)

    @property
    def needs(self) -> Needs:
        """The other score's, and the time of comparing keys."""
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
    """The largest cosine of each slot's key to one that is kept and more than `apart` tokens away; -1 where there is none."""
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
    idea="repairs what another policy keeps: slots whose key has a twin make room for keys that would be left without one",
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

    `around` is the policy whose choice is repaired: any policy with a score and scope "head", as it is, or the name of one
    that needs no file and evicts every `interval` tokens. The first `sinks` tokens, the last `recent` (by default 64, or a
    quarter of a budget below 256, or the other policy's window if that is longer) and, with `protect_prompt`, the prompt are
    never evicted.

    Rule:
      twins are keys with a cosine of `similarity` or more that are more than `apart` tokens apart
      a donor is a slot that the other policy keeps, that is not protected, and that has a twin which it keeps
      an orphan is a slot that it evicts, and that has no twin which it keeps
      the orphans least like any kept key take the places of the donors most like one, one for one, until either are used up

    Departures:
      - This is written from a port of the method (github.com/ruvnet/RuVector, issue 945) and what it says of the paper; the
        defaults of `similarity` and `apart` are the port's.
      - Keys are compared as they are cached, rotated for their positions.
      - As in the port, likeness to the slots that were kept before the repair counts: of two donors that are each other's only
        twin, both may go, and an orphan may enter beside one like it.

    Raises:
      ValueError: a setting out of its range, a policy without a score or with another scope, or a budget smaller than what is
        protected.

    >>> twin_kv(budget=512, around="r_kv").evict.recent
    64
    """
    other = inner(around, "twin_kv", budget=budget)
    if other.evict.scope != "head":
        rule = f"twin_kv repairs what each KV head keeps by itself; {other.name} has scope {other.evict.scope!r}. Use 'head'."
        raise refused(rule, around="unsupported")
    recent = max(default_recent(budget), other.needs.window) if recent is None else recent
    guard = protection(other.needs.window, sinks, recent, protect_prompt)
    chosen = dataclasses.replace(other.evict, order="position", **guard)
    evict = dataclasses.replace(chosen, score=Repaired(chosen, similarity, apart))
    return dataclasses.replace(other, name="twin_kv", evict=evict, schedule=Every(budget, interval))
