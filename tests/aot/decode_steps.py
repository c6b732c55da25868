"""What a decode step compiles to at the sizes of production: kernels, memory, and what XLA computes twice.

`python -m tests.aot.decode_steps --out results` compiles every setting of `SETTINGS`, for devices that need not be there, and
writes `decode-steps.json` and `decode-steps.md`. A setting takes half a minute on a CPU, on a TPU several times as long.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from jkv.engine.device_program import LEAST_ROWS
from jkv.engine.drafters import Ngram
from jkv.planning import roofline
from jkv.policies import r_kv
from jkv.testing import assert_no_pool_copy
from tests.aot import targets
from tests.support import programs

MODELS = {"r1-llama-8b": programs.R1_LLAMA, "r1-qwen-1.5b": programs.R1_QWEN}
LAUNCHED = re.compile(r"\d+: (k(?!CommandBuffer|While|Conditional|Sequential|DynamicSliceFusion)\w+) ")
LAYERS = 2, 6  # that are compiled: outside of the layers, XLA may make a kernel more or less of the same operations
OF_A_TPU = re.compile(
    r" (?:fusion|custom-call|copy|convolution|scatter|gather|sort|dynamic-update-slice|dynamic-slice|reduce)\("
)


class Setting(NamedTuple):
    """A device, the size of its pool and the batch; R-KV with a ring of eight queries, `slots` per row and KV head.

    With `drafts`, a step checks so many guesses in each row.
    """

    target: str
    model: str
    pool_gb: float
    batch: int
    slots: int
    drafts: int = 0


class Step(NamedTuple):
    """What a step of a setting compiles to."""

    layer_kernels: int  # of each layer but the first
    other_kernels: int  # embedding, sampling, the allocator, and the loop's own
    command_buffers: int  # CUDA graphs per step; 0 on a TPU
    computed_twice: int  # operations that XLA repeats to save memory
    temporary_bytes: int  # of the program with all layers, as those of two and more for each further one

    def kernels(self, num_layers: int) -> int:
        """Kernels of a whole step."""
        return self.other_kernels + num_layers * self.layer_kernels


SETTINGS = (
    Setting("h200", "r1-llama-8b", 110, 1, 1152),
    Setting("h200", "r1-llama-8b", 110, 32, 1152),
    Setting("h200", "r1-llama-8b", 110, 128, 1152),
    Setting("h200", "r1-llama-8b", 110, 512, 1152),
    Setting("h200", "r1-llama-8b", 110, 32, 16_384),
    Setting("h200", "r1-llama-8b", 60, 128, 1152),
    Setting("h200", "r1-llama-8b", 25, 128, 1152),
    Setting("h100", "r1-llama-8b", 60, 128, 1152),
    Setting("h100", "r1-llama-8b", 25, 32, 16_384),
    Setting("tpu-v6e", "r1-qwen-1.5b", 25, 1, 1152),
    Setting("tpu-v6e", "r1-qwen-1.5b", 25, 32, 1152),
    Setting("tpu-v6e", "r1-qwen-1.5b", 25, 128, 1152),
    Setting("tpu-v6e", "r1-qwen-1.5b", 25, 512, 1152),
    Setting("tpu-v6e", "r1-qwen-1.5b", 25, 32, 16_384),
    Setting("tpu-v5e", "r1-qwen-1.5b", 10, 32, 1152),
    Setting("tpu-v5e", "r1-qwen-1.5b", 10, 128, 1152),
)


class Compiled(NamedTuple):
    """A program of some layers."""

    program: jax.stages.Compiled
    kernels: int  # of a step
    command_buffers: int
    state: Any


def compiled_step(setting: Setting, num_layers: int, **options: Any) -> Compiled:
    """The decode program of a setting with some of the model's layers; the pool holds the pages of all."""
    config = dataclasses.replace(MODELS[setting.model], num_layers=num_layers)
    platform, _, page_size = targets.TARGETS[setting.target]
    shapes = programs.shapes_of(
        config,
        dtype=jnp.bfloat16,
        page_size=page_size,
        sharding=targets.sharding_of(setting.target),
        needs=programs.QUERIES,
        num_rows=max(setting.batch, LEAST_ROWS.get(platform, 1)),
        slots=setting.slots,
        pool_gb=setting.pool_gb,
        places=setting.drafts + 1,
    )
    drafter = Ngram(setting.drafts) if setting.drafts else None
    program, thunks = compile_and_dump(setting.target, functools.partial(programs.decode, drafter=drafter), shapes, options)
    if platform != "cuda":
        return Compiled(program, len(OF_A_TPU.findall(loop_body(program.as_text()))), 0, shapes.state)
    body = thunks.split("  body:", 1)[1]
    body = re.split(r"\n\d", body)[0]  # the loop's body is indented
    return Compiled(program, len(LAUNCHED.findall(body)), body.count("kCommandBuffer"), shapes.state)


