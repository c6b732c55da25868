"""Trains a small reasoner on chains of arithmetic: `python -m jkv.tasks.train configs/experiments/train-tiny-reasoner.toml`.

A curriculum of stages, each with its own problem sizes and sequence length; problems packed into rows, the prompt's loss
masked; AdamW; orbax checkpoints, from which a second start of the same command resumes.
The batch of a step depends on nothing but the seed and the step, so a resumed run sees what an unbroken one would.
"""

import argparse
import dataclasses
import functools
import json
import string
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jkv.model import decoder
from jkv.model.model_shapes import read_shape
from jkv.model.params import LayerParams, ModelConfig, Params, init_params
from jkv.tasks import chains, vocabulary

DRILLS = {"values": chains.draw_values, "steps": chains.draw_steps}
STEP_TOKENS = 20  # d= b * c _ b= 3 _ c= 7 _ 3 * 7 = 1 _ d= 1 and the blank line


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the curriculum: `steps` batches of `rows` packed rows of `length` tokens, problems of `low`..`high`.

    `max_doubts` cuts the verification passes, whose tokens are easy copies: fewer of them, more of each batch is reasoning.
    A share `drills` of the sequences are no problems but drills of the two things that a small model learns last: `values`
    to look up, asked for at random, or the formulas and results of `steps`. Only these are targets. A share `early` of the
    problems asks for a variable before the last.
    """

    steps: int
    rows: int
    length: int
    low: int
    high: int
    max_doubts: int = 4
    drills: float = 0.0
    drill: tuple[str, ...] = ("values",)  # which, in equal shares
    early: float = 0.2


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on."""

    model: str
    seed: int
    learning_rate: tuple[tuple[int, float], ...]  # rates at steps, straight lines between them
    weight_decay: float
    checkpoint_every: int
    stages: tuple[Stage, ...]

    @property
    def num_steps(self) -> int:
        """Updates of the whole run."""
        return sum(stage.steps for stage in self.stages)


def read_config(path: Path) -> TrainConfig:
    """A `TrainConfig` from a TOML file."""
    fields = tomllib.loads(path.read_text())
    rates = tuple((step, rate) for step, rate in fields["learning_rate"])
    stages = tuple(Stage(**stage | {"drill": tuple(stage.get("drill", ["values"]))}) for stage in fields["stages"])
    return TrainConfig(**fields | {"learning_rate": rates, "stages": stages})


def make_batch(tokenizer: Any, stage: Stage, seed: tuple[int, int]) -> dict[str, np.ndarray]:
    """One packed batch: `token`, `segment` (which problem), `position` (within it) and `is_target`, all `[rows, length]`.

    A trace that does not fit in what is left of a row is cut there, so no token of the batch is padding.
    """
    rng = np.random.default_rng(seed)
    shape = (stage.rows, stage.length + 1)
    batch = {name: np.zeros(shape, np.int32) for name in ("token", "segment", "position", "is_target")}
    for row in range(stage.rows):
        filled, segment = 0, 0
        while filled < shape[1]:
            tokens, is_target = draw_example(tokenizer, stage, rng)
            size = min(len(tokens), shape[1] - filled)
            span = slice(filled, filled + size)
            batch["token"][row, span] = tokens[:size]
            batch["segment"][row, span] = segment
            batch["position"][row, span] = np.arange(size)
            batch["is_target"][row, span] = is_target[:size]
            filled, segment = filled + size, segment + 1
    return batch


def draw_example(tokenizer: Any, stage: Stage, rng: np.random.Generator) -> tuple[list[int], list[bool]]:
    """One sequence of a stage, and which of its tokens are to be learnt."""
    if rng.random() < stage.drills:
        kind = stage.drill[int(rng.integers(len(stage.drill)))]
        given, asked = (tokenizer.encode(text) for text in DRILLS[kind](rng))
        return given + asked, [False] * len(given) + drill_targets(tokenizer, asked, kind)
    problem = chains.draw_problem(rng, stage.low, stage.high, stage.early)
    prompt = tokenizer.encode(problem.prompt)
    trace = tokenizer.encode(chains.write_trace(problem, min(chains.num_doubts(problem, rng), stage.max_doubts)))
    tokens = [*prompt, *trace, tokenizer.eos_token_id]
    return tokens, [i >= len(prompt) for i in range(len(tokens))]


def drill_targets(tokenizer: Any, asked: list[int], kind: str) -> list[bool]:
    """Which tokens of a drill can be known: every digit of values; the formula, sum and result of steps."""
    if kind == "steps":
        return [i % STEP_TOKENS in (1, 2, 3, 11, 12, 13, 15, 18) for i in range(len(asked))]
    digits = set(tokenizer.convert_tokens_to_ids(list(string.digits)))
    return [token in digits for token in asked]


def packed_attention(
    layer: int,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    cache: Int[Array, "B T"],
) -> tuple[Float[Array, "B T N H"], Int[Array, "B T"]]:
    """Causal attention within each packed problem (`jkv.model.decoder.Attend`); the cache is the problem of each token."""
    mask = cache[:, None, :, None] == cache[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True), cache


