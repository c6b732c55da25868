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
from jkv.cli.bench import MODEL, Benchmark, add_bench, rounds, whole
from jkv.cli.errors import run_safely
from jkv.cli.inputs import LOOKS
from jkv.cli.options import Option
from jkv.limits import check_numbers

PROGRAM = "python -m research.bench"
PAGE = Path("docs/results.md")  # that shows the tables, from the root of the repository
MOST_RECORD = 1 << 26  # bytes of a record, and of a page


def make_parser() -> argparse.ArgumentParser:
    """All benchmarks and their options."""
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, **LOOKS)
    benches = parser.add_subparsers(metavar="benchmark", required=True)
    for name, one in BENCHES.items():
        add_bench(benches, name, one, f"research.bench.{name}", PROGRAM)
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


def measure_papers(chosen: dict[str, Any], report: Any) -> dict[str, Any]:
    """The papers' tables."""
    from research.bench import papers

    return papers.measure(**chosen, report=report)


def measure_peers(chosen: dict[str, Any], report: Any) -> dict[str, Any]:
    """Other libraries."""
    from research.bench import peers

    return peers.measure(chosen.pop("contenders"), **chosen, report=report)


def measure_cost(chosen: dict[str, Any], report: Any) -> dict[str, Any]:
    """Parts of a step."""
    from jkv.bench import fixtures
    from research.bench import cost

    lengths, batches, budgets = (chosen[name] for name in ("lengths", "batches", "budgets"))
    middle = (lengths[len(lengths) // 2], batches[len(batches) // 2])
    points = cost.points(lengths, batches, budgets, *middle)
    return cost.measure(fixtures.model_of(chosen["model"]), points, chosen["rounds"], report)


def measure_rollouts(chosen: dict[str, Any], report: Any) -> dict[str, Any]:
    """Tunix's own sampler."""
    from research.bench import rollouts

    names = chosen.pop("models") or list(rollouts.SHAPES)
    if unknown := sorted(set(names) - set(rollouts.SHAPES)):
        raise ValueError(f"--models are {', '.join(rollouts.SHAPES)}; got {', '.join(unknown)}.")
    return rollouts.measure({name: rollouts.SHAPES[name] for name in names}, **chosen, report=report)


def measure_ledger(chosen: dict[str, Any], report: Any) -> dict[str, Any]:
    """Ways to compute log-probabilities."""
    from research.bench import ledger

    return ledger.measure(**chosen, report=report)


def measure_eviction(chosen: dict[str, Any], report: Any) -> dict[str, Any]:
    """Compaction and steps that evict."""
    from jkv.bench import fixtures
    from research.bench import eviction

    return eviction.measure(fixtures.model_of(chosen.pop("model")), **chosen, report=report)


BENCHES = {
    "papers": Benchmark(
        "the papers' own throughput tables, at shapes scaled to this machine",
        measure_papers,
        (rounds(2), Option("scale", float, 32.0, "divides the papers' lengths and budgets")),
        {"rounds": 1, "scale": 128.0, "quick": True},
    ),
    "peers": Benchmark(
        f"speed, memory and accuracy compared with transformers and kvpress ({install('peers')})",
        measure_peers,
        (
            rounds(3),
            Option("contenders", list, ["jkv", "transformers", "kvpress"], "comma-separated", words),
            Option("models", list, ["tiny-reasoner"], "comma-separated: tiny-reasoner, folders, GGUF files", words),
            Option("batches", list, [1, 8, 32], "of full caches", whole),
            Option("budget_batches", list, [16, 1], "of the budget, for other models the least alone", whole),
            Option("problems", int, 32, "whose answers are graded"),
            Option("new_tokens", int, 256),
            Option("settings", dict, {"budget": 128, "interval": 16, "window": 8}),
        ),
        {"problems": 2, "rounds": 1, "batches": [2], "budget_batches": [2], "new_tokens": 48}
        | {"settings": {"budget": 24, "interval": 16, "window": 8}},
    ),
    "cost": Benchmark(
        "where a decode step's time goes, by length, batch and budget",
        measure_cost,
        (
            rounds(5),
            MODEL,
            Option("lengths", list, [128, 512, 1536], "of full caches", whole),
            Option("budgets", list, [64, 128, 256], "of R-KV", whole),
            Option("batches", list, [1, 8, 32], "rows, comma-separated", whole),
        ),
        {"lengths": [96], "batches": [2], "budgets": [32], "rounds": 1},
    ),
    "rollouts": Benchmark(
        f"rollouts a second compared with tunix's own sampler ({install('tunix')})",
        measure_rollouts,
        (
            rounds(3),
            Option("prompts", int, 16, "of a step"),
            Option("samples", int, 8, "of each"),
            Option("limit", int, 512, "longest completion"),
            Option("models", list, None, "narrow, wide; default: both", words),
            Option("width", int, 48),
            Option("mean", int, 96),
            Option("budget", int, 96),
            Option("interval", int, 32),
            Option("rows", list, [16, 32, 64]),
            Option("problems", int, 8),
        ),
        {"models": ["narrow"], "prompts": 3, "samples": 2, "width": 12, "mean": 8, "limit": 40}
        | {"budget": 16, "interval": 16, "rows": [2], "problems": 0, "rounds": 1},
    ),
    "eviction": Benchmark(
        "what scoring and compaction cost, compared with their own arithmetic, on a wide model",
        measure_eviction,
        (
            rounds(5),
            MODEL,
            Option("batch", int, 8, "rows"),
            Option("budget", int, 1024, "of R-KV"),
            Option("interval", int, 128, "tokens between two evictions"),
        ),
        {"batch": 2, "budget": 48, "interval": 16, "rounds": 1},
    ),
    "ledger": Benchmark(
        "by how much engines, replays and trainers differ in the log-probabilities of the same tokens",
        measure_ledger,
        (
            Option("models", list, ["tiny-reasoner", "smollm2-135m"], "comma-separated", words),
            Option("policies", list, ["full", "r_kv"], "comma-separated", words),
            Option("budget", int, 64, "of policies that have one"),
            Option("interval", int, 16, "tokens between two evictions"),
            Option("new_tokens", int, 128, "of each sample"),
            Option("dtypes", list, ["float32", "bfloat16"], "comma-separated", words),
        ),
        {"models": ["tiny-reasoner"], "budget": 24, "interval": 8, "new_tokens": 24, "dtypes": ["float32"]},
    ),
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

    for name, (record_names, excerpt) in EXCERPTS.items():
        paths = [options.results / f"{record_name}.json" for record_name in record_names]
        if all(path.exists() for path in paths):
            for path in paths:
                check_file(path, MOST_RECORD)
            made_of = [read_json(path) for path in paths]
            tables[name] = table_of(record_names[0], made_of, paths[0], lambda made, excerpt=excerpt: excerpt(*made))
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
