"""Teaches a model to live in its budget: `python -m research.tasks.distill configs/experiments/distill-chains.toml`.

The student draws chains under a policy, at several budgets in turn, and learns its own full cache's distributions at the
tokens that it drew, by the replay of its evictions (`jkv.rl.distillation`). The teacher has the first weights, which stay. Each
seed is a run. The report has the divergence of new rollouts and the accuracy on held-out problems, before and after.

Runs are kept as they go: the same command resumes after the last checkpoint.
"""

import argparse
import contextlib
import dataclasses
import functools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jkv import reports as record
from jkv import rl
from jkv.checkpoints.loading import load
from jkv.checks import check_counts, check_known, typed
from jkv.cli.errors import run_safely
from jkv.evaluation.chains import draw_problem
from jkv.evaluation.held_out import HELD_OUT_SEED, held_out, solve
from jkv.eviction import Policy
from jkv.limits import parse
from jkv.model.params import Model, Params
from jkv.model.sampling import Sampling
from jkv.policies import full, make
from jkv.replay.score import score
from jkv.rl.distillation import KINDS
from jkv.rollout import Rollout
from jkv.text_files import read_toml
from research.grpo.checkpoints import Checkpoints, History, Progress
from research.grpo.learner import make_optimizer, seed_of
from research.grpo.outcome import interval, signed

UNSEEN_SEED = 6_000_029  # of the problems whose rollouts measure the divergence
OUTSIDE_OF_RUNS = ("seeds", "steps", "checkpoint_every")
COUNTS = ("steps", "prompts", "top", "max_new_tokens", "page_size", "checkpoint_every", "problems", "unseen")
COLUMNS = ("cache", "divergence, first", "last (95 %)", "change", "right, first", "last (95 %)", "change")


@dataclasses.dataclass(frozen=True)
class Lesson:
    """An experiment: one student a seed.

    Attributes:
      policy: the name of the policy under which the student lives.
      settings: of the policy, but for its budget.
      budgets: slots; each step takes the next one in turn.
      kind: of the loss.
      model: of the student and its teacher.
      seeds: of problems and draws.
      steps: updates, each on one completion of each of `prompts` problems.
      definitions: the fewest and the most of a problem that is learnt from.
      top: the teacher's most likely tokens that are learnt.
      learning_rate: of Adam, constant; gradients are clipped to a norm of 1.
      problems: held out, for the accuracy by greedy decoding.
      unseen: problems of the training's size, for the divergence.

    Raises:
      ValueError: a field of another type or out of its range.
    """

    policy: str
    settings: Mapping[str, Any]
    budgets: tuple[int, ...]
    kind: str = "forward"
    model: str = "tiny-reasoner"
    seeds: tuple[int, ...] = (0,)
    steps: int = 200
    prompts: int = 8
    definitions: tuple[int, int] = (3, 14)
    top: int = 16
    max_new_tokens: int = 512
    learning_rate: float = 1e-4
    page_size: int = 4
    checkpoint_every: int = 25
    problems: int = 100
    unseen: int = 16

    def __post_init__(self) -> None:
        for name in ("budgets", "seeds", "definitions"):
            values = tuple(typed(f"each of {name}", one, int) for one in getattr(self, name))
            if not values:
                raise ValueError(f"{name} must be at least one; got none.")
            object.__setattr__(self, name, values)
        check_counts(**{name: getattr(self, name) for name in COUNTS})
        check_known(KINDS, kind=self.kind)
        self.policies  # noqa: B018 -- a policy refuses what it does not know

    @property
    def policies(self) -> dict[int, Policy]:
        """The student's policy at each budget."""
        return {budget: make(self.policy, {**self.settings, "budget": budget}) for budget in self.budgets}

    def about(self, seed: int) -> dict[str, Any]:
        """Everything that a run's numbers depend on but its length; plain JSON."""
        return {name: value for name, value in vars(self).items() if name not in OUTSIDE_OF_RUNS} | {"seed": seed}


