"""The live set of a trail: the tokens that its text still has to read, known from the text alone and not from a model.

A text states facts by name: `b=3` a value, `d=b` and `d+c` the operands of a sum, `d>e` what comes next, `?d` and `@w` where to
start. A fact that is stated again was read. So it is live from its first statement to its last, in the slot of one content.
The name at the head of the running thought is live too, until the next one: it says which pass goes on, or that it is a branch.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool

from jkv.cache.attention import OPEN_END
from jkv.evaluation.chains import BREAK
from research.tasks.trails import CLOSE, PASSES

STARTS = ("?", "@", "#")
HEADS = frozenset((*PASSES, CLOSE, "Alternatively"))  # names at the head of thoughts
SINKS = 4  # first tokens that the oracle keeps


def statements(tokens: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Every stated fact, by the token that names it and the kind of its content, and the index of its content.

    >>> list(statements(["d=", "b", " ", "d+", "c", "d=", "0"]))
    [('d= name', 1), ('d+ name', 4), ('d= value', 6)]
    """
    for i, (token, after) in enumerate(itertools.pairwise(tokens)):
        if token in STARTS or (len(token) == 2 and token[0].isalpha() and token[1] in "=+>"):
            yield f"{token} {'value' if after.isdigit() else 'name'}", i + 1


def thought_heads(tokens: Sequence[str]) -> Iterator[int]:
    r"""The index of the name at the head of each thought that has one: the first token, or after `#` or `Wait`.

    >>> list(thought_heads(["\n\n", "A", " ", "d=", "b", "\n\n", "A>", "F", "\n\n", "Wait", " ", "F"]))
    [1, 11]
    """
    for i, token in enumerate(tokens):
        before = list(tokens[max(i - 2, 0) : i])
        if token in HEADS and (before[-1:] in ([BREAK], ["#"]) or before == ["Wait", " "]):
            yield i


def live_slots(tokens: Sequence[str], is_latest: bool = False) -> Bool[np.ndarray, "T1 T"]:
    """Whether each token is live before each query, `[now, token]`: in the first statement of its fact, or the latest, or as
    the head of the running thought.
    """
    stated: dict[str, list[int]] = {}
    for fact, content in statements(tokens):
        stated.setdefault(fact, []).append(content)
    live = np.zeros((len(tokens) + 1, len(tokens)), bool)
    for first, *others in stated.values():
        holds = [first, *others] if is_latest else [first]
        ends = others if is_latest else others[-1:]
        for content, end in zip(holds, ends, strict=False):
            live[content + 1 : end, content] = True
    for head, after in itertools.pairwise(thought_heads(tokens)):
        live[head + 1 : after, head] = True
    return live


def live_share(tokens: Sequence[str], start: int) -> float:
    """The largest live set from token `start` on, as a share of the text's length."""
    return float(live_slots(tokens)[start:].sum(axis=1).max() / len(tokens))


def keep_live(live: Bool[np.ndarray, "T1 T"], start: int, budget: int, interval: int) -> np.ndarray:
    """When a semantic oracle drops each token, as an end for each, `[T]`.

    Every `interval` tokens from `start` on it keeps the first `SINKS`, the live set, and the last tokens, `budget` in all.
    """
    total = live.shape[1]
    end, position = np.full(total, OPEN_END, np.int32), np.arange(total)
    for now in range(start, total, interval):
        held = (end == OPEN_END) & (position < now)
        rank = np.where(live[now] | (position < SINKS), total, 0) + position
        order = np.argsort(-np.where(held, rank, -1), kind="stable")
        drops = np.zeros(total, bool)
        drops[order[budget:]] = True
        end[drops & held] = now
    return end
