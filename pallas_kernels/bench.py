"""Times every implementation of a kernel on this machine: `python -m pallas_kernels.bench KERNEL`, or `--all --out DIR`.

All implementations run on the same values, at the shapes of real models, and are compared with the reference. One that cannot
run here is listed with the reason and not timed. Bytes are those that a perfect implementation would move, and the share of the
copy rate compares them with a large copy in the same run. `--all` also times `paged_attention` against attention over
contiguous caches (cuDNN through JAX, PyTorch). After `--seconds`, no measurement starts, and the report lists what was left
out. The files are written after every row.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KERNELS
from pallas_kernels.dispatch import own_platform, refusals
from pallas_kernels.models import MODELS, Case, Workload
from pallas_kernels.peers import rows_of_peers
from pallas_kernels.timing import copy_rate, seconds_of

LARGE = ("r1-qwen-1.5b", "r1-qwen-7b", "r1-llama-8b", "qwq-32b")  # default models on an accelerator
SMALL = ("tiny-reasoner",)  # default models on a CPU
INTERVAL = 128  # steps between two compactions of R-KV


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns 1 if any implementation disagrees with the reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", nargs="*", metavar="KERNEL", help=f"one of {', '.join(KERNELS)}")
    parser.add_argument("--all", action="store_true", help="all kernels, and the peers of paged_attention")
    parser.add_argument("--models", help=f"comma-separated list of {', '.join(MODELS)}")
    parser.add_argument("--batch", type=int, help="batch rows of the model; default: 64, or 4 on a CPU")
    parser.add_argument("--slots", type=int, default=1152, help="slots per row; default: R-KV's budget and buffer")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=480.0, help="no measurement starts after this time")
    parser.add_argument("--out", type=Path, help="folder for the JSON report and its Markdown table")
    options = parser.parse_args(argv)
    names = list(KERNELS) if options.all else options.kernel
    unknown = set(names) - set(KERNELS)
    if unknown or not names:
        parser.error(f"KERNEL must be one of {sorted(KERNELS)}, or use --all; got {sorted(unknown) or 'none'}")
    has_accelerator = own_platform() != "cpu"
    models = options.models.split(",") if options.models else list(LARGE if has_accelerator else SMALL)
    if set(models) - set(MODELS):
        parser.error(f"--models must be in {sorted(MODELS)}; got {sorted(set(models) - set(MODELS))}")
    workload = Workload(
        batch=options.batch or (64 if has_accelerator else 4),
        slots=options.slots,
        page_size=options.page_size,
        dtype=jnp.bfloat16 if has_accelerator else jnp.float32,
        layers=1,
    )
    until = time.perf_counter() + options.seconds
    report: dict[str, Any] = {"machine": describe_machine(), "copy_bytes_per_second": copy_rate(), "kernels": [], "peers": []}
    copy = report["copy_bytes_per_second"]
    for kernel, model in itertools.product(names, models):
        for row in rows_of(kernel, model, workload, copy, until):
            report["kernels"].append(row)
            keep(report, row, options.out)
    if options.all and has_accelerator:
        for row in rows_of_peers(copy, until):
            report["peers"].append(row)
            keep(report, row, options.out)
    print(table(report))
    return 0 if all(row.get("agrees", True) for row in report["kernels"]) else 1


def keep(report: dict[str, Any], row: dict[str, Any], folder: Path | None) -> None:
    """Prints a row to stderr and writes the report so far."""
    print(json.dumps(row), file=sys.stderr, flush=True)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"kernels-{report['machine']['device'].lower().replace(' ', '-')}"
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / f"{name}.md").write_text(table(report) + "\n")


def rows_of(kernel: str, model: str, workload: Workload, copy: float, until: float) -> Iterator[dict[str, Any]]:
    """Yields a row of the report for each implementation of a kernel in each of its cases, at the shapes of one model."""
    for case in KERNELS[kernel].shapes.CASES:
        yield from rows_of_case(kernel, model, workload._replace(**case.workload), case, copy, until)


def rows_of_case(
    kernel: str, model: str, workload: Workload, case: Case, copy: float, until: float
) -> Iterator[dict[str, Any]]:
    """Yields a row of the report for each implementation of a kernel in one case."""
    call, implementations, shapes = KERNELS[kernel]
    args = shapes.arguments(MODELS[model], workload, **case.options)
    reasons = refusals(implementations, own_platform(), *args)
    moved = shapes.num_bytes(MODELS[model], workload, **case.options)
    setting = dataclasses.asdict(Setting(kernel, case.name, model, workload.batch, workload.slots, workload.page_size, moved))
    values: Any = None
    expected: Any = None
    for name in sorted(implementations, key=lambda name: name != "reference"):  # the reference first
        row = setting | {"implementation": name}
        if name in reasons:
            yield row | {"not_timed": reasons[name]}
            continue
        if time.perf_counter() > until:
            yield row | {"not_timed": "out of time"}
            continue
        values = shapes.values(MODELS[model], workload, **case.options) if values is None else values
        run: Callable[..., Any] = functools.partial(call, implementation=name)
        run = gradients(run) if case.is_gradient else run
        try:
            program: Any = jax.jit(run).lower(*values).compile()
            got = jax.tree.map(lambda x: np.asarray(x, np.float32), program(*values))
            seconds, clock = seconds_of(run, values, is_updated=case.is_updated)
        except Exception as error:  # a failure on a device is a result, not the end of the run
            yield row | {"not_timed": f"{type(error).__name__}: {str(error)[:300]}", "agrees": False}
            continue
        if name == "reference":
            expected = got
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        difference = max(itertools.starmap(largest_difference, pairs))
        yield row | {
            "milliseconds": round(1000 * seconds, 4),
            "clock": clock,
            "share_of_copy_rate": round(moved / seconds / copy, 3),
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
            "largest_difference": difference,
            "agrees": bool(difference < tolerance(workload.dtype)),
        }


def gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the sum of a function's results by its first three arguments; it runs the forward pass too."""

    def total(*args: Any) -> jax.Array:
        return jnp.sum(run(*args).astype(jnp.float32))

    return jax.grad(total, argnums=(0, 1, 2))


