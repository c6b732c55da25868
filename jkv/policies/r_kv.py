"""R-KV (arXiv 2505.24133): keeps tokens that the last queries attend to and that repeat no other token."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels as kernels
from jkv.checks import check_between, check_least
from jkv.eviction.evict import Evict, protection
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import AttentionMass, less
from jkv.eviction.view import CacheView


@dataclasses.dataclass(frozen=True)
class ImportanceMinusRedundancy:
    """`importance * I - (1 - importance) * R`, the joint score of R-KV: the docstring of `r_kv` has the rule."""

    mass: AttentionMass
    importance: float
    similarity: float
    exempt: int
    released: bool

    @property
    def needs(self) -> Needs:
        """The queries of the importance, and the time of comparing keys."""
        return self.mass.needs | Needs(compares_keys=True)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        redundancy = redundancy_of(view, self.similarity, self.exempt, self.released)
        return less(self.importance * self.mass(view), (1 - self.importance) * redundancy)


def redundancy_of(view: CacheView, similarity: float, exempt: int = 1, exempt_first: bool = False) -> Float[Array, "B K S"]:
    """The softmax over filled slots of the mean cosine to the other keys (`pallas_kernels.key_redundancy`)."""
    batch, heads, num_slots, head_size = view.key.shape
    rows = (batch * heads, num_slots)
    redundancy = kernels.key_redundancy(
        view.key.reshape(*rows, head_size),
        view.is_filled.reshape(rows),
        threshold=similarity,
        exempt=exempt,
        exempt_first=exempt_first,
    )
    redundancy = jnp.where(view.is_filled, redundancy.reshape(view.position.shape), -jnp.inf)
    return jnp.where(view.is_filled, jax.nn.softmax(redundancy, axis=-1), 0.0)


@recipe(
    "R-KV",
    idea="keeps tokens with high attention from the last queries, and evicts keys that are similar to another key",
    arxiv="2505.24133",
    published={"over_group": "max-probability", "pool_first": True},
)
def r_kv(
    budget: int,
    interval: int = 128,
    window: int = 8,
    importance: float = 0.1,
    similarity: float = 0.5,
    exempt: int = 1,
    pool: int = 7,
    over_group: str = "max",
    scope: str = "head",
    released: bool = False,
    pool_first: bool = False,
    until: str | None = None,
    sinks: int = 0,
    recent: int | None = None,
    protect_prompt: bool = False,
) -> Policy:
    """R-KV with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    The last `window` tokens always stay; tokens of the prompt may be evicted. `until="</think>"` compacts the thinking alone,
    and keeps all tokens of the answer. The defaults are the authors' settings for the paper's main results. `released=True`
    reproduces the accidents of their code and its storage in score order, which changes what later compactions keep; the
    default corrects them. The first `sinks` tokens, the last `recent` (by default the window) and, with `protect_prompt`, the
    prompt are never evicted.

    Rule (Eq. 7):
      score = importance * I - (1 - importance) * R
      I = max-pool over `pool` slots of the mean over the last `window` queries of
          softmax over the slots before the window of the largest logit of the query group
      R = softmax over all slots of the mean cosine of the slot's key to the other keys,
          without the `exempt` most recent look-alikes (cosine above `similarity`) of each key

    Departures:
      - From the paper, as in the authors' code: the maximum over the group is that of logits, not of probabilities, and the
        mean over queries comes before the pooling. `over_group="max-probability", pool_first=True` is the paper's Eqs. 2 to 4.
      - From the authors' code: there a key without a look-alike exempts slot 0, and "most recent" means the slot, not the
        position. `released=True` reproduces both.

    Raises:
      ValueError: a setting out of its range, or a budget smaller than the window.

    >>> r_kv(budget=256).budget
    256
    """
    check_between(0, 1, ", as a weight does", importance=importance)
    check_between(-1, 1, ", as a cosine does", similarity=similarity)
    check_least(0, " slots", exempt=exempt)
    guard = protection(window, sinks, recent, protect_prompt)
    mass = AttentionMass(window, pool, over_group=over_group, pool_first=pool_first)
    score = ImportanceMinusRedundancy(mass, importance, similarity, exempt, released)
    evict = Evict(score, scope=scope, order="score" if released else "position", **guard)
    return Policy("r_kv", evict, Every(budget, interval), until=until)
