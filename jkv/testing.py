"""Helpers for tests with `jkv`, here and in your own code: tiny models, random cache views, checks of compiled programs."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jkv.analysis.recall import future_reads
from jkv.cache.pool import EMPTY
from jkv.eviction import Policy
from jkv.eviction.calibration import Calibration, QueryMoments, QueryStatistics, identity_of
from jkv.eviction.gate import DmsGate, FastKVzipGate, Gate, KVzapLinearGate, KVzapMlpGate
from jkv.eviction.view import CacheView
from jkv.model.joined import separate_weights
from jkv.model.params import LayerParams, LowRank, Model, ModelConfig, Params
from jkv.model.rotary import Rope, pair_norms, turn
from jkv.model.weight_shapes import init_params
from jkv.policies import oracle as oracles
from jkv.policies.foresight import Foresight, Network
from pallas_kernels.quantised import stored
from pallas_kernels.rotate_append.reference import rotate
from pallas_kernels.sealed import Records

TINY = ModelConfig(
    family="qwen2",
    vocab_size=32,
    width=32,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_size=8,
    mlp_width=48,
    max_positions=4096,
    qkv_bias=True,
    tie_embeddings=True,
)


class TinyTokenizer:
    """Each token is a letter, except the first four: begin and end of thinking, and two blank lines."""

    pieces = ("<think>", "</think>", "\n\n", ".\n\n", *(chr(i) for i in range(65, 93)))

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; the longest piece wins."""
        pattern = "|".join(re.escape(piece) for piece in sorted(self.pieces, key=len, reverse=True))
        return [self.pieces.index(piece) for piece in re.findall(pattern, text)]

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        """The pieces of the tokens, joined."""
        return "".join(self.pieces[token] for token in tokens)


def tiny_model(seed: int = 0, config: ModelConfig = TINY, tokenizer: Any = None) -> Model:
    """A random model whose weights are large enough that its logits are not flat; `tokenizer` may be a `TinyTokenizer`."""
    return Model(init_params(config, jax.random.key(seed), scale=0.3), tokenizer, name="tiny")


def unfolded(params: Params) -> Params:
    """The same weights in the layout of other libraries: query, key and value as [D, heads, H], out as [N, H, D]."""
    params = separate_weights(params)

    def unfold(layer: int) -> LayerParams:
        weights, size = params.layers[layer], params.config.of_layer(layer).head_size
        columns = {name: getattr(weights, name) for name in ("query", "key", "value")}
        columns = {name: x.reshape(x.shape[0], -1, size) for name, x in columns.items() if x is not None}
        return weights.replace(**columns, out=weights.out.reshape(-1, size, weights.out.shape[1]))

    return params.replace(layers=tuple(map(unfold, range(len(params.layers)))))


def adapted(params: Params, rank: int = 2, scale: float = 0.5, seed: int = 0) -> Params:
    """The weights with a random low-rank adapter on each matrix except embedding and experts, in the layout of that matrix."""
    params, numbers, key = separate_weights(params), itertools.count(), jax.random.key(seed)

    def adapt(weight: Any, num_in: int = 1) -> LowRank:
        rows, columns = weight.shape[:num_in], weight.shape[num_in:]
        down, up = (
            0.3 * jax.random.normal(jax.random.fold_in(key, next(numbers)), shape, weight.dtype)
            for shape in ((*rows, rank), (rank, *columns))
        )
        return LowRank(weight, down, up, scale)

    def adapt_layer(layer: LayerParams) -> LayerParams:
        names = "query", "key", "value", *(() if layer.experts else ("gate", "up", "down"))
        columns = {name: adapt(getattr(layer, name)) for name in names if getattr(layer, name) is not None}
        return layer.replace(**columns, out=adapt(layer.out, layer.out.ndim - 1))

    unembedding = None if params.unembedding is None else adapt(params.unembedding)
    return params.replace(layers=tuple(map(adapt_layer, params.layers)), unembedding=unembedding)


