"""The command line: `jkv generate` decodes one prompt or a file of them, `jkv eval` compares policies, `jkv steer`
extracts a steering vector.

Bad input ends with one line that says the rule, what was got and how to mend it, and exit status 2.
"""

import argparse
import ast
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e"
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy r_kv --budget 64 --set interval=16 --set window=4
  jkv generate --file prompts.txt --policy streaming_llm --budget 128 --out completions.jsonl
  jkv eval --config configs/experiments/tiny.toml --out results
  jkv steer --problems 100 --out steer.safetensors
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy seal --set vector=steer.safetensors
  jkv generate "b=3;c=7;d=b*c;e=d+b;?e" --policy reason_cache --set percentile=100 --page-size 4
  jkv policies
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    try:
        return options.run(options)
    except BrokenPipeError:  # `jkv generate ... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- for the interpreter's last flush
        return 0
    except (ValueError, OSError) as error:
        print(f"jkv: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jkv: interrupted", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    looks: dict[str, Any] = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser("jkv", description="Reasoning models with a compressed, paged KV cache.", **looks)
    commands = parser.add_subparsers(metavar="command")
    generate = commands.add_parser("generate", help="complete prompts", description="Completes prompts.", **looks)
    generate.set_defaults(run=run_generate)
    generate.add_argument("prompt", nargs="?", help="the prompt; or use --file")
    generate.add_argument("--file", type=Path, help='prompts: one a line, or JSON lines with a "prompt" (text or token ids)')
    generate.add_argument("--model", default="tiny-reasoner", help="a shipped model, a checkpoint folder, or a hub name")
    generate.add_argument("--policy", default="full", help="how the cache stays small (see `jkv policies`); default: full")
    generate.add_argument("--budget", type=int, help="slots kept in each layer and KV head")
    generate.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting of the policy; may be repeated"
    )
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-p", type=float, default=1.0, help="1 keeps all tokens (default)")
    generate.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens (default)")
    generate.add_argument("--seed", type=int, help="of the random draws; default: fresh, and reported")
    generate.add_argument("--max-new-tokens", type=int, help="default: 1024, or what the model's positions leave")
    generate.add_argument("-n", type=int, default=1, help="samples of each prompt")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="a text that ends a completion")
    generate.add_argument("--page-size", type=int, default=16, help="slots of a page (default 16)")
    generate.add_argument("--max-running", type=int, help="rows decoded together; default: up to 32")
    generate.add_argument("--out", metavar="FILE", help="write JSON lines, one a sample, here; - is standard output")
    evaluate = commands.add_parser(
        "eval",
        help="compare policies and budgets on the same problems",
        description="Accuracy, lengths and memory of policies and budgets on the same problems: a table, JSON and a picture.",
        **looks,
    )
    evaluate.set_defaults(run=run_eval)
    evaluate.add_argument("--config", type=Path, help="a TOML file with any of the options below and [settings.<policy>]")
    evaluate.add_argument("--model", help="a shipped model, a checkpoint folder, or a hub name; default: tiny-reasoner")
    evaluate.add_argument(
        "--file", type=Path, help='JSON lines with "prompt" and "answer", compared with \\boxed{}; default: unseen chains'
    )
    evaluate.add_argument("--problems", type=int, help="how many; default: 200")
    evaluate.add_argument("--policies", type=words, help="comma-separated; default: all but seal; full always runs")
    evaluate.add_argument("--budgets", type=words, help='slots, or shares of the mean length; default: "10%%,25%%,50%%"')
    evaluate.add_argument("--max-new-tokens", type=int, help="default: 1024, or what the model's positions leave")
    evaluate.add_argument("--max-running", type=int, help="rows decoded together; default: 32")
    evaluate.add_argument("--page-size", type=int, help="slots of a page; default: 16")
    evaluate.add_argument("--kv-memory", type=int, help="bytes of the pool; default: what the rows need")
    evaluate.add_argument("--out", type=Path, help="a folder for the table, the JSON and the picture (needs matplotlib)")
    evaluate.add_argument("--resume", action="store_true", help="go on where an interrupted run into --out ended")
    steer = commands.add_parser(
        "steer",
        help="extract a steering vector",
        description="Extracts a steering vector (SEAL) from a model's own traces, for the policies seal and skip_kv.",
        **looks,
    )
    steer.set_defaults(run=run_steer)
    steer.add_argument("--model", default="tiny-reasoner", help="a shipped model, a checkpoint folder, or a hub name")
    steer.add_argument("--file", type=Path, help="prompts, as of generate; default: unseen chains")
    steer.add_argument("--problems", type=int, default=100, help="how many unseen chains; default: 100")
    steer.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    steer.add_argument("--seed", type=int, help="of the random draws; default: fresh")
    steer.add_argument("--max-new-tokens", type=int, help="default: 1024, or what the model's positions leave")
    steer.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    policies = commands.add_parser("policies", help="list the policies and their settings")
    policies.set_defaults(run=run_policies)
    return parser


