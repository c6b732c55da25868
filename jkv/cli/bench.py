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
from typing import Any, NamedTuple

from jkv.checks import install, shown, words
from jkv.cli.inputs import LOOKS, make_folder
from jkv.cli.options import Option, add_options, defaults_of
from jkv.cli.serve import KEY
from jkv.errors import refused
from jkv.limits import MOST_SIZE

QUICK_POOLS = [430_000, 134_000]
NOT_SETTINGS = ("run", "bench", "benchmark", "module", "program", "quick", "out")
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


class Benchmark(NamedTuple):
    """What a benchmark measures, and its options; those without a line of help have no flag.

    Attributes:
      text: for its help.
      measure: its record, of the value of each option and a report.
      quick: what --quick sets: sizes of a test.
    """

    text: str
    measure: Callable[[dict[str, Any], Any], dict[str, Any]]
    options: tuple[Option, ...]
    quick: dict[str, Any]


def add(commands: Any) -> None:
    """The command's options, for each benchmark."""
    command = commands.add_parser("bench", help="measure speed and memory on this machine", description=__doc__, **LOOKS)
    benches = command.add_subparsers(metavar="benchmark", required=True)
    for name, one in BENCHES.items():
        add_bench(benches, name, one, f"jkv.bench.{name}", "jkv bench")


def add_bench(benches: Any, name: str, one: Benchmark, module: str, program: str) -> None:
    """The command of a benchmark; `module` has its `table`, and `program` is what a reader types."""
    parser = benches.add_parser(name, help=one.text, description=one.text, **LOOKS)
    parser.set_defaults(run=run, bench=name, benchmark=one, module=module, program=program)
    add_options(parser, COMMON)
    for option in one.options:
        option.add(parser)  # without its default, as a record has the flags that were given


def rounds(default: int) -> Option:
    """How often each figure is timed."""
    return Option("rounds", int, default, "timings of each; the median counts")


def run(options: argparse.Namespace) -> int:
    """Runs one benchmark; each figure is printed when it is measured."""
    from jkv import reports as records

    given = {name: value for name, value in vars(options).items() if name not in NOT_SETTINGS and value is not None}
    for name in POSITIVE:
        if not 0 < given.get(name, 1) < MOST_SIZE:
            flag = f"--{name.replace('_', '-')}"
            raise refused(f"{flag} must be positive and below 2**31; got {shown(given[name])}.", **{name: "out_of_range"})
    for name in ("lengths", "budgets", "batches", "budget_batches", "chunks", "drafts"):
        if name in given and not (given[name] and all(0 < size < MOST_SIZE for size in given[name])):
            rule = f"--{name} must be sizes, each positive and below 2**31; got {shown(given[name])}."
            raise refused(rule, **{name: "out_of_range"})
    if options.out:
        make_folder(options.out)
    about = records.about(command_of(f"{options.program} {options.bench}", options.quick, given))

    def report(figures: dict[str, Any]) -> None:
        print(json.dumps(figures), file=sys.stderr, flush=True)

    one: Benchmark = options.benchmark
    chosen = defaults_of(one.options) | (one.quick if options.quick else {}) | given
    record = {"about": about} | one.measure(chosen, report)
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


def measure_serve(chosen: dict[str, Any], report: Any) -> dict[str, Any]:
    """A load on a server."""
    from jkv.bench import serve

    limits, rows = (chosen.pop("first_limit"), chosen.pop("token_limit")), chosen.pop("batch")
    key = os.environ.get(KEY) or None
    return serve.measure(**chosen, rows=rows, limits_ms=limits, key=key, report=report)


def measure_throughput(chosen: dict[str, Any], report: Any) -> dict[str, Any]:
    """Fixed pools."""
    from jkv.bench import fixtures, throughput

    return throughput.measure(fixtures.model_of(chosen.pop("model")), **chosen, report=report)