def loss(params: Params, batch: dict[str, Int[Array, "B T1"]]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean negative log-likelihood of the traces' tokens in nats, and the share of them that the model would pick."""
    segment = batch["segment"][:, :-1]
    hidden, _ = decoder.forward(params, batch["token"][:, :-1], batch["position"][:, :-1], packed_attention, segment)
    log_probs = jax.nn.log_softmax(decoder.unembed(params, hidden))
    target = batch["token"][:, 1:]
    weight = ((batch["is_target"][:, 1:] > 0) & (segment == batch["segment"][:, 1:])).astype(jnp.float32)
    picked = jnp.take_along_axis(log_probs, target[..., None], axis=-1)[..., 0]
    hits = (jnp.argmax(log_probs, axis=-1) == target).astype(jnp.float32)
    return -(picked * weight).sum() / weight.sum(), (hits * weight).sum() / weight.sum()


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with clipped gradients, its learning rate a piecewise linear function of the step."""
    steps, rates = (jnp.array(column, jnp.float32) for column in zip(*config.learning_rate, strict=True))

    def schedule(step: Int[Array, ""]) -> Float[Array, ""]:
        return jnp.interp(step.astype(jnp.float32), steps, rates)

    adam = optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=config.weight_decay, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def is_matrix(params: Params) -> Params:
    """Which weights decay: matrices do, norms and biases do not."""
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


def init_to_look_up(config: ModelConfig, tokenizer: Any, key: PRNGKeyArray) -> Params:
    """Fresh weights that already lean towards looking things up, which random ones take most of a short training to find.

    Queries and keys of a group start equal, so that equal content attends to itself, and outputs start as transposed values,
    so that a head copies what it reads (mimetic initialisation, arXiv 2305.09828). In the first layer, query and key biases of
    heads 0, 2 and 3 differ by a rotation of one, two and three positions on the fastest channels: they start as heads that
    read the last three tokens. The tokens `x=` start half-way to their letter's embedding.
    """
    params = init_params(config, key, scale=config.width**-0.5 / 2)
    embedding = params.embedding
    for pair in vocabulary.PAIRS:
        ids = jnp.asarray(tokenizer.convert_tokens_to_ids([pair, pair[0]]))
        embedding = embedding.at[ids[0]].set(embedding[ids].sum(axis=0) * 2**-0.5)
    group, size = config.group_size, config.head_size

    def lean(weights: LayerParams) -> LayerParams:
        keys = weights.key.reshape(config.width, config.num_kv_heads, size)
        values = weights.value.reshape(config.width, config.num_kv_heads, size)
        query = jnp.repeat(keys, group, axis=1).reshape(weights.query.shape)
        out = 0.5 * jnp.repeat(values, group, axis=1).reshape(config.width, -1).T
        return weights.replace(query=0.5 * (weights.query + query) * 2**0.5, out=0.5 * weights.out + out)

    first, *others = (lean(weights) for weights in params.layers)
    fast = 3.8 * (jnp.arange(size // 2) < 8)  # channel pairs whose angle grows fast enough to separate neighbours
    angle = decoder.rotary_frequency(config)
    key_bias = jnp.concatenate([fast, jnp.zeros_like(fast)])
    fresh = params.layers[0]  # heads 2 and 3 do not copy as head 0 does, or what they read would blur what it reads
    first = first.replace(out=first.out.at[2 * size :].set(fresh.out[2 * size :] * 0.3))
    first = first.replace(key_bias=jnp.tile(key_bias, config.num_kv_heads))
    for head, back in ((0, 1), (2, 2), (3, 3)):
        span = slice(head * size, (head + 1) * size)
        bias = jnp.concatenate([fast * jnp.cos(back * angle), -fast * jnp.sin(back * angle)])
        first = first.replace(query=first.query.at[:, span].multiply(0.1), query_bias=first.query_bias.at[span].set(bias))
    return params.replace(embedding=embedding, layers=(first, *others))


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames=("params", "state"))
def train_step(
    optimizer: optax.GradientTransformation, params: Params, state: Any, batch: dict[str, Any]
) -> tuple[Params, Any, Any, Any]:
    """One update: new weights and optimiser state, the loss, the share of tokens right."""
    (value, hits), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
    update, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, update), state, value, hits


def plan_steps(config: TrainConfig, start: int) -> Iterator[tuple[int, Stage]]:
    """Every step from `start` on with its stage."""
    schedule = [stage for stage in config.stages for _ in range(stage.steps)]
    return iter(list(enumerate(schedule))[start:])


def train(config: TrainConfig, model_config: ModelConfig, folder: Path) -> Params:
    """Runs or resumes a training run whose checkpoints lie in `folder`; returns the last weights."""
    tokenizer = vocabulary.make_tokenizer()
    optimizer = make_optimizer(config)
    params = init_to_look_up(model_config, tokenizer, jax.random.key(config.seed))
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
            batch = make_batch(tokenizer, stage, (config.seed, step))
            params, state, value, hits = train_step(optimizer, params, state, batch)
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
    tokenizer = vocabulary.make_tokenizer()
    model_config = dataclasses.replace(read_shape(model_file), end_ids=(tokenizer.eos_token_id,))
    params = train(config, model_config, arguments.checkpoints)
    if arguments.out:
        from jkv.model.checkpoint import export

        export(params, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