def run_policies(_: argparse.Namespace) -> int:
    """Prints each policy's first line and settings."""
    import inspect

    from jkv.policies import POLICIES

    for name, recipe in POLICIES.items():
        print(f"{name}{inspect.signature(recipe).replace(return_annotation=inspect.Signature.empty)}")
        print(f"    {(recipe.__doc__ or '').strip().splitlines()[0]}")
    return 0


def run_generate(options: argparse.Namespace) -> int:
    """Generates, then prints texts or writes JSON lines."""
    prompts = read_prompts(options.prompt, options.file)
    if options.out not in (None, "-"):
        check_target(Path(options.out))
    from jkv import checkpoint
    from jkv.generate import generate
    from jkv.policies import make
    from jkv.sampling import Sampling

    policy = make(options.policy, read_settings(options.budget, options.set))
    sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
    model = checkpoint.load(options.model)
    out = generate(
        model,
        prompts,
        policy=policy,
        sampling=sampling,
        max_new_tokens=options.max_new_tokens,
        n=options.n,
        stop_strings=options.stop,
        page_size=options.page_size,
        max_running=options.max_running,
    )
    if options.out:
        write_lines(options.out, make_records(prompts, options.n, out, model.tokenizer))
    else:
        for i in range(len(out.lengths)):
            if len(out.lengths) > 1:
                print(f"--- {prompts[i // options.n]}")
            print(out.text[i] if out.text else out.tokens[i, : out.lengths[i]].tolist())
    print(summarise(policy, out), file=sys.stderr)
    return 0


EVAL_DEFAULTS: dict[str, Any] = {
    "model": "tiny-reasoner",
    "problems": 200,
    "budgets": ["10%", "25%", "50%"],
    "max_running": 32,
    "page_size": 16,
    "settings": {},
    "file": None,
    "max_new_tokens": None,
    "kv_memory": None,
}


EVAL_TYPES = {
    "problems": int,
    "kv_memory": int,
    "max_running": int,
    "page_size": int,
    "max_new_tokens": int,
    "model": str,
    "file": str,
} | {
    "budgets": list,
    "policies": list,
    "settings": dict,
}


