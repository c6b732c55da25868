"""The decoder: one functional forward pass for all families of `jkv.checkpoints.families`, switched by `ModelConfig`.

The caller decides where keys and values are stored and which of them each query reads: `forward` passes each layer's query,
key and value to an `attend` function. Decoding from the pool, chunked prefill, training and replay are four such functions.
The decoder does not depend on a policy.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.model import delta_net
from jkv.model.delta_net import DeltaInputs
from jkv.model.delta_weights import DeltaParams
from jkv.model.experts import Choose, activate, gating_of, mixture
from jkv.model.joined import joined_of, split
from jkv.model.layer_groups import check_attend
from jkv.model.norms import add_norm, norm, norm_of_all_heads
from jkv.model.params import ByRow, Codes, LayerParams, LowRank, MeshAxis, ModelConfig, Params
from jkv.model.rotary import rotation
from pallas_kernels import block_product, row_product
from pallas_kernels.blocks import Blocks, decoded
from pallas_kernels.rotate_append.reference import rotate

KeyAndValue: TypeAlias = tuple[Array | None, Array | None]  # of a layer; it has both if it stores them


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer: may store key and value in the cache, and returns the output and the cache.

    In models with learned sinks it takes one more argument, `sink`: a logit of each query head (`jkv.cache.sink_logit`). In
    models with layers that share keys and values it takes `is_stored`: true in such a layer. `layer`, `key` and `value`
    then come from the layer that has stored them in the same pass.
    """

    def __call__(
        self,
        layer: int,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        cache: Any,
    ) -> tuple[Float[Array, "B T N H"], Any]: ...


def forward(
    params: Params,
    token: Int[Array, "B T"],
    position: Int[Array, "B T"],
    attend: Attend,
    cache: Any,
    enter: Callable[[int, Array], Array] | None = None,
    observe: Callable[[int, Array, Any], Any] | None = None,
    choose: Choose | None = None,
    *,
    rotates: bool = True,
    remat: bool = False,
) -> tuple[Float[Array, "B T D"], Any]:
    """The hidden state of every token after the final norm, and the new cache.

    RoPE uses `position` alone, the index of each token in its sequence. The queries and keys passed to `attend` are rotated,
    unless the layer has no RoPE, or `rotates` is false: then `attend` rotates them. `enter` may change the hidden states at the
    input of each layer. `observe` sees them afterwards, before the layer's norm and attention, and returns the cache. `choose`
    sees the experts that a layer's router chooses for each token, [B, T, A], and returns those that are used, and the cache
    (`jkv.model.experts`). With `remat`, a gradient computes each layer once more in place of keeping what it computed.
    """
    config = params.config
    check_attend(config, attend)
    attend_any: Any = attend  # which takes a sink, if the model has one
    turn = turn_of_windows = rotation(config, position)
    if config.window_layers:
        turn_of_windows = rotation(config.in_windows, position)
    final = params.final_norm
    before = [None if config.norms_after else weights.attention_norm for weights in params.layers[1:]] + [final]

    def add(hidden: Array, added: Array, after: Array | None, before_next: Array | None) -> tuple[Array, Array]:
        """The next hidden state, and its norm.

        In models with norms after attention and MLP, `after` is that of what is added. If these are the only norms
        (`norms_after`), just the last sum has its own.
        """
        added = added if after is None else norm(config, added, after)
        if before_next is None:
            return hidden + added, hidden + added
        return add_norm(config, hidden, added, before_next)

    def mix(
        layer: int, weights: LayerParams, normed: Array, cache: Any, stored: KeyAndValue | None
    ) -> tuple[Array, Any, Any, KeyAndValue | None]:
        """What a layer's heads read, the matrix that projects it, the cache, and the keys and values that were read."""
        if weights.delta is not None:
            inputs, gate = project_delta(weights.delta, normed)
            out, cache = attend_any.recur(layer, inputs, cache)
            return delta_net.gated(weights.delta, out, gate, config.norm_epsilon), weights.delta.out, cache, stored
        query, key, value, of_output = project(config.of_layer(layer), weights, normed, params.axis)
        if rotates and layer not in config.layers_without_rope:
            cos, sin = turn_of_windows if layer in config.window_layers else turn
            query, key = rotate(query, cos, sin), None if key is None else rotate(key, cos, sin)
        of_sink = () if weights.sink is None else (weights.sink,)
        shares = {} if stored is None else {"is_stored": True}
        stored = (key, value) if stored is None else stored
        mixed, cache = attend_any(config.owner_of(layer), query, *stored, cache, *of_sink, **shares)
        mixed = mixed if of_output is None else mixed * jax.nn.sigmoid(of_output)
        return mixed.reshape(*token.shape, -1), weights.out, cache, stored

    def through(
        layer: int,
        weights: LayerParams,
        next_norm: Array | None,
        hidden: Array,
        normed: Array,
        cache: Any,
        stored: KeyAndValue | None,
        own_input: Array | None,
    ) -> tuple[Array, Array, Any, KeyAndValue | None]:
        if enter is not None:
            hidden = enter(layer, hidden)
            normed = input_of_attention(params, layer, hidden)
        cache = cache if observe is None else observe(layer, hidden, cache)
        mixed, matrix, cache, stored = mix(layer, weights, normed, cache, stored)
        out = times(mixed, matrix)
        before_mlp, after = weights.mlp_norm, (weights.after_attention_norm, weights.after_mlp_norm)
        if config.norms_after:
            before_mlp, after = None, (weights.attention_norm, weights.mlp_norm)
        hidden, normed = add(hidden, whole(params, out, weights.out_bias), after[0], before_mlp)
        out, cache = mlp(params, layer, weights, hidden, normed, choose, cache)
        if weights.layer_scale is None and own_input is None:
            return *add(hidden, out, after[1], next_norm), cache, stored
        hidden, _ = add(hidden, out, after[1], None)
        hidden = hidden if own_input is None else add_input(config, weights, hidden, own_input)
        hidden = hidden if weights.layer_scale is None else hidden * weights.layer_scale.astype(hidden.dtype)
        return hidden, hidden if next_norm is None else norm(config, hidden, next_norm), cache, stored

    @functools.partial(jax.checkpoint, static_argnums=0)
    def keeping_stream(
        layer: int,
        weights: LayerParams,
        hidden: Array,
        cache: Any,
        stored: KeyAndValue | None,
        own_input: Array | None,
    ) -> tuple[Array, Any, KeyAndValue | None]:
        """A layer whose gradient keeps only the hidden state, and recomputes its norm."""
        normed = input_of_attention(params, layer, hidden)
        hidden, _, cache, stored = through(layer, weights, None, hidden, normed, cache, stored, own_input)
        return hidden, cache, stored

    hidden = embed(params, token)
    inputs = inputs_of_layers(params, token, hidden)
    normed = input_of_attention(params, 0, hidden)
    stored: dict[int, KeyAndValue | None] = {}  # keys and values of this pass, by the layer that they belong to
    for layer, weights in enumerate(params.layers):
        owner, own_input = config.owner_of(layer), None if inputs is None else inputs[..., layer, :]
        rest = cache, stored.get(owner), own_input
        if remat:
            hidden, cache, stored[layer] = keeping_stream(layer, weights, hidden, *rest)
        else:
            hidden, normed, cache, stored[layer] = through(layer, weights, before[layer], hidden, normed, *rest)
    return norm(config, hidden, final) if remat else normed, cache


