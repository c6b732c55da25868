"""An experiment in learning by compressed rollouts, as TOML: a task, its arms (a policy and a loss), seeds and sizes."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jkv.checkpoints.loading import load
from jkv.checks import check_counts, shown, typed
from jkv.engine.results import Result
from jkv.evaluation import chains
from jkv.eviction import Policy
from jkv.limits import check_numbers
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.policies import make
from jkv.rl.correction import parse_mode
from jkv.text_files import read_toml
from research.tasks import counting, stepping

LOSSES = ("dense", "replay", "bypass")
CACHES = {"full": "dense", "own": "own"}  # of an evaluation's rewards, and their names in records
OUTSIDE_OF_RUNS = ("arms", "seeds", "steps", "checkpoint_every", "contrasts", "judged_by")
COUNTS = ("steps", "prompts", "samples", "max_new_tokens", "page_size", "evaluate_every", "evaluations", "checkpoint_every")


class Task(NamedTuple):
    """The initial model, the prompts, and the reward of a completion."""

    start: Callable[[int], Model]  # of a seed
    draw: Callable[[np.random.Generator, int], tuple[list[Any], list[Any]]]  # prompts and what their rewards depend on
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
    pairs = zip(out.text, answers, strict=True)
    return np.array([chains.read_answer(text) == answer for text, answer in pairs], np.float64)


TASKS = {
    "counting": Task(counting.start, counting.draw, counting.reward, counting.PROMPT_TOKENS, stop_ids=()),
    "stepping": Task(stepping.start, stepping.draw, stepping.reward, stepping.PROMPT_TOKENS, stop_ids=()),
    "chains": Task(lambda seed: load("tiny-reasoner", joined=False), draw_chains, right_answer, 32),
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
        for field, kind in (("name", str), ("policy", Policy), ("loss", str), ("correction", str)):
            typed(f"{field} of an arm", getattr(self, field), kind)
        if self.loss not in LOSSES:
            raise ValueError(f"The loss of an arm must be one of {', '.join(LOSSES)}; {self.name} has {self.loss!r}.")
        parse_mode(self.correction)


@dataclasses.dataclass(frozen=True)
class Course:
    """An experiment: every arm learns the task from every seed, by GRPO.

    Attributes:
      task: one of TASKS.
      arms: what is compared; the others are compared with the one named "full".
      seeds: of weights, prompts and draws; each once, since a run counted twice makes an interval too narrow.
      steps: updates, each on `prompts` times `samples` completions of at most `max_new_tokens`.
      learning_rate: of Adam, constant, above 0; gradients are clipped to a norm of 1.
      page_size: of the rollouts' pool.
      evaluate_every: steps between two evaluations on `evaluations` prompts that are the same for all.
      checkpoint_every: steps between two checkpoints.
      temperature: of all draws, above 0: samples of a prompt must differ.
      contrasts: pairs of arms whose final rewards are compared seed by seed: the first less the second.
      judged_by: the cache of the rewards that the picture shows: "full", or the arms' "own".

    Raises:
      ValueError: a field of another type or out of its range, an arm or a seed that is there twice, or a contrast that is no
        pair of arms.
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
    contrasts: tuple[tuple[str, str], ...] = ()
    judged_by: str = "full"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, typed(field.name, getattr(self, field.name), field.type))
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}; got {self.task!r}.")
        for name in ("seeds", "arms"):
            check_once(name, [getattr(one, "name", one) for one in getattr(self, name)])
        for seed in self.seeds:
            if not 0 <= typed("each of seeds", seed, int) < 2**32:
                raise ValueError(f"seeds must lie in [0, 2**32); got {seed}.")
        check_counts(**{name: getattr(self, name) for name in COUNTS})
        check_numbers({name: getattr(self, name) for name in COUNTS})
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2, since a group compares them; got {self.samples}.")
        for name in ("learning_rate", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite; got {getattr(self, name)}.")
        Sampling(self.temperature)
        if self.judged_by not in CACHES:
            raise ValueError(f"judged_by must be one of {', '.join(CACHES)}; got {self.judged_by!r}.")
        object.__setattr__(self, "contrasts", tuple(pair_of([arm.name for arm in self.arms], one) for one in self.contrasts))

    def about(self, arm: Arm, seed: int) -> dict[str, Any]:
        """Everything that a run's numbers depend on but its length; plain JSON."""
        given = {name: value for name, value in vars(self).items() if name not in OUTSIDE_OF_RUNS}
        return given | {"arm": {**vars(arm), "policy": arm.policy.definition}, "seed": seed}


def pair_of(names: Sequence[str], given: Any) -> tuple[str, str]:
    """Two different names of those, as a tuple.

    Raises:
      ValueError: anything else.
    """
    if isinstance(given, list | tuple) and len(given) == 2 and all(one in names for one in given) and given[0] != given[1]:
        return given[0], given[1]
    raise ValueError(f"A contrast is a pair of different arms, two of {', '.join(names)}; got {shown(given)}.")


def check_once(name: str, values: Sequence[Any]) -> None:
    """Refuses no values, and one that is there twice."""
    if not values:
        raise ValueError(f"{name} must be at least one; got none.")
    if twice := [str(value) for i, value in enumerate(values) if value in values[:i]]:
        raise ValueError(f"{name} must differ; got {', '.join(dict.fromkeys(twice))} more than once.")


def read_course(path: Path) -> Course:
    """A `Course` from a TOML file, its arms as `[arms.<name>]` with `policy`, `settings`, `loss` and `correction`.

    Raises:
      ValueError: no TOML, a field that no course has, or one that a `Course` or an `Arm` refuses.
    """
    try:
        fields = read_toml(path)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} must be a TOML file of a course: {str(error).rstrip('.')}. See configs/experiments/grpo-counting.toml."
        ) from None
    known = {field.name for field in dataclasses.fields(Course)}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"A course has {', '.join(sorted(known))}; {path} has {', '.join(unknown)}. Correct the file.")
    try:
        return make_course(fields)
    except ValueError as error:
        raise ValueError(f"{error} Correct {path}.") from None


def make_course(fields: Mapping[str, Any]) -> Course:
    """A course as a file has it, its fields known."""
    if "task" not in fields:
        raise ValueError(f"A course needs a task, one of {', '.join(TASKS)}; there is none.")
    arms = typed("arms", fields.get("arms", {}), dict)
    if not arms:
        raise ValueError("A course compares arms, at least one; there is no [arms.<name>].")
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    given["arms"] = tuple(make_arm(name, typed(f"arms.{name}", own, dict)) for name, own in arms.items())
    return Course(**given)


def make_arm(name: str, fields: Mapping[str, Any]) -> Arm:
    """An arm as a file has it."""
    kinds = {"policy": str, "settings": dict, "loss": str, "correction": str}
    if unknown := sorted(set(fields) - set(kinds)):
        raise ValueError(f"An arm has policy, settings, loss and correction; {name} has {', '.join(unknown)}.")
    given = {field: typed(f"arms.{name}.{field}", value, kinds[field]) for field, value in fields.items()}
    return Arm(name, make(given.pop("policy", "full"), given.pop("settings", {})), **given)
