"""How long a decode step would take on an H200: what is counted, over named assumptions of how near each part comes to a limit.

`python -m tests.aot.forecast` compiles a compaction and a step of two layers, takes the other counts from
`results/decode-steps.json`, and writes `results/forecast.json` and the table of `docs/kernel-notes.md`. Some figures come from
an H200 (`results/device-nvidia-h200.json`). The whole step was timed later; the assumptions stay, to be compared with it.
"""

import dataclasses
import json
import re
from typing import Any, NamedTuple

import jax.numpy as jnp

from jkv.model.sampling import BITS_A_PASS
from jkv.planning import roofline
from jkv.planning.devices import DEVICES
from jkv.policies import r_kv
from jkv.reports import ROOT, markdown, page_with, write_json, write_text
from pallas_kernels.paged_attention.gpu import num_pieces
from tests.aot import targets
from tests.aot.decode_steps import LAUNCHED, MODELS, Setting, compile_and_dump, compiled_step
from tests.support import programs

SETTING = Setting("h200", "r1-llama-8b", 110, 128, 1152)
CONFIG, POLICY = MODELS[SETTING.model], r_kv(programs.BUDGET, programs.INTERVAL)
PROMPT, NEW = 512, 16_384  # tokens of a row, as in `decode_steps.bytes_of`
STEPS, COUNTS, PAGE = (ROOT / name for name in ("results/decode-steps.json", "results/forecast.json", "docs/kernel-notes.md"))
STREAMING = 5  # kernels of a layer that stream weights or slots: four products and attention
CUT_PASSES = 2 * 32 // BITS_A_PASS  # over the logits, to find the last token of top-k and of top-p


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What no compiler can tell; seconds, bytes a second, and shares of a limit."""

    bandwidth: float = 4.18e12  # measured: what a copy reads and writes, of 4.8 in the data sheet
    products: float = 0.83  # of it
    attention: float = 0.907  # of it, measured with 128 rows
    kernel: float = 2e-6  # of a kernel that moves little
    gap: float = 0.85e-6  # from the end of a kernel to the beginning of the next in a CUDA graph
    compaction: float = 0.24  # of the roofline; measured: its three large kernels, in batches of 128 and 32 rows


class Counts(NamedTuple):
    """What is read from compiled programs."""

    layer_kernels: int
    other_kernels: int
    weight_gb: float
    attention_gb: float
    compaction_kernels: int  # of one row in all layers
    logit_passes: int  # over the logits of all rows in a step whose draws are not cut
    parts: int  # that attention leaves of a row and KV head for another kernel to combine


class Compaction(NamedTuple):
    """The compiled compaction of one row in all layers, and how many kernels it launches."""

    program: Any
    num_kernels: int


def compaction() -> Compaction:
    """R-KV's, in one CUDA graph."""
    shapes = programs.shapes_of(
        CONFIG,
        dtype=jnp.bfloat16,
        page_size=targets.TARGETS[SETTING.target][2],
        sharding=targets.sharding_of(SETTING.target),
        needs=programs.QUERIES,
        num_rows=SETTING.batch,
        slots=SETTING.slots,
        pool_gb=SETTING.pool_gb,
    )
    program, thunks = compile_and_dump(SETTING.target, lambda shapes: programs.compact("r_kv", shapes), shapes)
    assert thunks.count("kCommandBuffer") == 1, "What stands between two graphs is launched by itself."
    return Compaction(program, len(LAUNCHED.findall(thunks)))


def logit_passes(text: str, rows: int) -> int:
    """How often a compiled step reads all rows' logits, in reductions, or writes them."""
    wanted = f"f32[{rows},{CONFIG.vocab_size}]"
    holders, passes = set(), 0
    for name, made, kind, operands in re.findall(r"%(\S+) = (.*?) (\S+)\((.*?)\)", text):
        holders |= {f"%{name}"} if wanted in made else set()
        if kind in ("fusion", "custom-call"):
            passes += wanted in made
            is_reduction = "reduce" in name
            passes += is_reduction and any(operand.strip() in holders for operand in operands.split(","))
    return passes


def parts_of_row(text: str) -> int:
    """How many parts of each row a compiled step's attention leaves; 0 where its programs take whole rows."""
    return num_pieces(SETTING.slots) * ("paged_attention_combine" in text)


def counts_of(compaction: int, passes: int, parts: int) -> Counts:
    """All counts, those of the step from `results/decode-steps.json`."""
    steps = json.loads(STEPS.read_text())["steps"]
    (step,) = (one for one in steps if Setting(**{name: one[name] for name in Setting._fields if name in one}) == SETTING)
    kernels, moved = (step["layer_kernels"], step["other_kernels"]), step["gb"]
    return Counts(*kernels, moved["weights"], moved["attention"], compaction, passes, parts)


class Part(NamedTuple):
    """A row of the table: what it counts, what it assumes, and its seconds."""

    name: str
    counted: str
    seconds: float


