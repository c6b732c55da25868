"""The first ten minutes on an accelerator: `python -m research.bench.device --out results`, written after each figure.

Its parts, in this order; `--parts` chooses some, and after `--seconds` none starts:

  step       a decode step of random weights, with rows of equal and of ragged lengths, beside its roofline; by kernel; and
             as XLA compiles it without the engine's options, all and each, where the platform has some; and on a GPU with
             an array for each matrix in place of joined ones
  kernels    every implementation of every kernel against the reference and the rate of a copy (`pallas_kernels.bench`)
  peers      decode attention over pages beside other libraries' over contiguous caches (`pallas_kernels.peers`)
  prefill    prompt tokens a second, by chunk
  engine     the engine's whole loop, host included
  stress     R-KV's setting: 16,384 new tokens a row with a budget of 1,024 (arXiv 2505.24133, Table 2), each cache with as many
             rows as fit; tokens a second follow from steps timed along the way, integrated

The roofline of a step counts the bytes and operations of its phases (`jkv.planning.roofline`) at the rate of a copy on this
machine and at the vendor's rate of arithmetic. Of a record that is there already, the parts that do not run are kept, if they
are of models of the same shapes, with the same budget, interval and length.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jkv.bench.fixtures import fill, new_inputs, new_state, random_model, usual_page_size
from jkv.bench.rounds import GREEDY, seconds_of, timer
from jkv.checkpoints.model_shapes import find_shape
from jkv.checks import check_counts, words
from jkv.engine import programs
from jkv.engine.device_program import LEAST_ROWS, OPTIONS, DeviceProgram
from jkv.engine.engine import Engine
from jkv.engine.parts.base import Carried
from jkv.engine.results import complete
from jkv.eviction import Policy
from jkv.limits import parse
from jkv.model.eight_bits import FORMATS
from jkv.model.joined import separate_weights
from jkv.model.params import Model
from jkv.planning.devices import DEVICES, Device, find_device
from jkv.planning.plan import plan
from jkv.planning.roofline import Lifetime, step_costs
from jkv.policies import full, r_kv
from jkv.reports import about, digits, write
from jkv.resuming import digest_of
from pallas_kernels import KERNELS
from pallas_kernels import bench as kernel_bench
from pallas_kernels.dispatch import own_platform
from pallas_kernels.models import MODELS, Workload
from pallas_kernels.peers import rows_of_peers
from pallas_kernels.timing import copy_rate
from research.bench.device_record import earlier, part_of, table
from research.bench.step_breakdown import compact

STEPS = 16  # of a chunk
ROUNDS = 3  # chunks of each measurement, of which the median counts
PROMPT, NEW = 700, 16_384  # of R-KV's throughput table
LONG = 16  # ragged rows: one is so many times as long as the others
TRIED = {"cuda": {"products by cuBLAS alone": {"xla_gpu_enable_triton_gemm": False}}}  # options that may be worth having

APART = {  # separate matrices in place of joined ones: which of these XLA may join, as an option of its own
    "cuda": {"an array for each matrix": {}, "joined by XLA": {"xla_gpu_dot_merger_threshold_mb": 4096}},
}


class Bench(NamedTuple):
    """What all parts share."""

    model: Model
    device: Device  # with the measured rate of a copy for its bandwidth
    batches: tuple[int, ...]
    budget: int  # of R-KV
    interval: int
    new_tokens: int  # of the stress test
    most_rows: int  # of it, if fewer than fit


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    options = parse(command := parser(), argv)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        command.error(f"--parts must be among {', '.join(PARTS)}; got {', '.join(unknown)}.")
    try:
        check_counts(**{name: getattr(options, name) for name in ("budget", "interval", "new_tokens", "most_rows")})
        for batch in options.batches:
            check_counts(batches=batch)
        shapes = [find_shape(model) for model in options.models]
    except (ValueError, FileNotFoundError) as error:
        command.error(str(error))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    until = time.perf_counter() + options.seconds
    machine = kernel_bench.describe_machine()
    copy = copy_rate()
    name = machine["device"].lower().replace(" ", "-")
    record: dict[str, Any] = {
        "about": about("python -m research.bench.device"),
        "machine": machine,
        "copy_bytes_per_second": copy,
    }
    rows: list[dict[str, Any]] = []
    titles = {model: f"{model}, {options.weight_dtype} weights" if options.weight_dtype else model for model, _ in shapes}
    sizes = {name: getattr(options, name) for name in ("budget", "interval", "new_tokens")}
    made_of = {titles[model]: {"shape": digest_of(dataclasses.asdict(config)), **sizes} for model, config in shapes}
    kept: dict[str, Any] = {"rows": [], "made_of": {}}
    if options.out:
        try:
            kept = earlier(options.out / f"device-{name}.json", machine["jax"], made_of)
        except ValueError as error:
            command.error(str(error))
    record["made_of"] = kept["made_of"] | made_of

    def keep(row: dict[str, Any]) -> None:
        rows.append(row | {"date": record["about"]["date"][:10]})
        record["rows"] = rows + [one for one in kept["rows"] if part_of(one) not in map(part_of, rows)]
        print(json.dumps(row), file=sys.stderr, flush=True)
        if options.out:
            write(f"device-{name}", record, table(record), options.out)

    for model, config in shapes:
        title = titles[model]
        bench: Bench | None = None
        for part in options.parts:
            if time.perf_counter() > until:
                keep({"part": part, "model": title, "not_timed": "out of time"})
                continue
            if bench is None:  # weights take their time, too
                chosen = tuple(options.batches), options.budget, options.interval, options.new_tokens, options.most_rows
                weights = random_model(config, model, weight_dtype=options.weight_dtype)
                bench = Bench(weights, known_device(machine, copy), *chosen)
            for row in PARTS[part](bench, until):
                keep({"part": part, "model": title} | row)
        del bench
    print(table(record))
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", type=words, default=["r1-llama-8b"], help="names of `jkv plan --list`; default: r1-llama-8b")
    made.add_argument("--parts", type=words, default=list(PARTS), help=f"comma-separated; default: {','.join(PARTS)}")
    made.add_argument("--batches", type=lambda text: [int(word) for word in words(text)], default=[32, 128, 1], help="rows")
    made.add_argument("--weight-dtype", choices=list(FORMATS), help="weights in 8 bits; default: bfloat16, float32 on a CPU")
    made.add_argument("--budget", type=int, default=1024, help="of R-KV; default: 1024")
    made.add_argument("--interval", type=int, default=128, help="of R-KV; default: 128")
    made.add_argument("--new-tokens", type=int, default=NEW, help=f"of the stress test; default: {NEW}")
    made.add_argument("--most-rows", type=int, default=1 << 16, help="of the stress test; default: as many as fit")
    made.add_argument("--seconds", type=float, default=540.0, help="after which nothing starts; default: 540")
    made.add_argument("--out", type=Path, help="a folder for device-NAME.json and .md")
    return made


def known_device(machine: dict[str, Any], copy: float) -> Device:
    """The first device: its vendor's figures, but the bandwidth that a copy reaches; no rate if it has no name here."""
    kind = machine["device"].lower()
    known = next((device for name, device in DEVICES.items() if name in kind), None)
    stats, like = jax.devices()[0].memory_stats() or {}, known or find_device("cpu")
    return Device(kind, jax.default_backend(), int(stats.get("bytes_limit", like.memory)), copy, like.rate, like.rate_float32)


