r"""Trails of sums modulo 10, of whose text few tokens are read again: the task of tiny-reasoner-2.

A prompt states 10 to 20 facts in any order, half of which nobody needs: values `b=3`, sums with the name of the next step
`d=b d+c d>e` (d is b plus c, and then comes e), and the order of the passes `A>q`, `q>F`, `F>!`. A trace finds the values of a
trail of sums, verifies them in passes with names and, from the last, finds its answer by facts that it has not read before:

    #A and now step by step ?d            the first pass goes along the trail, from its start ?d to the end .
    A d=b d+c b=3 c=7 3+7=0 d=0 d>e       each step names the next one
    A e=d e+b d=0 b=3 0+3=3 e=3 e>.
    A>q                                   each pass names what comes next: another pass, or a branch on one variable
    Alternatively q=b q+h b=3 h=9 3+9=2 q=2 no use q>F        whose value nobody reads again
    Wait F ...                            and so on, in three kinds of words, until `F>!`
    finally @w                            then the facts that no pass has read

Whatever a step needs it finds by its name, and never by its place. The number of passes is drawn, and no greedy choice is open:
all that a trace says follows from its prompt.
"""

import dataclasses
import string

import numpy as np

from jkv.evaluation.chains import BREAK

PASSES = "ABCDEFGHIJKL"  # names of passes; a name's place modulo 3 gives its kind of words
STOP = "."  # the end of a trail
MOST_READ = 11  # facts that a trace reads
FIXED = 6  # of them: two values for the trail, two sums and a value for its end, a value for the branches
CLOSE = "!"  # what follows the last pass, and the name of the steps after it
PHRASES = (
    " and now step by step",
    " let me check that again from the first line",
    " is it right that all of this holds",
    " one more time with care",
    " maybe there was an error so look at it all again",
    " the same in other words to be sure",
    " now from the start again step by step",
    " to be sure look at every line one more time",
    " does it all hold let me see",
    " again with care and from the start",
    " it may be that one line was not right",
    " see if the same comes out in other words",
)
TALK = tuple(dict.fromkeys(word for phrase in PHRASES for word in phrase.split()))
MORE_TALK = ("of", "day", "sun", "rain", "house", "tree", "river", "old", "green", "runs", "under", "over")


@dataclasses.dataclass(frozen=True)
class Trail:
    """A problem, and what its trace will read.

    Attributes:
      values: `(name, digit)` of the variables that are given.
      sums: `(name, left, right)`, read or not.
      next_of: what comes after a sum, a pass or a branch: a name, `STOP` or `CLOSE`.
      main: the sums of the trail that each pass goes along.
      closing: the sums after the last pass; the last one's value is the answer.
      order: passes (upper case) and branches (lower case), in turn.
      prompt: the problem as text.
    """

    values: tuple[tuple[str, int], ...]
    sums: tuple[tuple[str, str, str], ...]
    next_of: dict[str, str]
    main: tuple[str, ...]
    closing: tuple[str, ...]
    order: tuple[str, ...]
    prompt: str

    @property
    def results(self) -> dict[str, int]:
        """The value of every variable that the trace reads or finds."""
        known, sums = dict(self.values), {name: operands for name, *operands in self.sums}
        branches = [name for name in self.order if name.islower()]
        for name in (*self.main, *branches, *self.closing):
            left, right = sums[name]
            known[name] = (known[left] + known[right]) % 10
        return known

    @property
    def answer(self) -> str:
        """The last variable and its value, `x=6`."""
        return f"{self.closing[-1]}={self.results[self.closing[-1]]}"


def draw_trail(
    rng: np.random.Generator, low: int = 2, high: int = 4, passes: tuple[int, int] = (4, 7), branches: int = 2, talk: int = 24
) -> Trail:
    """A random problem.

    Args:
      rng: the source of the draws.
      low: the fewest sums of the trail, at least 1.
      high: the most, at most 5.
      passes: the fewest and the most passes, 1 to 12; the number is drawn before all else, and so has no part in the answer.
      branches: the most branches, at most one between two passes.
      talk: the most words before the facts, and the most among them.
    """
    num_passes, size = int(rng.integers(passes[0], passes[1] + 1)), int(rng.integers(low, high + 1))
    num_branches = int(rng.integers(min(branches, num_passes - 1, MOST_READ - FIXED - size) + 1))
    names = iter(str(name) for name in rng.permutation(list(string.ascii_lowercase)))
    given, main, closing = ([next(names) for _ in range(count)] for count in (2, size, 2))
    late, aside, side = (
        next(names),
        [next(names) for _ in range(min(num_branches, 1))],
        [next(names) for _ in range(num_branches)],
    )
    sums = [draw_sum(rng, name, [main[i - 1]] if i else given[:1], given + main[:i]) for i, name in enumerate(main)]
    sums += [draw_sum(rng, name, aside, given + main) for name in side]
    sums += [draw_sum(rng, name, [late], [before]) for name, before in zip(closing, [main[-1], closing[0]], strict=True)]
    order = draw_order(rng, num_passes, side)
    next_of = dict(zip(order, [*order[1:], CLOSE], strict=True))
    for trail in (main, closing):
        next_of |= dict(zip(trail, [*trail[1:], STOP], strict=True))
    leaves = [*given, late, *aside]
    num_read = len(leaves) + len(sums)
    num_idle = min(num_read, 2 * MOST_READ - 2 - num_read) - int(rng.integers(2))
    idle = [next(names) for _ in range(num_idle)]
    split = num_idle // 2
    everyone = [*leaves, *main, *side, *closing, *idle]
    sums += [draw_sum(rng, name, everyone, everyone) for name in idle[:split]]
    values = [(name, int(rng.integers(10))) for name in [*leaves, *idle[split:]]]
    idle_next = {name: str(rng.choice(everyone)) for name in idle[:split]}
    prompt = write_prompt(rng, values, sums, next_of | idle_next, (main[0], closing[0], order[0]), talk)
    return Trail(tuple(values), tuple(sums), next_of | idle_next, tuple(main), tuple(closing), tuple(order), prompt)


