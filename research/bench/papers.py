"""The papers' own throughput tables, at shapes scaled to this machine: ratios against the full cache, beside the papers'.

On an accelerator the shapes are the papers', with random weights (`--scale 1`). On a CPU the models shrink (`shrunk`: the same
group of query heads, the same ratio of layers, heads and widths), and lengths and budgets are divided by `scale`: absolute
figures are then of another machine and another model, and only ratios compare. Random weights repeat no thought, so SkipKV's
and ReasonCache's tables, which need text, are of tiny-reasoner on problems of its own task.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from jkv.bench.fixtures import random_model
from jkv.bench.rounds import GREEDY, in_turns, median_and_spread, timer
from jkv.bench.throughput import Load
from jkv.bench.throughput import run as run_load
from jkv.checkpoints import loading as checkpoint
from jkv.engine.memory import num_row_pages
from jkv.engine.results import complete
from jkv.engine.scheduler import CHUNKS
from jkv.evaluation.held_out import held_out
from jkv.eviction import Policy
from jkv.generate import generate
from jkv.model.params import Model, ModelConfig
from jkv.policies import full, make
from jkv.reports import Report, digits, footnote, markdown

SHAPES = {
    "R1-Llama-8B": ModelConfig("llama", 128_256, 4096, 32, 32, 8, 128, 14_336, 131_072, rope_theta=500_000.0),
    "R1-Qwen-7B": ModelConfig("qwen2", 152_064, 3584, 28, 28, 4, 128, 18_944, 131_072, qkv_bias=True),
    "QwQ-32B": ModelConfig("qwen2", 152_064, 5120, 64, 40, 8, 128, 27_648, 131_072, rope_theta=1e6, qkv_bias=True),
}
FEWER_REQUESTS = 16  # R-KV's largest batches are divided by it where lengths are scaled


class Cell(NamedTuple):
    """One figure of a paper's table: a policy beside the full cache, tokens a second or samples a minute of both."""

    table: str
    model: str
    policy: str
    settings: dict[str, int]
    prompt: int
    new_tokens: int
    batch: int
    full_batch: int  # of the full cache beside it, in the same memory
    paper: float
    paper_full: float


def r_kv_cells() -> list[Cell]:
    """R-KV (2505.24133), Tables 1 and 3: the largest batch that the memory of an A100 80G holds, buffer 128."""
    cells = []
    for new_tokens, full_batch, paper_full, rows in (
        (
            8094,
            62,
            849.13,
            ((1024, 402, 3251.52), (1536, 287, 2525.75), (819, 479, 3809.15), (2785, 167, 1608.01), (4423, 105, 1257.83)),
        ),
        (
            16286,
            30,
            347.03,
            ((1024, 402, 3188.82), (1536, 287, 2447.61), (1638, 271, 2300.28), (5570, 82, 797.43), (8847, 46, 584.77)),
        ),
    ):
        for budget, batch, paper in rows:
            settings = {"budget": budget, "interval": 128}
            cells.append(Cell("R-KV 1", "R1-Llama-8B", "r_kv", settings, 98, new_tokens, batch, full_batch, paper, paper_full))
    return cells


RPC_TABLES: dict[tuple[str, str], dict[int, tuple[tuple[float, float, float], ...]]] = {
    # by batch, for 4,096 to 32,768 tokens: full, interval 1,024, interval 4,096; 0 where memory ran out
    ("RPC 5", "R1-Qwen-7B"): {
        8: ((401.50, 448.19, 406.43), (368.72, 428.31, 420.62), (330.41, 407.00, 385.75), (256.92, 385.00, 362.75)),
        16: ((669.53, 848.75, 753.11), (653.04, 794.62, 708.95), (504.50, 751.69, 671.38), (342.88, 650.20, 575.21)),
        32: ((1328.58, 1504.40, 1318.33), (1031.51, 1499.80, 1247.44), (671.83, 1288.51, 1064.05), (0.0, 977.11, 883.43)),
    },
    ("RPC 6", "QwQ-32B"): {
        8: ((128.79, 135.79, 126.59), (109.80, 131.97, 113.32), (93.28, 124.45, 115.75), (64.85, 111.84, 102.57)),
        16: ((213.75, 238.76, 214.27), (173.99, 229.22, 207.28), (117.51, 176.73, 187.97), (0.0, 178.06, 147.26)),
        32: ((351.34, 411.42, 345.02), (228.59, 392.04, 314.67), (0.0, 328.56, 279.34), (0.0, 246.81, 208.48)),
    },
}


def rpc_cells() -> list[Cell]:
    """RPC (2505.13866), Tables 5 and 6: H100, 128 tokens of prompt, a quarter of the thought stays; where full has a figure."""
    return [
        Cell(table, model, "rpc", {"interval": interval}, 128, 4096 << i, batch, batch, paper, figures[0])
        for (table, model), batches in RPC_TABLES.items()
        for batch, lengths in batches.items()
        for i, figures in enumerate(lengths)
        for interval, paper in zip((1024, 4096), figures[1:], strict=True)
        if figures[0]
    ]


