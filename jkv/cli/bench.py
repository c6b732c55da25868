"""`jkv bench` measures speed and memory on this machine, one JSON a run and the table made from it."""

import argparse
import importlib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jkv.checks import install, shown, words
from jkv.cli.inputs import LOOKS, make_folder
from jkv.cli.serve import KEY
from jkv.limits import MOST_SIZE

Measure = Callable[[dict[str, Any], bool, Any], dict[str, Any]]  # of the options that were given, --quick, and a report
QUICK_POOLS = [430_000, 134_000]
NOT_SETTINGS = ("run", "bench", "measure", "module", "program", "quick", "out")
POSITIVE = (
    *("rounds", "requests", "problems", "scale", "batch", "budget", "prompts", "samples", "limit"),
    *("new_tokens", "first_limit", "token_limit", "seconds"),
)


def whole(text: str) -> list[int]:
    """A comma-separated list of whole numbers."""
    try:
        return [int(word) for word in words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"a comma-separated list of whole numbers, such as 1,8,32; got {text!r}") from None


def rates(text: str) -> list[float]:
    """A comma-separated list of rates above 0; `inf` is all at once."""
    try:
        found = [float(word) for word in words(text)]
    except ValueError:
        found = []
    if not found or not all(rate > 0 for rate in found):
        raise argparse.ArgumentTypeError(f"a comma-separated list of requests a second, such as 2,8 or inf; got {text!r}")
    return found


def add(commands: Any) -> None:
    """The command's options, for each benchmark."""
    command = commands.add_parser("bench", help="measure speed and memory on this machine", description=__doc__, **LOOKS)
    benches = command.add_subparsers(metavar="benchmark", required=True)
    throughput, latency, serve = (
        add_bench(benches, name, *about, f"jkv.bench.{name}", "jkv bench") for name, about in BENCHES.items()
    )
    for parser in (throughput, latency):
        add_rounds(parser)
        add_model(parser)
    throughput.add_argument("--policies", type=words, help="comma-separated, compared with full; default: r_kv,rpc")
    throughput.add_argument("--scale", type=float, help="divides the paper's lengths, budget and interval; default: 4")
    throughput.add_argument("--requests", type=int, help="default: 32; the paper's: 256")
    latency.add_argument("--batches", type=whole, help="default: 1,8,32")
    latency.add_argument("--chunks", type=whole, help="most steps between two reads by the host; default: 16,1")
    add_serve(serve)


