"""Steering (SEAL, arXiv 2504.07986; SkipKV): a vector added to the hidden state wherever a new thought begins.

A thought begins after a token whose text holds a blank line. While the model thinks, that token's hidden state, where it
enters one layer, is pushed away from checking and changing course, towards carrying on: `strength * vector`, the vector being
the mean of checking and switching thoughts minus the mean of the others (`extract`).
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkv.reasoning.token_text import BREAK, END_OF_THINKING, THINK, TokenFacts, facts_of

CHECKS = (  # SEAL's: a thought that holds one of these, or starts with "wait", checks what was done
    "verify",
    "make sure",
    "hold on",
    "think again",
    "'s correct",
    "'s incorrect",
    "let me check",
    "seems right",
)
SWITCHES = (  # and one that holds one of these, or starts with "alternatively", changes course
    "think differently",
    "another way",
    "another approach",
    "another method",
    "another solution",
    "another strategy",
    "another technique",
)
CHECK_WORDS = ("Wait", "Alternatively", "again")  # SkipKV's: a thought that holds one checks what was done


@dataclasses.dataclass(frozen=True, eq=False)
class SteeringVector:
    """Directions of a model, one for each layer's input, and how they were made.

    Attributes:
      values: `[L, D]` float32, 0 for layers without one.
      about: anything worth knowing, as strings.
    """

    values: np.ndarray
    about: dict[str, str] = dataclasses.field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SteeringVector) and np.array_equal(self.values, other.values) and self.about == other.about

    def __hash__(self) -> int:
        return hash(self.values.tobytes())

    def save(self, path: Path | str) -> None:
        """Writes a safetensors file."""
        from safetensors.numpy import save_file

        save_file({"vector": self.values.astype(np.float32)}, str(path), metadata=self.about)

    def __repr__(self) -> str:
        return f"SteeringVector({self.values.shape[0]} layers, width {self.values.shape[1]})"


def load_vector(path: Path | str) -> SteeringVector:
    """What `SteeringVector.save` wrote.

    Raises:
      ValueError: no such file, or one without a vector.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            return SteeringVector(file.get_tensor("vector"), dict(file.metadata() or {}))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"A steering vector is a safetensors file that `jkv steer` wrote; {path}: {error}.") from error


@dataclasses.dataclass(frozen=True)
class Steer:
    """What is added, where, and how much.

    Attributes:
      vector: the directions.
      layer: whose input is changed.
      strength: how many times the vector is added; negative pushes away from checking.
      growth: how much the strength falls with each checking thought so far, brought up to date every `interval` tokens
        (SkipKV's 0.02; SEAL has none).
      interval: generated tokens between two such looks.
      keywords: words that make a thought a checking one there.
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
            raise ValueError(f"layer must be one of the vector's {num_layers}, from 0; got {self.layer}.")
        if self.interval < 1:
            raise ValueError(f"interval must be at least 1 generated token; got {self.interval}.")
        if not np.isfinite(self.values).all() or not self.values.any():
            raise ValueError(f"The vector of layer {self.layer} must be finite and not zero; extract one for that layer.")
        if not all(isinstance(word, str) and word for word in self.keywords):
            raise ValueError(f"keywords are words that make a thought a checking one; got {self.keywords!r}.")

    @property
    def values(self) -> np.ndarray:
        """The layer's direction: [D]."""
        return self.vector.values[self.layer]

    def steps_until_due(self, generated: int) -> int | None:
        """Steps to the next moment at which the strength may change; None if it never does."""
        return None if self.growth == 0 else self.interval - generated % self.interval


class SteerRules(NamedTuple):
    """What each batch row adds in a chunk; the tokens' part is the same for all."""

    strength: Float[Array, " B"]  # 0 for a row that is not steered
    layer: Int[Array, " B"]
    vector: Float[Array, "B D"]
    is_thinking: Bool[Array, " B"]  # at the start of the chunk
    is_break: Bool[Array, " V"]  # tokens after which a thought begins
    think: Int[Array, " 2"]  # the tokens that begin and end thinking, -1 for none


def amounts(rules: SteerRules, token: Int[Array, " B"], is_thinking: Bool[Array, " B"]) -> tuple[Array, Array]:
    """How much each row's token is steered, and whether the row thinks after it."""
    is_thinking = jnp.where(token == rules.think[0], True, jnp.where(token == rules.think[1], False, is_thinking))
    return jnp.where(is_thinking & rules.is_break[token], rules.strength, 0.0), is_thinking


def push(
    vector: Float[Array, "B D"],
    of_layer: Int[Array, " B"],
    amount: Float[Array, "B T"],
    layer: int,
    hidden: Float[Array, "B T D"],
) -> Float[Array, "B T D"]:
    """The hidden states with the rows' vectors added where this is their layer."""
    amount = jnp.where((of_layer == layer)[:, None], amount, 0.0)
    return hidden + (amount[..., None] * vector[:, None]).astype(hidden.dtype)


def marks_of(tokenizer: Any, vocab_size: int) -> TokenFacts:
    """Which tokens hold a blank line, and which begin and end thinking.

    Raises:
      ValueError: a model without a tokenizer, or whose thinking marks are not single tokens.
    """
    if tokenizer is None:
        raise ValueError("Steering goes by the text of tokens; this model has no tokenizer.")
    facts = facts_of(tokenizer, vocab_size)
    if (facts.think < 0).any():
        raise ValueError(f"Steering needs {THINK} and {END_OF_THINKING} to be one token each; got {facts.think.tolist()}.")
    return facts


@dataclasses.dataclass
class Thinking:
    """How far the thinking of a sample has come; each of its tokens is looked at once, and decoded once.

    Attributes:
      is_thinking: whether it has begun and not ended.
      num_checks: checking thoughts of the completion that were finished when they were last counted.
    """

    is_thinking: bool = False
    num_checks: int = 0
    _num_followed: int = 0
    _num_counted: int = 0

    def follow(self, prompt: Sequence[int] | np.ndarray, tokens: Sequence[int], marks: TokenFacts) -> None:
        """Takes the completion's new tokens, and the prompt's before the first of them."""
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
        """Counts the checks among the thoughts that were finished since the last count."""
        ends = np.flatnonzero(marks.is_break[tokens[self._num_counted :]])
        if len(ends):
            finished = self._num_counted + int(ends[-1]) + 1
            self.num_checks += num_checks(decode(tokens[self._num_counted : finished]), keywords)
            self._num_counted = finished


def label(thought: str) -> str:
    """SEAL's kind of a thought: "check", "switch" or "go on", by its first word and the phrases it holds.

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
    r"""SkipKV's count of checking thoughts: finished ones that hold a keyword as a word (or anywhere, if it is not ASCII).

    >>> num_checks("d=1\n\nWait\n\nb=3\n\nWait aga")
    1
    """
    return sum(is_check(thought, tuple(keywords)) for thought in text.split(BREAK)[:-1])


def is_check(thought: str, keywords: tuple[str, ...] = CHECK_WORDS) -> bool:
    """Whether a thought holds a keyword, as a word (or anywhere, if it is not ASCII)."""
    return any(pattern.search(thought) for pattern in patterns_of(keywords))


@functools.lru_cache
def patterns_of(keywords: tuple[str, ...]) -> list[re.Pattern[str]]:
    """What finds each keyword."""
    return [re.compile(rf"(?<!\w){re.escape(word)}(?!\w)" if word.isascii() else re.escape(word)) for word in keywords]
