"""Sentences, and which of them a later one says again (SkipKV): found on the host, one row at a time, when it is compacted.

A sentence ends with a token that ends a line. Its embedding is the mean of its tokens' hidden states after the final norm, at
unit length; the earlier of two that are alike is flagged, prompt and completion being one text. Compaction learns by position
which sentence each token is of, and how alike a later one is.
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.cache.pool import EMPTY
from jkv.model.params import Model

ENDS = ("\n", ".\n", ")\n", "\n\n", ".\n\n", ")\n\n", "?\n\n")  # as in SkipKV's code; its paper has all but the last


@dataclasses.dataclass(frozen=True)
class Sentences:
    """How a policy finds sentences that are said again.

    Attributes:
      threshold: the cosine above which a later sentence says an earlier one again.
      ends: what ends a sentence: token ids, or texts, which stand for their last token.

    Raises:
      ValueError: a field out of its range.
    """

    threshold: float
    ends: tuple[Any, ...] = ENDS

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(
                f"tau is the cosine above which two sentences are alike and must lie in (0, 1]; got {self.threshold}."
            )
        if not self.ends or not all(is_token(end) or (isinstance(end, str) and end) for end in self.ends):
            raise ValueError(f"ends are texts or token ids after which a sentence is over, at least one; got {self.ends!r}.")


def is_token(end: Any) -> bool:
    """Whether something is a number that may be a token's."""
    return isinstance(end, int | np.integer) and not isinstance(end, bool)


@functools.lru_cache(maxsize=8)
def ends_of(tokenizer: Any, vocab_size: int, ends: tuple[Any, ...]) -> np.ndarray:
    """Which tokens end a sentence: [V].

    Raises:
      ValueError: texts without a tokenizer, or tokens that the model does not have.
    """
    if tokenizer is None and not all(map(is_token, ends)):
        raise ValueError("Sentences end with texts, and this model has no tokenizer. Pass ends= as token ids.")
    ids = [end if is_token(end) else last_token(tokenizer, str(end)) for end in ends]
    known = [i for i in ids if i is not None]
    if not known or not 0 <= min(known) <= max(known) < vocab_size:
        raise ValueError(f"ends must be tokens of the model, in [0, {vocab_size}); {ends!r} are {ids}.")
    is_end = np.zeros(vocab_size, bool)
    is_end[known] = True
    return is_end


def last_token(tokenizer: Any, end: str) -> int | None:
    """The last token of a text; None for one that the tokenizer cannot write, which ends nothing."""
    ids = tokenizer.encode(end, add_special_tokens=False)
    text = tokenizer.decode(ids[-1:]) if ids else ""
    return ids[-1] if text and end.endswith(text) else None


class SentenceMap(NamedTuple):
    """What compaction is told about each row's tokens, by position."""

    sentence: Int[Array, "R T"]  # that the token is of
    similarity: Float[Array, "R T"]  # of the latest sentence that says the token's again, 0 if none does


def similarity_of_slots(sentences: SentenceMap, position: Int[Array, "B K S"]) -> Float[Array, "B K S"]:
    """How alike a later sentence is to each slot's, if the head holds at least two of its tokens; else 0.

    Batch row b shows sequence b modulo R, in any layer. Slots are in the order of their positions, the empty ones last, so
    tokens of a sentence are neighbours.
    """
    row = jnp.arange(position.shape[0], dtype=jnp.int32)[:, None, None] % len(sentences.sentence)
    sentence = jnp.where(position == EMPTY, EMPTY, sentences.sentence[row, position])
    is_like_next = (sentence[..., 1:] == sentence[..., :-1]) & (sentence[..., 1:] != EMPTY)
    edge = jnp.zeros((*sentence.shape[:-1], 1), bool)
    has_company = jnp.concatenate([edge, is_like_next], axis=-1) | jnp.concatenate([is_like_next, edge], axis=-1)
    return jnp.where(has_company, sentences.similarity[row, position], 0.0)


