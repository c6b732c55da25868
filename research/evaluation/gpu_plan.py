"""Half an hour of one GPU: `python -m research.evaluation.gpu_plan --model smollm2-135m --out gpu`.

Four stages, each a command in a process of its own, with a time limit:

  device    a decode step and prefill of a small shape: the device works, and programs are compiled into a cache
  tune      the model is fine-tuned on word problems that are solved and verified in English (`research.tasks.tune`)
  accuracy  the tuned model's answers under ten policies, at budgets of each problem's own length (`jkv eval`)
  stress    R-KV's setting with random weights of a 7B shape, and decode attention by the copy rate (`research.bench.device`)

Every command writes its figures as they come. A stage whose time is up is interrupted, and the next begins. A second start of
the same command skips stages that ended, and goes on with the others. It refuses a folder where stages ended with another
model, another configuration or other options.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.cards import card_of
from jkv.limits import parse
from jkv.reports import ROOT, write_json
from jkv.resuming import check_same, digest_of_files
from jkv.text_files import read_json, read_toml
from research.tasks.tune import STAGES

FIX = "Give another --out, or remove the folder to start anew."
GRACE = 30.0  # seconds that an interrupted stage has to write what it knows
CONFIG = ROOT / "configs" / "experiments" / "gpu-plan.toml"


class Stage(NamedTuple):
    """A command (the words after `python -m`), the minutes that it may take, and the folder that a later stage reads of it."""

    name: str
    minutes: float
    words: list[str]
    made: Path | None = None


def stages(options: argparse.Namespace) -> list[Stage]:
    """The plan."""
    out, tuned, accuracy = options.out, options.out / "model", options.out / "accuracy"
    seconds = 60 * options.stress_minutes - GRACE  # after which the benchmark starts nothing
    sizes = shlex.split(options.bench_options)
    tune = ["research.tasks.tune", options.model, "--task", options.task, "--minutes", str(options.tune_minutes)]
    compare = ["jkv", "eval", "--config", str(options.config), "--model", str(tuned), "--file", str(tuned / "problems.jsonl")]
    compare += ["--no-chat-template", "--out", str(accuracy)]
    bench = ["research.bench.device", *sizes, "--models"]
    return [
        Stage(
            "device",
            2,
            [*bench, options.small_shape, "--parts", "step,prefill", "--seconds", "60", "--out", str(out / "device")],
        ),
        Stage(
            "tune",
            options.tune_minutes + 1,
            [*tune, *shlex.split(options.tune_options), "--problems", str(options.problems), "--out", str(tuned)],
            tuned,
        ),
        Stage("accuracy", options.accuracy_minutes, [*compare, *(["--resume"] if any(accuracy.glob("*.json")) else [])]),
        Stage(
            "stress",
            options.stress_minutes,
            [
                *bench,
                options.shape,
                "--parts",
                "stress,kernels",
                "--seconds",
                str(max(0.0, seconds)),
                "--out",
                str(out / "stress"),
            ],
        ),
    ]


def run_stage(stage: Stage, environment: Mapping[str, str]) -> dict[str, Any]:
    """What became of a stage: "done", "out of time", or "failed" with its exit code."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", *stage.words], env=dict(environment))
    try:
        code = process.wait(timeout=60 * stage.minutes)
        ended = "done" if code == 0 else f"failed ({code})"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        ended = "out of time"
    return {"ended": ended, "seconds": round(time.monotonic() - began, 1), "command": command(stage)}


def run_plan(
    plan: list[Stage], file: Path, environment: Mapping[str, str], made_of: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs the stages that have not ended, and writes what became of each into `file`; `made_of` has digests of what they read.

    Raises:
      ValueError: a stage that ended was another command, read other files, or wrote other ones than there are now.
    """
    record = read_json(file, ("stages",))["stages"] if file.exists() else {}
    now = dict(made_of or {})
    for stage in plan:
        ended = record.get(stage.name, {})
        if ended.get("ended") == "done":
            same = {"command": command(stage)} | now | made_by(stage)
            before = {name: ended[name] for name in same if name in ended}
            check_same(f"{file}: the stage {stage.name} ended with something else", before, same, FIX)
    for stage in plan:
        if record.get(stage.name, {}).get("ended") != "done":
            print(f"{stage.name}: {shlex.join(stage.words)}", flush=True)
            record[stage.name] = run_stage(stage, environment) | now | made_by(stage)
            write_json(file, {"stages": record})
    return record


def made_by(stage: Stage) -> dict[str, str]:
    """The digest of what a later stage reads of this one; empty where none does."""
    if stage.made is None:
        return {}
    return {"made": digest_of_files([path for path in stage.made.rglob("*") if path.is_file()])}


def command(stage: Stage) -> str:
    """The command of a stage, the same for a first and for a second start."""
    return shlex.join(word for word in stage.words if word != "--resume")


def model_digest(name: str) -> str:
    """Identifies the files of a model, without loading it: this process leaves the device to the stages."""
    if file := checkpoint.find_gguf(name):
        return digest_of_files([file])
    card = card_of(name)
    folder = checkpoint.find_folder(name)
    if folder is None:
        folder = checkpoint.fetch(card.hub if card else name, ["*.safetensors", *checkpoint.SMALL_FILES])
    return digest_of_files([path for path in folder.iterdir() if path.is_file()])


def config_files(path: Path) -> list[Path]:
    """A configuration, and those that it `extends`, one after the other."""
    files = [path.resolve()]
    while isinstance(other := read_toml(files[-1]).get("extends"), str):
        if (file := (files[-1].parent / other).resolve()) in files:
            break  # which the comparison refuses
        files.append(file)
    return files


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="that is tuned; default: %(default)s")
    parser.add_argument("--task", choices=STAGES, default="words", help="default: words; chains for tiny-reasoner")
    parser.add_argument(
        "--config", type=Path, default=CONFIG, help="of the comparison; default: configs/experiments/gpu-plan.toml"
    )
    parser.add_argument("--problems", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--tune-minutes", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--accuracy-minutes", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--stress-minutes", type=float, default=6.0, help="default: %(default)s")
    parser.add_argument("--tune-options", default="", help="more options of research.tasks.tune, as one text")
    parser.add_argument("--bench-options", default="", help="more options of research.bench.device, as one text")
    parser.add_argument("--small-shape", default="smollm2-135m", help="of the first stage; default: %(default)s")
    parser.add_argument("--shape", default="r1-qwen-7b", help="of the stress test; default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="a folder for everything")
    options = parse(parser, argv)
    options.out.mkdir(parents=True, exist_ok=True)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(options.out / "compiled")}
    try:
        made_of = {"model": model_digest(options.model), "config": digest_of_files(config_files(options.config))}
        record = run_plan(stages(options), options.out / "plan.json", os.environ | cache, made_of)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for name, stage in record.items():
        print(f"{name}: {stage['ended']} after {stage['seconds']} s")
    return 0 if all(stage["ended"] == "done" for stage in record.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
