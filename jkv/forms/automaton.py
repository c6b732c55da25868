"""Finite automata of expressions: deterministic, as small as can be, and over classes of symbols that behave alike."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jkv.errors import InputError
from jkv.forms.expressions import Chain, Either, Expression, Machine, One, Repeat

MOST_STATES = 16_000  # of an automaton
MOST_PARTS = 500_000  # states of an expression before it is an automaton
MOST_STEPS = 1_000_000  # of those parts to each other without a symbol, all together
DEAD = -1
BYTES = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton, in which every state can still accept.

    Attributes:
      next: the state after a symbol of each class, DEAD where it cannot come: `[states, classes]` int32.
      class_of: the class of each symbol, `[symbols]`.
      is_accepting: whether a text may end in each state, `[states]`.
      starts: the states in which texts of each expression begin; DEAD for one without any text.
    """

    next: np.ndarray
    class_of: np.ndarray
    is_accepting: np.ndarray
    starts: tuple[int, ...]

    def accepts(self, symbols: Sequence[int]) -> bool:
        """Whether it accepts a text that begins in the first start."""
        state = self.starts[0]
        for symbol in symbols:
            state = DEAD if state == DEAD else int(self.next[state, self.class_of[symbol]])
        return state != DEAD and bool(self.is_accepting[state])


class AutomatonError(InputError):
    """A form is refused because no finite automaton, or none that is small enough, has its texts."""


def too_large(what: str, got: int, most: int) -> AutomatonError:
    """The error about a form that has too much of something."""
    rule = (
        "{field} must have at most {most:,} {what}; got {got:,} or more. Make it smaller: lower its longest lengths and counts."
    )
    return AutomatonError(rule, field="form", code="too_long", what=what, got=got, most=most)


