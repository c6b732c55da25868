"""A decode chunk: the steps between two looks of the host, as one loop on the device; here with one token a step.

`jkv.engine.speculation` has the loop whose steps append several tokens to a row. Both draw tokens and attend by the functions
of this file.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

from jkv.cache import pool as pages
from jkv.cache import sealed_pages
from jkv.cache.attention import Cache, DecodeAttention
from jkv.cache.in_step_eviction import StepRules
from jkv.cache.moved_sinks import SinkRules
from jkv.cache.page_selection import ReadRules
from jkv.cache.pool import EMPTY
from jkv.cache.query_ring import oldest_queries, put_back
from jkv.cache.row_storage import decode_groups
from jkv.engine.parts.base import Carried, Draw, Step
from jkv.engine.parts.table import Parts
from jkv.engine.state import State
from jkv.model import decoder, sampling
from jkv.model.params import Params
from jkv.model.rotary import rotary_angle, rotation
from jkv.model.sampling import SamplingRows
from pallas_kernels.dispatch import possible_platforms

TRACED = "dropped", "is_read", "steered"  # outputs of a chunk that are returned if samples are traced


class ChunkInputs(NamedTuple):
    """The host's inputs of a decode chunk, by row."""

    remaining: Int[Array, " B"]  # tokens until the row's limit; 0 for a row that is not running
    stop_ids: Int[Array, "B E"]  # padded with -1
    sampling: SamplingRows
    key: UInt32[Array, "B 2"]  # of each sample, before the position is folded in
    rules: StepRules | None = None  # None when the pool keeps no mass
    reads: ReadRules | None = None  # None when the pool keeps no bounds
    sinks: Int[Array, " B"] | None = None  # number of each row that moves them, 0 for others; None when no policy does
    is_alive: Bool[Array, " B"] | None = None  # rows that the last chunk left running; None where the host knows by `remaining`
    parts: Parts = Parts()


class ChunkOutputs(NamedTuple):
    """A chunk's tokens, for the host; tokens of finished rows are not real.

    A row's tokens come in order, one in each entry, whether a step draws one of them or several.
    """

    token: Int[Array, "steps B"]
    log_prob: Float[Array, "steps B"]
    is_real: Bool[Array, "steps B"]
    held_pages: Int[Array, ""]
    is_running: Bool[Array, " B"]  # rows that are not finished
    dropped: Int[Array, "steps L B K"] | None = None  # positions that steps evicted, EMPTY for none; None unless traced
    is_read: Bool[Array, "steps L B K MP"] | None = None  # pages that steps read, by entry of their table; None unless traced
    steered: Float[Array, "steps B"] | None = None  # multiple of the steering vector added to each token; None unless traced
    hidden: Float[Array, "steps B D"] | None = None  # of each token, after the final norm; None unless sentences are compared
    log_prob_full: Float[Array, "steps B"] | None = None  # before penalties and cuts; None where equal to `log_prob`
    experts: UInt[Array, "steps B L A"] | None = None  # that each token went through, by layer with experts; None unless asked
    log_prob_own: Float[Array, "steps B"] | None = None  # of the model's own distribution; None unless asked, or where equal
    top_token: Int[Array, "steps B top"] | None = None  # most likely under the model's own distribution; None unless asked
    top_log_prob: Float[Array, "steps B top"] | None = None  # their log-probabilities
    row_steps: Int[Array, " B"] | None = None  # steps that each row took part in; None where a step is a token
    drafted: Int[Array, " B"] | None = None  # guesses that were checked, likewise
    num_loops: Int[Array, ""] | None = None  # steps of the chunk, likewise
    num_run: Int[Array, ""] | None = None  # of the chunk's steps, those that were run; None is all


class Drawn(NamedTuple):
    """Tokens, drawn for one place of each row or for several, which are not in the cache yet."""

    token: Int[Array, "*B"]
    is_last: Bool[Array, "*B"]  # whether the row ends with it: by a stop token, or because its logits are not finite
    out: dict[str, Float[Array, "*B"]]  # fields of `ChunkOutputs` that follow from what it was drawn from


