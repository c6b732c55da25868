"""Trains a small reasoner on a task of arithmetic: `python -m jkv.tasks.train configs/experiments/train-tiny-reasoner.toml`.

A curriculum of stages, each with its own problem sizes and sequence length; problems packed into rows, the prompt's loss
masked; AdamW or Muon; orbax checkpoints, from which a second start of the same command resumes.
The batch of a step depends on nothing but the seed and the step, so a resumed run sees what an unbroken one would.
"""

import argparse
import dataclasses
import functools
import json
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool, Float, Int

from jkv.model import decoder
from jkv.model.model_shapes import read_shape
from jkv.model.params import ModelConfig, Params
from jkv.tasks import trail_vocabulary, vocabulary
from jkv.tasks.batches import Stage, make_batch, read_stage
from jkv.tasks.first_weights import extend, init_to_look_up
from jkv.tasks.optimizers import make_optimizer

TOKENIZERS = {"chains": vocabulary.make_tokenizer, "trails": trail_vocabulary.make_tokenizer}  # by task
LEAST_SHARE = 0.01  # attention to the first token below which a stage's `sink` pulls no harder


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on; `task` is a key of `TOKENIZERS`, `start` a shipped model with whose weights it begins."""

    model: str
    seed: int
    learning_rate: tuple[tuple[int, float], ...]  # rates at steps, straight lines between them
    weight_decay: float
    checkpoint_every: int
    stages: tuple[Stage, ...]
    task: str = "chains"
    start: str | None = None
    optimizer: str = "adamw"

    @property
    def num_steps(self) -> int:
        """Updates of the whole run."""
        return sum(stage.steps for stage in self.stages)


def read_config(path: Path) -> TrainConfig:
    """A `TrainConfig` from a TOML file."""
    fields = tomllib.loads(path.read_text())
    rates = tuple((step, rate) for step, rate in fields["learning_rate"])
    stages = tuple(read_stage(stage) for stage in fields["stages"])
    return TrainConfig(**fields | {"learning_rate": rates, "stages": stages})


def packed_attention(
    layer: int,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    cache: Bool[Array, "B T T"],
) -> tuple[Float[Array, "B T N H"], Bool[Array, "B T T"]]:
    """Attention to what each token sees (`jkv.model.decoder.Attend`); the cache says that (`seen`)."""
    return jax.nn.dot_product_attention(query, key, value, mask=cache[:, None]), cache


def watched_attention(
    layer: int,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    cache: tuple[Bool[Array, "B T T"], Bool[Array, "B T"], Float[Array, ""]],
) -> tuple[Float[Array, "B T N H"], Any]:
    """`packed_attention` that also sums, above the first layer, how far heads are from the first token of their problem."""
    is_seen, is_first, far = cache
    (rows, total, num_heads, size), num_kv_heads = query.shape, key.shape[2]
    grouped = query.reshape(rows, total, num_kv_heads, num_heads // num_kv_heads, size)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key) * size**-0.5
    share = jax.nn.softmax(jnp.where(is_seen[:, None, None], logits, -1e30), axis=-1)
    first = jnp.einsum("bkgts,bs->bkgt", share, is_first.astype(share.dtype))
    far = far - jnp.log(first + LEAST_SHARE).mean() * (layer > 0)
    return jnp.einsum("bkgts,bskh->btkgh", share, value).reshape(query.shape), (is_seen, is_first, far)


def seen(segment: Int[Array, "B T"], end: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Which tokens each token sees: those of its problem up to itself that have not ended."""
    place = jnp.arange(segment.shape[1], dtype=jnp.int32)
    is_open = (place[:, None] >= place) & (place[:, None] < end[:, None, :])
    return is_open & (segment[:, :, None] == segment[:, None, :])


