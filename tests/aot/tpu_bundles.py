"""Instruction bundles of compiled TPU kernels, per row of decode attention and per row of new slots.

`python -m tests.aot.tpu_bundles` prints these figures as a table, for TPUs that need not be there. libtpu writes the code of
every kernel it compiles to a folder that is named before libtpu is loaded, so tests run this module as a program.

A row's bundles are those of the loop over the rows: every bundle once, whether its branch is taken or not, and every inner
loop as often as the row runs it. A bundle takes a cycle unless it waits for a result, so these are lower bounds of the time.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import page_fetch
from pallas_kernels.models import MODELS, Workload
from pallas_kernels.paged_attention import shapes
from pallas_kernels.paged_attention import tpu as attention
from pallas_kernels.rotate_append import tpu as append
from pallas_kernels.sealed import page_bytes
from pallas_kernels.sealed_attention import shapes as sealed_shapes
from pallas_kernels.sealed_attention import tpu as sealed
from tests.aot import targets


class Chip(NamedTuple):
    """What a row's bundles are compared with. The clock is an estimate: it is not published."""

    clock_ghz: float
    hbm_gb_per_s: float


CHIPS = {"tpu-v5e": Chip(1.5, 819), "tpu-v6e": Chip(1.75, 1640)}
LLAMA = MODELS["r1-llama-8b"]
R_KV = Workload(batch=32, layers=1)  # 1152 slots a row
INT8 = R_KV._replace(kv_format="int8", layers=None)  # XLA would place the scales of one layer in vector memory
INT4 = INT8._replace(kv_format="int4")
CALLS: dict[str, tuple[Any, Workload, dict[str, bool]]] = {
    "page 128": (LLAMA, R_KV, {}),
    "page 16": (LLAMA, R_KV._replace(page_size=16), {}),
    "page 128, log-weights": (LLAMA, R_KV, {"weighted": True}),
    "page 128, log-weights, logits": (LLAMA, R_KV, {"weighted": True, "with_logits": True}),
    "page 128, head 64": (LLAMA._replace(head_size=64), R_KV, {}),
    "page 128, int8": (LLAMA, INT8, {}),
    "page 128, int8, log-weights": (LLAMA, INT8, {"weighted": True}),
    "page 128, int8, log-weights, logits": (LLAMA, INT8, {"weighted": True, "with_logits": True}),
    "page 128, int8, head 64": (LLAMA._replace(head_size=64), INT8, {}),
    "page 128, fp8": (LLAMA, INT8._replace(kv_format="fp8"), {}),
    "page 128, int4": (LLAMA, INT4, {}),
    "page 128, int4, log-weights": (LLAMA, INT4, {"weighted": True}),
    "page 128, int4, log-weights, logits": (LLAMA, INT4, {"weighted": True, "with_logits": True}),
    "page 128, int4, head 64": (LLAMA._replace(head_size=64), INT4, {}),
}


class Loop(NamedTuple):
    """A loop of a kernel's code."""

    bundles: int  # without its inner loops
    fetches: int  # started in an iteration, without those of its inner loops
    inner: tuple["Loop", ...]

    @property
    def once(self) -> int:
        """Bundles of an iteration whose inner loops run once."""
        return self.bundles + sum(loop.once for loop in self.inner)


class Row(NamedTuple):
    """The figures of a call, in bundles for a row. `hbm` is the time in which the row's slots come from memory."""

    fetch: int
    rest: int
    hbm: int


class Bundle(NamedTuple):
    """A line of code."""

    mark: str | None  # LB: the first one of a loop, PF: the first one behind a branch
    depth: int
    body: str


