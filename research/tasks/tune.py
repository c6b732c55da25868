"""Fine-tunes any model on a task of ours until its time is up: `python -m research.tasks.tune smollm2-135m --out tuned`.

The folder gets the model every `--save-seconds`, with a line in `tuned.jsonl`, and `problems.jsonl`, unseen problems of the
task with their answers for `jkv eval --file`. A second start of the same command goes on with the model that was saved and with
the time that was left; the optimiser starts anew. Another first model, other settings, and a saved model that is not the one
that a line of `tuned.jsonl` describes are refused.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jkv.checkpoints import loading as checkpoint
from jkv.checks import check_counts
from jkv.evaluation.chains import draw_problem
from jkv.evaluation.held_out import HELD_OUT_SEED
from jkv.evaluation.word_problems import draw_word_problem
from jkv.limits import parse
from jkv.model.params import Model, Params
from jkv.reports import append_text, json_lines, read_json_lines, write_text
from jkv.resuming import check_same
from research.tasks.batches import Stage, make_batch
from research.tasks.optimizers import make_optimizer
from research.tasks.train import train_step

STAGES = {"words": Stage(0, 8, 1024, 4, 10, passes=(0, 4)), "chains": Stage(0, 8, 1024, 3, 14)}
WARM_UP = 50  # steps, in which the learning rate rises to its value
REPORT_EVERY = 20  # steps
LOG = "tuned.jsonl"
FIRST: Mapping[str, Any] = {"step": 0, "seconds": 0.0}
FIX = "Give another --out, or remove the folder to start anew."


def unseen_problems(task: str, count: int) -> list[dict[str, str]]:
    """Problems that no training draws, with their answers."""
    rng, stage = np.random.default_rng(HELD_OUT_SEED), STAGES[task]

    def draw() -> Any:
        if task == "chains":
            return draw_problem(rng, stage.low, stage.high, stage.early)
        return draw_word_problem(rng, int(rng.integers(stage.low, stage.high + 1)))

    return [{"prompt": problem.prompt, "answer": problem.answer} for problem in (draw() for _ in range(count))]


def tune(
    params: Params,
    tokenizer: Any,
    task: str,
    stage: Stage,
    folder: Path,
    *,
    seconds: float,
    save_seconds: float = 60.0,
    rate: float = 1e-4,
    seed: int = 0,
    before: Mapping[str, Any] = FIRST,
    made_of: Mapping[str, Any] | None = None,
) -> Params:
    """The weights after so many seconds of training, those of earlier starts included: `before` is the line of the last save.

    `made_of` is written into each line, for the next start.
    """
    optimizer = make_optimizer("adamw", ((0, rate / WARM_UP), (WARM_UP, rate)), 0.01)
    log = folder / LOG
    step, state = before["step"], optimizer.init(params)
    began = time.monotonic() - before["seconds"]
    saved = time.monotonic()
    is_last = before["seconds"] >= seconds
    while not is_last:
        batch = make_batch(tokenizer, stage, (seed, step), task)
        params, state, value, hits = train_step(optimizer, params, state, batch)
        step += 1
        is_last = time.monotonic() - began >= seconds  # asked once a step, so that the last step is always saved
        if step % REPORT_EVERY == 0 or is_last:
            line = {"step": step, "loss": round(float(value), 5), "right": round(float(hits), 5)}  # waits for the device
            print(line, flush=True)
            if is_last or time.monotonic() - saved > save_seconds:
                line |= {"seconds": round(time.monotonic() - began, 1), "weights": Model(params).digests["weights"]}
                append_text(log, json_lines([line | {"made_of": made_of}]))  # first: a saved model always has a line
                checkpoint.export(params, tokenizer, folder, dtype=jnp.float32)
                saved = time.monotonic()
    return params


def last_save(folder: Path, origin: Mapping[str, Any], weights: str) -> dict[str, Any]:
    """The line of the save whose weights lie in a folder; a last line that was cut off is removed.

    Raises:
      ValueError: lines of another run (by `made_of`), or none that describes these weights.
    """
    lines = read_json_lines(folder / LOG, drops_cut_line=True)
    for line in lines:
        check_same(f"{folder} holds a model that was tuned in another way", line.get("made_of") or {}, origin, FIX)
    found = [line for line in lines if line["weights"] == weights]
    if not found:
        raise ValueError(
            f"The weights in {folder} must be described by a line of {LOG}; none has their digest {weights}. {FIX}"
        )
    write_text(folder / LOG, json_lines(lines))
    return found[-1]


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a shipped model, a checkpoint folder, a GGUF file, or a hub name")
    parser.add_argument("--task", choices=STAGES, default="words", help="default: words, in English; chains for tiny-reasoner")
    parser.add_argument("--minutes", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=8, help="of a batch (default %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row (default %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-4, help="of learning (default %(default)s)")
    parser.add_argument("--save-seconds", type=float, default=60.0, help="between two saved models (default %(default)s)")
    parser.add_argument("--problems", type=int, default=500, help="unseen ones that are written (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the model")
    options = parse(parser, argv)
    try:
        check_counts(rows=options.rows, length=options.length, problems=options.problems)
    except ValueError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    model = checkpoint.load(options.model, dtype=jnp.float32, joined=False)
    names = "task", "rows", "length", "rate"
    origin, before = model.digests | {name: getattr(options, name) for name in names}, dict(FIRST)
    if (options.out / LOG).exists() and (options.out / "model.safetensors").exists():
        tokenizer = model.tokenizer
        model = checkpoint.load(str(options.out), dtype=jnp.float32, joined=False)
        try:
            before = last_save(options.out, origin, model.digests["weights"])
        except ValueError as error:
            parser.error(str(error))
        model = dataclasses.replace(model, tokenizer=tokenizer)
    write_text(options.out / "problems.jsonl", json_lines(unseen_problems(options.task, options.problems)))
    stage = dataclasses.replace(STAGES[options.task], rows=options.rows, length=options.length)
    settings = {"seconds": 60 * options.minutes, "save_seconds": options.save_seconds, "rate": options.rate}
    tune(model.params, model.tokenizer, options.task, stage, options.out, **settings, before=before, made_of=origin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
