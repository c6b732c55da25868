"""Steering (SEAL, arXiv 2504.07986; SkipKV): adds a vector to the hidden state at the end of each thought.

A thought ends with a token whose text contains a blank line. While the model thinks, `strength * vector` is added to that
token's hidden state at the input of one layer. The vector is the mean of checking and switching thoughts minus the mean of the
others (`jkv.analysis.steering_vectors`), so a negative strength makes the model check less and go on more.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkv.checks import check_least, need_tokenizer, shown
from jkv.errors import InputError, refused
from jkv.reasoning.token_text import BREAK, END_OF_THINKING, THINK, TokenFacts, facts_of
from jkv.reports import write_bytes
from jkv.resuming import digest_of
from jkv.text_files import check_file

CHECKS = (  # SEAL: a thought that contains one of these, or starts with "wait", is a check
    "verify",
    "make sure",
    "hold on",
    "think again",
    "'s correct",
    "'s incorrect",
    "let me check",
    "seems right",
)
SWITCHES = (  # SEAL: a thought that contains one of these, or starts with "alternatively", is a switch
    "think differently",
    "another way",
    "another approach",
    "another method",
    "another solution",
    "another strategy",
    "another technique",
)
CHECK_WORDS = ("Wait", "Alternatively", "again")  # SkipKV: a thought that contains one is a check


@dataclasses.dataclass(frozen=True, eq=False)
class SteeringVector:
    """The steering vectors of a model, one for each layer's input.

    Attributes:
      values: `[L, D]` float32, 0 for layers without a vector.
      about: how they were made, as strings.
    """

    values: np.ndarray
    about: dict[str, str] = dataclasses.field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SteeringVector) and np.array_equal(self.values, other.values) and self.about == other.about

    def __hash__(self) -> int:
        return hash(self.values.tobytes())

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the content."""
        return digest_of([self.values.astype(np.float32).tobytes().hex(), self.about])

    def save(self, path: Path | str) -> None:
        """Writes a safetensors file."""
        from safetensors.numpy import save

        write_bytes(path, save({"vector": self.values.astype(np.float32)}, metadata=self.about))

    def __repr__(self) -> str:
        return f"SteeringVector({self.values.shape[0]} layers, width {self.values.shape[1]}, {self.digest})"


