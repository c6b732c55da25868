"""Trains a small reasoner on arithmetic: `python -m research.tasks.train configs/experiments/train-tiny-reasoner.toml`.

A curriculum of stages, each with its own problem sizes and sequence length; problems packed into rows, the prompt's loss
masked; AdamW or Muon; orbax checkpoints, from which a second start of the same command resumes. `run.json` in the same folder
has what the checkpoints are of: another run is refused.
The batch of a step depends on nothing but the seed and the step, so a resumed run sees what an unbroken one would.

With `--seconds` the last stage gets as many steps as the time allows, however fast the device is, and the learning rate's decay
with them; the number of steps is printed and written, and `--steps` runs the same schedule again.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool, Float, Int

from jkv.checkpoints.model_shapes import read_shape
from jkv.limits import parse
from jkv.model import decoder
from jkv.model.params import Model, ModelConfig, Params
from jkv.reports import write_json, write_text
from jkv.resuming import check_same, plain
from jkv.text_files import read_json
from research.tasks.feed import TOKENIZERS, Feed
from research.tasks.first_weights import extend, init_to_look_up
from research.tasks.optimizers import make_optimizer
from research.tasks.train_config import TrainConfig, check_can_stretch, read_config
from research.tasks.validation import Validation

LEAST_SHARE = 0.01  # attention to the first token below which a stage's `sink` pulls no harder
REPORT_EVERY = 20  # steps
RUN = "run.json"
FIX = "Give another --checkpoints, or the same command; remove the folder to start anew."
UNIT_RATE = ((0, 1.0), (1, 1.0))  # of the optimiser, whose updates a step multiplies by its own rate


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
    optimizer: optax.GradientTransformation,
    params: Params,
    state: Any,
    batch: dict[str, Any],
    sink: float = 0.0,
    rate: Float[Array, ""] | float = 1.0,
) -> tuple[Params, Any, Any, Any]:
    """One update, times `rate`: new weights and optimiser state, the loss, the share of tokens right."""
    (value, hits), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch, sink)
    update, state = optimizer.update(gradient, state, params)
    update = jax.tree.map(lambda leaf: leaf * rate, update)
    return optax.apply_updates(params, update), state, value, hits


def pick(params: Params, batch: dict[str, Any]) -> Array:
    """The model's most likely next token after each token of a batch, `[rows, length]`."""
    return most_likely(params, {name: batch[name] for name in ("token", "segment", "position", "end")})


@jax.jit
def most_likely(params: Params, batch: dict[str, Int[Array, "B T1"]]) -> Int[Array, "B T"]:
    """`pick`, compiled once for each shape."""
    position, is_seen = batch["position"][:, :-1], seen(batch["segment"][:, :-1], batch["end"][:, :-1])
    hidden, _ = decoder.forward(params, batch["token"][:, :-1], position, packed_attention, is_seen)
    return jnp.argmax(decoder.unembed(params, hidden), axis=-1)


def first_params(config: TrainConfig, model_config: ModelConfig, tokenizer: Any) -> Params:
    """The weights before the first step."""
    key = jax.random.key(config.seed)
    return extend(config.start, model_config, tokenizer, key) if config.start else init_to_look_up(model_config, tokenizer, key)


def train(
    config: TrainConfig, model_config: ModelConfig, folder: Path, workers: int = 0, deadline: float | None = None
) -> tuple[Params, TrainConfig]:
    """Runs or resumes a training run whose checkpoints lie in `folder`; returns the last weights, and the run as it was.

    Args:
      config: the run.
      model_config: the model's shape.
      folder: of checkpoints.
      workers: processes that make batches ahead (`research.tasks.feed`).
      deadline: on the clock of `time.monotonic`, by when all steps are done: it sets how many the last stage has.
    """
    tokenizer = TOKENIZERS[config.task]()
    optimizer = make_optimizer(config.optimizer, UNIT_RATE, config.weight_decay)
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(ocp.CheckpointManager(folder.absolute(), options=options))
        step = manager.latest_step() or 0
        batches = stack.enter_context(contextlib.closing(Feed(config, step, workers)))
        params = first_params(config, model_config, tokenizer)
        state, origin = optimizer.init(params), origin_of(config, Model(params, tokenizer))
        if step:
            check_run(folder, origin, config, step)
            restored = manager.restore(step, args=ocp.args.StandardRestore({"params": params, "state": state}))
            params, state = restored["params"], restored["state"]
            print(f"resumed after step {step}", flush=True)
        validation = Validation.draw(tokenizer, config.stages[-1], config.task) if config.validate_every else None
        log = Log(config, deadline)
        while step < log.config.num_steps:
            batch = next(batches)
            stage, rate = config.stage(step), np.float32(log.config.rate(step))
            params, state, value, hits = train_step(optimizer, params, state, batch, stage.sink, rate)
            step += 1
            is_last = step == log.config.num_steps
            if step % REPORT_EVERY == 0 or is_last:
                log.add(step, batch["token"].size, value, hits)
            if validation and (step % config.validate_every == 0 or is_last):
                figures = validation.measure(functools.partial(pick, params))
                print(json.dumps({"step": step, "validation": figures}), flush=True)
            if step % config.checkpoint_every == 0 or is_last:
                write_json(folder / RUN, {"made_of": origin, "learning_rate": log.config.learning_rate})
                manager.save(step, args=ocp.args.StandardSave({"params": params, "state": state}))
        log.close()
        manager.wait_until_finished()
    return params, log.config