def draw_facts(rng: np.random.Generator, linked: float = 0.0) -> tuple[str, str]:
    """A drill: facts as a prompt states them, and three times as many of the same, drawn with replacement, as traces do.

    `linked` is the share of the passes that another pass follows, as it mostly does in a trail; a variable follows the others.
    """
    names = [str(name) for name in rng.permutation(list(string.ascii_lowercase))[: int(rng.integers(4, 17))]]
    facts = [
        f"{name}={rng.integers(10)}" if i % 3 == 0 else write_sum(draw_sum(rng, name, names, names), str(rng.choice(names)))
        for i, name in enumerate(names)
    ]
    passes = [str(name) for name in rng.permutation(list(PASSES))[: int(rng.integers(2, 9))]]
    followers = [list(PASSES) if linked > 0 and rng.random() < linked else names for _ in passes]
    facts += [f"{name}>{rng.choice(after)}" for name, after in zip(passes, followers, strict=True)]
    order = [facts[i] for i in rng.permutation(len(facts))]
    return ";".join(order) + ";", "".join(f"{fact}{BREAK}" for fact in rng.choice(facts, 3 * len(facts)))


def draw_sum(rng: np.random.Generator, name: str, one: list[str], other: list[str]) -> tuple[str, str, str]:
    """A sum with an operand of each list, in any order, of different names and not its own."""
    left = str(rng.choice([x for x in one if x != name]))
    right = str(rng.choice([x for x in other if x not in (name, left)]))
    return (name, left, right) if rng.random() < 0.5 else (name, right, left)


def write_sum(one: tuple[str, str, str], after: str | None = None) -> str:
    """A sum, with the name of what comes after it.

    >>> write_sum(("d", "b", "c"), "e")
    'd=b d+c d>e'
    """
    name, left, right = one
    return f"{name}={left} {name}+{right}" + (f" {name}>{after}" if after else "")


def draw_order(rng: np.random.Generator, num_passes: int, side: list[str]) -> list[str]:
    """Passes, the first of which finds the values, with each branch between two of them."""
    first = str(rng.choice(list(PASSES[::3])))
    others = [str(name) for name in rng.permutation([name for name in PASSES if name != first])[: num_passes - 1]]
    order = [first, *others]
    places = sorted(rng.choice(np.arange(1, num_passes), len(side), replace=False).tolist(), reverse=True) if side else []
    for place, branch in zip(places, side, strict=True):
        order.insert(place, branch)
    return order


def write_prompt(
    rng: np.random.Generator,
    values: list[tuple[str, int]],
    sums: list[tuple[str, str, str]],
    next_of: dict[str, str],
    starts: tuple[str, str, str],
    talk: int,
) -> str:
    """Words, then the facts in any order with words among them, then where the trail, its end and the passes start."""
    facts = [f"{name}={value};" for name, value in values]
    facts += [f"{write_sum(one, next_of[one[0]])};" for one in sums]
    facts += [f"{name}>{after};" for name, after in next_of.items() if name.isupper()]
    words = ["".join(f" {word}" for word in rng.choice(TALK + MORE_TALK, int(rng.integers(talk + 1)))) + ";" for _ in range(2)]
    order = [facts[i] for i in rng.permutation(len(facts))]
    order.insert(int(rng.integers(len(order))), words[1])
    main, closing, first = starts
    return "".join([words[0], *order, f"?{main}@{closing}#{first}"])


def write_trace(trail: Trail) -> str:
    """The model's turn, from `<think>` to the boxed answer."""
    known, sums = trail.results, {one[0]: one for one in trail.sums}
    thoughts = ["<think>"]
    for i, name in enumerate(trail.order):
        after = trail.next_of[name]
        if name.islower():
            thoughts.append(f"Alternatively {restate(sums[name], known)} no use {name}>{after}")
            continue
        thoughts.append(f"{'Wait ' if i else '#'}{name}{PHRASES[PASSES.index(name)]} ?{trail.main[0]}")
        kind = 0 if i == 0 else PASSES.index(name) % 3
        thoughts += [f"{name} {restate(sums[one], known, kind)} {one}>{trail.next_of[one]}" for one in trail.main]
        thoughts.append(f"{name}>{after}")
    thoughts.append(f"finally @{trail.closing[0]}")
    thoughts += [f"{CLOSE} {restate(sums[one], known)} {one}>{trail.next_of[one]}" for one in trail.closing]
    return BREAK.join([*thoughts, "</think>", rf"\boxed{{{trail.answer}}}"])


def restate(one: tuple[str, str, str], known: dict[str, int], kind: int = 0) -> str:
    """A step in one of three kinds of words, of which the first also computes.

    >>> [restate(("d", "b", "c"), {"b": 3, "c": 7, "d": 0}, kind) for kind in range(3)]
    ['d=b d+c b=3 c=7 3+7=0 d=0', 'check d=0 d=b d+c c=7 b=3 ok', 'd=b d+c so d=0 since b=3 and c=7 then']
    """
    name, left, right = one
    result, first, second = f"{name}={known[name]}", f"{left}={known[left]}", f"{right}={known[right]}"
    if kind == 0:
        return f"{write_sum(one)} {first} {second} {known[left]}+{known[right]}={known[name]} {result}"
    if kind == 1:
        return f"check {result} {write_sum(one)} {second} {first} ok"
    return f"{write_sum(one)} so {result} since {first} and {second} then"
