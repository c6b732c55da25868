"""How fast: `python -m jkv.bench.throughput` against Hugging Face transformers, and compressed against full in a small pool.

All in one process, on the same weights and prompts, the contenders in turns; the median of several rounds counts. Every
timing is of a whole call, prefill, sampling and host work included, after one call that compiles. Needs torch.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jkv import checkpoint
from jkv.engine import Engine
from jkv.generate import generate
from jkv.memory import num_row_pages, page_bytes
from jkv.params import Model
from jkv.policies import full, r_kv

# A random Qwen2 of 3.2 million weights: small enough for a laptop, large enough that a step is not all overhead.
CONFIG: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
PROMPT = 16  # tokens
ROUNDS = 5


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=400, help="of the comparison with transformers")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    figures: dict[str, Any] = {"machine": describe_machine()}
    with tempfile.TemporaryDirectory() as folder:
        model = save_random(folder)
        ours = checkpoint.load(folder)
        figures["against_transformers"] = []
        for batch in options.batch:
            figures["against_transformers"].append(against_transformers(model, ours, batch, options.new_tokens, options.rounds))
            print(json.dumps(figures["against_transformers"][-1]), file=sys.stderr, flush=True)
        figures["in_a_quarter_of_the_memory"] = in_a_quarter(ours, options.rounds)
        figures["occupancy"] = occupancy(ours)
    print(json.dumps(figures, indent=1))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def describe_machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {"cores": os.cpu_count(), "machine": platform.machine(), "jax": jax.__version__, "device": str(jax.devices()[0])}


def save_random(folder: str) -> Any:
    """A random model of transformers, also saved as a checkpoint."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**CONFIG)).eval()
    model.save_pretrained(folder)
    return model


def draw_prompts(count: int, length: int = PROMPT) -> list[np.ndarray]:
    """Different prompts of one length."""
    return list(np.random.default_rng(0).integers(1, CONFIG["vocab_size"], (count, length), dtype=np.int32))


def against_transformers(model: Any, ours: Model, batch: int, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of both with full caches, greedy, no end token."""
    import torch

    prompts = draw_prompts(batch)
    ids = torch.tensor(np.stack(prompts), dtype=torch.long)
    outputs: dict[str, np.ndarray] = {}

    def theirs() -> None:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        outputs["transformers"] = out[:, PROMPT:].numpy()

    def mine() -> None:
        out = generate(ours, prompts, max_new_tokens=new_tokens, stop_ids=(), max_running=batch, progress=False)
        outputs["jkv"] = out.tokens
        outputs["host"] = np.array(out.stats.host_seconds / out.stats.seconds)

    seconds = in_turns({"transformers": theirs, "jkv": mine}, rounds)
    speed = {name: batch * new_tokens / value for name, value in seconds.items()}
    return {
        "batch": batch,
        "new_tokens": new_tokens,
        "tokens_per_second": {name: round(value) for name, value in speed.items()},
        "ratio": round(speed["jkv"] / speed["transformers"], 2),
        "equal_tokens": float((outputs["transformers"] == outputs["jkv"]).mean()),
        "host_share": round(float(outputs["host"]), 4),
    }


def in_a_quarter(ours: Model, rounds: int, rows: int = 32, new_tokens: int = 1008) -> dict[str, Any]:
    """`r_kv` and `full` on the same requests and pool, which holds a quarter of the full caches."""
    prompts = draw_prompts(rows)
    full_slots = PROMPT + new_tokens
    num_pages = rows * num_row_pages(ours.params, full_slots, 16) // 4
    policies = {"full": full(), "r_kv": r_kv(budget=128, interval=64)}
    stats: dict[str, Any] = {}

    def call(name: str) -> None:
        out = generate(
            ours,
            prompts,
            policy=policies[name],
            max_new_tokens=new_tokens,
            stop_ids=(),
            max_running=rows,
            num_pages=num_pages,
            progress=False,
        )
        stats[name] = {
            "occupancy": round(out.stats.occupancy, 3),
            "preemptions": out.stats.preemptions,
            "peak_kv_bytes": out.stats.peak_kv_bytes,
        }

    seconds = in_turns({name: lambda name=name: call(name) for name in policies}, rounds)
    speed = {name: rows * new_tokens / value for name, value in seconds.items()}
    return {
        "requests": rows,
        "new_tokens": new_tokens,
        "pool_bytes": num_pages * page_bytes(ours.params, 16),
        "full_caches_bytes": 4 * num_pages * page_bytes(ours.params, 16),
        "policies": {name: repr(policy) for name, policy in policies.items()},
        "tokens_per_second": {name: round(value) for name, value in speed.items()},
        "ratio": round(speed["r_kv"] / speed["full"], 2),
        "stats": stats,
    }


def occupancy(ours: Model, rows: int = 8, requests: int = 64) -> dict[str, Any]:
    """How busy rows are kept by a full queue of skewed lengths: log-normal, the longest ten times the median or more."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(150), 0.9, requests)), 10, 2000).astype(int)
    engine = Engine(ours, max_running=rows, max_slots=2048)
    for prompt, limit in zip(draw_prompts(requests), lengths.tolist(), strict=True):
        engine.submit(prompt, max_new_tokens=limit, stop_ids=())
    while engine.waiting:
        engine.step()
    queued = engine.stats.occupancy
    engine.run()
    return {
        "rows": rows,
        "requests": requests,
        "lengths": {"median": float(np.median(lengths)), "mean": float(lengths.mean()), "max": int(lengths.max())},
        "while_the_queue_was_full": round(queued, 4),
        "whole_run": round(engine.stats.occupancy, 4),
        "host_share": round(engine.stats.host_seconds / engine.stats.seconds, 4),
    }


def in_turns(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each, measured in turns after one call that counts for nothing."""
    for call in contenders.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            began = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in taken.items()}


if __name__ == "__main__":
    main()
