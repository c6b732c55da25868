"""How many held-out problems a model solves: `python -m research.tasks.accuracy` records the accuracy of a tiny model.

Problems come from a seed that training never used; greedy decoding; the interval is Wilson's at 95 %.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv.checkpoints import loading as checkpoint
from jkv.evaluation.held_out import HELD_OUT_SEED, solve
from jkv.eviction import Policy
from jkv.limits import parse
from jkv.model.params import Model
from jkv.policies import full
from jkv.reports import write_text
from jkv.statistics import wilson
from research.tasks.problems import problems_of

PAGE = Path("docs/results.md")  # from the root of the repository
MARKS = "<!-- accuracy -->", "<!-- /accuracy -->"


def evaluate(model: Model, problems: Sequence[Any], policy: Policy | None = None, **options: Any) -> dict[str, Any]:
    """Accuracy with its interval, lengths in tokens, and how the completions ended; `options` go to `generate`."""
    policy = full() if policy is None else policy
    out, right = solve(model, problems, policy, **options)
    low, high = wilson(sum(right), len(right))
    return {
        "policy": policy.definition,
        "problems": len(problems),
        "right": sum(right),
        "accuracy": sum(right) / len(right),
        "low": low,
        "high": high,
        "mean_tokens": float(out.lengths.mean()),
        "median_tokens": float(np.median(out.lengths)),
        "max_tokens": int(out.lengths.max()),
        "finished": {reason: out.finish_reason.count(reason) for reason in sorted(set(out.finish_reason))},
    }


def describe(result: dict[str, Any]) -> str:
    """The sentence between `MARKS` in `PAGE`."""
    return (
        f"Held-out accuracy with the full cache, greedy, {result['problems']} problems: **{result['accuracy']:.1%}** (95 % "
        f"interval {result['low']:.1%} to {result['high']:.1%}), in {result['median_tokens']:.0f} tokens at the median and "
        f"{result['max_tokens']} at most. Written by `python -m research.tasks.accuracy`."
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-reasoner", help="a shipped model or a checkpoint folder")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, help=f"write the result into this page, between its marks; alone: {PAGE}"
    )
    options = parse(parser)
    if options.page and not options.page.is_file():
        parser.error(f"--page must be a file with the marks {MARKS[0]} and {MARKS[1]}; {options.page} does not exist.")
    model = checkpoint.load(options.model)
    result = evaluate(model, problems_of(model.tokenizer, options.problems, options.seed))
    print(json.dumps(result, indent=2))
    if options.out:
        write_text(options.out, json.dumps(result, indent=2) + "\n")
    if options.page:
        page = options.page.read_text()
        between = re.compile(f"(?<={MARKS[0]})(?:(?!{MARKS[0]}).)*(?={MARKS[1]})", flags=re.DOTALL)
        write_text(options.page, between.sub(lambda _: f"\n{describe(result)}\n", page))


if __name__ == "__main__":
    main()
