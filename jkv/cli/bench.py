"""`jkv bench` measures speed, memory and cost on this machine, one JSON a run and the table made from it."""

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

BENCHES = {
    "throughput": "tokens a second of policies in fixed pools, from ample to tight (R-KV's stress test)",
    "papers": "the papers' own throughput tables, at shapes scaled to this machine",
    "peers": f"speed, memory and accuracy compared with transformers and kvpress ({install('peers')})",
    "cost": "where a decode step's time goes, by length, batch and budget",
    "rollouts": f"rollouts a second compared with tunix's own sampler ({install('tunix')})",
    "latency": "seconds to the first token, and between tokens, by rows and policy",
    "serve": f"what users of a server wait for, by the rate of requests and the policy ({install('serve')})",
    "eviction": "what scoring and compaction cost, compared with their own arithmetic, on a wide model",
}
PAGE = Path("docs/results.md")  # that shows the tables, from the root of the repository
MOST_RECORD = 1 << 26  # bytes of a record, and of a page
QUICK_POOLS = [430_000, 134_000]
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
    command = commands.add_parser("bench", help="measure speed, memory and cost on this machine", description=__doc__, **LOOKS)
    benches = command.add_subparsers(metavar="benchmark", required=True)
    parsers = {name: benches.add_parser(name, help=text, description=text, **LOOKS) for name, text in BENCHES.items()}
    for name, parser in parsers.items():
        parser.set_defaults(run=run, bench=name)
        parser.add_argument("--quick", action="store_true", help="sizes of a test: checks that it runs, not how fast")
        if name != "serve":  # its loads are one each
            parser.add_argument("--rounds", type=int, help="timings of each, of which the median counts")
        parser.add_argument(
            "--out",
            type=Path,
            help="a folder for NAME.json and NAME.md; with --model NAME-MODEL; default: the table alone is shown",
        )
    for name in ("throughput", "cost", "latency", "eviction"):
        parsers[name].add_argument("--model", help="a shipped model, a folder, a hub name, or a TOML file of a shape")
    throughput, papers, peers = (parsers[name] for name in ("throughput", "papers", "peers"))
    throughput.add_argument("--policies", type=words, help="comma-separated, compared with full; default: r_kv,rpc")
    throughput.add_argument("--scale", type=float, help="divides the paper's lengths, budget and interval; default: 4")
    throughput.add_argument("--requests", type=int, help="default: 32; the paper's: 256")
    papers.add_argument("--scale", type=float, help="divides the papers' lengths and budgets; default: 32")
    peers.add_argument("--contenders", type=words, help="comma-separated; default: jkv,transformers,kvpress")
    peers.add_argument("--models", type=words, help="comma-separated: tiny-reasoner (the default), folders, GGUF files")
    for size, text in (
        ("batches", "of full caches; default: 1,8,32"),
        ("budget-batches", "of the budget, for other models the least alone; default: 16,1"),
    ):
        peers.add_argument(f"--{size}", type=whole, help=text)
    peers.add_argument("--problems", type=int, help="whose answers are graded; default: 32")
    parsers["cost"].add_argument("--lengths", type=whole, help="of full caches; default: 128,512,1536")
    parsers["cost"].add_argument("--budgets", type=whole, help="of R-KV; default: 64,128,256")
    parsers["cost"].add_argument("--batches", type=whole, help="default: 1,8,32")
    parsers["latency"].add_argument("--batches", type=whole, help="default: 1,8,32")
    parsers["latency"].add_argument("--chunks", type=whole, help="most steps between two reads by the host; default: 16,1")
    for size, text in (
        ("prompts", "default: 16"),
        ("samples", "of each; default: 8"),
        ("limit", "longest completion; default: 512"),
    ):
        parsers["rollouts"].add_argument(f"--{size}", type=int, help=text)
    parsers["rollouts"].add_argument("--models", type=words, help="narrow, wide; default: both")
    for size, text in (("batch", "rows; default: 8"), ("budget", "of R-KV; default: 1024"), ("interval", "default: 128")):
        parsers["eviction"].add_argument(f"--{size}", type=int, help=text)
    add_serve(parsers["serve"])
    add_tables(benches)


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


