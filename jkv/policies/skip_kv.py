"""SkipKV (arXiv 2512.07993): R-KV that evicts repeated sentences first, and steers the model to think less."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Array, Float

from jkv.checks import shown
from jkv.errors import InputError
from jkv.eviction.evict import Evict, protection
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.view import CacheView, Score
from jkv.policies.r_kv import r_kv
from jkv.policies.seal import steer_by
from jkv.reasoning.sentences import ENDS, Sentences
from jkv.reasoning.steering import CHECK_WORDS, Steer, SteeringVector


@dataclasses.dataclass(frozen=True)
class LessRepeated:
    """Another score, minus the similarity of a slot's sentence to a later one that repeats it (`CacheView.similarity`)."""

    score: Score

    @property
    def needs(self) -> Needs:
        """The score's needs, and the similarity."""
        return self.score.needs | Needs(similarity=True)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        assert view.similarity is not None
        score: Any = self.score(view)
        return score - view.similarity


@recipe(
    "SkipKV",
    idea="as `r_kv`, but first evicts sentences that a later sentence repeats; also steers if given a vector",
    arxiv="2512.07993",
)
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
    sinks: int = 0,
    recent: int | None = None,
    protect_prompt: bool = False,
) -> Policy:
    """R-KV with a penalty on sentences whose embedding has a cosine above `tau` with that of a later one, prompt included.

    The penalty outweighs R-KV's score, so repeated sentences are evicted first, in each layer and head that still holds two of
    their tokens. The authors tuned `tau` for each model, data set and budget; the default lies at the middle of their 24 values
    (0.95 to 0.99). `ends` are the texts (or token ids) that end a sentence.

    `steer`, a vector that `jkv steer` wrote, adds SkipKV's adaptive steering: `seal` at `layer` (by default two thirds of the
    way up) with a `strength` (the authors' -1 or -1.25) that falls by `growth` for each thought so far that contains one of
    `keywords`, updated every `interval` tokens. A `Steer` has settings of its own. `sentences=False` leaves the penalty out, as
    an ablation. `sinks`, `recent` and `protect_prompt` are as in `r_kv`.

    Rule:
      score = R-KV's score - P
      P = cosine(sentence of the slot, latest later sentence with a cosine above tau), 0 if there is none

    Departures:
      - As in the authors' code, sentences are found by token ids, embeddings have unit length, and sentences of one token have
        no penalty.
      - From the authors' code: tokens know their sentence, while the code moves ranges after each eviction and loses some.
      - Keywords are whole words in the completion's text, while the code looks for tokens, so " again" does not count there.
      - A thought ends with a blank line, while the code counts sentences.

    Raises:
      ValueError: a setting out of its range, or a budget below the window.

    >>> skip_kv(budget=256).sentences.threshold
    0.98
    """
    plain: Any = r_kv(budget, interval, window, importance, similarity, exempt, pool, over_group).evict
    found, words = Sentences(tau, as_tuple(ends, "ends")), as_tuple(keywords, "keywords")
    if steer is not None and not isinstance(steer, Steer):
        steer = steer_by(steer, layer, strength, growth, interval, words)
    evict = Evict(LessRepeated(plain.score) if sentences else plain.score, **protection(window, sinks, recent, protect_prompt))
    return Policy("skip_kv", evict, Every(budget, interval), steer=steer, sentences=found if sentences else None)


def as_tuple(words: Sequence[Any], name: str) -> tuple[Any, ...]:
    """A tuple of what may be a list in a settings file."""
    if isinstance(words, str):
        raise InputError(
            "{field} is a list of texts, not one text; got {got}.", field=name, code="wrong_type", got=shown(words)
        )
    return tuple(words)
