"""An experiment in learning by compressed rollouts, as TOML: a task, its arms (a policy and a loss), seeds and sizes."""

import dataclasses
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jkv.checkpoint import load
from jkv.params import Model
from jkv.policies import Policy, make
from jkv.results import Result
from jkv.rl.correction import parse_mode
from jkv.tasks import chains, counting

LOSSES = ("dense", "replay", "bypass")


class Task(NamedTuple):
    """Where a model starts, what it is asked, and what a completion is worth."""

    start: Callable[[int], Model]  # of a seed
    draw: Callable[[np.random.Generator, int], tuple[list[Any], list[Any]]]  # prompts and what their rewards go by
    reward: Callable[[Result, Sequence[Any]], np.ndarray]  # of completions and the same, one for each: [N]
    prompt_tokens: int  # of the longest prompt
    stop_ids: tuple[int, ...] | None = None  # None: the model's own


def draw_chains(rng: np.random.Generator, count: int) -> tuple[list[str], list[str]]:
    """Short chains of arithmetic and their answers."""
    problems = [chains.draw_problem(rng, 3, 4) for _ in range(count)]
    return [problem.prompt for problem in problems], [problem.answer for problem in problems]


def right_answer(out: Result, answers: Sequence[str]) -> np.ndarray:
    """1 for a completion that boxes the answer, 0 for others."""
    assert out.text is not None
    told = zip(out.text, answers, strict=True)
    return np.array([chains.read_answer(text) == answer for text, answer in told], np.float64)


TASKS = {
    "counting": Task(counting.start, counting.draw, counting.reward, counting.PROMPT_TOKENS, stop_ids=()),
    "chains": Task(lambda seed: load("tiny-reasoner"), draw_chains, right_answer, 32),
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """How rollouts are compressed, and how they are learnt from.

    Attributes:
      name: of the arm.
      policy: of the rollouts.
      loss: "dense" trains the dense policy, corrected; "replay" the compressed one, exactly; "bypass" the dense one with the
        sampled log-probabilities as old ones.
      correction: of a dense loss, a mode of `jkv.rl.correct`.
    """

    name: str
    policy: Policy
    loss: str = "dense"
    correction: str = "tis+veto"

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"The loss of an arm must be one of {', '.join(LOSSES)}; {self.name} has {self.loss!r}.")
        parse_mode(self.correction)


@dataclasses.dataclass(frozen=True)
class Course:
    """An experiment: every arm learns the task from every seed, by GRPO.

    Attributes:
      task: one of TASKS.
      arms: what is compared; one named "full" is what the others are beside.
      seeds: of weights, prompts and draws.
      steps: updates, each on `prompts` times `samples` completions of at most `max_new_tokens`.
      learning_rate: of Adam, constant; gradients are clipped to a norm of 1.
      page_size: of the rollouts' pool.
      evaluate_every: steps between two evaluations on `evaluations` prompts that are the same for all.
      checkpoint_every: steps between two checkpoints.
      temperature: of all draws.
    """

    task: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0,)
    steps: int = 300
    prompts: int = 4
    samples: int = 8
    max_new_tokens: int = 96
    learning_rate: float = 4e-4
    page_size: int = 4
    evaluate_every: int = 30
    evaluations: int = 64
    checkpoint_every: int = 50
    temperature: float = 1.0

    def about(self, arm: Arm, seed: int) -> dict[str, Any]:
        """What a run's every number depends on, but for how long it is; plain JSON."""
        told = {name: value for name, value in vars(self).items() if name not in ("arms", "seeds", "steps", "checkpoint_every")}
        return told | {"arm": {**vars(arm), "policy": repr(arm.policy)}, "seed": seed}


def read_course(path: Path) -> Course:
    """A `Course` from a TOML file, its arms as `[arms.<name>]` with `policy`, `settings`, `loss` and `correction`.

    Raises:
      ValueError: no TOML, a field that no course has, an unknown task or policy, or a size below 1.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(
            f"{path} must be a TOML file of a course: {error}. See configs/experiments/grpo-counting.toml."
        ) from None
    arms = fields.pop("arms", {})
    known = {field.name for field in dataclasses.fields(Course)}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"A course has {', '.join(sorted(known))}; {path} has {', '.join(unknown)}. Mend the file.")
    if fields.get("task") not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {fields.get('task')!r} in {path}.")
    if not arms:
        raise ValueError(f"A course compares arms, at least one; {path} has no [arms.<name>].")
    if "seeds" in fields:
        fields["seeds"] = tuple(fields["seeds"])
    course = Course(arms=tuple(make_arm(name, **own) for name, own in arms.items()), **fields)
    for name in ("steps", "prompts", "max_new_tokens", "page_size", "evaluate_every", "evaluations", "checkpoint_every"):
        if getattr(course, name) < 1:
            raise ValueError(f"{name} must be at least 1; got {getattr(course, name)} in {path}.")
    if course.samples < 2:
        raise ValueError(f"samples must be at least 2, since a group compares them; got {course.samples} in {path}.")
    return course


def make_arm(name: str, policy: str = "full", settings: dict[str, Any] | None = None, **more: Any) -> Arm:
    """An arm as a file has it."""
    if unknown := sorted(set(more) - {"loss", "correction"}):
        raise ValueError(f"An arm has policy, settings, loss and correction; {name} has {', '.join(unknown)}.")
    return Arm(name, make(policy, settings or {}), **more)