def read_lesson(path: Path) -> Lesson:
    """A `Lesson` from a TOML file.

    Raises:
      ValueError: no TOML, or a field that no lesson has or that a `Lesson` refuses.
    """
    fields = read_toml(path)
    known = [field.name for field in dataclasses.fields(Lesson)]
    if unknown := sorted(set(fields) - set(known)):
        raise ValueError(f"A lesson has {', '.join(known)}; {path} has {', '.join(unknown)}. Correct the file.")
    return Lesson(**fields)


@functools.partial(jax.jit, static_argnames=("optimizer", "kind"))
def update(
    optimizer: optax.GradientTransformation, params: Params, state: Any, batch: rl.Batch, kind: str
) -> tuple[Params, Any, dict[str, Any]]:
    """New weights and optimiser state, and the loss's metrics."""
    (_, metrics), gradient = jax.value_and_grad(rl.distillation, has_aux=True)(params, batch, kind=kind)
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies counts by rates, which strict promotion refuses
        change, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, change), state, metrics


def draw_batch(lesson: Lesson, teacher: Model, rollout: Rollout, seed: Sequence[int], count: int) -> rl.Batch:
    """Completions of new problems by the student, with what its full cache would have said."""
    rng = np.random.default_rng(tuple(seed))
    prompts = [draw_problem(rng, *lesson.definitions).prompt for _ in range(count)]
    out = rollout(prompts, sampling=Sampling(seed=seed_of(*seed)), return_trace=True, progress=False)
    if rollout.pending:  # Ctrl-C
        raise KeyboardInterrupt
    length = rollout.defaults.max_prompt_tokens + lesson.max_new_tokens
    return rl.make_batch(out, teacher=score(teacher, out, top=lesson.top), replay=True, pack=length)


def make_rollouts(lesson: Lesson, model: Model) -> dict[int, Rollout]:
    """Where the student draws, at each budget."""
    sizes: Any = {"max_prompt_tokens": 128, "max_new_tokens": lesson.max_new_tokens, "page_size": lesson.page_size}
    rows = {"max_running": max(lesson.prompts, lesson.unseen), "pad_id": model.config.vocab_size - 1}
    return {budget: Rollout(model, policy, **sizes, **rows) for budget, policy in lesson.policies.items()}


def examine(lesson: Lesson, teacher: Model, params: Params, rollouts: Mapping[int, Rollout]) -> dict[str, Any]:
    """The divergence and the accuracy at each budget, and the accuracy with the full cache."""
    model, problems = dataclasses.replace(teacher, params=params), held_out(lesson.problems, HELD_OUT_SEED)
    found: dict[str, Any] = {"full": {"right": float(np.mean(solve(model, problems, full(), progress=False)[1]))}}
    for budget, rollout in rollouts.items():
        batch = draw_batch(lesson, teacher, rollout, (UNSEEN_SEED, budget), lesson.unseen)
        _, metrics = rl.distillation(params, batch, kind=lesson.kind)
        _, right = solve(model, problems, lesson.policies[budget], page_size=lesson.page_size, progress=False)
        found[str(budget)] = {"divergence": float(metrics["kl"]), "right": float(np.mean(right))}
    return found


def show(step: dict[str, Any]) -> None:
    """Prints a step's record at once."""
    print(step, flush=True)


