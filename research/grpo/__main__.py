"""GRPO on compressed rollouts, with no framework: `python -m research.grpo configs/experiments/grpo-counting.toml`.

Each arm of the file draws with its own policy and learns by its own loss; all start from the same weights and see the same
prompts. Reports the reward with the full cache, bytes saved, speed, mismatch, and how exact replay was. Runs are kept as they
go: the same command resumes after the last whole step before Ctrl-C, or after the last checkpoint where the process was killed.
"""

import argparse
import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jkv import reports as record
from jkv import viz
from jkv.cli.errors import run_safely
from jkv.limits import parse
from research.grpo.course import CACHES, Course, read_course
from research.grpo.learner import learn
from research.grpo.outcome import COLUMNS, CONTRASTS, by_arm, contrast_rows, describe, record_of, remarks, row_of

CONTRAST_NOTE = "Final rewards compared seed by seed: the first arm of each pair less the second."


def run_course(course: Course, folder: Path | None, progress: bool | None = None) -> Iterator[list[dict[str, Any]]]:
    """The records of all runs so far, after each; every arm from one seed before the next."""
    from tqdm.auto import tqdm

    runs: list[dict[str, Any]] = []
    for seed in course.seeds:
        for arm in course.arms:
            disable = None if progress is None else not progress
            with tqdm(total=course.steps, unit="step", desc=f"{arm.name}, seed {seed}", disable=disable) as bar:

                def show(step: dict[str, Any], bar: Any = bar) -> None:
                    bar.set_postfix(reward=f"{step['reward']:.3f}", overlap=f"{step['overlap']:.3f}", refresh=False)
                    bar.update()

                own = None if folder is None else folder / f"{slug(arm.name)}-{seed}"
                _, history = learn(course, arm, seed, own, show)
                bar.update(course.steps - bar.n)
            runs.append(record_of(arm, seed, history))
            yield runs


def slug(name: str) -> str:
    """A name as part of a path.

    >>> slug("r_kv, replayed")
    'r_kv-replayed'
    """
    return re.sub(r"[^\w.=%+-]+", "-", name).strip("-")


def report(course: Course, runs: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """The table of what has run, in Markdown, with what it is of and on."""
    table = record.markdown(COLUMNS, [row_of(name, own) for name, own in by_arm(runs).items()])
    compared = contrast_rows(runs, course.contrasts)
    contrasts = f"{CONTRAST_NOTE}\n\n{record.markdown(CONTRASTS, compared)}" if compared else ""
    parts = [describe(course, runs), table, " ".join(remarks(runs)), contrasts, record.footnote({"about": about})]
    return "\n\n".join(part for part in parts if part)


def write(course: Course, runs: Sequence[dict[str, Any]], about: dict[str, Any], folder: Path, name: str) -> None:
    """The report, its figures, and the picture, as `name`.md, .json and .png."""
    settings = {**vars(course), "arms": [arm.name for arm in course.arms]}
    record.write(name, {"about": about, "course": settings, "runs": list(runs)}, report(course, runs, about), folder)
    cache, whose = CACHES[course.judged_by], "the full cache" if course.judged_by == "full" else "each arm's own cache"
    curves = {
        arm: [
            {"step": [at["step"] for at in run["evaluations"]], "reward": [at[cache] for at in run["evaluations"]]}
            for run in own
        ]
        for arm, own in by_arm(runs).items()
    }
    record.write_figure(folder / f"{name}.png", viz.learning(curves, f"{course.task}: reward with {whose}"))


def narrow(course: Course, arms: str | None, seeds: str | None, steps: int | None) -> Course:
    """A part of a course, as asked for on the command line.

    Raises:
      ValueError: an arm that it does not have, seeds that are no numbers, or what a `Course` refuses.
    """
    known = {arm.name: arm for arm in course.arms}
    chosen = list(known) if arms is None else [name.strip() for name in arms.split(";")]
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"The arms are {'; '.join(known)}; got {'; '.join(unknown)}. Write several with ; between them.")
    if seeds is not None and not re.fullmatch(r"\d+(,\d+)*", seeds):
        raise ValueError(f"seeds are whole numbers with commas between them; got {seeds!r}.")
    return dataclasses.replace(
        course,
        arms=tuple(known[name] for name in chosen),
        contrasts=tuple(pair for pair in course.contrasts if set(pair) <= set(chosen)),
        seeds=course.seeds if seeds is None else tuple(map(int, seeds.split(","))),
        steps=course.steps if steps is None else steps,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m research.grpo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="a TOML file: see configs/experiments/grpo-counting.toml")
    parser.add_argument("--out", type=Path, help="a folder for the report, JSON, and the picture (needs matplotlib)")
    parser.add_argument("--checkpoints", type=Path, help="kept across starts; default: checkpoints/<the file's name>")
    parser.add_argument("--arms", help="some of the file's, with ; between them")
    parser.add_argument("--seeds", help="in place of the file's, with , between them")
    parser.add_argument("--steps", type=int, help="in place of the file's")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, help="a bar; default: in a terminal or notebook")
    options = parse(parser, words)
    checkpoints = options.checkpoints or Path("checkpoints") / options.config.stem
    about = record.about(f"python -m research.grpo {shlex.join(words)}")

    def run() -> int:
        course = narrow(read_course(options.config), options.arms, options.seeds, options.steps)
        if options.out:
            viz.look.figure_class()  # fails before hours of work where matplotlib is missing
            options.out.mkdir(parents=True, exist_ok=True)
        runs: list[dict[str, Any]] = []
        for runs in run_course(course, checkpoints, options.progress):
            if options.out:
                write(course, runs, about, options.out, options.config.stem)
        print(report(course, runs, about))
        return 0

    interrupted = f"interrupted; the same command resumes from {checkpoints}"
    return run_safely(run, "grpo:", interrupted, is_program=arguments is None)


if __name__ == "__main__":
    sys.exit(main())
