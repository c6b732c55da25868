"""Where guesses of a row's next tokens come from, for steps that append several (`jkv.engine.speculation`).

A drafter looks at each row's tokens so far, on the device, and proposes what may follow; `DraftPages` lets the model itself
decode ahead. Guesses never change a token: a row keeps those that it would have drawn anyway, and the better they are, the
fewer steps it takes.

A drafter of your own is a frozen dataclass with `drafts`, `history` and `propose`, as `Ngram` has.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jkv.checks import check_known, out_of_range, shown, typed
from jkv.errors import InputError, refused

NOTHING = -1  # in a history: before the first token of the row
AUTO = "auto"  # in place of a drafter: as many guesses as should pay
MOST_DRAFTS = 7  # a step appends at most 8 tokens to a row
MOST_HISTORY = 1 << 17
MOST_LENGTH = 16  # of an n-gram
MOST_PAGES = 1 << 16


class Proposal(NamedTuple):
    """Guesses of each row's next tokens; what lies beyond the length is not read."""

    token: Int[Array, "B drafts"]
    length: Int[Array, " B"]


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens; frozen and hashable, as programs are compiled for it.

    Attributes:
      drafts: the most tokens that it proposes, 1 to 7. A step takes one more token of each row.
      history: the last tokens of each row that it sees.
    """

    @property
    def drafts(self) -> int: ...

    @property
    def history(self) -> int: ...

    def propose(self, history: Int[Array, "B S"], prompt: Int[Array, " B"]) -> Proposal:
        """What may follow the last tokens of each row; a pure function of arrays.

        Args:
          history: the last S tokens of prompt and completion, in order, the newest last; -1 before the first one.
          prompt: a number that the rows of one prompt share; -1 for a row that does not run.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Ngram:
    """What followed when the row's last tokens stood in its text before: prompt lookup, for texts that repeat themselves.

    It looks for the last place where the newest `most` tokens stood, then for fewer, down to `least`, and proposes what came
    after. If that reaches the end of the text, the repetition goes on. The search takes `history` comparisons for each length,
    without a model and without the host. After "Prompt Lookup Decoding" (A. Saxena, 2023), which draws from the prompt.

    Attributes:
      drafts: tokens that it proposes, 1 to 7.
      most, least: the longest and the shortest repetition that counts, in tokens, 1 to 16.
      history: the last tokens of a row that are searched.

    Raises:
      ValueError: a number out of its range.

    >>> text = jnp.asarray([[-1, 5, 6, 7, 8, 5, 6]])
    >>> Ngram(drafts=3).propose(text, jnp.zeros(1, int)).token.tolist()
    [[7, 8, 5]]
    """

    drafts: int = 3
    most: int = 4
    least: int = 2
    history: int = 4096

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, typed(field.name, getattr(self, field.name), int))
        for name, limit in (("drafts", MOST_DRAFTS), ("most", MOST_LENGTH), ("least", MOST_LENGTH), ("history", MOST_HISTORY)):
            if not 1 <= getattr(self, name) <= limit:
                raise out_of_range(name, f"be 1 to {limit}", getattr(self, name))
        if self.least > self.most:
            rule = f"least must be at most most, the longest repetition; got {self.least} and {self.most}. Lower least."
            raise refused(rule, least="out_of_range")
        if self.history <= self.most:
            rule = f"history must be longer than the longest repetition, {self.most}; got {self.history}. Raise it."
            raise refused(rule, history="out_of_range")

    def propose(self, history: Int[Array, "B S"], prompt: Int[Array, " B"]) -> Proposal:
        """See `Drafter.propose`."""
        length = repeated(history, history, self.most)
        return continued(history, length, self.least, self.drafts)