def loss(params: Params, batch: dict[str, Int[Array, "B T1"]], sink: float = 0.0) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean negative log-likelihood of the traces' tokens in nats, and the share of them that the model would pick.

    `sink` times the mean of `-log(attention to the first token)` is added for each layer but the first.
    """
    segment, position = batch["segment"][:, :-1], batch["position"][:, :-1]
    is_seen = seen(segment, batch["end"][:, :-1])
    if sink:
        watched = (is_seen, position == 0, jnp.zeros(()))
        hidden, (*_, far) = decoder.forward(params, batch["token"][:, :-1], position, watched_attention, watched)
    else:
        hidden, _ = decoder.forward(params, batch["token"][:, :-1], position, packed_attention, is_seen)
        far = jnp.zeros(())
    log_probs = jax.nn.log_softmax(decoder.unembed(params, hidden))
    target = batch["token"][:, 1:]
    weight = ((batch["is_target"][:, 1:] > 0) & (segment == batch["segment"][:, 1:])).astype(jnp.float32)
    picked = jnp.take_along_axis(log_probs, target[..., None], axis=-1)[..., 0]
    hits = (jnp.argmax(log_probs, axis=-1) == target).astype(jnp.float32)
    return sink * far - (picked * weight).sum() / weight.sum(), (hits * weight).sum() / weight.sum()


@functools.partial(jax.jit, static_argnames=("optimizer", "sink"), donate_argnames=("params", "state"))
def train_step(
    optimizer: optax.GradientTransformation, params: Params, state: Any, batch: dict[str, Any], sink: float = 0.0
) -> tuple[Params, Any, Any, Any]:
    """One update: new weights and optimiser state, the loss, the share of tokens right."""
    (value, hits), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch, sink)
    update, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, update), state, value, hits


def plan_steps(config: TrainConfig, start: int) -> Iterator[tuple[int, Stage]]:
    """Every step from `start` on with its stage."""
    schedule = [stage for stage in config.stages for _ in range(stage.steps)]
    return iter(list(enumerate(schedule))[start:])


def train(config: TrainConfig, model_config: ModelConfig, folder: Path) -> Params:
    """Runs or resumes a training run whose checkpoints lie in `folder`; returns the last weights."""
    tokenizer = TOKENIZERS[config.task]()
    optimizer = make_optimizer(config.optimizer, config.learning_rate, config.weight_decay)
    key = jax.random.key(config.seed)
    if config.start:
        params = extend(config.start, model_config, tokenizer, key)
    else:
        params = init_to_look_up(model_config, tokenizer, key)
    state = optimizer.init(params)
    step, tokens, began = 0, 0, time.monotonic()
    with ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        if manager.latest_step() is not None:
            step = manager.latest_step()
            target = {"params": params, "state": state}
            restored = manager.restore(step, args=ocp.args.StandardRestore(target))
            params, state = restored["params"], restored["state"]
            print(f"resumed after step {step}", flush=True)
        for step, stage in plan_steps(config, step):  # noqa: B020 -- the loop goes on from the restored step
            batch = make_batch(tokenizer, stage, (config.seed, step), config.task)
            params, state, value, hits = train_step(optimizer, params, state, batch, stage.sink)
            tokens += stage.rows * stage.length
            if (step + 1) % 20 == 0:
                line = {
                    "step": step + 1,
                    "length": stage.length,
                    "loss": round(float(value), 5),
                    "right": round(float(hits), 5),
                }
                rate = tokens / (time.monotonic() - began)
                print(json.dumps(line | {"tokens": tokens, "tokens_per_second": round(rate)}), flush=True)
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.num_steps:
                manager.save(step + 1, args=ocp.args.StandardSave({"params": params, "state": state}))
        manager.wait_until_finished()
    return params


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a TOML file: see configs/experiments/train-tiny-reasoner.toml")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/tiny-reasoner"), help="kept across starts")
    parser.add_argument("--out", type=Path, help="write the finished model here, as a Hugging Face checkpoint folder")
    arguments = parser.parse_args()
    config = read_config(arguments.config)
    model_file = arguments.config.parents[1] / "models" / f"{config.model}.toml"
    tokenizer = TOKENIZERS[config.task]()
    model_config = dataclasses.replace(read_shape(model_file), end_ids=(tokenizer.eos_token_id,))
    params = train(config, model_config, arguments.checkpoints)
    if arguments.out:
        from jkv.model.checkpoint import export

        export(params, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