def add_tables(benches: Any) -> None:
    """The command that regenerates tables."""
    text = "regenerate the tables from the JSON, and put them between their marks in a page"
    parser = benches.add_parser("tables", help=text, description=text, **LOOKS)
    parser.set_defaults(run=run_tables)
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder of the JSON; default: results")
    parser.add_argument(
        "--page", type=Path, default=PAGE, help=f"has <!-- bench NAME --> and <!-- /bench NAME --> marks; default: {PAGE}"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where something would change")


def run(options: argparse.Namespace) -> int:
    """Runs one benchmark; each figure is printed when it is measured."""
    from jkv import reports as records

    given = {name: value for name, value in vars(options).items() if name not in ("run", "bench", "quick", "out")}
    given = {name: value for name, value in given.items() if value is not None}
    for name in POSITIVE:
        if not 0 < given.get(name, 1) < MOST_SIZE:
            raise ValueError(f"--{name.replace('_', '-')} must be positive and below 2**31; got {shown(given[name])}.")
    for name in ("lengths", "budgets", "batches", "budget_batches", "chunks"):
        if name in given and not (given[name] and all(0 < size < MOST_SIZE for size in given[name])):
            raise ValueError(f"--{name} must be sizes, each positive and below 2**31; got {shown(given[name])}.")
    if options.out:
        make_folder(options.out)
    about = records.about(command_of(options.bench, options.quick, given))

    def report(figures: dict[str, Any]) -> None:
        print(json.dumps(figures), file=sys.stderr, flush=True)

    record = {"about": about} | MEASURES[options.bench](given, options.quick, report)
    text = importlib.import_module(f"jkv.bench.{options.bench}").table(record)
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


def command_of(bench: str, quick: bool, given: dict[str, Any]) -> str:
    """The command as a reader would type it.

    >>> command_of("cost", True, {"batches": [1, 8]})
    'jkv bench cost --quick --batches 1,8'
    """
    typed = ["jkv", "bench", bench] + ["--quick"] * quick
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        typed += [f"--{name.replace('_', '-')}", text]
    return shlex.join(typed)


def measure_throughput(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """Fixed pools."""
    from jkv.bench import fixtures, throughput

    usual: dict[str, Any] = {"model": "tiny-reasoner", "policies": ["r_kv", "rpc"], "scale": 4.0, "requests": 32, "rounds": 3}
    usual |= {"scale": 16.0, "requests": 4, "rounds": 1, "policies": ["r_kv"], "pools": QUICK_POOLS} if quick else {}
    usual |= given
    return throughput.measure(fixtures.model_of(usual.pop("model")), **usual, report=report)


def measure_papers(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """The papers' tables."""
    from jkv.bench import papers

    usual = {"scale": 128.0 if quick else 32.0, "rounds": 1 if quick else 2} | given
    return papers.measure(**usual, quick=quick, report=report)


def measure_peers(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """Other libraries."""
    from jkv.bench import peers

    usual: dict[str, Any] = {"contenders": list(peers.NEEDED), "problems": 32, "rounds": 3}
    usual |= {"models": [peers.TASK], "batches": [1, 8, 32], "budget_batches": [16, 1], "new_tokens": 256}
    usual |= {"settings": {"budget": 128, "interval": 16, "window": 8}}
    if quick:
        usual |= {"problems": 2, "rounds": 1, "batches": [2], "budget_batches": [2], "new_tokens": 48}
        usual |= {"settings": {"budget": 24, "interval": 16, "window": 8}}
    usual |= given
    return peers.measure(usual.pop("contenders"), **usual, report=report)


def measure_cost(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """Parts of a step."""
    from jkv.bench import cost, fixtures

    usual: dict[str, Any] = {"model": "tiny-reasoner", "lengths": [128, 512, 1536], "batches": [1, 8, 32]}
    usual |= {"budgets": [64, 128, 256], "rounds": 5}
    if quick:
        usual |= {"lengths": [96], "batches": [2], "budgets": [32], "rounds": 1}
    usual |= given
    lengths, batches, budgets = (usual[name] for name in ("lengths", "batches", "budgets"))
    middle = (lengths[len(lengths) // 2], batches[len(batches) // 2])
    chosen = cost.points(lengths, batches, budgets, *middle)
    return cost.measure(fixtures.model_of(usual["model"]), chosen, usual["rounds"], report)


def measure_latency(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """What a user waits for."""
    from jkv.bench import fixtures, latency
    from jkv.policies import full, r_kv

    usual: dict[str, Any] = {"model": "tiny-reasoner", "batches": [1, 8, 32], "chunks": [16, 1], "rounds": 5}
    usual |= {"prompt": 128, "new_tokens": 256}
    usual |= {"batches": [2], "chunks": [4], "rounds": 1, "new_tokens": 24} if quick else {}
    usual |= given
    return latency.measure(fixtures.model_of(usual.pop("model")), [full(), r_kv(128, 16)], **usual, report=report)


def measure_rollouts(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """Tunix's own sampler."""
    from jkv.bench import rollouts

    usual: dict[str, Any] = {
        "models": list(rollouts.SHAPES),
        "prompts": 16,
        "samples": 8,
        "width": 48,
        "mean": 96,
        "limit": 512,
    }
    usual |= {"budget": 96, "interval": 32, "rows": [16, 32, 64], "problems": 8, "rounds": 3}
    if quick:
        usual |= {"models": ["narrow"], "prompts": 3, "samples": 2, "width": 12, "mean": 8, "limit": 40}
        usual |= {"budget": 16, "interval": 16, "rows": [2], "problems": 0, "rounds": 1}
    usual |= given
    if unknown := sorted(set(usual["models"]) - set(rollouts.SHAPES)):
        raise ValueError(f"--models are {', '.join(rollouts.SHAPES)}; got {', '.join(unknown)}.")
    return rollouts.measure({name: rollouts.SHAPES[name] for name in usual.pop("models")}, **usual, report=report)


def measure_eviction(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """Compaction and steps that evict."""
    from jkv.bench import eviction, fixtures

    usual: dict[str, Any] = {"model": "tiny-reasoner", "batch": 8, "budget": 1024, "interval": 128, "rounds": 5}
    usual |= ({"batch": 2, "budget": 48, "interval": 16, "rounds": 1} if quick else {}) | given
    return eviction.measure(fixtures.model_of(usual.pop("model")), **usual, report=report)


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


MEASURES: dict[str, Callable[[dict[str, Any], bool, Any], dict[str, Any]]] = {
    "throughput": measure_throughput,
    "papers": measure_papers,
    "peers": measure_peers,
    "cost": measure_cost,
    "latency": measure_latency,
    "serve": measure_serve,
    "rollouts": measure_rollouts,
    "eviction": measure_eviction,
}


def run_tables(options: argparse.Namespace) -> int:
    """Regenerates every table from its JSON."""
    from jkv import reports as records
    from jkv.text_files import check_file, read_json, read_text

    tables, pages = {}, {}
    for bench in BENCHES:
        own = options.results / f"{bench}.json"
        for path in (own, *sorted(options.results.glob(f"{bench}-*.json"))):  # of other models
            if not path.exists():
                continue
            check_file(path, MOST_RECORD)
            record = read_json(path)
            if not isinstance(record, dict):
                raise ValueError(f"{path} must be a JSON object that `jkv bench {bench}` wrote; it is none. Remove the file.")
            if "about" in record:  # what older commands wrote has no table
                tables[path.stem] = table_of(bench, record, path)
                pages[path.with_suffix(".md")] = tables[path.stem] + "\n"
    if not tables:
        raise ValueError(f"--results must hold the JSON of {', '.join(BENCHES)}; {options.results} holds none.")
    if not options.page.is_file():
        raise ValueError(
            f"--page must be a file with <!-- bench NAME --> marks; {options.page} does not exist. Name another page."
        )
    pages[options.page] = records.page_with(read_text(options.page, MOST_RECORD), tables)
    stale = [path for path, text in pages.items() if not path.exists() or read_text(path) != text]
    for path in stale:
        if not options.check:
            records.write_text(path, pages[path])
        print(f"{'would change' if options.check else 'wrote'} {path}")
    return 1 if stale and options.check else 0


def table_of(bench: str, record: dict[str, Any], path: Path) -> str:
    """The table of a benchmark's record.

    Raises:
      ValueError: a record of something else, whose fields the table does not find.
    """
    try:
        return str(importlib.import_module(f"jkv.bench.{bench}").table(record))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{path} must be a record that `jkv bench {bench}` wrote; its table cannot be made: {shown(error)}. Remove the "
            "file, or run the benchmark again."
        ) from error