def step_rows(bench: Bench, until: float) -> Iterator[dict[str, Any]]:
    """A decode step, and what compaction adds to it, for R-KV and the full cache at the same slots, equal and ragged."""
    policy = r_kv(bench.budget, interval=bench.interval)
    slots = bench.budget + bench.interval // 2
    steps: dict[int, float] = {}  # milliseconds of R-KV's, by batch
    for batch in bench.batches:
        row = timed_row("r_kv", batch, until, timed_step, bench, policy, np.full(batch, slots))
        yield row
        if "milliseconds" in row:
            steps[batch] = row["milliseconds"]
            yield timed_row("r_kv, compactions", batch, until, timed_compaction, bench, policy, batch, steps[batch])
    if steps and jax.default_backend() != "cpu" and time.perf_counter() < until:
        batch = max(steps)
        try:
            yield from kernel_rows(bench, policy, np.full(batch, slots))
        except Exception as error:  # a failure on a device is a result, not the end of the run
            yield {"name": "time by kernel", "batch": batch, "not_timed": described(error)}
    for batch in bench.batches:
        equal, ragged = np.full(batch, slots), np.where(np.arange(batch) == 0, LONG * slots, slots)
        yield timed_row("full", batch, until, timed_step, bench, full(), equal)
        if batch > 1:
            yield timed_row(f"full, one row {LONG} times as long", batch, until, timed_step, bench, full(), ragged)
    for batch in bench.batches if OPTIONS.get(own_platform()) else ():
        for name, chosen in other_options(own_platform(), batch == max(bench.batches)).items():
            program = with_options(programs.decode_chunk, chosen)
            row = timed_row(f"r_kv, {name}", batch, until, timed_step, bench, policy, np.full(batch, slots), program)
            yield beside(row, steps)
    for name, more in APART.get(own_platform(), {}).items():
        batch, chosen = max(bench.batches), OPTIONS[own_platform()] | more
        yield beside(timed_row(f"r_kv, {name}", batch, until, timed_apart, bench, policy, np.full(batch, slots), chosen), steps)


