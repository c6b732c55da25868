"""How many held-out problems a model solves: `python -m jkv.tasks.evaluate` records the accuracy of a shipped model.

Problems come from a seed that training never used; greedy decoding; the interval is Wilson's at 95 %.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv.checkpoints import loading as checkpoint
from jkv.engine.results import Result, complete
from jkv.eviction import Policy
from jkv.generate import generate
from jkv.limits import check_numbers, parse
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.policies import full
from jkv.reports import write_text
from jkv.statistics import wilson
from jkv.tasks import trail_vocabulary
from jkv.tasks.chains import Problem, draw_problem, read_answer
from jkv.tasks.trails import Trail, draw_trail

HELD_OUT_SEED = 2_000_003
CALIBRATION_SEED = 3_000_017  # of problems from which policies learn about a model
GATE_SEED = 4_000_037  # of problems that say whether a model can judge policies
PAGE = Path("docs/results.md")  # from the root of the repository
MARKS = "<!-- accuracy -->", "<!-- /accuracy -->"


def held_out(count: int, seed: int = HELD_OUT_SEED, tokenizer: Any = None) -> Sequence[Problem | Trail]:
    """Problems drawn as in training from another seed: trails for a tokenizer of trails, else chains of 3 to 14 definitions."""
    check_numbers({"problems": count})
    rng = np.random.default_rng(seed)
    draw: Callable[[np.random.Generator], Problem | Trail] = draw_trail if trail_vocabulary.is_own(tokenizer) else draw_problem
    return [draw(rng) for _ in range(count)]


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


def solve(model: Model, problems: Sequence[Any], policy: Policy, **options: Any) -> tuple[Result, list[bool]]:
    """Greedy completions of problems (anything with a `prompt` and an `answer`), and which of them are right.

    Raises:
      RuntimeError, KeyboardInterrupt: a sample failed, or Ctrl-C ended it early: half a run has no accuracy.
    """
    prompts = [problem.prompt for problem in problems]
    out = complete(generate(model, prompts, policy=policy, sampling=Sampling(temperature=0.0), **options))
    assert out.text is not None
    return out, [read_answer(text) == problem.answer for text, problem in zip(out.text, problems, strict=True)]


def describe(result: dict[str, Any]) -> str:
    """The sentence between `MARKS` in `PAGE`."""
    return (
        f"Held-out accuracy with the full cache, greedy, {result['problems']} problems: **{result['accuracy']:.1%}** (95 % "
        f"interval {result['low']:.1%} to {result['high']:.1%}), in {result['median_tokens']:.0f} tokens at the median and "
        f"{result['max_tokens']} at most. Written by `python -m jkv.tasks.evaluate`."
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
    result = evaluate(model, held_out(options.problems, options.seed, model.tokenizer))
    print(json.dumps(result, indent=2))
    if options.out:
        write_text(options.out, json.dumps(result, indent=2) + "\n")
    if options.page:
        page = options.page.read_text()
        between = re.compile(f"(?<={MARKS[0]})(?:(?!{MARKS[0]}).)*(?={MARKS[1]})", flags=re.DOTALL)
        write_text(options.page, between.sub(lambda _: f"\n{describe(result)}\n", page))


if __name__ == "__main__":
    main()