def draw_tokens(
    inputs: ChunkInputs,
    carries: Mapping[str, Any],
    logits: Float[Array, "B T V"],
    position: Int[Array, "B T"],
    number: Int[Array, "B T"],
    draws: str,
) -> Drawn:
    """The token at each place, drawn from the logits before it by the key of its own position."""
    draw, parts, places = Draw(logits, logits, number), inputs.parts.on, logits.shape[1]
    for name, part in parts.items():
        draw = part.draw(draw, carries[name])
    draw = draw._replace(is_own=draws == "greedy" and inputs.sampling.penalties is None and draw.logits is logits)

    def of_places(x: Array) -> Array:
        return jnp.repeat(x, places, axis=0)

    def flat(x: Array) -> Array:
        return jnp.broadcast_to(x, (len(x), places, *x.shape[2:])).reshape(-1, *x.shape[2:])

    rows, key = jax.tree.map(of_places, (inputs.sampling, inputs.key))
    forced, counts = jax.tree.map(flat, (draw.forced, draw.counts))
    drawn = sampling.draw(flat(draw.logits), rows, key, flat(position), draws, forced, counts)
    token, log_prob, log_prob_full = jax.tree.map(lambda x: x.reshape(position.shape), drawn)
    is_last = (token[..., None] == inputs.stop_ids[:, None]).any(axis=-1)
    is_last = is_last if draw.forced is None else is_last & (draw.forced < 0)
    out = {"log_prob": log_prob} | ({} if log_prob_full is None else {"log_prob_full": log_prob_full})
    for part in parts.values():
        out |= part.drawn(draw, token)
    return Drawn(token, is_last | ~jnp.isfinite(log_prob), out)


def rows_alive(inputs: ChunkInputs) -> Bool[Array, " B"]:
    """The rows that decode in a chunk."""
    is_active = inputs.remaining > 0
    return is_active if inputs.is_alive is None else is_active & inputs.is_alive


def decode_chunk(
    params: Params,
    state: State,
    inputs: ChunkInputs,
    carried: Carried,
    num_steps: int,
    draws: str,
    is_traced: bool,
) -> tuple[State, ChunkOutputs, Carried]:
    """See `jkv.engine.programs.decode_chunk`; each step appends one token to each row."""
    row = jnp.arange(inputs.remaining.shape[0], dtype=jnp.int32)
    parts = inputs.parts.on

    def step(loop: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], dict[str, Array]]:
        (cache, logits), is_active, remaining, carries = loop
        position, carries, number = cache.pool.logical_length, dict(carries), inputs.remaining - remaining
        drawn = draw_tokens(inputs, carries, logits[:, None], position[:, None], number[:, None], draws)
        token = jnp.where(is_active[:, None], drawn.token, 0)
        is_last = drawn.is_last[:, 0] | (remaining <= 1)
        goes_on, num_new = is_active & ~is_last, is_active.astype(jnp.int32)
        new = Step(params, cache, row, token, num_new, is_active)
        for name, part in parts.items():
            new, carries[name] = part.take(new, carries[name])
        pool, address = pages.reserve(new.cache.pool, row, num_new, 1)
        cache, attend = attention_of(inputs, new._replace(cache=new.cache._replace(pool=pool)), address, goes_on)
        given = new.params, new.token, position[:, None], attend, cache, new.enter, new.observe, new.choose
        hidden, cache = decoder.forward(*given, rotates=False)
        pool, dropped = pages.advance(cache.pool, row, num_new), None
        if cache.victim is not None:
            pool, dropped = pages.vacate(pool, cache.victim)
        of_tokens = {"token": token} | drawn.out
        for name, part in parts.items():
            of_tokens |= part.report(new, hidden, cache, carries[name])
        out: dict[str, Any] = {name: x[:, 0] for name, x in of_tokens.items()}
        out |= {"is_real": is_active, "dropped": dropped, "is_read": cache.is_read}
        state = State(cache.after_pass(pool), decoder.unembed(new.params, hidden[:, 0]))
        out = {name: x for name, x in out.items() if x is not None and (is_traced or name not in TRACED)}
        return (state, goes_on, remaining - 1, carries), out

    is_active = rows_alive(inputs)
    ring, num_seen, oldest = state.cache.query_ring, state.cache.pool.logical_length, None
    if ring is not None and inputs.is_alive is not None:
        # Rows that ended in the last chunk stay as they are, because they may be kept: the queries that this chunk overwrites
        # are saved, and restored at its end. They are read before the steps begin, or XLA would copy the ring.
        oldest, ring = jax.lax.optimization_barrier((oldest_queries(ring, num_seen), ring))
        state = state._replace(cache=state.cache._replace(query_ring=ring))
    start = state, is_active, inputs.remaining, {name: part.begin(carried) for name, part in parts.items()}
    (state, is_running, _, carries), out, num_run = run_steps(step, start, num_steps)
    if state.cache.tail is not None:
        state = state._replace(cache=state.cache._replace(pool=sealed_pages.seal_filled(state.cache, num_seen)))
    ring = state.cache.query_ring
    if ring is not None and oldest is not None:
        ring = put_back(ring, oldest, num_seen, ~is_active)
        state = state._replace(cache=state.cache._replace(query_ring=ring))
    outputs = ChunkOutputs(held_pages=pages.held_pages(state.cache.pool), is_running=is_running, num_run=num_run, **out)
    return state, outputs, carried_on(inputs, carries)


