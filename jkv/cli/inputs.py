"""What commands read: prompts, problems, settings, and checks of where they will write."""

import argparse
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jkv.checks import did_you_mean, install, need_tokenizer, shown
from jkv.errors import refused

EXAMPLES = """\
examples:
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e"
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy lag_kv --budget 96 --interval 16
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy lag_kv --budget 96 --html kept.html
  jkv generate "What is a KV cache?" --chat --model FOLDER --policy r_kv --budget 1024
  jkv chat --model FOLDER --policy r_kv --budget 1024
  jkv chat --url http://127.0.0.1:8000
  jkv serve tiny-reasoner --policy lag_kv --budget 128 --port 8000
  jkv generate --file prompts.txt --policy streaming_llm --budget 128 --out completions.jsonl
  jkv eval --config configs/experiments/tiny.toml --out results
  jkv analyze completions.jsonl --model tiny-reasoner
  jkv analyze --policies full,r_kv --budgets 256 --out results
  jkv steer --problems 100 --out steer.safetensors
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy seal --vector steer.safetensors
  jkv calibrate --out queries.safetensors
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy tri_attention --budget 128 --statistics queries.safetensors
  jkv foresee --out foresight.safetensors
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy foresight --budget 64 --network foresight.safetensors
  jkv choose FOLDER --texts notes.txt
  jkv choose FOLDER --problems problems.jsonl --memory 64MB
  jkv recall --policies r_kv,h2o,cur --budgets 25%
  jkv probe --config configs/experiments/probe-smollm2.toml --out results
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy reason_cache --percentile 100 --page-size 4
  jkv plan r1-llama-8b --device h200 --policy r_kv --budget 1024 --length 16384
  jkv bench latency --model smollm2-135m
  jkv diagnose trainer.py:log_probs --policy lag_kv --budget 48
  jkv models
  jkv policies
  jkv policies r_kv
"""


def examples_of(command: str) -> str:
    """The examples of one command; empty if there is none."""
    title, *lines = EXAMPLES.splitlines()
    own = [line for line in lines if f"{line} ".startswith(f"  jkv {command} ")]
    return "\n".join([title, *own]) if own else ""


LOADING = ("dtype", "weight_dtype", "max_positions")
FLAG = re.compile(r"--[a-z][a-z0-9-]*(=.*)?", flags=re.DOTALL)
LOOKS: dict[str, Any] = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}


def load_model(name: str, chosen: Mapping[str, Any], replicas: bool = True) -> Any:
    """The model of a command, with what `LOADING` chooses; on the mesh of its `--mesh`, which engines then run on, one alone
    without `replicas`.
    """
    from jkv.checkpoints import loading as checkpoint
    from jkv.engine.mesh import read_mesh

    mesh = None if chosen["mesh"] is None else read_mesh(chosen["mesh"], replicas)
    return checkpoint.load(name, mesh=mesh, **{option: chosen[option] for option in LOADING})


def sampling_of(options: argparse.Namespace, own: Any) -> Any:
    """`own`, a sampling or None for greedy draws, with what the command line changes; None where that changes nothing."""
    import dataclasses
    import warnings

    from jkv.model.sampling import SAMPLING_FIELDS, Sampling

    given = {name: getattr(options, name, None) for name in SAMPLING_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    sampling = dataclasses.replace(own or Sampling(temperature=0.0), **given)
    if sampling.seed is not None and not sampling.temperature:
        warnings.warn("--seed changes nothing: tokens are drawn greedily. Give --temperature above 0.", stacklevel=2)
    return sampling if given else None


def expand_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments, with a policy's settings as `--set`: `--interval 16` and `--interval=16` are `--set interval=16`.

    A flag that is neither an option of the command nor a setting of any policy, where it takes these, ends the program with
    the nearest name.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)  # what follows is no flag
    flags = [text.partition("=")[0] for text in arguments[:end] if FLAG.fullmatch(text)]
    options = set(parser._option_string_actions)
    unknown = [flag for flag in flags if not any(name.startswith(flag) for name in options)]
    if not unknown or parser._subparsers is not None:
        return list(arguments)
    if "--set" not in options:
        parser.error(f"{unknown[0]} is no option of this command.{did_you_mean(unknown[0], options)}")
    import inspect

    from jkv.policies import POLICIES

    fields = [field for recipe in POLICIES.values() for field in inspect.signature(recipe).parameters.values()]
    settings = {field.name.replace("_", "-") for field in fields}
    switches = {f"--{field.name.replace('_', '-')}" for field in fields if isinstance(field.default, bool)}
    for flag in unknown:
        if flag[2:] not in settings:
            near = did_you_mean(flag, [*options, *(f"--{name}" for name in settings)])
            own = f" A setting of a policy of your own is --set {flag[2:].replace('-', '_')}=VALUE."
            parser.error(f"{flag} is neither an option of this command nor a setting of a policy.{near}{own}")
    expanded, rest = [], list(arguments[:end])
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in unknown:
            expanded.append(word)
            continue
        if not equals:
            is_alone = not rest or (flag in switches and rest[0].lower() not in ("true", "false"))
            value = "True" if is_alone else rest.pop(0)
        expanded += ["--set", f"{flag[2:].replace('-', '_')}={value}"]
    expanded += arguments[end:]
    return expanded