def input_of_attention(params: Params, layer: int, hidden: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """What the projections of a layer's attention read: the norm of the hidden state, or in models with later norms itself."""
    if params.config.norms_after:
        return hidden
    return norm(params.config, hidden, params.layers[layer].attention_norm)


def embed(params: Params, token: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """The embeddings of tokens."""
    rows = rows_of_tokens(params, params.embedding, token)
    if not params.config.scales_embedding:
        return rows
    return rows * jnp.asarray(params.config.width**0.5, rows.dtype)  # rounded to the dtype first, as the makers do


def rows_of_tokens(params: Params, table: Float[Array, "V E"] | Blocks, token: Int[Array, "B T"]) -> Float[Array, "B T E"]:
    """The rows of a table with one for each token. Each shard of a mesh holds a part of the vocabulary."""
    if isinstance(table, Blocks):
        return decoded(table.data[token], table.kind).astype(table.dtype)
    if params.axis is None:
        return table[token]
    num_own = table.shape[0]
    own = token - num_own * jax.lax.axis_index(params.axis)
    is_own = (own >= 0) & (own < num_own)
    return add_shards(params, jnp.where(is_own[..., None], table[jnp.where(is_own, own, 0)], 0))


def inputs_of_layers(
    params: Params, token: Int[Array, "B T"], embedded: Float[Array, "B T D"]
) -> Float[Array, "B T L E"] | None:
    """An input of each layer, from a table of its own and the token's embedding (Gemma 4 E2B, E4B); None in other models."""
    config, weights = params.config, params.layer_inputs
    if weights is None:
        return None
    by_layer = *token.shape, config.num_layers, config.layer_input_width
    rows = rows_of_tokens(params, weights.embedding, token)
    of_token = rows * jnp.asarray(config.layer_input_width**0.5, rows.dtype)
    of_embedding = times(embedded, weights.projection) * jnp.asarray(config.width**-0.5, embedded.dtype)
    of_embedding = norm(config, of_embedding.reshape(by_layer), weights.norm)
    return (of_embedding + of_token.reshape(by_layer)) * jnp.asarray(2**-0.5, rows.dtype)


def add_input(
    config: ModelConfig, weights: LayerParams, hidden: Float[Array, "B T D"], own_input: Float[Array, "B T E"]
) -> Float[Array, "B T D"]:
    """The hidden state at the end of a layer, with the layer's own input in it, which the hidden state gates."""
    gate = activate(config.activation, times(hidden, weights.input_gate))
    return hidden + norm(config, times(gate * own_input, weights.input_out), weights.input_norm)


def unembed(params: Params, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Float32 logits of the next token."""
    if params.unembedding is None and isinstance(params.embedding, Blocks):
        logits = times(hidden, params.embedding, jnp.float32)
    elif params.unembedding is None:
        (logits,) = row_product(hidden, params.embedding, by_output=True, dtype=jnp.float32)
    else:
        logits = times(hidden, params.unembedding, jnp.float32)
    if cap := params.config.final_softcap:
        logits = cap * jnp.tanh(logits / cap)
    return logits if params.axis is None else jax.lax.all_gather(logits, params.axis, axis=logits.ndim - 1, tiled=True)


def add_shards(params: Params, partial: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """The sum of the partial results of all shards of a mesh; without a mesh, the argument."""
    return partial if params.axis is None else jax.lax.psum(partial, params.axis)


def whole(params: Params, partial: Float[Array, "*B D"], own: Float[Array, "... D"] | None = None) -> Float[Array, "*B D"]:
    """The sum of `add_shards`, and of `own`, which is the same on each shard."""
    total = add_shards(params, partial)
    return total if own is None else total + own


def project(
    config: ModelConfig,
    weights: LayerParams,
    normed: Float[Array, "B T D"],
    axis: MeshAxis = None,
) -> tuple[
    Float[Array, "B T N H"], Float[Array, "B T K H"] | None, Float[Array, "B T K H"] | None, Float[Array, "B T N H"] | None
]:
    """A layer's query, key (neither is rotated), value, and output gate before its sigmoid, None in models without.

    A layer that shares keys and values has none of its own. `axis` is that of a mesh that splits the heads.
    """

    def heads(flat: Array, bias: Array | None, count: int, of_all: Array | None = None) -> Array:
        flat = flat if bias is None else flat + bias
        flat = flat if of_all is None else norm_of_all_heads(flat, of_all, config.norm_epsilon, axis)
        return flat.reshape(*flat.shape[:-1], count, -1)

    of_query, of_key, of_value = products_of_heads(config, weights, normed)
    query, gate = heads(of_query, weights.query_bias, config.num_query_heads, weights.all_query_norm), None
    if config.has_output_gate:
        query, gate = jnp.split(query, 2, axis=-1)
    query = norm(config, query, weights.query_norm) if config.qk_norm else query
    if config.attention_scale:  # attention divides by the root of the head size
        factor = config.attention_scale * config.head_size**0.5
        query = (query.astype(jnp.float32) * factor).astype(query.dtype)
    if of_key is None:
        return query, None, None, gate
    key = heads(of_key, weights.key_bias, config.num_kv_heads, weights.all_key_norm)
    value = key if of_value is None else heads(of_value, weights.value_bias, config.num_kv_heads)
    key = norm(config, key, weights.key_norm) if config.qk_norm else key
    return query, key, norm(config, value, None) if config.value_norm else value, gate


def products_of_heads(
    config: ModelConfig, weights: LayerParams, normed: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T queries"], Float[Array, "B T keys"] | None, Float[Array, "B T keys"] | None]:
    """The products with a layer's query, key and value, all heads side by side; None for a matrix that it lacks."""
    whole = joined_of(weights, "query_key_value")
    if whole is None:
        own = [one for one in (weights.query, weights.key, weights.value) if one is not None]
        query, key, value, *_ = *products(normed, *own), None, None  # a layer may have no value, or neither
        return query, key, value
    query, key, *values = split(times(normed, whole), config.head_widths)
    return query, key, values[0] if values else None


def project_delta(weights: DeltaParams, normed: Float[Array, "B T D"]) -> tuple[DeltaInputs, Float[Array, "B T inner"]]:
    """What the recurrence of a layer reads, and the gate of its output."""
    whole = joined_of(weights, "query_key_value")
    matrices = [weights.query, weights.key, weights.value] if whole is None else [whole]
    mixed = jnp.concatenate(products(normed, *matrices), axis=-1)
    taps = jnp.concatenate([weights.query_taps, weights.key_taps, weights.value_taps])[:, 0]
    apart = jax.lax.optimization_barrier(normed)  # or XLA for GPU joins the small matrices with the large ones, and copies all
    rate = jax.nn.sigmoid(times(apart, weights.rate, jnp.float32))
    log_decay = delta_net.decays(weights, times(apart, weights.decay, jnp.float32))
    return DeltaInputs(mixed, rate, log_decay, taps), times(normed, weights.gate)


def mlp(
    params: Params,
    layer: int,
    weights: LayerParams,
    hidden: Float[Array, "B T D"],
    normed: Float[Array, "B T D"],
    choose: Choose | None,
    cache: Any,
) -> tuple[Float[Array, "B T D"], Any]:
    """The gated feed-forward block, a mixture of such blocks, or both beside each other; and the cache.

    Both may have norms of their own (Gemma 4), and a sigmoid may gate the first (Qwen3.5). Without norms, the shards of a mesh
    add up both at once.
    """
    config, out = params.config, None
    if weights.down is not None:
        if (both := joined_of(weights, "gate_up")) is None:
            gate, up = products(normed, weights.gate, weights.up)
        else:
            gate, up = jnp.split(times(normed, both), 2, axis=-1)
        out = times(gating_of(config)(gate, up), weights.down)
        if weights.shared_gate is not None:
            out = out * jax.nn.sigmoid(times(normed, weights.shared_gate))
    if weights.experts is None:
        assert out is not None
        return whole(params, out), cache
    reads, routed = normed, None
    if weights.experts_norm is not None:
        reads, routed = norm(config, hidden, weights.experts_norm), hidden
    of_layer = None if choose is None else functools.partial(choose, layer)
    mixed, biases, cache = mixture(config, weights.experts, reads, routed, axis=params.axis, choose=of_layer, cache=cache)
    if out is None or weights.experts_norm is None:
        return whole(params, mixed if out is None else mixed + out, biases), cache
    out = norm(config, whole(params, out), weights.mlp_out_norm)
    return out + norm(config, whole(params, mixed, biases), weights.experts_out_norm), cache


def times(x: Float[Array, "*B fan_in"], weight: Any, dtype: Any = None) -> Float[Array, "*B fan_out"]:
    """`x` times a matrix: see `products`."""
    return products(x, weight, dtype=dtype)[0]


def products(x: Float[Array, "*B fan_in"], *weights: Any, dtype: Any = None) -> list[Float[Array, "*B _out"]]:
    """`x` times each matrix, which may be unfolded, a `LowRank`, `ByRow`, `Codes` or `Blocks`; one call per kind.

    `dtype` is the dtype of the products; None means the operands' dtype. Inside a program the reshape copies nothing.
    """
    if any(isinstance(one, ByRow) for one in weights):
        found = products(x, *(one.base if isinstance(one, ByRow) else one for one in weights), dtype=dtype)
        return [
            plus_adapters(x, one, sums) if isinstance(one, ByRow) else sums for one, sums in zip(weights, found, strict=True)
        ]
    if any(isinstance(one, LowRank) for one in weights):
        return [with_adapter(x, one, dtype) if isinstance(one, LowRank) else times(x, one, dtype) for one in weights]
    if all(isinstance(one, Blocks) for one in weights):
        return list(block_product(x, *weights, dtype=dtype))
    if len({(type(one), getattr(one, "code", one).dtype) for one in weights}) > 1:
        return [times(x, one, dtype) for one in weights]
    if isinstance(weights[0], Codes):
        sums = row_product(x, *(one.code for one in weights), dtype=jnp.float32)
        return [(found * one.scale).astype(dtype or x.dtype) for found, one in zip(sums, weights, strict=True)]
    return list(row_product(x, *(one.reshape(x.shape[-1], -1) for one in weights), dtype=dtype))


def with_adapter(x: Float[Array, "*B fan_in"], weight: LowRank, dtype: Any) -> Float[Array, "*B fan_out"]:
    """`x` times a matrix and its adapter, which is rounded to the dtype of `x` first: a trainer's may be in float32.

    Otherwise float32 adapters would turn all activations of a bfloat16 model into float32.
    """
    down, up = weight.down.astype(x.dtype), weight.up.astype(x.dtype)
    base, added = times(x, weight.base, dtype), times(times(x, down), up, dtype)
    return base + (added * weight.scale).astype(base.dtype)


def plus_adapters(
    x: Float[Array, "B *T fan_in"], weight: ByRow, base: Float[Array, "B *T fan_out"]
) -> Float[Array, "B *T fan_out"]:
    """`x` times a matrix, plus each row times the adapter in its own place. A row's bits do not depend on the other rows."""
    rows, added = x.reshape(x.shape[0], -1, x.shape[-1]), []
    for stack in weight.stacks:
        down, up, scale = (one[weight.place] for one in (stack.down, stack.up, stack.scale))
        inner = jnp.einsum("bti,bir->btr", rows, down, preferred_element_type=jnp.float32).astype(x.dtype)
        added.append(jnp.einsum("btr,bro->bto", inner, up, preferred_element_type=jnp.float32) * scale[:, None, None])
    return base + jnp.concatenate(added, axis=-1).reshape(base.shape).astype(base.dtype)
