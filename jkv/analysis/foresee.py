"""Trains the networks of `jkv.foresight`: what will be read of each slot, from full-cache passes whose end is known.

Each text is run once. At moments `STRIDE` tokens apart, the networks see the slots that are then old, and learn the
distribution of the squared attention that all later queries of the text give them. One step of training takes a few moments,
all of them equally likely, in all layers and KV heads at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.analysis.calibration import is_one
from jkv.analysis.recall import padded, queries_keys_values, received_so_far, sinks_of
from jkv.checkpoints.tokenizer import encode_whole
from jkv.checks import check_counts, need_tokenizer, size
from jkv.engine.memory import HOST_MEMORY, free_bytes
from jkv.errors import refused
from jkv.eviction.calibration import identity_of
from jkv.limits import check_numbers
from jkv.model.params import Model, ModelConfig
from jkv.model.rotary import rope_of
from jkv.policies.foresight import AGES, INPUTS, Foresight, Network, expected_reads, features
from jkv.replay.score import check_tokens
from jkv.reports import Report

REPORTED = 100  # steps between two reports
STRIDE = 16  # tokens between two moments
RECENT = 4  # slots that are never candidates, as the policy keeps them
FIRST = 4  # moment; before it, few slots are old
LONGEST, SHORT = 4_096, 1_024  # tokens of a text by default
POWER = 2  # of the attention that is foreseen, by default
RATE, DECAY = 3e-3, 1e-3  # of AdamW, the rate falling to 0 along a cosine


class Moments(NamedTuple):
    """The texts: what the slots hold, and what is read of them from each moment on. Stored in 16 bits."""

    key: Float[Array, "n L K S H"]  # as cached
    value: Float[Array, "n L K S H"]
    reads: Float[Array, "n E L K S"]  # squared attention of all later queries, as a share
    num: Int[Array, " n"]  # moments from the first on


def foresee(
    model: Model,
    texts: Sequence[Any],
    *,
    hidden: int = 32,
    steps: int = 2_000,
    batch: int = 8,
    seed: int = 0,
    without: Sequence[str] = (),
    power: int = POWER,
    report: Report = lambda figures: None,
) -> Foresight:
    """The networks of `jkv.foresight` for a model, trained on texts such as its own completions with the full cache.

    The networks record the longest age that training saw, and the policy gives older slots that age. So train on texts as long
    as those that the model will write.

    Args:
      model: whose keys and values they will read.
      texts: each a string or token ids; those shorter than 80 tokens teach nothing and are left out.
      hidden: size of the hidden layer of each network.
      steps: of training.
      batch: moments of a step.
      seed: of the first weights and of the order of the texts.
      without: inputs that the networks do not see, of "key", "value" and "age", to learn what each is worth.
      power: of the attention that they learn to expect; 1 counts what is spread thinly, too.
      report: receives the mean loss, in nats, of every hundred steps.

    Raises:
      ValueError: no text that is long enough, text for a model without a tokenizer, or an input that there is not.
    """
    check_counts(hidden=hidden, steps=steps, batch=batch, power=power)
    check_numbers({"hidden": hidden, "steps": steps, "power": power})
    is_seen = seen_inputs(model.config, without)
    sequences = [encode(model, text) for text in ([texts] if is_one(texts) else texts)]
    shortest = (FIRST + 1) * STRIDE
    sequences = [sequence for sequence in sequences if len(sequence) >= shortest]
    if not sequences:
        rule = f"Foresight is trained on texts of at least {shortest} tokens; got none. Pass longer ones."
        raise refused(rule, texts="does_not_fit")
    check_memory(model.config, sequences)
    moments = watch(model, sequences, power)
    rope = jax.tree.map(jnp.asarray, rope_of(model.config))
    network = fit(rope, moments, spread_of(rope, moments), is_seen, hidden, steps, batch, seed, report)
    network = network._replace(longest_age=jnp.full(len(network.into), longest_age(sequences), jnp.float32))
    about = identity_of(model) | {"tokens": str(sum(map(len, sequences)))}
    return Foresight(jax.tree.map(np.asarray, network), about)


def longest_age(sequences: Sequence[np.ndarray]) -> float:
    """The age of the oldest slot at the last moment of the longest text, within what the networks tell apart."""
    last_moment = max(len(sequence) // STRIDE - 1 for sequence in sequences)
    return min(float(last_moment * STRIDE - 1), AGES[-1])


def seen_inputs(config: ModelConfig, without: Sequence[str]) -> Float[np.ndarray, " F"]:
    """1 for each number that the networks see of a slot, 0 for the numbers of inputs that are left out."""
    if unknown := sorted(set(without) - set(INPUTS)):
        rule = f"Foresight reads {', '.join(INPUTS)}; it cannot do without {', '.join(map(repr, unknown))}."
        raise refused(rule, without="unknown_name")
    sizes = dict(zip(INPUTS, (config.head_size, config.head_size, len(AGES)), strict=True))
    return np.concatenate([np.full(size, name not in without, np.float32) for name, size in sizes.items()])


def encode(model: Model, text: Any) -> np.ndarray:
    """The token ids of a text."""
    if isinstance(text, str):
        need_tokenizer(model.tokenizer, "One of the texts is a string", "Pass token ids.")
        text = encode_whole(model.tokenizer, text)
    ids = np.asarray(text, np.int32)
    check_tokens(model.params, ids, [])
    return ids[: model.config.max_positions]


def check_memory(config: ModelConfig, sequences: Sequence[np.ndarray]) -> None:
    """Refuses texts whose `Moments`, twice while they are copied, and one layer's attention do not fit what the host has free.

    Raises:
      ValueError: they do not; the error counts the bytes.
    """
    width = max(padded(sequence).shape[1] for sequence in sequences)
    each, one_layer = bytes_of_text(config, width)
    needed, free = 2 * len(sequences) * each + one_layer, free_bytes(jax.devices("cpu")[0], 1.0)
    if needed > free:
        heads = config.num_paged_layers * config.num_kv_heads
        raise refused(
            f"Texts of {width} tokens, with their keys, values and reads in {heads} layer-heads, take {size(each)} each, twice "
            f"while they are copied, and {size(one_layer)} for one layer's attention: {size(needed)} for {len(sequences)} of "
            f"them; {size(free)} are free. Pass fewer, or shorter ones, or set {HOST_MEMORY} to the bytes that it may take.",
            texts="does_not_fit",
        )


def bytes_of_text(config: ModelConfig, width: int) -> tuple[int, int]:
    """Bytes of the `Moments` of one text of `width` tokens, and of one layer's attention to it."""
    heads = config.num_paged_layers * config.num_kv_heads
    each = 2 * heads * width * (2 * config.head_size + width // STRIDE)
    return each, 4 * config.num_kv_heads * width * (width + 1)


def default_length(config: ModelConfig, num_texts: int) -> int:
    """Tokens of each text if nothing else is asked: the model's positions, at most `LONGEST`, halved until memory holds them.

    Never below `SHORT`, at which texts without memory are refused.
    """
    length, free = min(config.max_positions, LONGEST), free_bytes(jax.devices("cpu")[0], 1.0)
    while length > SHORT:
        each, one_layer = bytes_of_text(config, length)
        if 2 * num_texts * each + one_layer <= free // 2:
            break
        length //= 2
    return length


def watch(model: Model, sequences: Sequence[np.ndarray], power: int = POWER) -> Moments:
    """One full-cache pass over each text."""
    width = max(padded(sequence).shape[1] for sequence in sequences)
    num_moments = width // STRIDE
    config, n = model.config, len(sequences)
    heads = config.num_paged_layers, config.num_kv_heads
    shape = (n, *heads, width, config.head_size)
    key, value = (np.zeros(shape, jnp.bfloat16) for _ in range(2))
    reads = np.zeros((n, num_moments, *heads, width), np.float16)
    for i, sequence in enumerate(sequences):
        total = len(sequence)
        of_layers = zip(queries_keys_values(model.params, padded(sequence)), sinks_of(model.params), strict=True)
        for layer, ((query, *cached), sink) in enumerate(of_layers):
            for kept, of_layer in zip((key, value), cached, strict=True):
                kept[i, layer, :, :total] = np.asarray(of_layer)[:total].swapaxes(0, 1)
            received = np.asarray(received_so_far(query, cached[0], power, sink))[:, :, :total]
            later = received[:, total, None] - received[:, :total:STRIDE]  # [K, E, S]
            later /= np.maximum(later.sum(axis=-1, keepdims=True), 1e-9)
            reads[i, : later.shape[1], layer, :, :total] = later.swapaxes(0, 1)
    num = np.array([len(sequence) // STRIDE - FIRST for sequence in sequences], np.int32)
    return Moments(*map(jnp.asarray, (key, value, reads, num)))


def spread_of(rope: Any, moments: Moments, num_texts: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each feature over the slots of a few texts: [L, K, F] each."""
    seen = []
    for i in range(min(num_texts, len(moments.key))):
        total = (FIRST + int(moments.num[i])) * STRIDE
        key, value = moments.key[i, :, :, :total], moments.value[i, :, :, :total]
        age = jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), key.shape[:3])
        seen.append(np.asarray(features(rope, key, value, age, age.astype(jnp.float32))))
    x = np.concatenate(seen, axis=2)
    return x.mean(axis=2), x.std(axis=2) + 0.05


def fit(
    rope: Any,
    moments: Moments,
    spread: tuple[np.ndarray, np.ndarray],
    is_seen: Float[np.ndarray, " F"],
    hidden: int,
    steps: int,
    batch: int,
    seed: int,
    report: Report,
) -> Network:
    """The networks after training; their inputs are what `features` returns, with `spread` folded into the first weights.

    Weights of inputs that `is_seen` leaves out are 0.
    """
    import optax

    mean, deviation = (jnp.asarray(x) for x in spread)
    shape = mean.shape
    key = jax.random.key(seed)
    network = Network(
        jax.random.normal(jax.random.fold_in(key, 0), (*shape, hidden)) * shape[-1] ** -0.5,
        jnp.zeros((*shape[:2], hidden)),
        jax.random.normal(jax.random.fold_in(key, 1), (*shape[:2], hidden)) * hidden**-0.5,
        jnp.zeros(shape[0]),
    )

    optimiser = optax.adamw(optax.cosine_decay_schedule(RATE, steps), weight_decay=DECAY)

    def loss_of(network: Network, moments: Moments, text: Int[Array, ""], at: Int[Array, ""]) -> Float[Array, ""]:
        """The cross-entropy between what is read from moment `at` on and what the networks expect, mean over the heads."""
        moment = FIRST + at
        now = moment * STRIDE
        position = jnp.broadcast_to(jnp.arange(moments.key.shape[3], dtype=jnp.int32), moments.key.shape[1:4])
        x = features(rope, moments.key[text], moments.value[text], position, (now - 1 - position).astype(jnp.float32))
        expected = expected_reads(network, (x - mean[:, :, None]) / deviation[:, :, None] * is_seen)
        is_old = position < now - RECENT
        reads = jnp.where(is_old, moments.reads[text, moment].astype(jnp.float32), 0.0)
        reads = reads / jnp.maximum(reads.sum(axis=-1, keepdims=True), 1e-6)
        return -(reads * jnp.where(is_old, jax.nn.log_softmax(expected, axis=-1, where=is_old), 0.0)).sum(axis=-1).mean()

    @jax.jit
    def several(carry: Any, moments: Moments, indices: Int[Array, " _"]) -> tuple[Any, Float[Array, " _"]]:
        def step(carry: Any, index: Int[Array, ""]) -> tuple[Any, Float[Array, ""]]:
            network, state = carry
            which, when = jax.random.split(jax.random.fold_in(key, 2 + index))
            text = jax.random.categorical(which, jnp.log(moments.num.astype(jnp.float32)), shape=(batch,))
            at = jax.random.randint(when, (batch,), 0, moments.num[text])

            def mean_loss(network: Network) -> Float[Array, ""]:
                return jax.lax.map(lambda one: loss_of(network, moments, *one), (text, at)).mean()

            loss, slope = jax.value_and_grad(mean_loss)(network)
            with jax.numpy_dtype_promotion("standard"):  # optax multiplies counts by rates, which strict promotion refuses
                change, state = optimiser.update(slope, state, network)
            return (optax.apply_updates(network, change), state), loss

        return jax.lax.scan(step, carry, indices)

    carry = network, optimiser.init(network)
    for start in range(0, steps, REPORTED):
        carry, losses = several(carry, moments, jnp.arange(start, min(start + REPORTED, steps)))
        report({"step": start + len(losses), "loss": float(losses.mean())})
    network = carry[0]
    into = network.into * is_seen[:, None] / deviation[..., None]
    return network._replace(into=into, bias=network.bias - jnp.einsum("lkf,lkfi->lki", mean, into))
