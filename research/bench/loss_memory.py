"""The memory of a replayed loss's gradient: `python -m research.bench.loss_memory --tokens 4096` on a CPU.

One text of random tokens, evicted as by a window of `--budget` tokens; random weights of a model's shape; and an adapter of
`--rank` on each matrix, which is all that is trained. "planned" is what the compiled program says before it runs, of temporary
arrays and outputs, without weights; "used" is how far this process's peak rose above its memory before the run. With jax 0.10,
set `XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=false`, without which a CPU undoes `remat`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.bench.rounds import timer
from jkv.cache.attention import OPEN_END
from jkv.checkpoints.model_shapes import find_shape
from jkv.limits import parse
from jkv.model.adapter_stacks import is_low_rank
from jkv.model.params import ModelConfig, Params
from jkv.model.sampling import Sampling, rows_of
from jkv.model.weight_shapes import init_params
from jkv.replay.columns import trace_columns
from jkv.replay.trace import Trace
from jkv.rl import Batch, policy_loss
from jkv.testing import adapted
from research.bench.peer_worker import forget_peak, peak_rss


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose shape the weights have: a name or a TOML file")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--remat", action=argparse.BooleanOptionalAction, default=True)
    options = parse(parser)
    print(json.dumps(memory_of_a_step(options.model, options.tokens, options.budget, options.rank, options.remat)))


def memory_of_a_step(model: str, tokens: int, budget: int, rank: int, remat: bool) -> dict[str, Any]:
    """MB that are planned and used on a CPU, and the seconds of the run."""
    name, config = find_shape(model)
    params = adapted(init_params(config, jax.random.key(0), dtype=jnp.float32), rank)
    batch = windowed(config, tokens, budget)
    leaves, tree = jax.tree.flatten(params, is_leaf=is_low_rank)
    held = [leaf.base if is_low_rank(leaf) else leaf for leaf in leaves]
    trained = [(leaf.down, leaf.up) if is_low_rank(leaf) else None for leaf in leaves]

    def loss(trained: list[Any], held: list[Any], batch: Batch) -> Any:
        rebuilt: list[Any] = [
            base if pair is None else leaf.replace(base=base, down=pair[0], up=pair[1])
            for leaf, base, pair in zip(shapes, held, trained, strict=True)
        ]
        weights: Params = jax.tree.unflatten(tree, rebuilt)
        return policy_loss(weights, batch, remat=remat)[0]

    shapes = jax.eval_shape(lambda: leaves)
    step = jax.jit(jax.grad(loss)).lower(trained, held, batch).compile()
    planned = step.memory_analysis()
    assert planned is not None
    jax.block_until_ready((trained, held, batch))
    forget_peak()
    before = own_rss()
    with timer() as seconds:
        gradient = jax.block_until_ready(step(trained, held, batch))
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)):
        raise ValueError("The gradient must be finite; it is not.")
    megabytes = {
        "planned": planned.temp_size_in_bytes + planned.output_size_in_bytes,
        "used": peak_rss() - before,
        "weights": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
    }
    asked = {"model": name, "tokens": tokens, "budget": budget, "rank": rank, "remat": remat}
    return (
        asked | {f"{key}_mb": round(value / 1e6) for key, value in megabytes.items()} | {"seconds": round(seconds.running, 1)}
    )


def windowed(config: ModelConfig, tokens: int, budget: int) -> Batch:
    """A text of which each token reads itself and the last `budget` to `budget + interval - 1` ones."""
    shape = (1, config.num_paged_layers, config.num_kv_heads, tokens)
    place, interval = np.arange(tokens), max(1, budget // 4)
    end = place + budget + interval - place % interval
    source, begin, ended = (
        np.broadcast_to(x.astype(np.int32), shape) for x in (place, place, np.where(end < tokens, end, OPEN_END))
    )
    ones = jnp.ones((1, tokens))
    return Batch(
        token=jax.random.randint(jax.random.key(1), (1, tokens), 0, config.vocab_size),
        mask=ones > 0,
        sampled=-ones,
        advantage=ones,
        settings=jax.tree.map(jnp.asarray, rows_of([Sampling()])),
        columns=trace_columns(Trace.of(source, begin, ended), tokens),
        start=jnp.zeros(1, jnp.int32),
    )


def own_rss() -> int:
    """Bytes of memory that this process has."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