def timed_apart(bench: Bench, policy: Policy, lengths: np.ndarray, options: dict[str, Any]) -> dict[str, Any]:
    """The figures of a step with an array for each matrix, compiled with these options."""
    model = dataclasses.replace(bench.model, params=separate_weights(bench.model.params))
    return timed_step(bench._replace(model=model), policy, lengths, with_options(programs.decode_chunk, options))


def beside(row: dict[str, Any], steps: dict[int, float]) -> dict[str, Any]:
    """A row with its time as a multiple of that of the engine's own program with as many rows."""
    if row["batch"] in steps and "milliseconds" in row:
        row["times_our_options"] = digits(row["milliseconds"] / steps[row["batch"]], 3)
    return row


def timed_row(name: str, batch: int, until: float, call: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The figures of a call, or why there are none: a failure on a device is a result, not the end of the run."""
    row: dict[str, Any] = {"name": name, "batch": batch}
    if time.perf_counter() > until:
        return row | {"not_timed": "out of time"}
    try:
        return row | call(*args)
    except Exception as error:
        return row | {"not_timed": described(error)}


def described(error: Exception) -> str:
    """An error in a cell."""
    return f"{type(error).__name__}: {str(error)[:200]}"


def other_options(platform: str, one_by_one: bool) -> dict[str, dict[str, Any]]:
    """What to compare an engine's options with: none, which is as XLA compiles by itself, all but one, and more of them."""
    ours = OPTIONS[platform]
    found: dict[str, dict[str, Any]] = {"XLA's own options": {}}
    if one_by_one:
        found |= {f"without {name}": {k: v for k, v in ours.items() if k != name} for name in ours}
        found |= {name: ours | more for name, more in TRIED.get(platform, {}).items()}
    return found


def with_options(program: DeviceProgram, options: dict[str, Any]) -> Any:
    """The program as XLA compiles it with these options."""
    return jax.jit(program.function, compiler_options=options, **program.settings)


def chunk_of(
    bench: Bench, policy: Policy, lengths: np.ndarray, program: Any = programs.decode_chunk, longest: int = 0
) -> Callable[[], Any]:
    """A call that decodes the next chunk of rows that start with `lengths` random slots; `ROUNDS` + 1 calls have room.

    Every row has room for `longest` slots if that is more.
    """
    params, running = bench.model.params, len(lengths)
    batch = max(running, LEAST_ROWS.get(own_platform(), 1))  # as an engine has
    lengths = np.pad(lengths, (0, batch - running))
    room = np.maximum(lengths + STEPS * (ROUNDS + 1), longest)
    state = fill(new_state(params, policy, batch, room, usual_page_size()), jax.random.key(1), lengths)
    inputs = new_inputs(params, policy, batch, running)
    held = [jax.block_until_ready(state)]  # else what XLA times while it compiles would wait for it

    def call() -> Any:
        state, outputs, _ = program(params, held.pop(), inputs, Carried(), num_steps=STEPS, draws="greedy")
        held.append(state)
        return outputs.token

    return call


def timed_step(
    bench: Bench, policy: Policy, lengths: np.ndarray, program: Any = programs.decode_chunk, longest: int = 0
) -> dict[str, Any]:
    """Milliseconds of a step, and of its roofline at the mean length of the measurement."""
    call = chunk_of(bench, policy, lengths, program, longest)
    with timer() as first:
        jax.block_until_ready(call())
    seconds = statistics.median(seconds_of(call) for _ in range(ROUNDS)) / STEPS
    mean = float(lengths.mean()) + STEPS * (1 + ROUNDS / 2)
    best = roofline(bench, policy, mean, len(lengths))
    return {
        "slots": round(float(lengths.mean())),
        "compiling_seconds": digits(first.compiling),
        "milliseconds": digits(1000 * seconds),
        "tokens_per_second": digits(len(lengths) / seconds),
        "roofline_milliseconds": digits(1000 * best),
        "times_roofline": digits(seconds / best, 3),
    }


def roofline(bench: Bench, policy: Policy, slots: float, rows: int) -> float:
    """Seconds of a step by `jkv.planning.roofline`."""
    params, config = bench.model.params, bench.model.config
    itemsize = params.embedding.dtype.itemsize
    table = 0 if config.tie_embeddings else params.embedding.size  # looked up, not multiplied
    nothing = np.zeros(config.num_layers)
    life = Lifetime(np.full(config.num_layers, slots), 0, nothing, nothing, nothing)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) // itemsize - table
    sizes: Any = {"weights": weights, "logits": config.vocab_size, "itemsize": itemsize, "page_size": usual_page_size()}
    costs = step_costs(config, policy, life, **sizes, rows=rows)
    return sum(cost.seconds(bench.device, itemsize) for cost in costs.values())


