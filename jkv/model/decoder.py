"""The decoder: one functional forward pass for all families of `jkv.model.families`, switched by `ModelConfig`.

The caller decides where keys and values are stored and which of them each query reads: `forward` passes each layer's query,
key and value to an `attend` function. Decoding from the pool, chunked prefill, training and replay are four such functions.
The decoder does not depend on a policy.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels
from jkv.model.experts import mixture
from jkv.model.layer_groups import check_attend
from jkv.model.params import LayerParams, LowRank, ModelConfig, Params
from jkv.model.rotary import rotation
from pallas_kernels.add_norm.reference import rms_norm
from pallas_kernels.rotate_append.reference import rotate


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer: may store key and value in the cache, and returns the output and the cache."""

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
    *,
    rotates: bool = True,
    remat: bool = False,
) -> tuple[Float[Array, "B T D"], Any]:
    """The hidden state of every token after the final norm, and the new cache.

    RoPE uses `position` alone, the index of each token in its sequence. The queries and keys passed to `attend` are rotated,
    unless the layer has no RoPE, or `rotates` is false: then `attend` rotates them. `enter` may change the hidden states at the
    input of each layer. `observe` sees them afterwards, before the layer's norm and attention, and returns the cache. With
    `remat`, a gradient computes each layer once more in place of keeping what it computed.
    """
    config = params.config
    check_attend(config, attend)
    turn = turn_of_windows = rotation(config, position)
    if config.window_layers:
        turn_of_windows = rotation(config.in_windows, position)
    norms = [*(weights.attention_norm for weights in params.layers), params.final_norm]

    def add(hidden: Array, added: Array, norm: Array) -> tuple[Array, Array]:
        return kernels.add_norm(hidden, add_shards(params, added), norm, epsilon=config.norm_epsilon)

    def through(
        layer: int, weights: LayerParams, next_norm: Array, hidden: Array, normed: Array, cache: Any
    ) -> tuple[Array, Array, Any]:
        if enter is not None:
            hidden = enter(layer, hidden)
            normed = rms_norm(hidden, norms[layer], config.norm_epsilon)
        cache = cache if observe is None else observe(layer, hidden, cache)
        query, key, value = project(config, weights, normed)
        if rotates and layer not in config.layers_without_rope:
            cos, sin = turn_of_windows if layer in config.window_layers else turn
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed, cache = attend(layer, query, key, value, cache)
        hidden, normed = add(hidden, times(mixed.reshape(*token.shape, -1), weights.out), weights.mlp_norm)
        return *add(hidden, mlp(config, weights, normed), next_norm), cache

    step = jax.checkpoint(through, static_argnums=0) if remat else through
    hidden = embed(params, token)
    normed = rms_norm(hidden, norms[0], config.norm_epsilon)
    for layer, weights in enumerate(params.layers):
        hidden, normed, cache = step(layer, weights, norms[layer + 1], hidden, normed, cache)
    return normed, cache


def embed(params: Params, token: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """The embeddings of tokens. Each shard of a mesh holds a part of the vocabulary."""
    if params.axis is None:
        return params.embedding[token]
    num_own = params.embedding.shape[0]
    own = token - num_own * jax.lax.axis_index(params.axis)
    is_own = (own >= 0) & (own < num_own)
    return add_shards(params, jnp.where(is_own[..., None], params.embedding[jnp.where(is_own, own, 0)], 0))


def unembed(params: Params, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Float32 logits of the next token."""
    if params.unembedding is None:
        logits = jnp.einsum("...d,vd->...v", hidden, params.embedding, preferred_element_type=jnp.float32)
    else:
        logits = times(hidden, params.unembedding, jnp.float32)
    return logits if params.axis is None else jax.lax.all_gather(logits, params.axis, axis=logits.ndim - 1, tiled=True)


def add_shards(params: Params, partial: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """The sum of the partial results of all shards of a mesh; without a mesh, the argument."""
    return partial if params.axis is None else jax.lax.psum(partial, params.axis)


def project(
    config: ModelConfig,
    weights: LayerParams,
    normed: Float[Array, "B T D"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """A layer's query, key (neither is rotated) and value."""

    def heads(matrix: Any, bias: Array | None, count: int) -> Array:
        flat = times(normed, matrix)
        flat = flat if bias is None else flat + bias
        return flat.reshape(*flat.shape[:-1], count, config.head_size)

    query = heads(weights.query, weights.query_bias, config.num_query_heads)
    key = heads(weights.key, weights.key_bias, config.num_kv_heads)
    value = heads(weights.value, weights.value_bias, config.num_kv_heads)
    if config.qk_norm:
        query = rms_norm(query, weights.query_norm, config.norm_epsilon)
        key = rms_norm(key, weights.key_norm, config.norm_epsilon)
    return query, key, value


def mlp(config: ModelConfig, weights: LayerParams, normed: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The gated feed-forward block (SwiGLU), or a mixture of such blocks."""
    if weights.experts is not None:
        return mixture(config, weights.experts, normed)
    return times(jax.nn.silu(times(normed, weights.gate)) * times(normed, weights.up), weights.down)


def times(x: Float[Array, "*B fan_in"], weight: Any, dtype: Any = None) -> Float[Array, "*B fan_out"]:
    """`x` times a matrix, which may be unfolded or a `LowRank`.

    `dtype` is the dtype of the product; None means that of the operands. Inside a program the reshape copies nothing.
    """
    if isinstance(weight, LowRank):
        added = times(times(x, weight.down), weight.up, dtype)
        return times(x, weight.base, dtype) + added * weight.scale
    return jnp.matmul(x, weight.reshape(x.shape[-1], -1), preferred_element_type=dtype)
