"""SkipKV (arXiv 2512.07993): R-KV, with sentences that a later one says again given up first; and steering, to think less."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Array, Float

from jkv.policies.base import CacheView, Evict, Policy, Score
from jkv.policies.r_kv import r_kv
from jkv.policies.recipe import recipe
from jkv.policies.schedules import Every
from jkv.policies.seal import steer_by
from jkv.reasoning.sentences import ENDS, Sentences
from jkv.reasoning.steering import CHECK_WORDS, Steer, SteeringVector


@dataclasses.dataclass(frozen=True)
class LessRepeated:
    """A score less the similarity of a slot's sentence to a later one, where it is flagged (`CacheView.similarity`)."""

    score: Score

    needs_similarity = True

    @property
    def needs_mass(self) -> bool:
        """Whether the accumulated mass is needed."""
        return getattr(self.score, "needs_mass", False)

    @property
    def compares_keys(self) -> bool:
        """Whether each key is compared with each other."""
        return getattr(self.score, "compares_keys", False)

    @property
    def window(self) -> int:
        """Last queries needed."""
        return getattr(self.score, "window", 0)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        assert view.similarity is not None
        return self.score(view) - view.similarity


@recipe
def skip_kv(
    budget: int,
    interval: int = 128,
    window: int = 8,
    tau: float = 0.98,
    steer: Steer | SteeringVector | Path | str | None = None,
    layer: int | None = None,
    strength: float = -1.0,
    growth: float = 0.02,
    keywords: Sequence[str] = CHECK_WORDS,
    ends: Sequence[Any] = ENDS,
    importance: float = 0.1,
    similarity: float = 0.5,
    exempt: int = 1,
    pool: int = 7,
    over_group: str = "max",
    sentences: bool = True,
) -> Policy:
    """R-KV with a penalty on sentences whose embedding has a cosine above `tau` with a later one's; the prompt's count too.

    The penalty, that cosine, outweighs R-KV's score, so flagged sentences go first, in every layer and head that still holds
    two of their tokens. `tau` was tuned for each model, data set and budget; the default lies at the middle of the authors' 24
    values (0.95 to 0.99). `ends` are the texts (or token ids) that end a sentence.

    `steer`, a vector that `jkv steer` wrote, adds SkipKV's adaptive steering: `seal` at `layer` (by default two thirds up) with
    a `strength` (the authors' -1 or -1.25) that falls by `growth` for each thought so far that holds one of `keywords`, brought
    up to date every `interval` tokens. A `Steer` comes with settings of its own. `sentences=False` leaves the penalty out, an
    ablation.

    As in the authors' code: sentences are found by token ids, their embedding is at unit length, of several later ones the
    latest counts, and sentences of one token are never penalised. Apart from it: tokens know their sentence, where the code
    moves ranges after each eviction, and loses some; keywords are whole words of the completion's text, where the code looks
    for tokens, so that " again" does not count there; and a thought ends with a blank line, where the code counts sentences.

    Raises:
      ValueError: a setting out of its range, or a budget below the window.

    >>> skip_kv(budget=256).sentences.threshold
    0.98
    """
    plain: Any = r_kv(budget, interval, window, importance, similarity, exempt, pool, over_group).evict
    found, words = Sentences(tau, as_tuple(ends, "ends")), as_tuple(keywords, "keywords")
    if steer is not None and not isinstance(steer, Steer):
        steer = steer_by(steer, layer, strength, growth, interval, words)
    evict = Evict(LessRepeated(plain.score) if sentences else plain.score, recent=window)
    return Policy("skip_kv", evict, Every(budget, interval), steer=steer, sentences=found if sentences else None)


def as_tuple(words: Sequence[Any], name: str) -> tuple[Any, ...]:
    """What may be a list, of a settings file."""
    if isinstance(words, str):
        raise ValueError(f"{name} is a list of texts, not one text; got {words!r}.")
    return tuple(words)