@dataclasses.dataclass(frozen=True)
class Siblings(Ngram):
    """What followed the row's last tokens in its own text, or in other samples of its prompt: for groups of samples.

    The longest repetition counts, of equal ones the row's own. Each row searches the texts of all rows, so the search takes as
    many times as long as there are rows. Guesses change no token, so a sample does not depend on its siblings.
    """

    history: int = 1024

    def propose(self, history: Int[Array, "B S"], prompt: Int[Array, " B"]) -> Proposal:
        """See `Drafter.propose`."""
        num_rows, num_tokens = history.shape
        row = jnp.arange(num_rows, dtype=jnp.int32)
        of_texts = jax.vmap(lambda text: repeated(jnp.broadcast_to(text, history.shape), history, self.most), out_axes=1)
        length = of_texts(history)  # of the newest tokens of each row, up to each place of each text: [B, B, S]
        is_own = row[:, None] == row
        is_sibling = (prompt[:, None] == prompt) & (prompt >= 0)
        place = jnp.arange(num_tokens, dtype=jnp.int32)
        is_found = (length >= self.least) & (is_own | is_sibling)[..., None] & (place < num_tokens - 1)
        rank = jnp.where(is_found, (2 * length + is_own[..., None].astype(jnp.int32)) * num_tokens + place, -1)
        text = jnp.argmax(rank.max(axis=2), axis=1).astype(jnp.int32)
        return continued(history[text], length[row, text], self.least, self.drafts)


@dataclasses.dataclass(frozen=True)
class DraftPages:
    """What the model itself draws when it reads only some pages of the row's cache: for long caches, on accelerators.

    Before each step that checks guesses, the model decodes that many tokens ahead, one at a time (`jkv.engine.page_drafts`). It
    reads a row's first page and its newest ones, in each layer and KV head, besides what it decodes ahead. So a guess costs a
    pass through the weights, which all rows share, and little of the cache. It pays where reading the cache is most of a step.
    Layers with a window or a recurrent state read what they always read.

    Attributes:
      drafts: tokens that it decodes ahead, 1 to 7.
      pages: pages that it reads, the first one and the page of the newest token among them; at least 2.

    Raises:
      ValueError: a number out of its range.
    """

    drafts: int = 3
    pages: int = 8

    def __post_init__(self) -> None:
        for name, least, most in (("drafts", 1, MOST_DRAFTS), ("pages", 2, MOST_PAGES)):
            object.__setattr__(self, name, typed(name, getattr(self, name), int))
            if not least <= getattr(self, name) <= most:
                raise out_of_range(name, f"be {least} to {most:,}", getattr(self, name))

    @property
    def history(self) -> int:
        """The last tokens of a row that it sees: the cache has the others."""
        return 1

    def propose(self, history: Int[Array, "B S"], prompt: Int[Array, " B"]) -> Proposal:
        """As many guesses as it makes; the step that checks them decodes the tokens."""
        return Proposal(jnp.zeros((len(history), self.drafts), jnp.int32), jnp.full(len(history), self.drafts, jnp.int32))


def repeated(text: Int[Array, "B S"], history: Int[Array, "B S"], most: int) -> Int[Array, "B S"]:
    """How many tokens up to each place of a text are the newest ones of a history, at most `most`."""
    same, length = jnp.ones(text.shape, bool), jnp.zeros(text.shape, jnp.int32)
    for back in range(most):
        newest = history[:, history.shape[1] - 1 - back, None]
        shifted = jnp.pad(text, [(0, 0), (back, 0)], constant_values=NOTHING)[:, : text.shape[1]]
        same &= (shifted == newest) & (newest != NOTHING)
        length += same.astype(jnp.int32)
    return length


def continued(history: Int[Array, "B S"], length: Int[Array, "B S"], least: int, drafts: int) -> Proposal:
    """What follows the longest repetition that ends before the newest place, of several the last; nothing below `least`."""
    num_tokens = history.shape[1]
    place = jnp.arange(num_tokens, dtype=jnp.int32)
    rank = jnp.where((place < num_tokens - 1) & (length >= least), length * num_tokens + place, -1)
    found = jnp.argmax(rank, axis=1).astype(jnp.int32)
    is_found = jnp.take_along_axis(rank, found[:, None], axis=1)[:, 0] >= 0
    period = num_tokens - 1 - found  # what is between goes on repeating
    ahead = jnp.arange(drafts, dtype=jnp.int32) % jnp.maximum(period, 1)[:, None]
    token = jnp.take_along_axis(history, jnp.minimum(found[:, None] + 1 + ahead, num_tokens - 1), axis=1)
    return Proposal(token, jnp.where(is_found, drafts, 0).astype(jnp.int32))


def ngram(drafts: int = 3, *, most: int = 4, least: int = 2, history: int = 4096) -> Ngram:
    """Guesses from the row's own text: what followed when its last tokens stood there before. See `Ngram`."""
    return Ngram(drafts, most, least, history)


def siblings(drafts: int = 3, *, most: int = 4, least: int = 2, history: int = 1024) -> Siblings:
    """Guesses from the texts of all samples of the row's prompt, such as a GRPO group. See `Siblings`."""
    return Siblings(drafts, most, least, history)