def compaction_share(rows: list[dict[str, Any]], model: str) -> str | None:
    """The time of R-KV's scoring and compaction as a share of the decode attention between two compactions; None if not timed.

    Each part counts with its fastest implementation. The share of all decoding is lower, since decoding also reads the weights.
    """

    def fastest(kernel: str, case: str) -> float:
        mine = [row for row in rows if (row["kernel"], row["case"], row["model"]) == (kernel, case, model)]
        return min((row["milliseconds"] for row in mine if "milliseconds" in row), default=float("nan"))

    parts = [("attention_mass", "score"), ("key_redundancy", "compaction"), ("take_slots", "compaction")]
    taken, step = [fastest(*part) for part in parts], fastest("paged_attention", "decode step")
    if not sum(taken) / step > 0:  # NaN when a part is missing
        return None
    return (
        f"{model}: scoring and compaction take {sum(taken):.3f} ms a layer ({taken[0]:.3f} mass, {taken[1]:.3f} redundancy, "
        f"{taken[2]:.3f} moving), {sum(taken) / step / INTERVAL:.1%} of the attention of the {INTERVAL} steps between two."
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """The setting of a measurement; `bytes` are those that a perfect implementation would move."""

    kernel: str
    case: str
    model: str
    batch: int
    slots: int
    page_size: int
    bytes: int


def tolerance(dtype: Any) -> float:
    """The largest difference allowed from the reference, relative to the largest number in its result."""
    return 2e-2 if dtype == jnp.bfloat16 else 1e-4


def largest_difference(x: np.ndarray, y: np.ndarray) -> float:
    """The largest difference of two results, relative to the largest finite number of `y`; infinite if one alone is finite."""
    if not x.size:
        return 0.0
    is_finite = np.isfinite(y)
    if not np.array_equal(is_finite, np.isfinite(x)):
        return float("inf")
    largest = np.abs(y[is_finite]).max(initial=0.0)
    return float(np.abs(x[is_finite] - y[is_finite]).max(initial=0.0) / max(largest, 1e-30))


def describe_machine() -> dict[str, Any]:
    """The name of the device, the versions, and for a GPU the target configuration for compiling without the device."""
    device = jax.devices()[0]
    described = {
        "device": device.device_kind if device.platform != "cpu" else f"{platform.machine()} CPU",
        "platform": device.platform,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    if own_platform() == "cuda":
        try:
            from jax._src.lib import xla_client

            described["target_config"] = str(xla_client.get_topology_for_devices(jax.devices()).target_config)
        except Exception as error:  # not a public name of JAX; the run does not depend on it
            described["target_config"] = f"{type(error).__name__}: {error}"
    return described


def table(report: dict[str, Any]) -> str:
    """The Markdown table of a report."""
    machine = report["machine"]
    lines = [
        f"{machine['device']}, jax {machine['jax']}: copies at {report['copy_bytes_per_second'] / 1e9:.0f} GB/s.",
        "",
        "| kernel | case | model | batch | slots | page | implementation | ms | of copy rate | scratch MB | difference |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in [*report["kernels"], *report["peers"]]:
        setting = f"| {row['kernel']} | {row['case']} | {row['model']} | {row['batch']} | {row['slots']} | {row['page_size']} |"
        if "not_timed" in row:
            lines.append(f"{setting} {row['implementation']} | not timed: {row['not_timed']} | | | |")
            continue
        difference = f"{row['largest_difference']:.1e}" if "largest_difference" in row else ""
        memory = f"{row['temporary_bytes'] / 1e6:.2f}" if "temporary_bytes" in row else ""
        figures = f"{row['milliseconds']:.3f} | {row['share_of_copy_rate']:.0%} | {memory} | {difference}"
        lines.append(f"{setting} {row['implementation']} | {figures} |")
    models = dict.fromkeys(row["model"] for row in report["kernels"])
    shares = [share for model in models if (share := compaction_share(report["kernels"], model))]
    lines += ["", *shares] if shares else []
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
