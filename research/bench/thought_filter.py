"""Cost of stage 1 of sharing on one core: `python -m research.bench.thought_filter` prints milliseconds per new thought.

The thoughts are synthetic, of the size that a large model writes: 60 tokens of a vocabulary of 151,936, few of them common, and
three formulas in the text. Every third thought repeats an earlier one, so that its formulas are parsed and compared.
"""

import argparse
import json
import os
from collections.abc import Sequence

import numpy as np

from jkv.bench.rounds import timer
from jkv.limits import parse
from jkv.reasoning.thoughts import Filter, FilterStats, ThoughtFinder, TokenBags
from jkv.reasoning.token_text import TokenFacts

VOCABULARY, LENGTH, END = 151_936, 60, 0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--earlier", type=int, default=500, help="thoughts that each new one is compared with")
    parser.add_argument("--rounds", type=int, default=100, help="new thoughts that are timed")
    options = parse(parser)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})
    print(json.dumps(cost_of_a_thought(options.earlier, options.rounds)))


def cost_of_a_thought(earlier: int, rounds: int) -> dict[str, float]:
    """Milliseconds per thought after `earlier` others: the median, the 99th percentile, and the share of similar pairs."""
    rng, ones, stats = np.random.default_rng(0), np.ones(VOCABULARY, np.int64), FilterStats()
    is_end = np.arange(VOCABULARY) == END
    never = np.zeros(VOCABULARY, bool)
    facts = TokenFacts(is_end, is_end, 4 * ones, np.array([-1, -1], np.int32), starts_line=never, ends_line=never)
    weight = 1 / (np.arange(1, VOCABULARY) + 20.0)
    weight /= weight.sum()
    finder = ThoughtFinder(Filter(), facts, text_of, TokenBags(VOCABULARY), stats)
    thoughts: list[list[int]] = []
    taken = []
    for count in range(earlier + rounds):
        repeats = count % 3 == 2
        thought = thoughts[rng.integers(count)] if repeats else rng.choice(VOCABULARY - 1, LENGTH, p=weight) + 1
        thoughts.append(np.asarray(thought).tolist())
        with timer() as seconds:
            for token in (*thoughts[-1], END):
                finder.take(token, 0)
        taken.append(1e3 * seconds.running)
    timed = taken[earlier:]
    return {
        "earlier_thoughts": earlier,
        "median_ms": round(float(np.median(timed)), 3),
        "p99_ms": round(float(np.percentile(timed, 99)), 3),
        "similar_share": round(stats.similar / max(stats.compared, 1), 5),
        "kept": stats.kept,
    }


def text_of(tokens: Sequence[int]) -> str:
    """A text of words, with formulas that depend on the tokens."""
    a, b, c = (int(token) % 97 for token in tokens[:3])
    words = " ".join(f"w{token}" for token in tokens)
    return f"{words} \\(x_{{{a}}} = \\frac{{{b}}}{{{c} + y}}\\) so $z^2 + {a}z - {b} = 0$ and {a}*{b}={c}"


if __name__ == "__main__":
    main()