def add_bench(benches: Any, name: str, text: str, measure: Measure, module: str, program: str) -> argparse.ArgumentParser:
    """One benchmark with the options that all have; `module` has its `table`, and `program` is what a reader types."""
    parser: argparse.ArgumentParser = benches.add_parser(name, help=text, description=text, **LOOKS)
    parser.set_defaults(run=run, bench=name, measure=measure, module=module, program=program)
    parser.add_argument("--quick", action="store_true", help="sizes of a test: checks that it runs, not how fast")
    parser.add_argument(
        "--out",
        type=Path,
        help="a folder for NAME.json and NAME.md; with --model NAME-MODEL; default: the table alone is shown",
    )
    return parser


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """How often each figure is timed."""
    parser.add_argument("--rounds", type=int, help="timings of each, of which the median counts")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model of a benchmark that takes any."""
    parser.add_argument("--model", help="a shipped model, a folder, a hub name, or a TOML file of a shape")


def add_serve(parser: Any) -> None:
    """The options of a load."""
    parser.add_argument("--url", help="of a server; default: one is started here, and ended")
    parser.add_argument("--model", help="which to serve, where none is running; default: tiny-reasoner")
    parser.add_argument("--policies", type=words, help="comma-separated; default: full,r_kv")
    parser.add_argument("--budget", type=int, help="slots of the policies that have one; default: 128")
    parser.add_argument("--rates", type=rates, help="requests a second, comma-separated; inf: all at once; default: 2,4,8,inf")
    parser.add_argument("--requests", type=int, help="of each load; default: 64")
    parser.add_argument("--new-tokens", type=int, help="mean length of completions; default: 256")
    parser.add_argument("--batch", type=int, help="rows of the server that is started; default: 8")
    parser.add_argument("--first-limit", type=float, help="ms to the first token of a good request; default: 1000")
    parser.add_argument("--token-limit", type=float, help="ms from one token to the next of a good request; default: 20")
    parser.add_argument("--seed", type=int, help="of arrivals and lengths; default: 0")
    parser.add_argument("--seconds", type=float, help="after which a request has failed; default: 600")


def run(options: argparse.Namespace) -> int:
    """Runs one benchmark; each figure is printed when it is measured."""
    from jkv import reports as records

    given = {name: value for name, value in vars(options).items() if name not in NOT_SETTINGS and value is not None}
    for name in POSITIVE:
        if not 0 < given.get(name, 1) < MOST_SIZE:
            raise ValueError(f"--{name.replace('_', '-')} must be positive and below 2**31; got {shown(given[name])}.")
    for name in ("lengths", "budgets", "batches", "budget_batches", "chunks"):
        if name in given and not (given[name] and all(0 < size < MOST_SIZE for size in given[name])):
            raise ValueError(f"--{name} must be sizes, each positive and below 2**31; got {shown(given[name])}.")
    if options.out:
        make_folder(options.out)
    about = records.about(command_of(f"{options.program} {options.bench}", options.quick, given))

    def report(figures: dict[str, Any]) -> None:
        print(json.dumps(figures), file=sys.stderr, flush=True)

    record = {"about": about} | options.measure(given, options.quick, report)
    text = importlib.import_module(options.module).table(record)
    print(text)
    if options.out:
        name = record_name(options.bench, given.get("model"))
        records.write(name, record, text, options.out)
        print(f"wrote {name}.json and {name}.md to {options.out}", file=sys.stderr)
    return 0


def record_name(bench: str, model: str | None) -> str:
    """What a record is called: the benchmark, and the model if it is not the benchmark's own.

    >>> record_name("serve", None), record_name("serve", "checkpoints/smollm2-135m")
    ('serve', 'serve-smollm2-135m')
    """
    return bench if model is None else f"{bench}-{Path(model).stem if Path(model).suffix == '.toml' else Path(model).name}"


def command_of(program: str, quick: bool, given: dict[str, Any]) -> str:
    """The command as a reader would type it.

    >>> command_of("jkv bench latency", True, {"batches": [1, 8]})
    'jkv bench latency --quick --batches 1,8'
    """
    typed = ["--quick"] * quick
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        typed += [f"--{name.replace('_', '-')}", text]
    return f"{program} {shlex.join(typed)}".rstrip()


def measure_serve(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """A load on a server."""
    from jkv.bench import serve

    usual: dict[str, Any] = {"url": None, "model": "tiny-reasoner", "policies": ["full", "r_kv"], "budget": 128}
    usual |= {"rates": [2.0, 4.0, 8.0, math.inf], "requests": 64, "new_tokens": 256, "batch": 8, "seed": 0, "seconds": 600.0}
    usual |= {"first_limit": 1000.0, "token_limit": 20.0}
    usual |= {"rates": [50.0, math.inf], "requests": 6, "new_tokens": 24, "batch": 2, "budget": 48} if quick else {}
    usual |= given
    limits, rows = (usual.pop("first_limit"), usual.pop("token_limit")), usual.pop("batch")
    key = os.environ.get(KEY) or None
    return serve.measure(**usual, rows=rows, limits_ms=limits, key=key, report=report)


def measure_throughput(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """Fixed pools."""
    from jkv.bench import fixtures, throughput

    usual: dict[str, Any] = {"model": "tiny-reasoner", "policies": ["r_kv", "rpc"], "scale": 4.0, "requests": 32, "rounds": 3}
    usual |= {"scale": 16.0, "requests": 4, "rounds": 1, "policies": ["r_kv"], "pools": QUICK_POOLS} if quick else {}
    usual |= given
    return throughput.measure(fixtures.model_of(usual.pop("model")), **usual, report=report)


def measure_latency(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """What a user waits for."""
    from jkv.bench import fixtures, latency
    from jkv.policies import full, r_kv

    usual: dict[str, Any] = {"model": "tiny-reasoner", "batches": [1, 8, 32], "chunks": [16, 1], "rounds": 5}
    usual |= {"prompt": 128, "new_tokens": 256}
    usual |= {"batches": [2], "chunks": [4], "rounds": 1, "new_tokens": 24} if quick else {}
    usual |= given
    return latency.measure(fixtures.model_of(usual.pop("model")), [full(), r_kv(128, 16)], **usual, report=report)


BENCHES: dict[str, tuple[str, Measure]] = {
    "throughput": ("tokens a second of policies in fixed pools, from ample to tight (R-KV's stress test)", measure_throughput),
    "latency": ("seconds to the first token, and between tokens, by rows and policy", measure_latency),
    "serve": (
        f"what users of a server wait for, by the rate of requests and the policy ({install('serve')})",
        measure_serve,
    ),
}