class Parts:
    """A nondeterministic automaton, built from its end: each expression begins at a state, and goes on to one that exists."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[int, int]]] = []  # of each state: symbols, and the state after them
        self.free: list[list[int]] = []  # states that it is at the same time
        self._built: dict[tuple[int, int], int] = {}
        self._kept: list[Expression] = []  # so that no other expression gets the identity of one that was built

    def state(self) -> int:
        """A new state."""
        if len(self.edges) >= MOST_PARTS:
            raise too_large("parts", len(self.edges), MOST_PARTS)
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def build(self, what: Expression, then: int) -> int:
        """The state in which an expression begins that goes on to `then`."""
        key = id(what), then
        if key not in self._built:
            self._kept.append(what)
            self._built[key] = self._new(what, then)
        return self._built[key]

    def _new(self, what: Expression, then: int) -> int:
        match what:
            case One(symbols):
                state = self.state()
                self.edges[state].append((symbols, then))
                return state
            case Chain(parts):
                return functools.reduce(lambda after, part: self.build(part, after), reversed(parts), then)
            case Either(parts):
                state = self.state()
                self.free[state] = [self.build(part, then) for part in parts]
                return state
            case Repeat(part, least, most):
                return self._repeat(part, least, most, then)
            case Machine(automaton):
                return self._embed(automaton, then)
        raise TypeError(what)

    def _repeat(self, part: Expression, least: int, most: int | None, then: int) -> int:
        if most is None:
            after = self.state()
            self.free[after] = [then, self.build(part, after)]
        else:
            after = then
            for _ in range(most - least):
                state = self.state()
                self.free[state] = [then, self.build(part, after)]
                after = state
        for _ in range(least):
            after = self.build(part, after)
        return after

    def _embed(self, automaton: Automaton, then: int) -> int:
        masks = masks_of(automaton)
        states = [self.state() for _ in automaton.next]
        for state, row, accepts in zip(states, automaton.next.tolist(), automaton.is_accepting, strict=True):
            self.edges[state] = [(masks[i], states[to]) for i, to in enumerate(row) if to != DEAD]
            self.free[state] = [then] if accepts else []
        return states[automaton.starts[0]] if automaton.starts[0] != DEAD else self.state()

    def closures(self) -> list[frozenset[int]]:
        """Of each state, the states with edges (or the end, 0) that it is at the same time."""
        found, total = list[frozenset[int]](), 0
        for state in range(len(self.edges)):
            seen, open_ones = {state}, [state]
            while open_ones:
                new = [to for to in self.free[open_ones.pop()] if to not in seen]
                seen.update(new)
                open_ones += new
            total += len(seen)
            if total > MOST_STEPS:
                raise too_large("optional parts after each other", total, MOST_STEPS)
            found.append(frozenset(one for one in seen if self.edges[one] or one == 0))
        return found


class Numbers:
    """Numbers of the states of an automaton that is made, from 0 on, in the order in which they are met."""

    def __init__(self) -> None:
        self._of: dict[Any, int] = {}
        self.states: list[Any] = []  # which grows while the steps from each are computed

    def __call__(self, state: Any) -> int:
        """The number of a state, a new one if it has none.

        Raises:
          ValueError: there are too many.
        """
        if state not in self._of:
            if len(self.states) >= MOST_STATES:
                raise too_large("states", len(self.states), MOST_STATES)
            self._of[state] = len(self.states)
            self.states.append(state)
        return self._of[state]


def masks_of(automaton: Automaton) -> list[int]:
    """The symbols of each class."""
    masks = [0] * automaton.next.shape[1]
    for symbol, index in enumerate(automaton.class_of.tolist()):
        masks[index] |= 1 << symbol
    return masks


def classes_of(sets: Sequence[int], num_symbols: int) -> np.ndarray:
    """The class of each symbol: two are of one class where they are in the same sets."""
    groups = [(1 << num_symbols) - 1]
    for each in sets:
        groups = [part for group in groups for part in (group & each, group & ~each) if part]
    found = np.zeros(num_symbols, np.int32)
    for index, group in enumerate(groups):
        found[[symbol for symbol in range(num_symbols) if group >> symbol & 1]] = index
    return found


def automaton_of(*expressions: Expression, num_symbols: int = BYTES) -> Automaton:
    """The smallest automaton of some expressions, each with a start of its own.

    Raises:
      ValueError: it has too many states.
    """
    parts = Parts()
    end = parts.state()
    starts = [parts.build(each, end) for each in expressions]
    sets = list(dict.fromkeys(symbols for edges in parts.edges for symbols, _ in edges))
    class_of = classes_of(sets, num_symbols)
    classes_in = {symbols: classes_within(symbols, class_of) for symbols in sets}
    closures = parts.closures()
    steps = [[(i, closures[to]) for symbols, to in edges for i in classes_in[symbols]] for edges in parts.edges]
    number = Numbers()
    first = tuple(number(closures[start]) for start in starts)
    rows = []
    for states in number.states:
        row = [DEAD] * (int(class_of.max()) + 1)
        after = collections.defaultdict[int, set[int]](set)
        for state in states:
            for i, more in steps[state]:
                after[i] |= more
        for i, group in after.items():
            row[i] = number(frozenset(group))
        rows.append(row)
    accepting = np.array([end in states for states in number.states])
    return smallest(Automaton(np.array(rows, np.int32), class_of, accepting, first))


def classes_within(symbols: int, class_of: np.ndarray) -> list[int]:
    """The classes whose symbols are in a set."""
    return sorted({int(index) for symbol, index in enumerate(class_of) if symbols >> symbol & 1})


def alive(following: np.ndarray, is_accepting: np.ndarray) -> np.ndarray:
    """Which states of a table can still come to an end: [states]."""
    return reached(following.shape[0], backwards(following), np.flatnonzero(is_accepting))


def backwards(following: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The steps of a table, each once, from the state after it to the one before."""
    before, index = np.nonzero(following != DEAD)
    steps = np.unique(following[before, index].astype(np.int64) * len(following) + before)
    return steps // len(following), steps % len(following)


def reached(num_states: int, steps: tuple[np.ndarray, np.ndarray], starts: np.ndarray) -> np.ndarray:
    """Which states steps lead to, from any of the starts: [states]."""
    from scipy.sparse import csr_array  # here, as it takes long to import
    from scipy.sparse.csgraph import breadth_first_order

    rows = np.concatenate([steps[0], np.full(len(starts), num_states)])
    columns = np.concatenate([steps[1], starts])
    graph = csr_array((np.ones(len(rows), np.int8), (rows, columns)), shape=(num_states + 1, num_states + 1))
    found = np.zeros(num_states + 1, bool)
    found[breadth_first_order(graph, num_states, return_predecessors=False)] = True
    return found[:-1]


def kept(automaton: Automaton, is_kept: np.ndarray) -> Automaton:
    """An automaton without some of its states."""
    new = np.where(is_kept, np.cumsum(is_kept) - 1, DEAD)
    moved = np.append(new, DEAD).astype(np.int32)
    starts = tuple(int(moved[start]) for start in automaton.starts)
    return Automaton(moved[automaton.next[is_kept]], automaton.class_of, automaton.is_accepting[is_kept], starts)


def smallest(automaton: Automaton) -> Automaton:
    """The automaton without states that cannot accept, and with one state in place of several that go on alike."""
    automaton = kept(automaton, alive(automaton.next, automaton.is_accepting))
    if not len(automaton.next):
        return automaton
    label = groups_of(automaton.next, automaton.is_accepting)
    first = np.unique(label, return_index=True)[1]
    renamed = np.append(label, DEAD).astype(np.int32)
    starts = tuple(int(renamed[start]) for start in automaton.starts)
    return Automaton(renamed[automaton.next[first]], automaton.class_of, automaton.is_accepting[first], starts)


