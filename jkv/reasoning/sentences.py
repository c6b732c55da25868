"""Finds sentences that a later sentence repeats (SkipKV), on the host, for each row before its compaction.

A sentence ends with a token that ends a line. Its embedding is the mean of its tokens' hidden states after the final norm,
normalised. Of two similar sentences the earlier is flagged. Prompt and completion are one text. Compaction receives, for each
position, the sentence of the token and the similarity of the latest sentence that repeats it.
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
from jkv.checks import shown
from jkv.errors import InputError
from jkv.model.params import Model

ENDS = ("\n", ".\n", ")\n", "\n\n", ".\n\n", ")\n\n", "?\n\n")  # as in SkipKV's code; the paper lists all but the last


@dataclasses.dataclass(frozen=True)
class Sentences:
    """How a policy finds repeated sentences.

    Attributes:
      threshold: the cosine above which a later sentence repeats an earlier one.
      ends: what ends a sentence: token ids, or texts. A text means its last token.

    Raises:
      ValueError: a field is out of range.
    """

    threshold: float
    ends: tuple[Any, ...] = ENDS

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            rule = "{field} is the cosine above which two sentences are similar and must lie in (0, 1]; got {got}."
            raise InputError(rule, field="tau", code="out_of_range", got=self.threshold)
        if not self.ends or not all(is_token(end) or (isinstance(end, str) and end) for end in self.ends):
            rule = "{field} must be one or more texts or token ids that end a sentence; got {got}."
            raise InputError(rule, field="ends", code="wrong_type", got=shown(self.ends))


def is_token(end: Any) -> bool:
    """Whether an end is a token id."""
    return isinstance(end, int | np.integer) and not isinstance(end, bool)


@functools.lru_cache(maxsize=8)
def ends_of(tokenizer: Any, vocab_size: int, ends: tuple[Any, ...]) -> np.ndarray:
    """Which tokens end a sentence: [V].

    Raises:
      ValueError: texts without a tokenizer, or tokens outside the vocabulary.
    """
    if tokenizer is None and not all(map(is_token, ends)):
        rule = "Texts in {field} need a tokenizer, and this model has none. Pass {field}= as token ids."
        raise InputError(rule, field="ends", code="unsupported")
    ids = [end if is_token(end) else last_token(tokenizer, str(end)) for end in ends]
    known = [i for i in ids if i is not None]
    if not known or not 0 <= min(known) <= max(known) < vocab_size:
        rule = "{field} must be tokens of the model, in [0, {most}); {got} are {ids}."
        raise InputError(rule, field="ends", code="out_of_range", most=vocab_size, got=shown(ends), ids=shown(ids))
    is_end = np.zeros(vocab_size, bool)
    is_end[known] = True
    return is_end


def last_token(tokenizer: Any, end: str) -> int | None:
    """The last token of a text; None if the tokenizer cannot encode the text."""
    ids = tokenizer.encode(end, add_special_tokens=False)
    text = tokenizer.decode(ids[-1:]) if ids else ""
    return ids[-1] if text and end.endswith(text) else None


class SentenceMap(NamedTuple):
    """The sentences of each row, by position: an input of compaction."""

    sentence: Int[Array, "R T"]  # index of the token's sentence
    similarity: Float[Array, "R T"]  # to the latest sentence that repeats it; 0 if none does


def similarity_of_slots(sentences: SentenceMap, position: Int[Array, "B K S"]) -> Float[Array, "B K S"]:
    """The similarity of a later sentence to that of each slot, if the head keeps at least two of its tokens; else 0.

    Batch row b is sequence b modulo R, in any layer. Slots are in the order of positions, with empty slots last, so the tokens
    of a sentence are adjacent.
    """
    row = jnp.arange(position.shape[0], dtype=jnp.int32)[:, None, None] % len(sentences.sentence)
    sentence = jnp.where(position == EMPTY, EMPTY, sentences.sentence[row, position])
    is_like_next = (sentence[..., 1:] == sentence[..., :-1]) & (sentence[..., 1:] != EMPTY)
    edge = jnp.zeros((*sentence.shape[:-1], 1), bool)
    has_company = jnp.concatenate([edge, is_like_next], axis=-1) | jnp.concatenate([is_like_next, edge], axis=-1)
    return jnp.where(has_company, sentences.similarity[row, position], 0.0)


class SentenceLog:
    """The sentences of one row so far. Finished sentences are embedded; evicted ones are forgotten."""

    def __init__(self, is_end: np.ndarray, threshold: float, width: int) -> None:
        self.is_end, self.threshold = is_end, threshold
        self.sentence: list[int] = []  # index of each token's sentence
        self.similarity = np.zeros(0, np.float32)  # of each finished sentence to the latest one that repeats it
        self.known = np.zeros(0, np.int64)  # sentences that are compared already ...
        self.embedding = np.zeros((0, width), np.float32)  # ... and their embeddings
        self._fresh: list[np.ndarray] = []  # embeddings of finished sentences that are not compared yet
        self._sum = np.zeros(width)  # of the hidden states of the unfinished sentence

    @property
    def nbytes(self) -> int:
        """Bytes of all embeddings, the unfinished sentence included."""
        return self.embedding.nbytes + sum(one.nbytes for one in self._fresh) + self._sum.nbytes

    @property
    def num_finished(self) -> int:
        """The number of finished sentences."""
        return len(self.similarity) + len(self._fresh)

    def take(self, tokens: Sequence[int] | np.ndarray, hidden: np.ndarray) -> None:
        """Adds the next tokens with their hidden states [T, D]. How tokens are split into calls changes nothing."""
        for token, state in zip(tokens, np.asarray(hidden, np.float64), strict=True):
            self.sentence.append(self.num_finished)
            self._sum += state
            if self.is_end[token]:
                length = max(float(np.linalg.norm(self._sum)), 1e-12)  # of sum and mean, the unit vector is the same
                self._fresh.append((self._sum / length).astype(np.float32))
                self._sum = np.zeros_like(self._sum)

    def compare(self) -> None:
        """Flags sentences that a new one repeats; the latest repetition counts."""
        if not self._fresh:
            return
        first, new = len(self.similarity), np.stack(self._fresh)
        self.similarity = np.concatenate([self.similarity, np.zeros(len(new), np.float32)])
        self.known = np.concatenate([self.known, np.arange(first, first + len(new))])
        self.embedding = np.concatenate([self.embedding, new])
        self._fresh = []
        cosine = self.embedding @ new.T
        for j in range(len(new)):
            is_repeated = (self.known < first + j) & (cosine[:, j] > self.threshold)
            self.similarity[self.known[is_repeated]] = cosine[is_repeated, j]

    def forget(self, is_left: np.ndarray) -> None:
        """Drops the embeddings of fully evicted sentences. `is_left` [T]: whether any head keeps the position."""
        left = np.unique(np.asarray(self.sentence)[is_left[: len(self.sentence)]])
        stays = np.isin(self.known, left)
        self.known, self.embedding = self.known[stays], self.embedding[stays]

    def by_position(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The fields of `SentenceMap`, padded to [width] each."""
        count, others = len(self.sentence), self.num_finished + 1 - len(self.similarity)
        sentence, similarity = np.zeros(width, np.int32), np.zeros(width, np.float32)
        sentence[:count] = self.sentence
        similarity[:count] = np.pad(self.similarity, (0, others))[sentence[:count]]
        return sentence, similarity

    def copy(self) -> "SentenceLog":
        """An independent copy."""
        twin = copy.copy(self)
        twin.sentence, twin._fresh = list(self.sentence), list(self._fresh)
        twin.similarity, twin._sum = self.similarity.copy(), self._sum.copy()
        return twin


def new_log(model: Model, sentences: Sentences | None) -> SentenceLog | None:
    """An empty log for a policy that compares sentences; None for others."""
    if sentences is None:
        return None
    is_end = ends_of(model.tokenizer, model.config.vocab_size, sentences.ends)
    return SentenceLog(is_end, sentences.threshold, model.config.width)


def map_sentences(log: SentenceLog, width: int) -> SentenceMap:
    """The sentences of a row and which of them are repeated, padded to `width` positions."""
    log.compare()
    arrays: Any = (of_row[None] for of_row in log.by_position(width))
    return SentenceMap(*arrays)
