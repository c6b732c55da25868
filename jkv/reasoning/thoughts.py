"""Splits a stream of tokens into thoughts and finds similar earlier ones: stage 1 of ReasonCache (arXiv 2507.21433).

A thought ends with a token whose text contains a blank line, with the second of two tokens that make one (some tokenizers have
a token for every end of a line), or where thinking begins or ends. One sparse product compares it with all earlier thoughts of
its sequence: the cosine of two bags of tokens (or of two embeddings), times the ratio of the shorter length to the longer, in
bytes. Pairs above the threshold are candidates, unless their formulas or code differ (`jkv.reasoning.formulas`). The threshold
falls as the sequence repeats itself. All of this runs on the host while the device decodes.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jkv.checks import install, shown
from jkv.errors import InputError, refused
from jkv.reasoning.formulas import form_of
from jkv.reasoning.token_text import TokenFacts

SENTENCE = "sentence:"  # prefix of the name of a sentence-transformers model


@runtime_checkable
class SimilarityIndex(Protocol):
    """The thoughts so far, in the form in which they are compared."""

    def compare(self, tokens: Sequence[int], text: Callable[[], str]) -> np.ndarray:
        """Adds a thought. Returns its cosine with each earlier one: [thoughts]."""
        ...


class TokenBags:
    """Token counts of each thought, as the rows of one sparse matrix."""

    def __init__(self, vocab_size: int) -> None:
        self._new = np.zeros(vocab_size, np.float32)
        self._token, self._thought = np.zeros(1024, np.int64), np.zeros(1024, np.int64)
        self._count = np.zeros(1024, np.float32)
        self._norm: list[float] = []
        self._size = 0

    def compare(self, tokens: Sequence[int], text: Callable[[], str]) -> np.ndarray:
        token, count = np.unique(np.asarray(tokens, np.int64), return_counts=True)
        self._new[token] = count
        size = self._size
        dots = np.bincount(self._thought[:size], self._count[:size] * self._new[self._token[:size]], minlength=len(self._norm))
        self._new[token] = 0
        norm = float(np.sqrt((count.astype(np.float64) ** 2).sum()))
        cosine = dots / (np.asarray(self._norm) * norm) if self._norm else np.zeros(0)
        while size + len(token) > len(self._token):
            self._token, self._thought = np.tile(self._token, 2), np.tile(self._thought, 2)
            self._count = np.tile(self._count, 2)
        end = size + len(token)
        self._token[size:end], self._count[size:end], self._thought[size:end] = token, count, len(self._norm)
        self._norm.append(norm)
        self._size = end
        return cosine


class Embeddings:
    """One vector per thought, computed from its tokens or its text."""

    def __init__(self, embed: Callable[[Sequence[int], Callable[[], str]], Any]) -> None:
        self._embed = embed
        self._unit = np.zeros((0, 0), np.float32)
        self._size = 0

    def compare(self, tokens: Sequence[int], text: Callable[[], str]) -> np.ndarray:
        vector = np.asarray(self._embed(tokens, text), np.float32).reshape(-1)
        if not np.isfinite(vector).all() or (self._size and len(vector) != self._unit.shape[1]):
            rule = f"An encoder must return finite vectors of one length; got shape {vector.shape}, {vector[:3]}. Correct it."
            raise refused(rule, encoder="invalid")
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
    """Which thoughts are similar.

    Attributes:
      strict: the similarity threshold of a sequence that never repeats itself.
      soft: the threshold of a sequence that only repeats itself. The threshold in use is `strict - (strict - soft) * mean`,
        where the mean is over the similarities of the new thought to all earlier ones. With `soft == strict` it is fixed.
      structure: whether formulas and code must be equal.
      encoder: "tokens" for bags of token ids; "embedding" for the mean of the model's token embeddings; "sentence:<model>" for
        a sentence encoder, by name or folder (such as all-MiniLM-L6-v2, with the extra `sentence`); or a function from a text
        to a vector.
      penalises_length: whether the cosine is multiplied by the ratio of the shorter length to the longer.

    Raises:
      ValueError: a field is out of range.
    """

    strict: float = 0.9
    soft: float = 0.7
    structure: bool = True
    encoder: str | Callable[[str], Any] = "tokens"
    penalises_length: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.soft <= self.strict <= 1:
            rule = "Thresholds must be 0 <= soft <= strict <= 1; got strict={strict} and soft={soft}."
            raise InputError(rule, field="strict", code="out_of_range", strict=self.strict, soft=self.soft)
        if isinstance(self.encoder, str) and self.encoder not in ("tokens", "embedding"):
            if not self.encoder.removeprefix(SENTENCE) or not self.encoder.startswith(SENTENCE):
                rule = (
                    "{field} must be 'tokens', 'embedding', '{sentence}<model>', or a function from a text to a vector; got "
                    "{got}."
                )
                raise InputError(rule, field="encoder", code="unknown_name", sentence=SENTENCE, got=shown(self.encoder))
            if importlib.util.find_spec("sentence_transformers") is None:
                rule = "{field}={got} needs sentence-transformers, which is not installed. Run: {command}."
                raise InputError(
                    rule, field="encoder", code="unsupported", got=shown(self.encoder), command=install("sentence")
                )


@dataclasses.dataclass
class Thought:
    """A finished thought: positions [begin, end) of the sequence."""

    begin: int
    end: int
    closed: int  # the number of generated tokens when it ended
    tokens: list[int]  # white space included
    num_bytes: int
    form: int | None = None  # id of its formulas and code; None until it is needed


@dataclasses.dataclass
class FilterStats:
    """Counts of stage 1, over all sequences of an engine."""

    steps: int = 0  # thoughts
    compared: int = 0  # pairs of thoughts
    similar: int = 0  # pairs above the threshold
    kept: int = 0  # similar pairs whose formulas and code are equal
    unparsed: int = 0  # formulas that no parser accepts, compared by their tokens


class ThoughtFinder:
    """Finds the thoughts of one sequence. Each token is read once."""

    def __init__(
        self,
        rule: Filter,
        facts: TokenFacts,
        decode: Callable[[Sequence[int]], str],
        index: SimilarityIndex,
        stats: FilterStats,
        position: int = 0,
    ) -> None:
        self.rule, self.facts, self.decode, self.index, self.stats = rule, facts, decode, index, stats
        self.thoughts: list[Thought] = []
        self._marks = frozenset(facts.think.tolist())
        self._form_ids: dict[Any, int] = {}  # syntax trees -> id
        self._num_bytes = np.zeros(64)
        self._begin = self._position = position
        self._compared: list[int] = []  # tokens of the open thought that are compared ...
        self._tokens: list[int] = []  # ... and all of them, white space included
        self._was_line = False  # whether the last token ended a line

    def take(self, token: int, generated: int) -> tuple[int, list[int]] | None:
        """Adds the next token. If it ends a thought, returns the indices of this thought and of similar earlier ones."""
        self._position += 1
        if token not in self._marks:
            self._tokens.append(token)
        if self.facts.has_content[token]:
            self._compared.append(token)
        is_end = self.facts.ends_thought[token] or (self._was_line and self.facts.starts_line[token])
        self._was_line = bool(self.facts.ends_line[token])
        return self.close(generated) if is_end else None

    def close(self, generated: int) -> tuple[int, list[int]] | None:
        """Ends the open thought, as at the end of a text. Returns what `take` does; None for white space alone."""
        found = None
        if self._compared:
            num_bytes = int(self.facts.num_bytes[self._compared].sum())
            thought = Thought(self._begin, self._position, generated, self._tokens, num_bytes)
            found = len(self.thoughts), self._compare(thought, self._compared)
        self._begin, self._compared, self._tokens = self._position, [], []
        return found

    def _compare(self, thought: Thought, tokens: list[int]) -> list[int]:
        count = len(self.thoughts)
        cosine = self.index.compare(tokens, functools.partial(self.decode, thought.tokens))
        if count == len(self._num_bytes):
            self._num_bytes = np.tile(self._num_bytes, 2)
        others, similarity = self._num_bytes[:count], cosine
        if self.rule.penalises_length:
            similarity = cosine * np.minimum(others, thought.num_bytes) / np.maximum(np.maximum(others, thought.num_bytes), 1)
        self._num_bytes[count] = thought.num_bytes
        self.thoughts.append(thought)
        threshold = self.rule.strict - (self.rule.strict - self.rule.soft) * (float(similarity.mean()) if count else 0.0)
        similar = np.flatnonzero(similarity > threshold).tolist()
        kept = [i for i in similar if not self.rule.structure or self._form(thought) == self._form(self.thoughts[i])]
        stats = self.stats
        stats.steps, stats.compared = stats.steps + 1, stats.compared + count
        stats.similar, stats.kept = stats.similar + len(similar), stats.kept + len(kept)
        return kept

    def _form(self, thought: Thought) -> int:
        if thought.form is None:
            form, unparsed = form_of(self.decode(thought.tokens))
            thought.form = self._form_ids.setdefault(form, len(self._form_ids))
            self.stats.unparsed += unparsed
        return thought.form


def make_index(rule: Filter, vocab_size: int, embedding: Callable[[], np.ndarray]) -> SimilarityIndex:
    """The index in which a sequence's thoughts are compared. `embedding` returns the model's token embeddings [V, D]."""
    if rule.encoder == "tokens":
        return TokenBags(vocab_size)
    if rule.encoder == "embedding":
        return Embeddings(lambda tokens, text: embedding()[np.asarray(tokens)].mean(axis=0))
    encode: Any = sentence_encoder(rule.encoder) if isinstance(rule.encoder, str) else rule.encoder
    return Embeddings(lambda tokens, text: encode(text()))


@functools.lru_cache(maxsize=1)
def sentence_encoder(encoder: str) -> Callable[[str], Any]:
    """The sentence encoder of a setting `sentence:<name or folder>`."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(encoder.removeprefix(SENTENCE)).encode