def timed_compaction(bench: Bench, policy: Policy, batch: int, step: float) -> dict[str, Any]:
    """What compactions of all rows add to a step of `step` milliseconds, one for each row in an interval."""
    params, config = bench.model.params, bench.model.config
    seconds = []
    for _ in range(2):  # the first one compiles
        state = new_state(params, policy, batch, bench.budget + bench.interval, usual_page_size())
        state = fill(state, jax.random.key(1), bench.budget + bench.interval)
        run = functools.partial(compact, state, policy=policy, batch=batch, num_layers=config.num_layers)
        seconds.append(seconds_of(run, after=state))
    added = 1000 * seconds[-1] / bench.interval
    return {"milliseconds": digits(added), "compaction_share": digits(added / (step + added), 3)}


def kernel_rows(bench: Bench, policy: Policy, lengths: np.ndarray, most: int = 12) -> Iterator[dict[str, Any]]:
    """The device's time of a step by kernel, the longest first, from a profile of one chunk."""
    call = chunk_of(bench, policy, lengths)
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (file,) = Path(folder).rglob("*.xplane.pb")
        spent = device_time(file)
    total = sum(seconds for seconds, _ in spent.values())
    for name, (seconds, launches) in sorted(spent.items(), key=lambda item: -item[1][0])[:most]:
        yield {
            "name": f"kernel {name}",
            "batch": len(lengths),
            "milliseconds": digits(1000 * seconds / STEPS),
            "launches_a_step": digits(launches / STEPS),
            "share": digits(seconds / total, 3),
        }