def run_eval(options: argparse.Namespace) -> int:
    """Compares policies, printing each line of the table as it is known."""
    import jax

    from jkv import checkpoint
    from jkv.bench import compare as bench
    from jkv.policies import POLICIES, needs_no_file

    chosen = read_eval_settings(options, EVAL_DEFAULTS | {"policies": list(filter(needs_no_file, POLICIES))})
    model_name = Path(str(chosen["model"])).name
    name = f"{options.config.stem}-{model_name}" if options.config else model_name
    if options.out:
        check_plotting()
        options.out.mkdir(parents=True, exist_ok=True)
    model = checkpoint.load(str(chosen["model"]))
    problems = read_problems(chosen["file"], chosen["problems"])
    about = {field: str(value) if isinstance(value, Path) else value for field, value in chosen.items()}

    def report(outcomes: list[bench.Outcome]) -> None:
        jax.clear_caches()  # programs of this budget's shapes: a process may not map so many that all could stay
        print(bench.row_of(outcomes[-1]), flush=True)
        if options.out:  # after each, so that nothing is lost when the next is interrupted
            bench.write(outcomes, options.out, name, about)

    if options.resume and not options.out:
        raise ValueError("--resume goes on with what is in --out; got none. Name the folder.")
    known = bench.read(options.out / f"{name}.json", about) if options.resume else []
    print(bench.table([]), flush=True)
    bench.compare(
        model,
        problems,
        chosen["policies"],
        chosen["budgets"],
        chosen["settings"],
        report=report,
        known=known,
        max_new_tokens=chosen["max_new_tokens"],
        max_running=chosen["max_running"],
        page_size=chosen["page_size"],
        kv_memory=chosen["kv_memory"],
    )
    if options.out:
        print(f"wrote {name}.md, .json and .png to {options.out}", file=sys.stderr)
    return 0


def run_steer(options: argparse.Namespace) -> int:
    """Generates traces, extracts their vector and saves it."""
    from jkv import checkpoint
    from jkv.extract import extract
    from jkv.generate import generate
    from jkv.sampling import Sampling

    check_target(options.out)
    sampling = Sampling(options.temperature, seed=options.seed)
    prompts = read_prompts(None, options.file) if options.file else [p.prompt for p in read_problems(None, options.problems)]
    model = checkpoint.load(options.model)
    out = generate(model, prompts, sampling=sampling, max_new_tokens=options.max_new_tokens)
    completions = [tokens[:length] for tokens, length in zip(out.tokens, out.lengths, strict=True)]
    vector = extract(model, out.prompts, completions)
    vector.save(options.out)
    kinds = ", ".join(f"{value} {name}" for name, value in vector.about.items() if name in ("check", "switch", "go on"))
    print(f"wrote {options.out}: {vector}, from thoughts: {kinds}", file=sys.stderr)
    return 0