def parts_of(counts: Counts, assumed: Assumed) -> list[Part]:
    """The parts of a step, one after the other."""
    layers, rows, rate = CONFIG.num_layers, SETTING.batch, assumed.bandwidth
    values = CONFIG.num_query_heads * (CONFIG.head_size + 1)  # of a row's output and its log-sums
    moved = 2 * 4 * layers * rows * counts.parts * values / 1e9
    logits = 4 * rows * CONFIG.vocab_size / 1e9
    small = counts.layer_kernels - STREAMING
    kernels = layers * counts.layer_kernels + counts.other_kernels
    life = roofline.lifetime(POLICY, PROMPT, NEW, layers)
    cost = roofline.compaction_cost(CONFIG, POLICY, life, vector=2 * CONFIG.head_size)
    often = life.compactions * rows / NEW  # compactions for each step
    gb, tflop = cost.num_bytes / life.compactions / 1e9, cost.flops / life.compactions / 1e12
    peak = DEVICES[SETTING.target].rate_of(2)
    assert peak
    compaction = (1e9 * gb / rate + 1e12 * tflop / peak) / assumed.compaction
    compaction += counts.compaction_kernels * (assumed.kernel + assumed.gap)
    pause, each = f"{1e6 * assumed.gap:g} microseconds", f"{1e6 * assumed.kernel:g} microseconds"
    combined = [Part("parts of rows, written and read by the combination", f"{moved:.1f} GB", 1e9 * moved / rate)]
    return [
        Part(
            "products",
            f"{counts.weight_gb:.1f} GB of weights; {100 * assumed.products:.0f} % of the memory's speed assumed",
            1e9 * counts.weight_gb / rate / assumed.products,
        ),
        Part(
            "attention",
            f"{counts.attention_gb:.1f} GB; {100 * assumed.attention:.0f} % measured",
            1e9 * counts.attention_gb / rate / assumed.attention,
        ),
        *(combined if moved else []),
        Part("sampling", f"{counts.logit_passes} passes over {1e3 * logits:.0f} MB", 1e9 * counts.logit_passes * logits / rate),
        Part(
            f"the other kernels: {small} a layer, {counts.other_kernels} a step",
            f"{each} each assumed",
            (layers * small + counts.other_kernels) * assumed.kernel,
        ),
        Part(f"gaps between {kernels} kernels", f"{pause} each assumed", kernels * assumed.gap),
        Part(
            f"compaction: {often:.2f} rows a step",
            f"{gb:.2f} GB, then {tflop:.2f} TFLOP, {100 * assumed.compaction:.0f} % of the memory's and the arithmetic's speed "
            f"measured; {counts.compaction_kernels} kernels, and their gaps",
            often * compaction,
        ),
    ]


def bound_gb(counts: Counts) -> float:
    """GB that a step must move, by the roofline: the logits once written and once read."""
    return counts.weight_gb + counts.attention_gb + 8 * SETTING.batch * CONFIG.vocab_size / 1e9


def ratio(counts: Counts, assumed: Assumed) -> float:
    """A step's time over its bound."""
    return sum(part.seconds for part in parts_of(counts, assumed)) * assumed.bandwidth / 1e9 / bound_gb(counts)


def report(counts: Counts, assumed: Assumed) -> str:
    """The table, and what it comes to."""
    parts = parts_of(counts, assumed)
    moved = bound_gb(counts)
    cells = [(part.name, part.counted, f"{1e3 * part.seconds:.2f}") for part in parts]
    cells += [("sum", "", f"{1e3 * sum(part.seconds for part in parts):.2f}")]
    cells += [("bound: all bytes at the memory's speed", f"{moved:.1f} GB", f"{1e12 * moved / assumed.bandwidth:.2f}")]
    cut = 1e3 * CUT_PASSES * 4 * SETTING.batch * CONFIG.vocab_size / assumed.bandwidth
    table = markdown(("part", "counted", "ms"), cells)
    return f"{table}\n\nThat is {ratio(counts, assumed):.2f} times the bound. Draws cut by top-k or top-p add {cut:.1f} ms."


def recorded() -> Counts:
    """The counts of the last run."""
    found = json.loads(COUNTS.read_text())
    return counts_of(found["compaction_kernels"], found["logit_passes"], found["parts"])


def main() -> None:
    """Compiles, and writes the counts and the page."""
    text = compiled_step(SETTING, 2).program.as_text()
    counts = counts_of(compaction().num_kernels, logit_passes(text, SETTING.batch), parts_of_row(text))
    assumed = Assumed()
    record: dict[str, Any] = {name: getattr(counts, name) for name in ("compaction_kernels", "logit_passes", "parts")}
    seconds = {part.name: round(part.seconds, 6) for part in parts_of(counts, assumed)}
    record |= {"assumed": dataclasses.asdict(assumed), "seconds": seconds, "ratio": round(ratio(counts, assumed), 3)}
    write_json(COUNTS, record)
    write_text(PAGE, page_with(PAGE.read_text(), {"forecast": report(counts, assumed)}))
    print(report(counts, assumed))


if __name__ == "__main__":
    main()