class SentenceLog:
    """The sentences of one row so far. Only those that end are embedded; those of which no token is left are forgotten."""

    def __init__(self, is_end: np.ndarray, threshold: float, width: int) -> None:
        self.is_end, self.threshold = is_end, threshold
        self.sentence: list[int] = []  # that each token is of
        self.similarity = np.zeros(0, np.float32)  # of each finished sentence to the latest one that says it again
        self.known = np.zeros(0, np.int64)  # finished sentences that were compared with those before them ...
        self.embedding = np.zeros((0, width), np.float32)  # ... and how they are embedded
        self._fresh: list[np.ndarray] = []  # embeddings of sentences that were not compared yet
        self._sum = np.zeros(width)  # over the unfinished sentence

    @property
    def nbytes(self) -> int:
        """Bytes of embeddings, that of the unfinished sentence included."""
        return self.embedding.nbytes + sum(one.nbytes for one in self._fresh) + self._sum.nbytes

    @property
    def num_finished(self) -> int:
        """Sentences that ended."""
        return len(self.similarity) + len(self._fresh)

    def take(self, tokens: Sequence[int] | np.ndarray, hidden: np.ndarray) -> None:
        """Takes the next tokens with their hidden states [T, D]; however they are cut into pieces, the sums are the same."""
        for token, state in zip(tokens, np.asarray(hidden, np.float64), strict=True):
            self.sentence.append(self.num_finished)
            self._sum += state
            if self.is_end[token]:
                length = max(float(np.linalg.norm(self._sum)), 1e-12)  # scaling makes the mean of the sum
                self._fresh.append((self._sum / length).astype(np.float32))
                self._sum = np.zeros_like(self._sum)

    def compare(self) -> None:
        """Flags what the sentences that ended since the last time say again; the latest of several counts."""
        if not self._fresh:
            return
        first, new = len(self.similarity), np.stack(self._fresh)
        self.similarity = np.concatenate([self.similarity, np.zeros(len(new), np.float32)])
        self.known = np.concatenate([self.known, np.arange(first, first + len(new))])
        self.embedding = np.concatenate([self.embedding, new])
        self._fresh = []
        cosine = self.embedding @ new.T
        for j in range(len(new)):
            is_said_again = (self.known < first + j) & (cosine[:, j] > self.threshold)
            self.similarity[self.known[is_said_again]] = cosine[is_said_again, j]

    def forget(self, is_left: np.ndarray) -> None:
        """Drops the embeddings of sentences of which no head holds a token; `is_left` by position [T]."""
        left = np.unique(np.asarray(self.sentence)[is_left[: len(self.sentence)]])
        stays = np.isin(self.known, left)
        self.known, self.embedding = self.known[stays], self.embedding[stays]

    def by_position(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Each token's sentence and that one's similarity, as `SentenceMap` has them: [width] each."""
        count, others = len(self.sentence), self.num_finished + 1 - len(self.similarity)
        sentence, similarity = np.zeros(width, np.int32), np.zeros(width, np.float32)
        sentence[:count] = self.sentence
        similarity[:count] = np.pad(self.similarity, (0, others))[sentence[:count]]
        return sentence, similarity

    def copy(self) -> "SentenceLog":
        """A log that goes its own way."""
        twin = copy.copy(self)
        twin.sentence, twin._fresh = list(self.sentence), list(self._fresh)
        twin.similarity, twin._sum = self.similarity.copy(), self._sum.copy()
        return twin


def new_log(model: Model, sentences: Sentences | None) -> SentenceLog | None:
    """An empty log for a policy that goes by sentences; None for others."""
    if sentences is None:
        return None
    is_end = ends_of(model.tokenizer, model.config.vocab_size, sentences.ends)
    return SentenceLog(is_end, sentences.threshold, model.config.width)


def map_sentences(log: SentenceLog, width: int) -> SentenceMap:
    """Which sentences of a row are said again, for as many positions as `width`."""
    log.compare()
    arrays: Any = (of_row[None] for of_row in log.by_position(width))
    return SentenceMap(*arrays)