LINE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?[^:]*:([> ]*)\{(.*)")
EMPTY = re.compile(r"\s*\}")


def loops_of(code: str) -> tuple[Loop, ...]:
    """The loops of a kernel's code."""
    lines = [match.groups() for line in code.splitlines() if (match := LINE.match(line))]
    return parsed([Bundle(mark, arrows.count(">"), body) for mark, arrows, body in lines]).inner


def parsed(bundles: list[Bundle]) -> Loop:
    """The bundles as the body of a loop. The branch back is printed as if it were outside, and so are those that it delays."""
    own, fetches, inner, i = 0, 0, [], 0
    while i < len(bundles):
        mark, depth, body = bundles[i]
        if mark == "LB" and i > 0:
            behind = next((j for j in range(i + 1, len(bundles)) if is_behind(bundles[j], depth)), len(bundles))
            end = max(j for j in range(i, behind) if bundles[j].depth >= depth) + 1
            tail = bundles[end:behind]
            if tail and "sbr.rel" in tail[0].body and all(EMPTY.match(bundle.body) for bundle in tail[1:]):
                end = behind
            inner.append(parsed(bundles[i:end]))
            i = end
        else:
            own, fetches, i = own + 1, fetches + body.count(" = dma.hbm_to_vmem"), i + 1
    return Loop(own, fetches, tuple(inner))


def is_behind(bundle: Bundle, depth: int) -> bool:
    """Whether a bundle comes after a loop of that depth."""
    return (bundle.mark == "LB" and bundle.depth <= depth) or (bundle.mark == "PF" and bundle.depth < depth)


def attention_row(loops: tuple[Loop, ...], block_pages: int, num_pages: int) -> tuple[int, int]:
    """Bundles that fetch the pages of a row that is one block, and all others."""
    (step,) = loops
    row = next(loop for loop in step.inner if any(block.inner for block in loop.inner))
    (block,) = row.inner
    group, one, *_ = (loop for loop in block.inner if loop.fetches)  # those of the row's next block, then the next step's
    clear = [loop for loop in block.inner if not loop.fetches]
    groups, ones = divmod(num_pages, page_fetch.STARTED)
    rest = row.bundles + block.bundles + sum(loop.once for loop in clear) * (block_pages - num_pages)
    return groups * group.once + ones * one.once, rest


class Dump:
    """Compiles kernels and returns their code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"

    def loops(self, target: str, name: str, trace: Callable[..., jax.stages.Traced], *args: Any) -> tuple[Loop, ...]:
        """The loops of the kernel of that name."""
        for path in self.folder.glob("*"):
            path.unlink()
        sharding = targets.sharding_of(target)
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
        targets.compile_for(target, trace, *args)
        (path,) = (x for x in self.folder.glob(f"*{name}*-final_bundles.txt") if "schedule" not in x.name)
        return loops_of(path.read_text())


def attention_figures(dump: Dump, target: str, call: str) -> Row:
    """A row of 1152 slots."""
    (model, workload, options), chip = CALLS[call], CHIPS[target]
    options = dict(options)
    with_logits = options.pop("with_logits", False)
    args = shapes.arguments(model, workload, **options)
    assert attention.why_not(*args, with_logits=with_logits) is None
    run = jax.jit(lambda *args: attention.paged_attention.__wrapped__(*args, with_logits=with_logits))
    loops = dump.loops(target, "paged_attention", run.trace, *args)
    num_pages = workload.max_pages()
    num_bytes = 2 * workload.slots * workload.vector_bytes(model)
    cycles = round(num_bytes / chip.hbm_gb_per_s * chip.clock_ghz)
    return Row(*attention_row(loops, attention.pages_of_block(args[1], num_pages), num_pages), cycles)


def sealed_figures(dump: Dump, target: str) -> Row:
    """A row of 1152 slots, all of them sealed."""
    args, chip = sealed_shapes.arguments(LLAMA, R_KV), CHIPS[target]
    assert sealed.why_not(*args) is None
    loops = dump.loops(target, "sealed_attention", jax.jit(sealed.sealed_attention.__wrapped__).trace, *args)
    form, num_pages = args[1].format, args[2].shape[1]
    num_bytes = num_pages * page_bytes(LLAMA.head_size, R_KV.dtype, form, form.page)
    return Row(*attention_row(loops, num_pages, num_pages), round(num_bytes / chip.hbm_gb_per_s * chip.clock_ghz))


def append_figures(dump: Dump, target: str, workload: Workload) -> int:
    """Bundles to rotate and store the token of a row of 32 query heads and 8 KV heads, and to store the query in a ring."""

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows, heads, kv_heads, dtype = workload.batch, LLAMA.num_query_heads, LLAMA.num_kv_heads, workload.dtype
    angles, ring = of(jnp.float32, rows, LLAMA.head_size // 2), of(dtype, 8 * rows, heads, LLAMA.head_size)
    projected, places = of(dtype, rows, heads + 2 * kv_heads, LLAMA.head_size), of(jnp.int32, rows, kv_heads)
    args = workload.pool(LLAMA), projected, angles, angles, places, ring, of(jnp.int32, rows)
    run = jax.jit(append.rotate_append.__wrapped__, donate_argnums=(0, 5))
    return sum(loop.once for loop in dump.loops(target, "rotate_append", run.trace, *args))  # one grid step, several loops


def figures() -> dict[str, Any]:
    """Target -> call -> figures."""
    jax.config.update("jax_enable_compilation_cache", False)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        dump = Dump(Path(folder))
        for target in CHIPS:
            rows = {call: attention_figures(dump, target, call)._asdict() for call in CALLS}
            rows["page 128, kvarn"] = sealed_figures(dump, target)._asdict()
            appended = {"append": append_figures(dump, target, R_KV), "append int8": append_figures(dump, target, INT8)}
            found[target] = {"attention": rows} | appended
    return found


def table(found: dict[str, Any]) -> str:
    """The figures in Markdown."""
    lines = ["| TPU | call | fetch | rest | all | memory |", "|---|---|---|---|---|---|"]
    for target, of in found.items():
        for call, row in of["attention"].items():
            cells = row["fetch"], row["rest"], row["fetch"] + row["rest"], row["hbm"]
            lines.append(f"| {target[4:]} | {call} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = figures()
    print(json.dumps(found) if "--json" in sys.argv else table(found))