def load_vector(path: Path | str) -> SteeringVector:
    """Reads a file of `SteeringVector.save`.

    Raises:
      ValueError: there is no such file, or it has no vector.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_file(Path(path))
        with safe_open(str(path), framework="numpy") as file:
            return SteeringVector(file.get_tensor("vector"), dict(file.metadata() or {}))
    except (OSError, ValueError, SafetensorError) as error:
        why = str(error).replace(str(path), "it").rstrip(".")[:300]
        rule = f"A steering vector must be a safetensors file made by `jkv steer`; {shown(str(path))}: {why}."
        raise refused(rule, path="invalid") from error


@dataclasses.dataclass(frozen=True)
class Steer:
    """Which vector is added, at which layer, and how strongly.

    Attributes:
      vector: the steering vectors of the model.
      layer: the layer whose input is changed.
      strength: the factor of the vector; negative values reduce checking.
      growth: how much the strength falls with each check so far (SkipKV: 0.02; SEAL: 0).
      interval: generated tokens between two counts of the checks.
      keywords: a thought that contains one of these counts as a check.
    """

    vector: SteeringVector
    layer: int
    strength: float = -1.0
    growth: float = 0.0
    interval: int = 128
    keywords: tuple[str, ...] = CHECK_WORDS

    def __post_init__(self) -> None:
        num_layers = self.vector.values.shape[0]
        if not 0 <= self.layer < num_layers:
            rule = "{field} must lie in [0, {most}), the layers of the vector; got {got}."
            raise InputError(rule, field="layer", code="out_of_range", most=num_layers, got=self.layer)
        check_least(1, " generated token", interval=self.interval)
        if not np.isfinite(self.values).all() or not self.values.any():
            message = f"The vector of layer {self.layer} must be finite and not zero. Extract one for that layer."
            raise refused(message, vector="out_of_range")
        if not all(isinstance(word, str) and word for word in self.keywords):
            rule = "{field} must be non-empty strings; got {got}."
            raise InputError(rule, field="keywords", code="wrong_type", got=shown(self.keywords))

    @property
    def values(self) -> np.ndarray:
        """The vector of the layer: [D]."""
        return self.vector.values[self.layer]

    def steps_until_due(self, generated: int) -> int | None:
        """Decode steps to the next possible change of the strength; None if it is constant."""
        return None if self.growth == 0 else self.interval - generated % self.interval


def amounts(
    strength: Float[Array, " B"],
    is_break: Bool[Array, " V"],
    think: Int[Array, " 2"],
    token: Int[Array, " B"],
    is_thinking: Bool[Array, " B"],
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """The strength for each row's token, and whether the row is thinking after it.

    `is_break` are the tokens that end a thought, `think` those that begin and end thinking.
    """
    is_thinking = jnp.where(token == think[0], True, jnp.where(token == think[1], False, is_thinking))
    return jnp.where(is_thinking & is_break[token], strength, 0.0), is_thinking


def push(
    vector: Float[Array, "B D"],
    of_layer: Int[Array, " B"],
    amount: Float[Array, "B T"],
    layer: int,
    hidden: Float[Array, "B T D"],
) -> Float[Array, "B T D"]:
    """The hidden states, with the vectors of the rows that are steered at this layer added."""
    amount = jnp.where((of_layer == layer)[:, None], amount, 0.0)
    return hidden + (amount[..., None] * vector[:, None]).astype(hidden.dtype)


def marks_of(tokenizer: Any, vocab_size: int) -> TokenFacts:
    """Which tokens contain a blank line, and which begin and end thinking.

    Raises:
      ValueError: the model has no tokenizer, or its thinking marks are not single tokens.
    """
    need_tokenizer(tokenizer, "Steering needs the text of tokens")
    facts = facts_of(tokenizer, vocab_size)
    if (facts.think < 0).any():
        rule = f"Steering needs {THINK} and {END_OF_THINKING} to be one token each; got {facts.think.tolist()}."
        raise refused(rule, model="unsupported")
    return facts


@dataclasses.dataclass
class Thinking:
    """The progress of a sample's thinking. Each token is read once and decoded once.

    Attributes:
      is_thinking: whether thinking has begun and not ended.
      num_checks: the finished checks of the completion, at the last count.
    """

    is_thinking: bool = False
    num_checks: int = 0
    _num_followed: int = 0
    _num_counted: int = 0

    def follow(self, prompt: Sequence[int] | np.ndarray, tokens: Sequence[int], marks: TokenFacts) -> None:
        """Reads the new tokens of the completion; the first call also reads the prompt."""
        if self._num_followed == 0:
            self._read(prompt, marks)
        self._read(tokens[self._num_followed :], marks)
        self._num_followed = len(tokens)

    def _read(self, tokens: Sequence[int] | np.ndarray, marks: TokenFacts) -> None:
        for token in tokens:
            if token in marks.think:
                self.is_thinking = bool(token == marks.think[0])

    def count(
        self, tokens: Sequence[int], marks: TokenFacts, decode: Callable[[Sequence[int]], str], keywords: Sequence[str]
    ) -> None:
        """Counts the checks among the thoughts that finished since the last count."""
        ends = np.flatnonzero(marks.is_break[tokens[self._num_counted :]])
        if len(ends):
            finished = self._num_counted + int(ends[-1]) + 1
            self.num_checks += num_checks(decode(tokens[self._num_counted : finished]), keywords)
            self._num_counted = finished


def label(thought: str) -> str:
    """SEAL's label of a thought: "check", "switch" or "go on", from its first word and the phrases in it.

    >>> label("Wait, 3*7=1"), label("Let me try another way."), label("d=b*c")
    ('check', 'switch', 'go on')
    """
    text = thought.strip().lower()
    if text.startswith("wait") or any(phrase in text for phrase in CHECKS):
        return "check"
    if text.startswith("alternatively") or any(phrase in text for phrase in SWITCHES):
        return "switch"
    return "go on"


def num_checks(text: str, keywords: Sequence[str] = CHECK_WORDS) -> int:
    r"""SkipKV's count of checks: finished thoughts that contain a keyword as a word (or anywhere, if it is not ASCII).

    >>> num_checks("d=1\n\nWait\n\nb=3\n\nWait aga")
    1
    """
    return sum(is_check(thought, tuple(keywords)) for thought in text.split(BREAK)[:-1])


def is_check(thought: str, keywords: tuple[str, ...] = CHECK_WORDS) -> bool:
    """Whether a thought contains a keyword as a word (or anywhere, if it is not ASCII)."""
    return any(pattern.search(thought) for pattern in patterns_of(keywords))


@functools.lru_cache
def patterns_of(keywords: tuple[str, ...]) -> list[re.Pattern[str]]:
    """A regular expression for each keyword."""
    return [re.compile(rf"(?<!\w){re.escape(word)}(?!\w)" if word.isascii() else re.escape(word)) for word in keywords]
