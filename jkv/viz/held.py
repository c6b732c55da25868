"""A trace as spans of time: which layer and KV head held which token, from which query to which.

The query of a sequence's token q reads a column when `begin <= q < end`. A span is a time without break in which a layer and
head hold a token, read once or several times: several where pages were shared and the token has a multiplicity; Quest's tokens
have several spans, one for each time that their page was read.
"""

from typing import NamedTuple

import numpy as np

from jkv.engine.results import Result
from jkv.errors import refused


class Spans(NamedTuple):
    """Spans of one sample, by layer and head, token, and time (int64, each `[C]`)."""

    head: np.ndarray  # layer * K + KV head
    token: np.ndarray  # by position
    begin: np.ndarray  # first position whose query reads it
    end: np.ndarray  # first that reads it no more; the sequence's length when it stays


class Held(NamedTuple):
    """What each layer and head of a sample held.

    Attributes:
      num_prompt: tokens of the prompt.
      num_tokens: of prompt and completion.
      num_layers: L.
      num_heads: K.
      spans: when it held each token.
      again: when it read a held token once more, in another's place.
      comes_back: whether a token that was not read is read later: the policy chooses what is read, and evicts nothing.
    """

    num_prompt: int
    num_tokens: int
    num_layers: int
    num_heads: int
    spans: Spans
    again: Spans
    comes_back: bool


def check_sample(out: Result, sample: int) -> None:
    """Refuses a result without a trace, and a sample that is not there.

    Raises:
      ValueError: either.
    """
    if out.trace is None:
        rule = "What was kept is in the trace; this result has none. Call generate with return_trace=True."
        raise refused(rule, out="missing")
    if not 0 <= sample < len(out.lengths):
        rule = f"sample must lie in [0, {len(out.lengths)}), the samples of this result; got {sample}."
        raise refused(rule, sample="out_of_range")


def held_by(out: Result, sample: int) -> Held:
    """What every layer and head held for one sample, at any time.

    Raises:
      ValueError: no trace, or no such sample.
    """
    check_sample(out, sample)
    assert out.trace is not None
    num_prompt = len(out.prompts[sample])
    total = num_prompt + int(out.lengths[sample])
    trace = out.trace.part(slice(sample, sample + 1))
    source, begin, end = (field[0] for field in (trace.source, trace.begin, trace.end))
    num_layers, num_heads, width = source.shape
    token, begin, end = (field.reshape(-1).astype(np.int64) for field in (source, begin, end))
    head = np.repeat(np.arange(num_layers * num_heads), width)
    end = np.minimum(end, total)
    is_read = (begin < end) & (token < total)
    spans, again = split(Spans(*(field[is_read] for field in (head, token, begin, end))), total)
    num_spans = np.bincount(spans.head * total + spans.token, minlength=1)
    return Held(num_prompt, total, num_layers, num_heads, spans, again, bool((num_spans > 1).any()))


def split(columns: Spans, total: int) -> tuple[Spans, Spans]:
    """Spans in order of head, token and time, and the parts of columns that read a token which another column reads already."""
    group = columns.head * total + columns.token
    order = np.lexsort((columns.begin, group))
    head, token, begin, end = (field[order] for field in columns)
    group = group[order]
    # The largest end so far in each group: groups ascend, so an offset keeps them apart under one running maximum.
    largest = np.maximum.accumulate(group * (total + 1) + end)
    before = np.zeros_like(end)
    before[1:] = np.where(group[1:] == group[:-1], largest[:-1] - group[1:] * (total + 1), 0)
    own, again = np.maximum(begin, before), np.minimum(end, before)
    is_own, is_again = own < end, begin < again
    return (
        Spans(head[is_own], token[is_own], own[is_own], end[is_own]),
        Spans(head[is_again], token[is_again], begin[is_again], again[is_again]),
    )


def slots(held: Held) -> np.ndarray:
    """Slots that each position's query finds filled in each layer and head, its own included: `[L, K, tokens]`."""
    num_groups, width = held.num_layers * held.num_heads, held.num_tokens + 1
    change = np.bincount(held.spans.head * width + held.spans.begin, minlength=num_groups * width)
    change -= np.bincount(held.spans.head * width + held.spans.end, minlength=num_groups * width)
    return change.reshape(held.num_layers, held.num_heads, width).cumsum(axis=-1)[..., :-1]
