"""Reasoning steps in a stream of tokens, and which earlier ones each is like: stage 1 of ReasonCache (arXiv 2507.21433).

A step ends with a token whose text holds a blank line, or where thinking begins or ends. It is compared with all earlier steps
of its sequence in one sparse product: the cosine of two bags of tokens (or of two embeddings), times the shorter length in
bytes by the longer. What is above a threshold that falls as the sequence repeats itself is a candidate, unless the formulas and
code in the two differ (`jkv.reasoning.formulas`). All of it runs on the host, while the device decodes.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jkv.reasoning.formulas import form_of
from jkv.reasoning.token_text import TokenFacts

SENTENCE = "sentence:"  # before the name of a model of sentence-transformers


@runtime_checkable
class Library(Protocol):
    """The steps so far, in whatever form they are compared."""

    def compare(self, tokens: Sequence[int], text: Callable[[], str]) -> np.ndarray:
        """The cosine of a new step with each of those before it, and adds it: [steps]."""
        ...


class TokenBags:
    """How often each token occurs in a step: all earlier bags are the rows of one sparse matrix."""

    def __init__(self, vocab_size: int) -> None:
        self._new = np.zeros(vocab_size, np.float32)
        self._token, self._step = np.zeros(1024, np.int64), np.zeros(1024, np.int64)
        self._count = np.zeros(1024, np.float32)
        self._norm: list[float] = []
        self._size = 0

    def compare(self, tokens: Sequence[int], text: Callable[[], str]) -> np.ndarray:
        token, count = np.unique(np.asarray(tokens, np.int64), return_counts=True)
        self._new[token] = count
        size = self._size
        dots = np.bincount(self._step[:size], self._count[:size] * self._new[self._token[:size]], minlength=len(self._norm))
        self._new[token] = 0
        norm = float(np.sqrt((count.astype(np.float64) ** 2).sum()))
        cosine = dots / (np.asarray(self._norm) * norm) if self._norm else np.zeros(0)
        while size + len(token) > len(self._token):
            self._token, self._step = np.tile(self._token, 2), np.tile(self._step, 2)
            self._count = np.tile(self._count, 2)
        end = size + len(token)
        self._token[size:end], self._count[size:end], self._step[size:end] = token, count, len(self._norm)
        self._norm.append(norm)
        self._size = end
        return cosine


class Embeddings:
    """A vector for each step, from a function of its tokens or its text."""

    def __init__(self, embed: Callable[[Sequence[int], Callable[[], str]], Any]) -> None:
        self._embed = embed
        self._unit = np.zeros((0, 0), np.float32)
        self._size = 0

    def compare(self, tokens: Sequence[int], text: Callable[[], str]) -> np.ndarray:
        vector = np.asarray(self._embed(tokens, text), np.float32).reshape(-1)
        if not np.isfinite(vector).all() or (self._size and len(vector) != self._unit.shape[1]):
            raise ValueError(f"An encoder gives finite vectors, all of one length; got {vector.shape}, {vector[:3]}.")
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        if self._size == len(self._unit):
            grown = np.zeros((max(64, 2 * self._size), len(vector)), np.float32)
            if self._size:
                grown[: self._size] = self._unit
            self._unit = grown
        cosine = self._unit[: self._size] @ vector
        self._unit[self._size] = vector
        self._size += 1
        return cosine


@dataclasses.dataclass(frozen=True)
class Filter:
    """Which steps are alike.

    Attributes:
      strict: the similarity above which steps are alike while nothing repeats.
      soft: the one where everything does: the threshold is `strict - (strict - soft) * mean`, over the new step's similarities
        to all earlier ones. Equal to `strict`, the threshold is fixed.
      structure: whether formulas and code must be the same.
      encoder: "tokens", bags of token ids; "embedding", the mean of the model's token embeddings; "sentence:<model>", a
        sentence encoder by name or folder (such as all-MiniLM-L6-v2, with the extra `sentence`); or a function from a text to a
        vector.
      penalises_length: whether the shorter length by the longer counts.

    Raises:
      ValueError: a field out of its range.
    """

    strict: float = 0.9
    soft: float = 0.7
    structure: bool = True
    encoder: str | Callable[[str], Any] = "tokens"
    penalises_length: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.soft <= self.strict <= 1:
            raise ValueError(f"Thresholds must be 0 <= soft <= strict <= 1; got {self.strict=}, {self.soft=}.")
        if isinstance(self.encoder, str) and self.encoder not in ("tokens", "embedding"):
            if not self.encoder.removeprefix(SENTENCE) or not self.encoder.startswith(SENTENCE):
                raise ValueError(
                    f"encoder is 'tokens', 'embedding', '{SENTENCE}<model>', or a function from text to a vector; got "
                    f"{self.encoder!r}."
                )
            if importlib.util.find_spec("sentence_transformers") is None:
                raise ValueError(
                    f"encoder={self.encoder!r} needs sentence-transformers, which is not installed. Run: pip install "
                    '"jkv[sentence]".'
                )


@dataclasses.dataclass
class Step:
    """A finished step: positions [begin, end) of the sequence, and the number of generated tokens with which it ended."""

    begin: int
    end: int
    closed: int
    text: list[int]  # its tokens, white space included
    num_bytes: int
    form: int | None = None  # the number of its formulas, once somebody asked


@dataclasses.dataclass
class FilterStats:
    """What stage 1 did, counted over all sequences of an engine."""

    steps: int = 0
    compared: int = 0  # pairs of steps
    similar: int = 0  # of them, those above the threshold
    kept: int = 0  # of them, those whose formulas agree, or that hold none
    unparsed: int = 0  # formulas that no parser took, compared by their tokens


class StepFinder:
    """The steps of one sequence; tokens are looked at once."""

    def __init__(
        self,
        rule: Filter,
        facts: TokenFacts,
        decode: Callable[[Sequence[int]], str],
        library: Library,
        stats: FilterStats,
        position: int = 0,
    ) -> None:
        self.rule, self.facts, self.decode, self.library, self.stats = rule, facts, decode, library, stats
        self.steps: list[Step] = []
        self._marks = frozenset(facts.think.tolist())
        self._forms: dict[Any, int] = {}  # syntax trees, numbered as they come
        self._num_bytes = np.zeros(64)
        self._begin = self._position = position
        self._tokens: list[int] = []  # those that say something ...
        self._text: list[int] = []  # ... and all of them

    def take(self, token: int, generated: int) -> tuple[int, list[int]] | None:
        """Takes the next token; if a step ends with it, the step's index and those of the earlier steps that it is like."""
        self._position += 1
        if token not in self._marks:
            self._text.append(token)
        if self.facts.says_something[token]:
            self._tokens.append(token)
        return self.close(generated) if self.facts.ends_step[token] else None

    def close(self, generated: int) -> tuple[int, list[int]] | None:
        """Ends the step here, as where a text is over, and tells the same of it; None for one that says nothing."""
        found = None
        if self._tokens:  # what says nothing is no step
            num_bytes = int(self.facts.num_bytes[self._tokens].sum())
            step = Step(self._begin, self._position, generated, self._text, num_bytes)
            found = len(self.steps), self._compare(step, self._tokens)
        self._begin, self._tokens, self._text = self._position, [], []
        return found

    def _compare(self, step: Step, tokens: list[int]) -> list[int]:
        count = len(self.steps)
        cosine = self.library.compare(tokens, functools.partial(self.decode, step.text))
        if count == len(self._num_bytes):
            self._num_bytes = np.tile(self._num_bytes, 2)
        others, similarity = self._num_bytes[:count], cosine
        if self.rule.penalises_length:
            similarity = cosine * np.minimum(others, step.num_bytes) / np.maximum(np.maximum(others, step.num_bytes), 1)
        self._num_bytes[count] = step.num_bytes
        self.steps.append(step)
        threshold = self.rule.strict - (self.rule.strict - self.rule.soft) * (float(similarity.mean()) if count else 0.0)
        similar = np.flatnonzero(similarity > threshold).tolist()
        kept = [i for i in similar if not self.rule.structure or self._form(step) == self._form(self.steps[i])]
        stats = self.stats
        stats.steps, stats.compared = stats.steps + 1, stats.compared + count
        stats.similar, stats.kept = stats.similar + len(similar), stats.kept + len(kept)
        return kept

    def _form(self, step: Step) -> int:
        if step.form is None:
            form, unparsed = form_of(self.decode(step.text))
            step.form = self._forms.setdefault(form, len(self._forms))
            self.stats.unparsed += unparsed
        return step.form


def make_library(rule: Filter, vocab_size: int, embedding: Callable[[], np.ndarray]) -> Library:
    """What a sequence's steps are compared in; `embedding` gives the model's token embeddings [V, D], if asked."""
    if rule.encoder == "tokens":
        return TokenBags(vocab_size)
    if rule.encoder == "embedding":
        return Embeddings(lambda tokens, text: embedding()[np.asarray(tokens)].mean(axis=0))
    encode: Any = sentence_encoder(rule.encoder) if isinstance(rule.encoder, str) else rule.encoder
    return Embeddings(lambda tokens, text: encode(text()))


@functools.lru_cache(maxsize=1)
def sentence_encoder(encoder: str) -> Callable[[str], Any]:
    """A sentence encoder of sentence-transformers, by the name or folder that the setting names."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(encoder.removeprefix(SENTENCE)).encode