def device_time(file: Path) -> dict[str, tuple[float, int]]:
    """Seconds and launches of each kernel in a profile, by name without template arguments and digits at its end."""
    spent: dict[str, tuple[float, int]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if "Stream" not in line.name and "XLA Ops" not in line.name:
                continue
            for event in line.events:
                name = event.name.partition("<")[0].removeprefix("void ").rstrip("0123456789").rstrip("._")
                seconds, launches = spent.get(name, (0.0, 0))
                spent[name] = seconds + event.duration_ns / 1e9, launches + 1
    return spent


def kernels_rows(bench: Bench, until: float) -> Iterator[dict[str, Any]]:
    """Every implementation of every kernel, at this model's shapes."""
    if bench.model.name not in MODELS:
        yield {"name": "all", "not_timed": f"no shape of kernels for {bench.model.name}; there are {', '.join(MODELS)}"}
        return
    batch, dtype = max(bench.batches), bench.model.params.embedding.dtype
    workload = Workload(batch, bench.budget + bench.interval, usual_page_size(), dtype, 1)
    assert bench.device.bandwidth is not None
    for kernel in KERNELS:
        for row in kernel_bench.rows_of(kernel, bench.model.name, workload, bench.device.bandwidth, until):
            if "largest_difference" in row:
                row["largest_difference"] = digits(row["largest_difference"], 2)
            yield row | {"name": f"{row['kernel']}, {row['case']}, {row['implementation']}"}


def peers_rows(bench: Bench, until: float) -> Iterator[dict[str, Any]]:
    """Attention over contiguous caches."""
    assert bench.device.bandwidth is not None
    for row in rows_of_peers(bench.device.bandwidth, until):
        yield row | {"name": f"{row['implementation']}, {row['slots']} slots, pages of {row['page_size']}"}


def prefill_rows(bench: Bench, until: float) -> Iterator[dict[str, Any]]:
    """A chunk of a prompt's tokens, after as many as the budget."""
    params = bench.model.params
    for chunk in (256, 1024, 2048):
        if bench.budget + 2 * chunk > bench.model.config.max_positions or time.perf_counter() > until:
            yield {"name": f"chunk {chunk}", "not_timed": "too long for the model, or out of time"}
            continue
        state = new_state(params, full(), 1, bench.budget + 3 * chunk, usual_page_size())
        state = fill(state, jax.random.key(1), bench.budget)
        seconds = []
        for _ in range(3):
            arguments = np.zeros(1, np.int32), np.ones((1, chunk), np.int32), np.full(1, chunk, np.int32)
            began = time.perf_counter()
            state, hidden, *_ = programs.prefill_chunk(params, state, *arguments)
            jax.block_until_ready(hidden)
            seconds.append(time.perf_counter() - began)
        row = {"name": f"chunk {chunk}", "batch": 1, "milliseconds": digits(1000 * min(seconds[1:]))}
        yield row | {"tokens_per_second": digits(chunk / min(seconds[1:]))}


def engine_rows(bench: Bench, until: float) -> Iterator[dict[str, Any]]:
    """The engine's loop over rows that start together and run two intervals: tokens a second and the host's share."""
    policy = r_kv(bench.budget, interval=bench.interval)
    new = 2 * bench.interval
    for batch in bench.batches:
        if time.perf_counter() > until:
            yield {"name": "r_kv", "batch": batch, "not_timed": "out of time"}
            continue
        engine = Engine(bench.model, max_running=batch, max_slots=bench.budget + bench.interval, policies=[policy])
        for _ in range(2):  # the first run compiles
            before = engine.stats.tokens, engine.stats.seconds, engine.stats.host_seconds
            prompts = np.random.default_rng(0).integers(1, bench.model.config.vocab_size, (batch, min(64, bench.budget)))
            for prompt in prompts:
                engine.submit(prompt, policy, GREEDY, max_new_tokens=new, stop_ids=())
            engine.run()
            for ticket in list(engine.tickets):
                complete(engine.result(ticket))
        after = engine.stats.tokens, engine.stats.seconds, engine.stats.host_seconds
        tokens, seconds, host = (now - then for now, then in zip(after, before, strict=True))
        row = {"name": "r_kv", "batch": batch, "tokens_per_second": digits(tokens / seconds)}
        yield row | {"milliseconds": digits(1000 * seconds / new), "host_share": digits(host / seconds, 3)}


def stress_rows(bench: Bench, until: float) -> Iterator[dict[str, Any]]:
    """R-KV's setting: the rows that fit, steps timed at several lengths, and tokens a second of the whole."""
    compressed = r_kv(bench.budget, interval=bench.interval)
    length = min(PROMPT + bench.new_tokens, bench.model.config.max_positions)
    rows = {
        name: min(bench.most_rows, plan(bench.model, bench.device, policy, length, min(PROMPT, length // 2)).own.batch)
        for name, policy in (("full", full()), ("r_kv", compressed))
    }
    settings = [("full", full(), rows["full"]), ("r_kv", compressed, rows["full"]), ("r_kv", compressed, rows["r_kv"])]
    for name, policy, batch in settings:
        yield timed_row(name, batch, until, whole_life, bench, policy, batch, length, until)


def whole_life(bench: Bench, policy: Policy, batch: int, length: int, until: float) -> dict[str, Any]:
    """Tokens a second over a row's life, by Simpson's rule over steps at the start, the middle and the end of growth.

    Compactions count in the time and not in the roofline.
    """
    grown = length if policy.budget is None else bench.budget
    lengths = [PROMPT, (PROMPT + grown) // 2, grown] if policy.budget is None else [bench.budget + bench.interval // 2]
    step, own = [], STEPS * (ROUNDS + 1)  # steps that a measurement takes
    for slots in lengths:  # in a pool of the same size, for which the step is compiled once
        if time.perf_counter() > until:
            return {"not_timed": "out of time"}
        row = timed_step(bench, policy, np.full(batch, min(slots, length) - own), longest=max(lengths))
        step.append(row["milliseconds"])
    mean = step[0] if len(step) == 1 else (step[0] + 4 * step[1] + step[2]) / 6
    added = 0.0
    if policy.budget is not None:
        added = timed_compaction(bench, policy, batch, mean)["milliseconds"]
    whole, usual = mean + added, float(np.mean(lengths))
    best = 1000 * roofline(bench, policy, usual, batch)
    figures = {"milliseconds": digits(whole), "tokens_per_second": digits(1000 * batch / whole), "slots": round(usual)}
    return figures | {"roofline_milliseconds": digits(best), "times_roofline": digits(whole / best, 3)}


PARTS: dict[str, Callable[[Bench, float], Iterator[dict[str, Any]]]] = {
    "step": step_rows,
    "kernels": kernels_rows,
    "peers": peers_rows,
    "prefill": prefill_rows,
    "engine": engine_rows,
    "stress": stress_rows,
}

if __name__ == "__main__":
    sys.exit(main())
