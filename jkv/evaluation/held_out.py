"""Problems of tiny-reasoner that its training never saw, and how many of them a model solves under a policy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv.engine.results import Result, complete
from jkv.evaluation.chains import Problem, draw_problem, read_answer
from jkv.eviction import Policy
from jkv.generate import generate
from jkv.limits import check_numbers
from jkv.model.params import Model
from jkv.model.sampling import Sampling

HELD_OUT_SEED = 2_000_003
CALIBRATION_SEED = 3_000_017  # of problems from which policies learn about a model


def held_out(count: int, seed: int = HELD_OUT_SEED) -> Sequence[Problem]:
    """Chains of 3 to 14 definitions, drawn as in training from another seed."""
    check_numbers({"problems": count})
    rng = np.random.default_rng(seed)
    return [draw_problem(rng) for _ in range(count)]


def solve(model: Model, problems: Sequence[Any], policy: Policy, **options: Any) -> tuple[Result, list[bool]]:
    """Greedy completions of problems (anything with a `prompt` and an `answer`), and which of them are right.

    Raises:
      RuntimeError, KeyboardInterrupt: a sample failed, or Ctrl-C ended it early: half a run has no accuracy.
    """
    prompts = [problem.prompt for problem in problems]
    out = complete(generate(model, prompts, policy=policy, sampling=Sampling(temperature=0.0), **options))
    assert out.text is not None
    return out, [read_answer(text) == problem.answer for text, problem in zip(out.text, problems, strict=True)]