def read_eval_settings(options: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    """Options of the command line before those of the file before the defaults."""
    written = {} if options.config is None else read_config(options.config)
    if unknown := sorted(set(written) - set(defaults)):
        raise ValueError(f"{options.config} may set {', '.join(sorted(defaults))}; got {', '.join(unknown)}.")
    for name, kind in EVAL_TYPES.items():
        if name in written and not isinstance(written[name], kind):
            raise ValueError(f"{options.config}: {name} must be of type {kind.__name__}; got {written[name]!r}.")
    given = {name: getattr(options, name, None) for name in defaults}
    return defaults | written | {name: value for name, value in given.items() if value is not None}


def read_config(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A TOML file on top of the one that it `extends`, if any; tables of settings are joined name by name."""
    own, chain = tomllib.loads(path.read_text()), (*chain, path.resolve())
    settings = own.setdefault("settings", {})
    if not isinstance(settings, dict) or not all(isinstance(table, dict) for table in settings.values()):
        raise ValueError(f"{path}: settings are tables, one a policy, as [settings.r_kv]; got {settings!r}.")
    for name, table in settings.items():
        if not isinstance(table.get("policy", ""), str):
            raise ValueError(f"{path}: the policy of [settings.{name}] is a name; got {table['policy']!r}.")
    if "extends" not in own:
        return own
    other = own.pop("extends")
    if not isinstance(other, str) or (path.parent / other).resolve() in chain:
        raise ValueError(f"{path}: extends names another file, not this one or one that extends it; got {other!r}.")
    base = read_config(path.parent / other, chain)
    return base | own | {"settings": base["settings"] | settings}


def check_target(path: Path) -> None:
    """Refuses to start what could not be written at its end."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"--out must be a file in a folder that exists; got {path}.")


def read_problems(file: Path | None, count: int) -> list[Any]:
    """Problems of a file, or unseen chains."""
    from jkv.bench.compare import Problem
    from jkv.tasks.evaluate import held_out

    if count < 1:
        raise ValueError(f"problems must be at least 1; got {count}.")
    if file is None:
        return [Problem(problem.prompt, problem.answer) for problem in held_out(count)]
    return [Problem(record["prompt"], str(record["answer"])) for record in read_records(Path(file), ("prompt", "answer"))][
        :count
    ]


def check_plotting() -> None:
    """Refuses to start what would fail at its end."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--out draws a picture with matplotlib, which is not installed. Run: pip install "jkv[eval]".')


def words(text: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def read_prompts(prompt: str | None, file: Path | None) -> list[Any]:
    """The prompts of the command line or of a file."""
    if (prompt is None) == (file is None):
        raise ValueError("generate takes one prompt or --file FILE; got " + ("neither." if prompt is None else "both."))
    if file is None:
        return [prompt]
    lines = [line for line in read_text(file).splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file} must hold at least one prompt, one a line; it is empty.")
    if file.suffix != ".jsonl":
        return lines
    return [record["prompt"] for record in read_records(file, ("prompt",))]


def read_text(file: Path) -> str:
    """A file's text."""
    try:
        return file.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8 text; {error}.") from None


def read_records(file: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, which must have some fields."""
    records = []
    for number, line in enumerate((line for line in read_text(file).splitlines() if line.strip()), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if not isinstance(record, dict) or not all(field in record for field in fields):
            wanted = " and ".join(f'"{field}"' for field in fields)
            raise ValueError(f"Each line of {file} must be a JSON object with {wanted}; line {number} is not.")
        records.append(record)
    return records


def read_settings(budget: int | None, pairs: Iterable[str]) -> dict[str, Any]:
    """Policy settings from `--budget` and `--set name=value`."""
    settings: dict[str, Any] = {} if budget is None else {"budget": budget}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, such as interval=16; got {pair!r}.")
        try:
            settings[name.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            settings[name.strip()] = text.strip()
    return settings


def make_records(prompts: Sequence[Any], n: int, out: Any, tokenizer: Any) -> Iterable[dict[str, Any]]:
    """One record a sample."""
    for i, length in enumerate(out.lengths.tolist()):
        yield {
            "prompt": prompts[i // n],
            "sample": i % n,
            "text": out.text[i] if tokenizer is not None else None,
            "tokens": out.tokens[i, :length].tolist(),
            "logprobs": [round(x, 6) for x in out.logprobs[i, :length].tolist()],
            "finish_reason": out.finish_reason[i],
            "seed": out.stats.seed,
        }


def write_lines(target: str, records: Iterable[dict[str, Any]]) -> None:
    """JSON lines to a file or standard output."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)


def summarise(policy: Any, out: Any) -> str:
    """One line of statistics."""
    s = out.stats
    saved = 1 - s.peak_kv_bytes / max(s.dense_kv_bytes, 1)
    share = f" ({saved:.0%} saved)" if saved > 0 else ""  # a short text fills its last pages in part
    return (
        f"[{policy.name}] {s.generated_tokens} tokens, finished by {'/'.join(sorted(set(out.finish_reason)))}; "
        f"peak KV {s.peak_kv_bytes / 1024:.0f} KiB of a full cache's {s.dense_kv_bytes / 1024:.0f}{share}; "
        f"{s.evicted:.0f} tokens evicted in {s.compactions} compactions; "
        + (f"{s.shared} tokens shared; " if s.sharing is not None else "")
        + f"{s.tokens_per_second:.0f} tokens/s; "
        f"compiled in {s.compile_seconds:.1f} s; seed {s.seed}"
    )


if __name__ == "__main__":
    sys.exit(main())