class TextCell(NamedTuple):
    """A figure of a table that needs text: a policy on problems, all at once, in a share of the pool of their full caches."""

    table: str
    model: str
    policy: str
    settings: dict[str, Any]
    batch: int
    pool_share: float
    page_size: int
    paper: float
    paper_full: float


SKIP_KV = {"budget": 192, "interval": 16, "window": 4}
TEXT_CELLS = [
    # SkipKV (2512.07993), Table 1: GSM8K samples a minute, budget 512 of at most 8,192 tokens, A100 40G
    TextCell("SkipKV 1", "R1-Qwen-7B", "r_kv", SKIP_KV, 10, 1.0, 16, 5.81, 4.07),
    TextCell("SkipKV 1", "R1-Qwen-7B", "skip_kv", SKIP_KV | {"tau": 0.9}, 10, 1.0, 16, 9.70, 4.07),
    TextCell("SkipKV 1", "R1-Qwen-7B", "r_kv", SKIP_KV, 50, 1.0, 16, 13.7, 2.64),
    TextCell("SkipKV 1", "R1-Qwen-7B", "skip_kv", SKIP_KV | {"tau": 0.9}, 50, 1.0, 16, 22.7, 2.64),
    # ReasonCache (2507.21433), Table I: the average of tokens a second, A800, vLLM
    TextCell("ReasonCache I", "R1-Qwen-32B", "reason_cache", {"warm_up": 64}, 32, 1 / 3, 4, 254.53, 162.82),
    TextCell("ReasonCache I", "R1-Qwen-32B", "random_share", {}, 32, 1 / 3, 4, 251.15, 162.82),
]