def random_view(
    rng: np.random.Generator,
    batch: int = 2,
    heads: int = 2,
    slots: int = 40,
    window: int = 8,
    group: int = 2,
    dtype: Any = jnp.float32,
    budget: int | None = None,
    carried_names: Sequence[str] = (),
) -> CacheView:
    """A random view with rows of different lengths; a third of the keys are look-alikes, and empty slots hold NaN."""
    length = rng.integers(window, slots + 1, size=(batch, 1))
    seen = np.sort(np.stack([rng.permutation(3 * slots)[:slots] for _ in range(batch * heads)]), axis=-1)
    position = seen.reshape(batch, heads, slots).astype(np.int32)
    for b in range(batch):  # the newest `window` positions are the same everywhere, as after decoding
        position[b, :, length[b, 0] - window : length[b, 0]] = 3 * slots + np.arange(window)
    position = np.where(np.arange(slots) < length[:, :, None], position, EMPTY)
    shape = (batch, heads, slots, 8)
    key, value = rng.standard_normal((2, *shape)).astype(np.float32)
    key[:, :, 1::3] = key[:, :, :1] + 0.1 * key[:, :, 1::3]  # look-alikes
    key, value = (np.where((position == EMPTY)[..., None], np.nan, x) for x in (key, value))
    query = rng.standard_normal((batch, heads * group, window, 8))
    prompt_length = jnp.asarray([3] * batch, jnp.int32)
    budgets = None if budget is None else jnp.full((batch, heads), budget, jnp.int32)
    mass, similarity, carried = (
        np.where(position == EMPTY, np.float32(np.nan), x) for x in rng.random((3, *position.shape), np.float32)
    )
    similarity = np.where(similarity < 0.7, np.float32(0), similarity)  # a third has been repeated
    norm = np.where(position == EMPTY, np.float32(np.nan), rng.random(position.shape, np.float32))
    rope = Rope(jnp.broadcast_to(10.0 ** -jnp.arange(4.0), (batch, 4)), jnp.ones(batch))
    mean = jnp.asarray(rng.standard_normal((batch, heads * group, 8)), jnp.float32)
    moments = QueryMoments(mean, pair_norms(mean, 4) + jnp.asarray(rng.random((batch, heads * group, 4)), jnp.float32))
    gate = np.where(position == EMPTY, np.float32(np.nan), rng.standard_normal(position.shape, np.float32))
    return CacheView(
        jnp.asarray(key, dtype),
        jnp.asarray(value, dtype),
        jnp.asarray(position),
        jnp.asarray(query, dtype),
        jnp.asarray(mass),
        jnp.asarray(similarity),
        carried={name: jnp.asarray((i + 1) * carried) for i, name in enumerate(carried_names)} or None,
        layer=0,
        budget=budgets,
        prompt_length=prompt_length,
        rope=rope,
        projected_norm=jnp.asarray(norm),
        calibration=moments,
        gate=jnp.asarray(gate),
    )


def looping_view(
    rng: np.random.Generator,
    period: int,
    has_rope: bool = True,
    start: int = 0,
    copies: int = 3,
    heads: int = 2,
    slots: int = 40,
    window: int = 8,
    group: int = 2,
    carried_names: Sequence[str] = (),
) -> CacheView:
    """A view of a text that repeats `period` random tokens, from position `start` on; batch rows are equal up to rounding.

    Whatever a score may read is the same at each repetition of a token, but for RoPE and the accumulated mass. In a layer
    without RoPE, keys and queries repeat too.
    """
    slot = np.arange(slots)
    token, position = slot % period, start + slot
    rope = Rope(jnp.broadcast_to(float(has_rope) * 10.0 ** -jnp.arange(4.0), (1, 4)), jnp.ones(1))
    base = rng.standard_normal((2 * heads + heads * group, period, 8)).astype(np.float32)
    parts = [jnp.asarray(x)[:, token].swapaxes(0, 1)[None] for x in np.split(base, [heads, 2 * heads])]
    cos, sin = turn(rope, jnp.asarray(position, jnp.int32)[None])
    key, query = (np.asarray(rotate(x, cos, sin))[0].swapaxes(0, 1) for x in (parts[0], parts[2]))
    value = np.asarray(parts[1])[0].swapaxes(0, 1)
    logits = np.einsum("kgqh,ksh->kgqs", query.reshape(heads, group, slots, 8), key) * 8**-0.5
    share = np.where(position <= position[:, None], np.exp(logits), 0)
    mass = (share / share.sum(axis=-1, keepdims=True)).sum(axis=(1, 2))
    similarity, carried, norm, gate = rng.random((4, heads, period), np.float32)[..., token]

    def copied(x: np.ndarray) -> Array:
        error = 1 + 2.0**-21 * rng.uniform(-1, 1, (copies, *x.shape))
        return jnp.asarray(x * error, jnp.float32)

    mean = np.broadcast_to(rng.standard_normal((heads * group, 8)), (copies, heads * group, 8))
    half = pair_norms(jnp.asarray(mean, jnp.float32), 4)
    return CacheView(
        copied(key),
        copied(value),
        jnp.broadcast_to(jnp.asarray(position, jnp.int32), (copies, heads, slots)),
        copied(query[:, -window:]),
        copied(mass),
        copied(similarity),
        carried={name: copied((i + 1) * carried) for i, name in enumerate(carried_names)} or None,
        layer=0,
        prompt_length=jnp.full(copies, 3, jnp.int32),
        rope=jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), rope),
        projected_norm=copied(norm),
        calibration=QueryMoments(jnp.asarray(mean, jnp.float32), half + 0.5),
        gate=copied(gate),
    )


