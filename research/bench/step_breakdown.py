"""The parts of a decode step as programs of their own, at the shapes that the engine would run them at.

Each takes sixteen steps in one scan, as a chunk does, and feeds something of every step into the next, so that no compiler
can drop a step.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels
from jkv.bench.fixtures import fill, new_inputs, new_state, usual_page_size
from jkv.bench.rounds import medians_in_turns, seconds_of
from jkv.cache import pool as pages
from jkv.engine import programs
from jkv.engine.programs import ChunkInputs
from jkv.engine.row_views import view_of_rows
from jkv.engine.scheduler import CHUNKS
from jkv.engine.state import State
from jkv.eviction import Evict, Policy
from jkv.model import decoder, sampling
from jkv.model.params import Params

STEPS = CHUNKS[0]
LEAST = 1e-30  # so little of a result that adding it changes nothing, which no compiler can prove


def seconds_of_parts(params: Params, policy: Policy, batch: int, slots: int, interval: int, rounds: int) -> dict[str, float]:
    """Seconds that each part on the device takes of a step of `batch` rows of `slots` slots, medians of some rounds."""
    state = filled(params, policy, batch, slots)
    inputs = new_inputs(params, policy, batch)
    calls: dict[str, Callable[[], Any]] = {
        "attention": functools.partial(attention, params, state),
        "weights": functools.partial(weights, params, state),
        "sampling": functools.partial(draws, state, inputs),
    }
    timed = {name: functools.partial(seconds_of, call) for name, call in calls.items()}
    timed["pool"] = functools.partial(seconds_on_fresh_state, bookkeeping, params, policy, batch, slots)
    if isinstance(policy.evict, Evict):
        timed["scoring"] = functools.partial(seconds_of, functools.partial(scores, state, evict=policy.evict.static))
        compact_all = functools.partial(compact, policy=policy, batch=batch, num_layers=params.config.num_layers)
        timed["compaction"] = functools.partial(
            seconds_on_fresh_state, compact_all, params, policy, batch, slots + interval // 2
        )
    seconds = medians_in_turns(timed, rounds)
    parts = {name: value / (interval if name in ("scoring", "compaction") else STEPS) for name, value in seconds.items()}
    if "compaction" in parts:
        parts["compaction"] -= parts["scoring"]  # that program does both
    return parts


def filled(params: Params, policy: Policy, batch: int, slots: int) -> State:
    """Rows that hold so many random slots, with room for a chunk more."""
    return fill(new_state(params, policy, batch, slots + STEPS, usual_page_size()), jax.random.key(1), slots)


def seconds_on_fresh_state(program: Callable[[State], State], params: Params, policy: Policy, batch: int, slots: int) -> float:
    """Seconds of a program that takes the state over and returns the next one."""
    state = filled(params, policy, batch, slots)
    return seconds_of(functools.partial(program, state), after=state)


@jax.jit
def attention(params: Params, state: State) -> Float[Array, "R G H"]:
    """Attention over the pages of all layers, a query for each row and head."""
    pool, config = state.cache.pool, params.config
    table = pool.page_table.reshape(config.num_layers, -1, pool.page_table.shape[-1])
    length = pool.length.reshape(config.num_layers, -1)
    shape = (table.shape[1], config.group_size, config.head_size)

    def step(query: Array, _: None) -> tuple[Array, None]:
        for layer in range(config.num_layers):
            out = kernels.paged_attention(query, pool.kv, table, length, None, layer)[0]
            query = query + jnp.asarray(LEAST, out.dtype) * out
        return query, None

    return jax.lax.scan(step, jax.random.normal(jax.random.key(2), shape, pool.kv.dtype), None, length=STEPS)[0]


@jax.jit
def weights(params: Params, state: State) -> Int[Array, "B 1"]:
    """The decoder from embedding to logits with nothing to attend to: what reads the weights, norms and rotation included."""
    position = state.cache.pool.logical_length[:, None]

    def attend(layer: int, query: Array, key: Array, value: Array, cache: Any) -> tuple[Array, Any]:
        group = query.shape[2] // key.shape[2]
        return query + jnp.asarray(LEAST, query.dtype) * jnp.repeat(key + value, group, axis=2), cache

    def step(token: Array, offset: Array) -> tuple[Array, None]:
        hidden, _ = decoder.forward(params, token, position + offset, attend, None)
        logits = decoder.unembed(params, hidden[:, 0])
        return (jnp.max(logits, axis=-1, keepdims=True) > 1 / LEAST).astype(jnp.int32), None

    return jax.lax.scan(step, jnp.zeros_like(position), jnp.arange(STEPS, dtype=jnp.int32))[0]


@jax.jit
def draws(state: State, inputs: ChunkInputs) -> Float[Array, "B V"]:
    """The draw of a greedy token and its log-probability."""
    position = state.cache.pool.logical_length

    def step(logits: Array, offset: Array) -> tuple[Array, None]:
        token, log_prob, _ = sampling.draw(logits, inputs.sampling, inputs.key, position + offset, "greedy")
        return logits + LEAST * (log_prob + token.astype(jnp.float32))[:, None], None

    return jax.lax.scan(step, state.logits, jnp.arange(STEPS, dtype=jnp.int32))[0]


@functools.partial(jax.jit, donate_argnames="state")
def bookkeeping(state: State) -> State:
    """Reserves a slot for each new token, writes its key and value there, and advances the lengths."""
    layers, batch, heads, _ = state.cache.pool.page_table.shape
    row, num_new = jnp.arange(batch, dtype=jnp.int32), jnp.ones(batch, jnp.int32)

    def step(pool: pages.Pool, offset: Array) -> tuple[pages.Pool, None]:
        pool, address = pages.reserve(pool, row, num_new, 1)
        new = jnp.full((batch, 1, heads, pool.kv.shape[-1]), 1, pool.kv.dtype) * offset.astype(pool.kv.dtype)
        for layer in range(layers):
            pool = pages.append(pool, address[layer], new, new)
        return pages.advance(pool, row, num_new), None

    pool, _ = jax.lax.scan(step, state.cache.pool, jnp.arange(STEPS, dtype=jnp.int32))
    return state._replace(cache=state.cache._replace(pool=pool))


@functools.partial(jax.jit, static_argnames="evict")
def scores(state: State, evict: Evict) -> Float[Array, "L B K S"]:
    """The scores that compactions of all rows rank slots by, row after row."""
    num_layers, _, num_heads, _ = state.cache.pool.page_table.shape
    budget = jnp.zeros((num_layers, 1, num_heads), jnp.int32)

    def rate(row: Array) -> Array:
        return evict.rate(view_of_rows(state.cache, row[None], evict, budget, jnp.zeros(1, jnp.int32)))

    score = jax.lax.map(rate, jnp.arange(state.cache.pool.num_rows, dtype=jnp.int32))
    return score.swapaxes(0, 1)


def compact(state: State, policy: Policy, batch: int, num_layers: int) -> State:
    """Scoring and compaction of all rows, as the engine dispatches them."""
    evict: Any = policy.evict
    budget, nothing = (
        np.full((num_layers, 1, state.cache.pool.page_table.shape[2]), policy.budget or 0, np.int32),
        np.zeros(1, np.int32),
    )
    protected = np.asarray([[evict.sinks], [evict.recent]], np.int32)
    for i in range(batch):
        row = np.full(1, i, np.int32)
        state = programs.compact(state, row, budget, nothing, protected, evict=evict.static, is_traced=False)[0]
    return state
