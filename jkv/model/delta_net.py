"""Gated DeltaNet (arXiv 2412.06464): a layer that keeps a matrix for each head in place of keys and values.

With the memory S of a head, a decay g in (0, 1] and a rate b in (0, 1), a token with key k, value v and query q changes the
memory to `S = g S + k outer (b (v - g S'k))` and reads `S'q`: what the key read before is replaced by the value in the share b.
Queries, keys and values have passed a short causal convolution, whose last inputs belong to the state too.

`step` is that rule for one token. `chunks` computes the same for many tokens in blocks: inside of a block, what each token adds
follows from a triangular system (the UT transform of arXiv 2406.06484, section 3). All of it is float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.model.delta_weights import DeltaNet, DeltaParams
from pallas_kernels import row_sum

BLOCK = 64  # tokens of a triangular system
UNIT_EPSILON = 1e-6  # added to the squared length of a query or key, before it is divided by its length
EXACT = jax.lax.Precision.HIGHEST


class DeltaInputs(NamedTuple):
    """What the recurrence reads of each token, and the convolution before it."""

    mixed: Float[Array, "B T C"]  # channels of queries, keys and values, before the convolution
    rate: Float[Array, "B T N"]  # float32, in (0, 1)
    log_decay: Float[Array, "B T N"]  # float32, at most 0
    taps: Float[Array, "C W"]


class DeltaState(NamedTuple):
    """What a layer keeps of the tokens so far."""

    memory: Float[Array, "B N I H"]  # float32; I channels of a key, H of a value
    recent: Float[Array, "B R C"]  # the last W - 1 inputs of the convolution, 0 before the first token


class Heads(NamedTuple):
    """Queries, keys and values after the convolution, float32."""

    query: Float[Array, "B T K I"]  # of length 1, divided by the root of the number of channels
    key: Float[Array, "B T K I"]  # of length 1
    value: Float[Array, "B T K G H"]


def zero_state(sizes: DeltaNet, num_rows: int, dtype: Any) -> DeltaState:
    """The state before the first token."""
    memory = jnp.zeros((num_rows, sizes.num_value_heads, sizes.key_size, sizes.value_size), jnp.float32)
    return DeltaState(memory, jnp.zeros((num_rows, sizes.taps - 1, sizes.num_channels), dtype))


def convolve(sizes: DeltaNet, inputs: DeltaInputs, recent: Float[Array, "B R C"]) -> tuple[Heads, Float[Array, "B S C"]]:
    """Queries, keys and values, and all inputs of the convolution, the recent ones first (S = R + T)."""
    batch, length = inputs.mixed.shape[:2]
    every = jnp.concatenate([recent, inputs.mixed.astype(recent.dtype)], axis=1)
    taps = inputs.taps.astype(jnp.float32)
    summed = sum(taps[:, i] * every[:, i : i + length].astype(jnp.float32) for i in range(sizes.taps))
    flat, keys = jax.nn.silu(summed), sizes.num_key_heads * sizes.key_size
    query, key, value = jnp.split(flat, [keys, 2 * keys], axis=-1)
    query, key = (unit(x.reshape(batch, length, sizes.num_key_heads, sizes.key_size)) for x in (query, key))
    value = value.reshape(batch, length, sizes.num_key_heads, -1, sizes.value_size)
    return Heads(query * sizes.key_size**-0.5, key, value), every


def unit(x: Float[Array, "*B I"]) -> Float[Array, "*B I"]:
    """Vectors of length 1."""
    return x * jax.lax.rsqrt(row_sum(x, of_squares=True) + UNIT_EPSILON)


def step(
    sizes: DeltaNet, inputs: DeltaInputs, state: DeltaState, is_active: Bool[Array, " B"]
) -> tuple[Float[Array, "B T N H"], DeltaState]:
    """What each row's next token (T = 1) reads, and the state after it; that of rows that are not active stays.

    `S'q` after the change is `g S'q + (q k) d` of the one before, with the added d: so one product reads the memory for both
    key and query, before it is written.
    """
    heads, every = convolve(sizes, inputs, state.recent)
    group = sizes.num_value_heads // sizes.num_key_heads
    key, query = (jnp.repeat(x[:, 0], group, axis=1) for x in (heads.key, heads.query))  # [B, N, I]
    decay, rate = jnp.exp(inputs.log_decay[:, 0])[..., None], inputs.rate[:, 0, :, None]
    read = jnp.einsum("bnpi,bnih->pbnh", jnp.stack([key, query], axis=2), state.memory, precision=EXACT)
    added = rate * (heads.value.reshape(read.shape[1:]) - decay * read[0])
    out = decay * read[1] + (query * key).sum(axis=-1, keepdims=True) * added
    new = decay[..., None] * state.memory + key[..., None] * added[..., None, :]
    memory = jnp.where(is_active[:, None, None, None], new, state.memory)
    recent = jnp.where(is_active[:, None, None], every[:, 1:], state.recent)
    return out[:, None], DeltaState(memory, recent)


def chunks(
    sizes: DeltaNet, inputs: DeltaInputs, state: DeltaState, num_new: Int[Array, " B"]
) -> tuple[Float[Array, "B T N H"], DeltaState]:
    """What each of T tokens reads, and the state after the first `num_new` of them; later ones are padding.

    Padding has the rate 0 and the decay 1, so it changes nothing. A gradient computes each block once more, and keeps the
    memory before each: N * I * H numbers for `BLOCK` tokens.
    """
    heads, every = convolve(sizes, inputs, state.recent)
    batch, length = inputs.rate.shape[:2]
    is_new = (jnp.arange(length, dtype=jnp.int32) < num_new[:, None])[..., None]
    rate, log_decay = (jnp.where(is_new, x, 0.0) for x in (inputs.rate, inputs.log_decay))
    rate, log_decay = (x.reshape(*heads.value.shape[:-1]) for x in (rate, log_decay))
    block = min(BLOCK, length)

    def blocks(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, -length % block)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, -1, block, *x.shape[2:]), 1, 0)

    memory = state.memory.reshape(batch, sizes.num_key_heads, -1, sizes.key_size, sizes.value_size)
    memory, out = jax.lax.scan(jax.checkpoint(one_block), memory, jax.tree.map(blocks, (heads, rate, log_decay)))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, -1, sizes.num_value_heads, sizes.value_size)[:, :length]
    last = num_new[:, None] + jnp.arange(sizes.taps - 1, dtype=jnp.int32)  # the last inputs that are not padding
    recent = jnp.take_along_axis(every, last[..., None], axis=1)
    return out, DeltaState(memory.reshape(state.memory.shape), recent)


def one_block(
    memory: Float[Array, "B K G I H"], tokens: tuple[Heads, Float[Array, "B T K G"], Float[Array, "B T K G"]]
) -> tuple[Float[Array, "B K G I H"], Float[Array, "B T K G H"]]:
    """The memory after a block of tokens, and what each of them reads.

    What token t adds is `b (v - g_t S'k - sum over s < t of g_t / g_s (k k_s) d_s)` with the decays g since the block began: a
    triangular system for all d at once. It is solved by substitution, as a product of powers would lose all digits where keys
    repeat.
    """
    (query, key, value), rate, log_decay = tokens
    total = jnp.moveaxis(jnp.cumsum(log_decay, axis=1), 1, -1)  # [B, K, G, T]
    rate = jnp.moveaxis(rate, 1, -1)
    is_seen = jnp.tril(jnp.ones((total.shape[-1],) * 2, bool))
    between = jnp.exp(jnp.where(is_seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    since = jnp.exp(total)[..., None]

    def product(terms: str, *operands: Array) -> Array:
        return jnp.einsum(terms, *operands, precision=EXACT)

    of_keys = product("btki,bski->bkts", key, key)[:, :, None] * between * rate[..., None]
    wanted = jnp.moveaxis(value, 1, 3) - since * product("btki,bkgih->bkgth", key, memory)
    added = jax.lax.linalg.triangular_solve(of_keys, rate[..., None] * wanted, left_side=True, lower=True, unit_diagonal=True)
    of_queries = product("btki,bski->bkts", query, key)[:, :, None] * between
    out = since * product("btki,bkgih->bkgth", query, memory) + product("bkgts,bkgsh->bkgth", of_queries, added)
    until_end = jnp.exp(total[..., -1:] - total)[..., None]
    memory = since[..., -1:, :] * memory + product("btki,bkgth->bkgih", key, until_end * added)
    return memory, jnp.moveaxis(out, 3, 1)


def gated(
    weights: DeltaParams, out: Float[Array, "B T N H"], gate: Float[Array, "B T inner"], epsilon: float
) -> Float[Array, "B T inner"]:
    """The norm of what each head reads, times SiLU of the gate, in the gate's dtype."""
    length = jax.lax.rsqrt(row_sum(out, of_squares=True) / out.shape[-1] + epsilon)
    flat = (out * length * weights.norm.astype(jnp.float32)).reshape(gate.shape)
    return (flat * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def decays(weights: DeltaParams, projected: Float[Array, "B T N"]) -> Float[Array, "B T N"]:
    """The log of each token's decay, float32: a learned speed of the head times a softplus of the token's own."""
    speed = jnp.exp(weights.log_decay.astype(jnp.float32))
    return -speed * jax.nn.softplus(projected.astype(jnp.float32) + weights.decay_bias.astype(jnp.float32))