def compile_and_dump(
    target: str, trace: Callable[..., Any], shapes: programs.Shapes, options: dict[str, Any] | None = None
) -> tuple[jax.stages.Compiled, str]:
    """A program, and the list of what it launches on a GPU; empty on a TPU."""
    if targets.TARGETS[target][0] != "cuda":
        return targets.compile_for(target, trace, shapes, compiler_options=options), ""
    with tempfile.TemporaryDirectory() as folder:
        dumps = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} | (options or {})
        program = targets.compile_for(target, trace, shapes, compiler_options=dumps)
        return program, max((path.read_text() for path in Path(folder).glob("*.thunk_sequence_after*.txt")), key=len)


def loop_body(text: str) -> str:
    """The longest body of a loop: that over decode steps."""
    computations = {one.split(maxsplit=1)[0].lstrip("%"): one for one in re.split(r"\n}\n+", text) if one.strip()}
    return max((computations[name] for name in re.findall(r"body=%([\w.-]+)", text)), key=lambda one: one.count("\n"))


def computed_twice(program: jax.stages.Compiled) -> int:
    """Instructions that XLA repeats to save memory, which it marks in their names."""
    return len(set(re.findall(r"%\S*\.remat\S* = ", program.as_text())))


def step_of(setting: Setting) -> Step:
    """What a setting's step compiles to. Asserts that no pool is copied."""
    few, more = (compiled_step(setting, layers) for layers in LAYERS)
    for one in (few, more):
        assert_no_pool_copy(one.program, one.state.cache.pool)
    further = LAYERS[1] - LAYERS[0]
    layer = round((more.kernels - few.kernels) / further)
    memory = [one.program.memory_analysis().temp_size_in_bytes for one in (few, more)]
    whole = memory[0] + (MODELS[setting.model].num_layers - LAYERS[0]) * max(0, memory[1] - memory[0]) // further
    twice = max(computed_twice(one.program) for one in (few, more))
    return Step(layer, more.kernels - LAYERS[1] * layer, max(few.command_buffers, more.command_buffers), twice, whole)


def bytes_of(setting: Setting) -> dict[str, float]:
    """GB that each phase of a step must move at R-KV's mean length, or with all slots filled where they are more."""
    config = MODELS[setting.model]
    policy = r_kv(programs.BUDGET, programs.INTERVAL)
    life = roofline.lifetime(policy, 512, 16_384, config.num_layers)
    if setting.slots > programs.BUDGET + programs.INTERVAL:
        life = life._replace(mean_slots=jnp.full(config.num_layers, setting.slots))
    weights = sum(x.size for x in jax.tree.leaves(programs.weight_shapes(config))) - config.vocab_size * config.width
    costs = roofline.step_costs(
        config,
        policy,
        life,
        weights=weights,
        logits=config.vocab_size,
        itemsize=2,
        page_size=targets.TARGETS[setting.target][2],
        rows=setting.batch,
    )
    return {name: round(cost.num_bytes / 1e9, 3) for name, cost in costs.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """The figures in Markdown."""
    head = (
        "device | model | pool, GB | rows | slots | kernels a layer | others | kernels a step | graphs | computed twice | "
        "scratch, MB | weights, GB | attention, GB | sampling, GB"
    )
    lines = [f"jax {jax.__version__}, compiled ahead of time. A step's bytes are those that it must move.", ""]
    lines += [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    for row in rows:
        moved = [f"{row['gb'][name]:.2f}" for name in ("weights", "attention", "sampling")]
        cells = [row[name] for name in ("target", "model", "pool_gb", "batch", "slots", "layer_kernels", "other_kernels")]
        cells += [row["kernels"], row["command_buffers"], row["computed_twice"], f"{row['temporary_bytes'] / 1e6:.0f}", *moved]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Writes the table after every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for decode-steps.json and decode-steps.md")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for setting in SETTINGS:
        step, layers = step_of(setting), MODELS[setting.model].num_layers
        rows.append(setting._asdict() | step._asdict() | {"kernels": step.kernels(layers), "gb": bytes_of(setting)})
        (options.out / "decode-steps.json").write_text(json.dumps({"jax": jax.__version__, "steps": rows}, indent=1) + "\n")
        (options.out / "decode-steps.md").write_text(table(rows) + "\n")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