def random_statistics(model: Model, seed: int = 0) -> QueryStatistics:
    """Random statistics of queries that a policy takes for this model's own."""
    config, rng = model.config, np.random.default_rng(seed)
    mean: Any = rng.standard_normal((config.num_paged_layers, config.num_query_heads, config.head_size)).astype(np.float32)
    length = np.asarray(pair_norms(jnp.asarray(mean), (config.rotary_size or config.head_size) // 2))
    modulus: Any = length + rng.random(length.shape, np.float32)
    return QueryStatistics(QueryMoments(mean, modulus), identity_of(model))


def random_networks(model: Model, hidden: int = 4, seed: int = 0) -> Foresight:
    """Random networks that `jkv.foresight` takes for this model's own."""
    heads = model.config.num_paged_layers, model.config.num_kv_heads
    into, bias, out = (jnp.zeros((*heads, *rest)) for rest in ((1, hidden), (hidden,), (hidden,)))
    like = random_calibration(Foresight(Network(into, bias, out, jnp.full(heads[0], 4096.0))), model, seed)
    assert isinstance(like, Foresight)
    return like


def random_gate(model: Model, kind: str = "linear", seed: int = 0) -> Gate:
    """A random gate that `jkv.learned_gate` takes for one of this model: "dms", "linear" or "mlp" (KVzap), or "fast".

    About half of its numbers are below 0 ("fast": below 0.5).
    """
    kinds: dict[str, tuple[Any, list[tuple[int, ...]]]] = {  # with the sizes that the model does not decide
        "dms": (DmsGate, [(1, 1), (1, 1, 1), (1, 1)]),
        "linear": (KVzapLinearGate, [(1, 1, 1), (1, 1)]),
        "mlp": (KVzapMlpGate, [(1, 5, 1), (1, 5), (1, 1, 5), (1, 1)]),
        "fast": (
            FastKVzipGate,
            [(1, 1, 1, 4, 1), (1, 1, 1, 4), (1, 4), (1, 1, 4, 1), (1, 4), (1, 1, 3, 4), (1, 1, 1)],
        ),
    }
    arrays, shapes = kinds[kind]
    gate = random_calibration(Gate(arrays(*(np.zeros(shape, np.float32) for shape in shapes))), model, seed)
    assert isinstance(gate, Gate)
    return gate


def random_calibration(like: Calibration, model: Model, seed: int = 0) -> Calibration:
    """A random calibration of the same kind that a policy takes for one of this model."""
    if isinstance(like, QueryStatistics):
        return random_statistics(model, seed)
    rng = np.random.default_rng(seed)
    arrays = type(like.arrays)(
        *(rng.standard_normal(shape).astype(np.float32) for shape in like.shapes_for(model.config).values())
    )
    if isinstance(like, Foresight):
        arrays = arrays._replace(longest_age=np.resize(like.arrays.longest_age, arrays.longest_age.shape))
    return type(like)(arrays, identity_of(model))


def oracle(
    model: Model, prompt: Sequence[int], tokens: Sequence[int], budget: int, interval: int = 16, sinks: int = 0, recent: int = 4
) -> Policy:
    """The policy that knows what will be read when `tokens` follow `prompt`, and keeps it: the best that a budget allows.

    `jkv eval` and `jkv probe` have it as "oracle". `jkv.policies.oracle` has its rule.

    Raises:
      ValueError: a setting out of its range.

    >>> model = tiny_model()
    >>> oracle(model, [4, 5, 6], [7, 8, 9], budget=16).budget
    16
    """
    return oracles.oracle(future_reads(model, (prompt, tokens), interval), budget, interval, sinks, recent)


def assert_no_pool_copy(compiled: Any, pool: Any, other_bytes: int = 0) -> None:
    """Asserts that a compiled program updates the donated pool in place.

    `compiled` is a `jax.stages.Compiled`; `pool` is the `Pool` (arrays or shapes) that it was compiled for. Three things must
    hold. The program aliases at least the pool's bytes from input to output. Its temporaries are below a tenth of the pool,
    plus the `other_bytes` that are known to be needed, such as a second layout of weights. No copy, convert or transpose in its
    optimised HLO makes an array with as many elements as the pool, or as it has codes.
    """
    shape = pool.kv.shape
    pool_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool.kv))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes, (
        f"the program aliases {memory.alias_size_in_bytes} bytes, less than the pool's {pool_bytes}: is it donated?"
    )
    assert memory.temp_size_in_bytes < pool_bytes // 10 + other_bytes, (
        f"temporaries of {memory.temp_size_in_bytes} bytes against a pool of {pool_bytes}: the pool or a slice of it is copied"
    )
    codes = [pool.kv.key, pool.kv.value] if isinstance(pool.kv, Records) else [stored(pool.kv)]
    copies = [line for one in {shape, *(x.shape for x in codes)} for line in find_copies(compiled.as_text(), one)]
    assert not copies, "the program copies the pool:\n" + "\n".join(copies)


def find_copies(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """The lines of an HLO text that copy, convert or transpose an array with as many elements as `shape`, in any shape.

    An asynchronous copy is reported once, at its end.

    >>> find_copies("%copy.1 = f32[4,2,8,16]{3,2,1,0} copy(%p)", (4, 2, 8, 16))
    ['%copy.1 = f32[4,2,8,16]{3,2,1,0} copy(%p)']
    """
    pattern = re.compile(r"= \w+\[([\d,]+)\]\S* (?:copy|copy-done|convert|transpose)\(")
    found = []
    for line in hlo.splitlines():
        match = pattern.search(line)
        if match and math.prod(map(int, match[1].split(","))) == math.prod(shape):
            found.append(line.strip())
    return found
