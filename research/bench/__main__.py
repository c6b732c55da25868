"""`python -m research.bench` measures what the papers and other libraries are compared by, and makes the tables of results.

One JSON a run, and the table made from it. `jkv bench` has the benchmarks that users run on their own machine.
"""

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jkv.checks import install, shown, words
from jkv.cli import bench
from jkv.cli.bench import Measure, add_bench, add_model, add_rounds, whole
from jkv.cli.inputs import LOOKS
from jkv.cli_errors import run_safely
from jkv.limits import check_numbers

PROGRAM = "python -m research.bench"
PAGE = Path("docs/results.md")  # that shows the tables, from the root of the repository
MOST_RECORD = 1 << 26  # bytes of a record, and of a page


def make_parser() -> argparse.ArgumentParser:
    """All benchmarks and their options."""
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, **LOOKS)
    benches = parser.add_subparsers(metavar="benchmark", required=True)
    papers, peers, cost, rollouts, eviction = parsers = [
        add_bench(benches, name, *about, f"research.bench.{name}", PROGRAM) for name, about in BENCHES.items()
    ]
    for one in parsers:
        add_rounds(one)
    for one in (cost, eviction):
        add_model(one)
    papers.add_argument("--scale", type=float, help="divides the papers' lengths and budgets; default: 32")
    peers.add_argument("--contenders", type=words, help="comma-separated; default: jkv,transformers,kvpress")
    peers.add_argument("--models", type=words, help="comma-separated: tiny-reasoner (the default), folders, GGUF files")
    for size, text in (
        ("batches", "of full caches; default: 1,8,32"),
        ("budget-batches", "of the budget, for other models the least alone; default: 16,1"),
    ):
        peers.add_argument(f"--{size}", type=whole, help=text)
    peers.add_argument("--problems", type=int, help="whose answers are graded; default: 32")
    cost.add_argument("--lengths", type=whole, help="of full caches; default: 128,512,1536")
    cost.add_argument("--budgets", type=whole, help="of R-KV; default: 64,128,256")
    cost.add_argument("--batches", type=whole, help="default: 1,8,32")
    for size, text in (
        ("prompts", "default: 16"),
        ("samples", "of each; default: 8"),
        ("limit", "longest completion; default: 512"),
    ):
        rollouts.add_argument(f"--{size}", type=int, help=text)
    rollouts.add_argument("--models", type=words, help="narrow, wide; default: both")
    for size, text in (("batch", "rows; default: 8"), ("budget", "of R-KV; default: 1024"), ("interval", "default: 128")):
        eviction.add_argument(f"--{size}", type=int, help=text)
    add_tables(benches)
    return parser


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


def measure_papers(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """The papers' tables."""
    from research.bench import papers

    usual = {"scale": 128.0 if quick else 32.0, "rounds": 1 if quick else 2} | given
    return papers.measure(**usual, quick=quick, report=report)


def measure_peers(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """Other libraries."""
    from research.bench import peers

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
    from jkv.bench import fixtures
    from research.bench import cost

    usual: dict[str, Any] = {"model": "tiny-reasoner", "lengths": [128, 512, 1536], "batches": [1, 8, 32]}
    usual |= {"budgets": [64, 128, 256], "rounds": 5}
    if quick:
        usual |= {"lengths": [96], "batches": [2], "budgets": [32], "rounds": 1}
    usual |= given
    lengths, batches, budgets = (usual[name] for name in ("lengths", "batches", "budgets"))
    middle = (lengths[len(lengths) // 2], batches[len(batches) // 2])
    chosen = cost.points(lengths, batches, budgets, *middle)
    return cost.measure(fixtures.model_of(usual["model"]), chosen, usual["rounds"], report)


def measure_rollouts(given: dict[str, Any], quick: bool, report: Any) -> dict[str, Any]:
    """Tunix's own sampler."""
    from research.bench import rollouts

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
    from jkv.bench import fixtures
    from research.bench import eviction

    usual: dict[str, Any] = {"model": "tiny-reasoner", "batch": 8, "budget": 1024, "interval": 128, "rounds": 5}
    usual |= ({"batch": 2, "budget": 48, "interval": 16, "rounds": 1} if quick else {}) | given
    return eviction.measure(fixtures.model_of(usual.pop("model")), **usual, report=report)


BENCHES: dict[str, tuple[str, Measure]] = {
    "papers": ("the papers' own throughput tables, at shapes scaled to this machine", measure_papers),
    "peers": (
        f"speed, memory and accuracy compared with transformers and kvpress ({install('peers')})",
        measure_peers,
    ),
    "cost": ("where a decode step's time goes, by length, batch and budget", measure_cost),
    "rollouts": (f"rollouts a second compared with tunix's own sampler ({install('tunix')})", measure_rollouts),
    "eviction": ("what scoring and compaction cost, compared with their own arithmetic, on a wide model", measure_eviction),
}
TABLES = {name: f"jkv.bench.{name}" for name in bench.BENCHES} | {name: f"research.bench.{name}" for name in BENCHES}


def run_tables(options: argparse.Namespace) -> int:
    """Regenerates every table from its JSON."""
    from jkv import reports as records
    from jkv.text_files import check_file, read_json, read_text

    tables, pages = {}, {}
    for name in TABLES:
        own = options.results / f"{name}.json"
        for path in (own, *sorted(options.results.glob(f"{name}-*.json"))):  # of other models
            if not path.exists():
                continue
            check_file(path, MOST_RECORD)
            record = read_json(path)
            if not isinstance(record, dict):
                raise ValueError(f"{path} must be a JSON object of the benchmark {name}; it is none. Remove the file.")
            if "about" in record:  # what older commands wrote has no table
                tables[path.stem] = table_of(name, record, path)
                pages[path.with_suffix(".md")] = tables[path.stem] + "\n"
    from research.bench.excerpts import EXCERPTS

    for name, (record_name, excerpt) in EXCERPTS.items():
        path = options.results / f"{record_name}.json"
        if path.exists():
            check_file(path, MOST_RECORD)
            tables[name] = table_of(record_name, read_json(path), path, excerpt)
    if not tables:
        raise ValueError(f"--results must hold the JSON of {', '.join(TABLES)}; {options.results} holds none.")
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


def table_of(name: str, record: Any, path: Path, make: Callable[[Any], str] | None = None) -> str:
    """The table of a benchmark's record, by `make` or by the benchmark's own module.

    Raises:
      ValueError: a record of something else, whose fields the table does not find.
    """
    try:
        return str((make or importlib.import_module(TABLES[name]).table)(record))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{path} must be a record of the benchmark {name}; its table cannot be made: {shown(error)}. Remove the "
            "file, or run the benchmark again."
        ) from error


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    options = make_parser().parse_args(arguments)

    def start() -> int:
        check_numbers(vars(options))
        status: int = options.run(options)
        return status

    return run_safely(start, f"{PROGRAM}: error:", f"{PROGRAM}: interrupted", is_program=arguments is None)


if __name__ == "__main__":
    raise SystemExit(main())