def groups_of(following: np.ndarray, is_accepting: np.ndarray) -> np.ndarray:
    """The group of each state: states of one group go on alike, so that no text tells them apart.

    From the end: a state whose followers have groups is of the group of others with the same followers. Where states follow
    each other in circles, the states of the last circles are split until they stay.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    after, earlier = backwards(following)
    before = earlier, after
    group, names = np.full(len(following) + 1, DEAD), dict[Any, int]()  # one more, of what cannot come
    num_open = np.bincount(before[0], minlength=len(following))
    first = np.searchsorted(before[1], np.arange(len(following) + 1))

    def settle(states: list[int]) -> None:
        """Gives groups to states whose followers have all theirs, and so on."""
        while states:
            one = states.pop()
            if group[one] == DEAD:
                group[one] = names.setdefault((is_accepting[one], group[following[one]].tobytes()), len(names))
            for other in before[0][first[one] : first[one + 1]].tolist():
                num_open[other] -= 1
                if not num_open[other] and group[other] == DEAD:
                    states.append(other)

    settle(np.flatnonzero(num_open == 0).tolist())
    while len(left := np.flatnonzero(group[:-1] == DEAD)):
        inner = np.isin(before[0], left) & np.isin(before[1], left)
        edges = csr_array((np.ones(inner.sum(), np.int8), (before[0][inner], before[1][inner])), shape=(len(following),) * 2)
        circle = connected_components(edges, connection="strong")[1]
        goes_on = np.isin(circle, circle[before[0][inner & (circle[before[0]] != circle[before[1]])]])
        last = np.flatnonzero((group[:-1] == DEAD) & ~goes_on)
        group[last] = len(names) + split(following[last], is_accepting[last], last, group)
        names.update({("circle", int(each)): int(each) for each in np.unique(group[last])})
        settle(last.tolist())
    found, least = group[:-1], np.unique(group[:-1], return_index=True)
    like = least[1][np.searchsorted(least[0], found)]
    assert np.array_equal(group[following], group[following[like]])
    assert np.array_equal(is_accepting, is_accepting[like])
    return np.searchsorted(least[0], found)


def split(following: np.ndarray, is_accepting: np.ndarray, states: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The groups of states in circles, from 0 on, given the groups of the states that come after the circles."""
    inside, label, count = np.full(len(group), DEAD), is_accepting.astype(np.int64), 0
    while True:
        inside[states] = label
        code = np.concatenate(
            [label[:, None], np.where(inside[following] == DEAD, group[following], -2 - inside[following])], axis=1
        )
        label = np.unique(code, axis=0, return_inverse=True)[1].reshape(-1)
        if label.max() + 1 == count:
            return label
        count = label.max() + 1


def product(one: Automaton, other: Automaton, accepts: Callable[[bool, bool], bool]) -> Automaton:
    """What `accepts` of whether one and the other accept, of automata with one start each and the same symbols.

    Raises:
      ValueError: it has too many states.
    """
    both = one.class_of.astype(np.int64) * other.next.shape[1] + other.class_of
    pairs, class_of = np.unique(both, return_inverse=True)
    columns = pairs // other.next.shape[1], pairs % other.next.shape[1]
    dead = np.full((1, len(pairs)), DEAD, np.int32)
    tables = [np.concatenate([x.next[:, i], dead]) for x, i in zip((one, other), columns, strict=True)]
    number = Numbers()
    start = number((one.starts[0], other.starts[0]))
    rows = [[number(pair) for pair in zip(tables[0][a].tolist(), tables[1][b].tolist(), strict=True)] for a, b in number.states]
    ends = [np.append(x.is_accepting, False) for x in (one, other)]
    accepting = np.array([accepts(bool(ends[0][a]), bool(ends[1][b])) for a, b in number.states])
    return smallest(Automaton(np.array(rows, np.int32), class_of.astype(np.int32), accepting, (start,)))


def both(*expressions: Expression) -> Expression:
    """What all of several expressions have."""
    machines = [automaton_of(each) for each in expressions]
    return Machine(functools.reduce(lambda a, b: product(a, b, lambda x, y: x and y), machines))


def only_first(one: Expression, other: Expression, num_symbols: int = BYTES) -> Expression:
    """What the first expression has and the other has not."""
    first, second = automaton_of(one, num_symbols=num_symbols), automaton_of(other, num_symbols=num_symbols)
    return Machine(product(first, second, lambda x, y: x and not y))


def overlap(*expressions: Expression) -> bool:
    """Whether two of several expressions have a text in common."""
    machines = [automaton_of(each) for each in expressions]
    return any(len(product(a, b, lambda x, y: x and y).next) for a, b in itertools.combinations(machines, 2))