def run_steps(
    step: Callable[[Any, None], tuple[Any, dict[str, Array]]], start: tuple[Any, ...], num_steps: int
) -> tuple[Any, dict[str, Array], Int[Array, ""] | None]:
    """What the last of some steps carries on, their outputs, and how many were run; None is all.

    Where the device itself decides whether a loop goes on, it ends once no row is active (`start[1]`, [B]); the outputs of
    later steps are zeros. A GPU would ask the host after each step, and runs all of them.
    """
    if "cuda" in possible_platforms():
        return *jax.lax.scan(step, start, length=num_steps), None

    def goes_on(loop: tuple[Any, ...]) -> Array:
        number, carry, _ = loop
        return (number < num_steps) & carry[1].any()

    def body(loop: tuple[Any, ...]) -> tuple[Any, ...]:
        number, carry, kept = loop
        carry, out = step(carry, None)
        return number + 1, carry, jax.tree.map(lambda all_steps, one: all_steps.at[number].set(one), kept, out)

    shapes = jax.eval_shape(step, start, None)[1]
    kept = jax.tree.map(lambda x: jnp.zeros((num_steps, *x.shape), x.dtype), shapes)
    num_run, carry, kept = jax.lax.while_loop(goes_on, body, (jnp.int32(0), start, kept))
    return carry, kept, num_run


def carried_on(inputs: ChunkInputs, carries: Mapping[str, Any]) -> Carried:
    """What the parts keep on the device after a chunk."""
    ends: dict[str, Array] = {}
    for name, part in inputs.parts.on.items():
        ends |= part.end(carries[name])
    return Carried(**ends)


def attention_of(
    inputs: ChunkInputs, new: Step, address: Int[Array, "L B K T"], goes_on: Bool[Array, " B"]
) -> tuple[Cache, decoder.Attend]:
    """The cache for a step whose tokens go to `address`, and the attention of the decoder's layers.

    A query reads what is filled up to its own place. `goes_on` says whether a row has a next step.
    """
    cache, config, places = new.cache, new.params.config, new.token.shape[1]
    pool, place = cache.pool, jnp.arange(places, dtype=jnp.int32)
    position, is_new = pool.logical_length[:, None] + place, place < new.num_new[:, None]
    length = pool.length[..., None] + jnp.minimum(place + 1, new.num_new[:, None])[None, :, None]
    if pool.vacant_slot is not None:  # which the first token fills
        length = jnp.where(pool.vacant_slot[..., None] == EMPTY, length, pool.length[..., None])
    sinks = None
    if inputs.sinks is not None:  # lengths of rows that move their sinks are the same in every layer and head
        angle = rotary_angle(config, (length[0, :, 0, 0] - 1 - position[:, 0])[:, None])
        sinks = SinkRules(inputs.sinks, jnp.cos(angle), jnp.sin(angle))
    turn, unrotated = rotation(config, position.reshape(-1)), config.unrotated
    attend: decoder.Attend
    if cache.tail is None:
        filled = length[..., 0] if places == 1 else length
        rules, reads, axis = inputs.rules, inputs.reads, new.params.axis
        attend = DecodeAttention(address, filled, position[:, 0], *turn, rules, reads, sinks, goes_on, unrotated, axis)
    else:
        attend = sealed_pages.SealedDecode(address, length, position, is_new, *turn, inputs.reads, unrotated)
    cache = cache._replace(
        victim=None if inputs.rules is None else jnp.full(pool.length.shape, EMPTY, jnp.int32),
        is_read=None if inputs.reads is None else jnp.zeros(pool.page_table.shape, bool),
    )
    return cache, decode_groups(config, attend, cache, position, is_new)