def measure_latency(chosen: dict[str, Any], report: Any) -> dict[str, Any]:
    """What a user waits for."""
    from jkv.bench import fixtures, latency
    from jkv.policies import full, r_kv

    return latency.measure(fixtures.model_of(chosen.pop("model")), [full(), r_kv(128, 16)], **chosen, report=report)


def measure_speculate(chosen: dict[str, Any], report: Any) -> dict[str, Any]:
    """What guesses of the next tokens gain."""
    from jkv.bench import fixtures, speculate
    from jkv.policies import full, r_kv

    policies = [full(), r_kv(chosen.pop("budget"), 16)]
    return speculate.measure(fixtures.model_of(chosen.pop("model")), policies, **chosen, report=report)


COMMON = (
    Option("quick", bool, False, "sizes of a test: checks that it runs, not how fast"),
    Option(
        "out", str, None, "a folder for NAME.json and NAME.md; with --model NAME-MODEL; default: the table alone is shown", Path
    ),
)
MODEL = Option("model", str, "tiny-reasoner", "a shipped model, a folder, a hub name, or a TOML file of a shape")
BENCHES = {
    "throughput": Benchmark(
        "tokens a second of policies in fixed pools, from ample to tight (R-KV's stress test)",
        measure_throughput,
        (
            rounds(3),
            MODEL,
            Option("policies", list, ["r_kv", "rpc"], "comma-separated, compared with full", words),
            Option("scale", float, 4.0, "divides the paper's lengths, budget and interval"),
            Option("requests", int, 32, "the paper's: 256"),
        ),
        {"scale": 16.0, "requests": 4, "rounds": 1, "policies": ["r_kv"], "pools": QUICK_POOLS},
    ),
    "latency": Benchmark(
        "seconds to the first token, and between tokens, by rows and policy",
        measure_latency,
        (
            rounds(5),
            MODEL,
            Option("batches", list, [1, 8, 32], "rows, comma-separated", whole),
            Option("chunks", list, [16, 1], "most steps between two reads by the host", whole),
            Option("prompt", int, 128),
            Option("new_tokens", int, 256),
        ),
        {"batches": [2], "chunks": [4], "rounds": 1, "new_tokens": 24},
    ),
    "speculate": Benchmark(
        "tokens a step and time with guesses of the next tokens, beside plain decoding",
        measure_speculate,
        (
            rounds(3),
            MODEL,
            Option("batches", list, [1, 8], "rows, comma-separated", whole),
            Option("drafter", str, "ngram", "where guesses come from: ngram, siblings or draft_pages"),
            Option("drafts", list, [1, 3, 7], "guesses a step, comma-separated", whole),
            Option("budget", int, 128, "slots of R-KV, beside the full cache"),
            Option("new_tokens", int, 256, "of each row"),
        ),
        {"batches": [2], "drafts": [3], "rounds": 1, "new_tokens": 24, "budget": 32},
    ),
    "serve": Benchmark(
        f"what users of a server wait for, by the rate of requests and the policy ({install('serve')})",
        measure_serve,
        (
            Option("url", str, None, "of a server; default: one is started here, and ended"),
            Option("model", str, "tiny-reasoner", "which to serve, where none is running"),
            Option("policies", list, ["full", "r_kv"], "comma-separated", words),
            Option("budget", int, 128, "slots of the policies that have one"),
            Option("rates", list, [2.0, 4.0, 8.0, math.inf], "requests a second, comma-separated; inf: all at once", rates),
            Option("requests", int, 64, "of each load"),
            Option("new_tokens", int, 256, "mean length of completions"),
            Option("batch", int, 8, "rows of the server that is started"),
            Option("first_limit", float, 1000.0, "ms to the first token of a good request"),
            Option("token_limit", float, 20.0, "ms from one token to the next of a good request"),
            Option("seed", int, 0, "of arrivals and lengths"),
            Option("seconds", float, 600.0, "after which a request has failed"),
        ),
        {"rates": [50.0, math.inf], "requests": 6, "new_tokens": 24, "batch": 2, "budget": 48},
    ),
}