def draft_pages(drafts: int = 3, *, pages: int = 8) -> DraftPages:
    """Guesses by the model itself, over some pages of the row's cache: the first one and the newest. See `DraftPages`."""
    return DraftPages(drafts, pages)


DRAFTERS: dict[str, Callable[..., Drafter]] = {"ngram": ngram, "siblings": siblings, "draft_pages": draft_pages}


def drafter_named(name: str | None, drafts: int | None = None) -> Drafter | str | None:
    """The drafter that a command line names, or "auto"; None without a name.

    Raises:
      ValueError: an unknown name, a number out of its range, or a number of guesses of no drafter.
    """
    if name is None:
        if drafts is not None:
            rule = f"--drafts is for --speculate; got {drafts} alone. Add --speculate ngram, or leave it out."
            raise refused(rule, drafts="conflict")
        return None
    check_known((*DRAFTERS, AUTO), speculate=name)
    if name == AUTO:
        if drafts is not None:
            rule = f"--speculate auto chooses how many guesses pay; got --drafts {drafts} too. Leave it out, or name ngram."
            raise refused(rule, drafts="conflict")
        return AUTO
    return DRAFTERS[name]() if drafts is None else DRAFTERS[name](drafts)


def check_drafter(drafter: Any, vocab_size: int, num_rows: int) -> Drafter:
    """A drafter that works: it has the attributes, can be traced, and proposes tokens of the vocabulary.

    Raises:
      ValueError: what is missing or wrong, by name.
    """
    if not isinstance(drafter, Drafter):
        rule = "{field} must be a drafter, such as jkv.ngram(), with drafts, history and propose(history, prompt); got {got}."
        raise InputError(rule, field="speculate", code="wrong_type", got=shown(drafter))
    name, drafts, length = type(drafter).__name__, drafter.drafts, drafter.history
    try:
        hash(drafter)
    except TypeError as error:
        rule = f"A drafter is an argument of compiled programs and must be hashable; {name} is not. Make it a frozen dataclass."
        raise refused(rule, speculate="wrong_type") from error
    for field, value, most in (("drafts", drafts, MOST_DRAFTS), ("history", length, MOST_HISTORY)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise refused(f"{name}.{field} must be 1 to {most}; got {shown(value)}.", speculate="out_of_range")
    history = jax.ShapeDtypeStruct((num_rows, length), jnp.int32), jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    try:
        found = jax.eval_shape(drafter.propose, *history)
    except Exception as error:
        raise refused(f"{name}.propose cannot be traced: {type(error).__name__}: {error}", speculate="invalid") from error
    shapes = [(getattr(x, "shape", None), str(getattr(x, "dtype", None))) for x in jax.tree.leaves(found)]
    wanted = [((num_rows, drafts), "int32"), ((num_rows,), "int32")]
    if not isinstance(found, Proposal) or shapes != wanted:
        rule = f"{name}.propose must return a Proposal of int32 [{num_rows}, {drafts}] and [{num_rows}]; got {shapes}."
        raise refused(rule, speculate="invalid")
    # Rows of few different tokens, which a drafter that looks for repetitions finds.
    text = jnp.arange(num_rows * length, dtype=jnp.int32).reshape(num_rows, length) % min(3, vocab_size)
    token, count = jax.device_get(drafter.propose(text, jnp.zeros(num_rows, jnp.int32)))
    used = token[jnp.arange(drafts) < count[:, None]]
    if (count > drafts).any() or (count < 0).any():
        raise refused(f"{name} may propose at most {drafts} tokens; got {count.tolist()}.", speculate="out_of_range")
    if ((used < 0) | (used >= vocab_size)).any():
        rule = f"{name} must propose tokens of the vocabulary, 0 to {vocab_size - 1}; got {sorted(set(used.tolist()))[:8]}."
        raise refused(rule, speculate="out_of_range")
    return drafter


def places_of(drafter: Drafter | None) -> int:
    """T: the most tokens that a step appends to a row."""
    return 1 if drafter is None else drafter.drafts + 1


def is_token(token: Int[Array, "B drafts"], vocab_size: int) -> Bool[Array, "B drafts"]:
    """Which drafts are tokens; the first that is none ends a row's drafts."""
    return jnp.cumprod(((token >= 0) & (token < vocab_size)).astype(jnp.int32), axis=1) > 0