def learn(lesson: Lesson, seed: int, folder: Path | None, on_step: Callable[[dict[str, Any]], None] = show) -> History:
    """One student, from the last checkpoint in `folder`; its steps, and what was measured before and after them.

    Raises:
      ValueError: the folder holds another run.
      KeyboardInterrupt: Ctrl-C was pressed; `folder` has the last checkpoint.
    """
    teacher, optimizer = load(lesson.model, joined=False), make_optimizer(lesson.learning_rate)
    start = Progress(teacher.params, optimizer.init(teacher.params))
    with contextlib.closing(Checkpoints(folder, lesson.about(seed) | {"start": teacher.digests})) as checkpoints:
        now = checkpoints.restore(start, lesson.steps)
        rollouts = make_rollouts(lesson, dataclasses.replace(teacher, params=now.params))
        while True:  # Ctrl-C loses the steps after the last checkpoint
            done = len(now.history.steps)
            if done in (0, lesson.steps) and not any(one["step"] == done for one in now.history.evaluations):
                now = now.evaluated({"step": done, **examine(lesson, teacher, now.params, rollouts)})
            if done and (done == lesson.steps or done % lesson.checkpoint_every == 0):
                checkpoints.save(now)
            if done == lesson.steps:
                return now.history
            budget = lesson.budgets[done % len(lesson.budgets)]
            batch = draw_batch(lesson, teacher, rollouts[budget], (seed, done), lesson.prompts)
            params, state, metrics = update(optimizer, now.params, now.state, batch, lesson.kind)
            now = now.stepped(params, state, {"budget": budget, **{name: float(value) for name, value in metrics.items()}})
            for rollout in rollouts.values():
                rollout.update(now.params)
            on_step(now.history.steps[-1])


def rows_of(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each cache: means over seeds before and after, and the change seed by seed."""
    rows = []
    for cache in [name for name in runs[0]["evaluations"][0] if name != "step"]:
        pairs = [(run["evaluations"][0][cache], run["evaluations"][-1][cache]) for run in runs]
        cells = [cache]
        for figure in ("divergence", "right"):
            if figure not in pairs[0][0]:
                cells += [""] * 3
                continue
            first, last = ([pair[i][figure] for pair in pairs] for i in (0, 1))
            changes = [after - before for before, after in zip(first, last, strict=True)]
            cells += [f"{np.mean(first):.3f}", str(interval(last)), signed(interval(changes))]
        rows.append(cells)
    return rows


def report(lesson: Lesson, runs: Sequence[Mapping[str, Any]], about: dict[str, Any]) -> str:
    """The table of what has run, in Markdown, with what it is of and on."""
    text = (
        f"{lesson.model} taught by its own full cache ({lesson.kind}, {lesson.top} tokens), under {lesson.policy} at "
        f"{' and '.join(map(str, lesson.budgets))} slots in turn; {len(runs)} seeds, {lesson.steps} updates of "
        f"{lesson.prompts} completions. The divergence, in nats a token, is of {lesson.unseen} new rollouts; right is "
        f"the share of {lesson.problems} held-out problems, greedy."
    )
    return "\n\n".join([text, record.markdown(COLUMNS, rows_of(runs)), record.footnote({"about": about})])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m research.tasks.distill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="a TOML file: see configs/experiments/distill-chains.toml")
    parser.add_argument("--out", type=Path, help="a folder for the report and its JSON")
    parser.add_argument("--checkpoints", type=Path, help="kept across starts; default: checkpoints/<the file's name>")
    parser.add_argument("--steps", type=int, help="in place of the file's")
    options = parse(parser, words)
    checkpoints = options.checkpoints or Path("checkpoints") / options.config.stem
    about = record.about(f"python -m research.tasks.distill {shlex.join(words)}")

    def run() -> int:
        lesson = read_lesson(options.config)
        lesson = dataclasses.replace(lesson, steps=options.steps or lesson.steps)
        runs: list[dict[str, Any]] = []
        for seed in lesson.seeds:
            history = learn(lesson, seed, checkpoints / str(seed))
            runs.append({"seed": seed, **dataclasses.asdict(history)})
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                about_lesson = {**vars(lesson), "steps": lesson.steps}
                text = report(lesson, runs, about)
                record.write(options.config.stem, {"about": about, "lesson": about_lesson, "runs": runs}, text, options.out)
        print(report(lesson, runs, about))
        return 0

    interrupted = f"interrupted; the same command resumes from {checkpoints}"
    return run_safely(run, "distill:", interrupted, is_program=arguments is None)


if __name__ == "__main__":
    sys.exit(main())