def origin_of(config: TrainConfig, start: Model) -> dict[str, Any]:
    """What the steps of a run depend on, except for their learning rates: its settings, and the model before the first step."""
    last = dataclasses.replace(config.stages[-1], steps=0)  # which may become longer
    fields = dataclasses.asdict(dataclasses.replace(config, stages=(*config.stages[:-1], last)))
    free = "checkpoint_every", "validate_every", "learning_rate"
    return plain({name: value for name, value in fields.items() if name not in free} | start.digests)


def check_run(folder: Path, origin: dict[str, Any], config: TrainConfig, step: int) -> None:
    """Refuses checkpoints of another run, or of one whose rates up to `step` were others.

    Raises:
      ValueError: what differs, or checkpoints of an older version, which do not show it.
    """
    what = f"{folder} holds checkpoints of another run"
    record = read_json(folder / RUN, ("made_of", "learning_rate")) if (folder / RUN).exists() else {}
    check_same(what, record.get("made_of", {}), origin, FIX)
    rates = tuple((at, rate) for at, rate in record["learning_rate"])
    before = dataclasses.replace(config, learning_rate=rates)
    if any(before.rate(i) != config.rate(i) for i in range(step)):
        raise ValueError(f"{what}, by the learning rates of the first {step} steps: then {rates}. {FIX}")


class Log:
    """Prints a line for every 20th step once the next one was handed to the device, which thus never waits for it.

    With a deadline it also keeps the run's length in step with the measured speed (`TrainConfig.fill`).
    """

    def __init__(self, config: TrainConfig, deadline: float | None) -> None:
        self.planned, self.config, self.deadline = config, config, deadline
        self.began = time.monotonic()
        self.waiting: tuple[int, int, Any, Any] | None = None
        self.timed: tuple[int, float] | None = None  # a step of the last stage, and when it was done

    def add(self, step: int, size: int, value: Any, hits: Any) -> None:
        """Keeps what a step gave, and prints what the one before gave."""
        self.close()
        self.waiting = step, size, value, hits

    def close(self) -> None:
        """Prints what is left."""
        if self.waiting is None:
            return
        step, size, value, hits = self.waiting
        line = {"step": step, "loss": round(float(value), 5), "right": round(float(hits), 5)}  # waits for the device
        now = time.monotonic()
        if self.deadline is not None and step > self.config.last_start:
            if self.timed is None:
                self.timed = step, now
            elif step - self.timed[0] >= 5 * REPORT_EVERY:
                pace = (now - self.timed[1]) / (step - self.timed[0])
                left = self.deadline - now - REPORT_EVERY * pace
                self.config = self.planned.fill(self.config, step + REPORT_EVERY, left, pace)
        line |= {"steps": self.config.num_steps, "batch": size, "seconds": round(now - self.began, 1)}
        print(json.dumps(line), flush=True)
        self.waiting = None


def main() -> None:
    """The command line."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a TOML file: see configs/experiments/train-tiny-reasoner.toml")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/tiny-reasoner"), help="kept across starts")
    parser.add_argument("--out", type=Path, help="write the finished model here, as a Hugging Face checkpoint folder")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches ahead (default: none)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, help="end by then: the last stage has as many steps as fit")
    length.add_argument("--steps", type=int, help="of the whole run: the last stage has what the others leave")
    parser.add_argument("--start", help="a shipped model or a folder with whose weights to begin, or `fresh`")
    arguments = parse(parser)
    config = read_config(arguments.config)
    if arguments.start:
        config = dataclasses.replace(config, start=None if arguments.start == "fresh" else arguments.start)
    if arguments.seconds or arguments.steps:
        check_can_stretch(config)
    if arguments.steps:
        config = config.with_steps(arguments.steps)
    model_file = arguments.config.parents[1] / "models" / f"{config.model}.toml"
    tokenizer = TOKENIZERS[config.task]()
    model_config = dataclasses.replace(read_shape(model_file), end_ids=(tokenizer.eos_token_id,))
    deadline = began + arguments.seconds if arguments.seconds else None
    params, config = train(config, model_config, arguments.checkpoints, arguments.workers, deadline)
    print(
        f"{config.num_steps} steps in {time.monotonic() - began:.0f} s; the same again: --steps {config.num_steps}", flush=True
    )
    if arguments.out:
        from jkv.checkpoints.loading import export

        export(params, tokenizer, arguments.out)
        record = {
            "config": arguments.config.name,
            "start": config.start,
            "steps": config.num_steps,
            "seconds": round(time.monotonic() - began),
        }
        write_text(arguments.out / "training.json", json.dumps(record | {"device": jax.devices()[0].device_kind}) + "\n")


if __name__ == "__main__":
    main()