def read_prompts(prompt: str | None, file: Path | None) -> list[Any]:
    """The prompts of the command line or of a file."""
    if (prompt is None) == (file is None):
        rule = "generate takes one prompt or --file FILE; got " + ("neither." if prompt is None else "both.")
        raise refused(rule, prompt="conflict")
    if file is None:
        return [prompt]
    from jkv.reports import read_json_lines
    from jkv.text_files import read_text

    if file.suffix == ".json":
        rule = f"Prompts are one a line, or JSON lines in a file that ends in .jsonl; got {file}. Rename or convert it."
        raise refused(rule, file="wrong_type")
    lines = [line for line in read_text(file).splitlines() if line.strip()]
    if not lines:
        raise refused(f"{file} must hold at least one prompt, one a line; it is empty.", file="missing")
    if file.suffix != ".jsonl":
        return lines
    prompts = [record["prompt"] for record in read_json_lines(file, ("prompt",))]
    for i, one in enumerate(prompts):
        if not isinstance(one, str | list):
            rule = f"A prompt is a string or a list of token ids; prompt {i} of {file} is {shown(one)}."
            raise refused(rule, file="wrong_type")
    return prompts


def passages(model: Any, text: Path | None, count: int, length: int, prompt: int) -> list[tuple[list[int], list[int]]]:
    """Texts as pairs of token ids, what is prefilled and what follows: passages of a file, at even distances, or, without one,
    the model's greedy traces of chains that no evaluation uses.

    Raises:
      ValueError: a file with fewer tokens, or a model without a tokenizer.
    """
    from jkv.evaluation.probe_texts import passages_of
    from jkv.text_files import read_text

    need_tokenizer(model.tokenizer, "Text is read as tokens")
    if text is None:
        return own_traces(model, count)
    if prompt >= length:
        rule = f"--prompt is the beginning of a passage and must be shorter than --length; got {prompt} and {length}."
        raise refused(rule, prompt="out_of_range")
    tokens = model.tokenizer.encode(read_text(text), add_special_tokens=False)
    if len(tokens) < count * length:
        rule = f"{text} must hold {count} passages of {length} tokens; it has {len(tokens):,}. Lower --passages or --length."
        raise refused(rule, text="does_not_fit")
    return [(part[:prompt], part[prompt:]) for part in passages_of(tokens, count, length)]


def own_traces(model: Any, count: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and greedy completions of unseen problems of the model's task, which `jkv eval` does not use."""
    from jkv.engine.results import complete
    from jkv.evaluation.held_out import CALIBRATION_SEED, held_out
    from jkv.generate import generate
    from jkv.model.sampling import Sampling

    prompts = [problem.prompt for problem in held_out(count, CALIBRATION_SEED)]
    out = complete(generate(model, prompts, sampling=Sampling(temperature=0.0)))
    rows = zip(out.prompts, out.tokens, out.lengths, strict=True)
    return [(prompt.tolist(), tokens[:length].tolist()) for prompt, tokens, length in rows]


def check_target(path: Path, option: str = "--out") -> None:
    """Refuses to start what could not be written at its end."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise refused(f"{option} must be a file in a folder that exists; got {path}.", **{option[2:]: "not_found"})
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise refused(f"{option} must be a file that may be written; {path} may not. Give another.", **{option[2:]: "conflict"})
    if path.exists() and stat.S_ISFIFO(path.stat().st_mode):  # to open one that nobody reads takes for ever
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            rule = f"{option} must be a file, or a pipe that is read; nothing reads {path}. Give another."
            raise refused(rule, **{option[2:]: "conflict"}) from None


def make_folder(path: Path) -> None:
    """Makes the folder of `--out`, before work that would be lost without it.

    Raises:
      ValueError: a file is in its place, or it may not be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"--out must be a folder that can be made; got {path}: {error.strerror}. Give another."
        raise refused(rule, out="conflict") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise refused(f"--out must be a folder that may be written; {path} may not. Give another.", out="conflict")


def can_draw() -> bool:
    """Whether pictures can be drawn; says so where they cannot."""
    import importlib.util

    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        print(f"jkv: no picture is drawn, as matplotlib is not installed. For one, run: {install('eval')}", file=sys.stderr)
    return found


def read_line() -> str | None:
    """The next message; None at the end of the input or where the user asks for it."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line in ("/exit", "/quit") else line