def shrunk(config: ModelConfig) -> ModelConfig:
    """A model with an eighth of the layers, a quarter of the KV heads, and all widths a sixteenth; the group is the same."""
    heads = max(1, config.num_kv_heads // 4)
    return dataclasses.replace(
        config,
        vocab_size=config.vocab_size // 16,
        width=config.width // 16,
        num_layers=config.num_layers // 8,
        num_query_heads=heads * config.group_size,
        num_kv_heads=heads,
        head_size=32,
        mlp_width=config.mlp_width // 16,
    )


def chosen_cells(is_quick: bool, has_accelerator: bool) -> list[Cell]:
    """What is measured: all on an accelerator; elsewhere R-KV's, and the middle batch of RPC's Table 5 at two lengths."""
    cells = [*r_kv_cells(), *rpc_cells()]
    if is_quick:
        return [cells[0], next(cell for cell in cells if cell.policy == "rpc")]
    if has_accelerator:
        return cells
    few = [cell for cell in rpc_cells() if cell.table == "RPC 5" and cell.batch == 16 and cell.new_tokens in (8192, 32768)]
    return [*r_kv_cells(), *few]


def measure(scale: float, rounds: int, quick: bool = False, report: Report = print) -> dict[str, Any]:
    """Every cell's ratio in this engine beside the paper's."""
    records: list[dict[str, Any]] = []

    def keep(cell: Cell | TextCell, ran: dict[str, Any]) -> None:
        paper = {"paper": cell.paper, "paper_full": cell.paper_full, "paper_ratio": digits(cell.paper / cell.paper_full)}
        records.append({"table": cell.table, "paper_model": cell.model, "policy": cell.policy} | paper | ran)
        report(records[-1])

    models: dict[str, Model] = {}
    for cell in chosen_cells(quick, jax.default_backend() != "cpu"):
        if cell.model not in models:
            config = SHAPES[cell.model] if scale == 1 else shrunk(SHAPES[cell.model])
            models[cell.model] = random_model(config, cell.model if scale == 1 else f"{cell.model}, shrunk")
        keep(cell, measure_cell(models[cell.model], cell, scale, rounds))
        jax.clear_caches()
    tiny = checkpoint.load("tiny-reasoner")
    for text in TEXT_CELLS[:1] if quick else TEXT_CELLS:
        keep(text, measure_text(tiny, text, rounds))
        jax.clear_caches()
    return {"scale": scale, "rounds": rounds, "models": sorted({one["model"] for one in records}), "records": records}


def measure_cell(model: Model, cell: Cell, scale: float, rounds: int) -> dict[str, Any]:
    """A policy and the full cache, each in the batch that the paper gives it, in one pool: that of the full caches."""
    fewer = FEWER_REQUESTS if scale > 1 and cell.batch != cell.full_batch else 1
    prompt, new_tokens = max(1, round(cell.prompt / scale)), round(cell.new_tokens / scale)
    full_batch = max(1, round(cell.full_batch / fewer))
    policy = scaled(cell.policy, cell.settings, scale)
    pool = full_batch * (prompt + new_tokens)
    loads = {"full": Load(full_batch, prompt, new_tokens, pool)}
    loads["own"] = Load(max(1, round(cell.batch / fewer)), prompt, new_tokens, pool)
    policies = {"full": full(), "own": policy}
    calls = {name: functools.partial(run_load, model, loads[name], policies[name]) for name in loads}
    results = in_turns(calls, rounds)
    rates = {name: median_and_spread([one.tokens / one.seconds for one in runs])[0] for name, runs in results.items()}
    return {
        "model": repr(model),
        "settings": policy.budget or cell.settings,
        "requests": [loads["own"].requests, full_batch],
        "tokens": [prompt, new_tokens],
        "pool_tokens": pool,
        "unit": "tokens/s",
        "rate": digits(rates["own"]),
        "full_rate": digits(rates["full"]),
        "ratio": digits(rates["own"] / rates["full"]),
        "peak_kv_bytes": [results[name][-1].peak_kv_bytes for name in ("own", "full")],
    }


def scaled(name: str, settings: dict[str, int], scale: float) -> Policy:
    """A policy with its slots and steps divided by `scale`, in whole chunks of the engine where it counts steps."""
    least = {"budget": CHUNKS[0], "interval": CHUNKS[0]}
    own = {field: max(least[field], round(value / scale)) for field, value in settings.items()}
    own["interval"] = round(own["interval"] / CHUNKS[0]) * CHUNKS[0]
    return make(name, own | ({"window": CHUNKS[0]} if name == "rpc" and scale > 1 else {}))


def measure_text(model: Model, cell: TextCell, rounds: int) -> dict[str, Any]:
    """A policy and the full cache on the same problems to their own end."""
    prompts = [problem.prompt for problem in held_out(cell.batch)]
    whole = num_row_pages(model.params, model.config.max_positions // 2, cell.page_size)
    num_pages = max(whole + 1, round(cell.pool_share * cell.batch * whole))
    policies = {"full": full(), "own": make(cell.policy, cell.settings)}
    options: dict[str, Any] = {"max_running": cell.batch, "page_size": cell.page_size, "num_pages": num_pages}
    calls = {name: functools.partial(run_text, model, prompts, policy, options) for name, policy in policies.items()}
    results = in_turns(calls, rounds)
    is_samples = cell.table.startswith("SkipKV")
    rates = {name: median_and_spread([one[0 if is_samples else 1] for one in runs])[0] for name, runs in results.items()}
    return {
        "model": repr(model),
        "settings": cell.settings,
        "requests": [cell.batch, cell.batch],
        "tokens": "to their end",
        "pool_share": cell.pool_share,
        "unit": "samples/min" if is_samples else "tokens/s",
        "rate": digits(rates["own"]),
        "full_rate": digits(rates["full"]),
        "ratio": digits(rates["own"] / rates["full"]),
        "peak_kv_bytes": [results[name][-1][2] for name in ("own", "full")],
    }


def run_text(model: Model, prompts: list[str], policy: Policy, options: dict[str, Any]) -> tuple[float, float, int]:
    """Samples a minute and tokens a second, wall time but for compiling, and the most bytes held."""
    limit = model.config.max_positions // 2 - 64
    with timer() as seconds:
        out = generate(model, prompts, policy=policy, sampling=GREEDY, max_new_tokens=limit, progress=False, **options)
    return 60 * len(prompts) / seconds.running, float(complete(out).lengths.sum()) / seconds.running, out.stats.peak_kv_bytes


COLUMNS = (
    "table",
    "paper's model",
    "policy",
    "settings",
    "batch (full's)",
    "tokens",
    "rate",
    "full's",
    "ratio",
    "paper's ratio",
    "paper's rates",
)


def row_of(one: dict[str, Any]) -> tuple[Any, ...]:
    """A line of the table."""
    settings = one["settings"]
    shown = (
        ", ".join(f"{name} {value}" for name, value in settings.items()) if isinstance(settings, dict) else f"budget {settings}"
    )
    return (
        one["table"],
        one["paper_model"],
        one["policy"],
        shown,
        f"{one['requests'][0]} ({one['requests'][1]})",
        one["tokens"] if isinstance(one["tokens"], str) else " + ".join(map(str, one["tokens"])),
        f"{one['rate']:,.0f} {one['unit']}",
        f"{one['full_rate']:,.0f}",
        f"**{one['ratio']:.2f}**",
        f"**{one['paper_ratio']:.2f}**",
        f"{one['paper']:,.0f} and {one['paper_full']:,.0f}",
    )


def table(record: dict[str, Any]) -> str:
    """Our ratio beside each paper's."""
    scale = record["scale"]
    shapes = "the papers' shapes, random weights" if scale == 1 else f"shapes shrunk, lengths and budgets divided by {scale:g}"
    caption = (
        f"Ratios against the full cache in the same run, beside the papers'; {shapes}. Rates are of this machine and these "
        f"models ({'; '.join(record['models'])}), not comparable with the papers'."
    )
    return f"{caption}\n\n{markdown(COLUMNS, map(row_of, record['records']))}\n\n{footnote(record)}"
