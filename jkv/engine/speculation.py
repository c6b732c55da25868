"""A decode chunk whose steps append several tokens to a row: its next token, and guesses of those after it that prove right.

A step passes T tokens of each row through the model at once: the one that is drawn already, and up to T - 1 guesses of a
drafter (`jkv.engine.drafters`). From the logits at each place the next token is drawn, by the key of its own position. A guess
is accepted if it is that very token and all before it are. So the tokens are the same as in plain decoding, not only
distributed alike, and drafts change only the number of steps. Greedy draws follow the same rule.

- Every row passes T places in every step, with or without guesses, and a query reads what is filled up to its own place. So
  neither a row's guesses nor its neighbours' change a bit of its arithmetic. Engines of another T round differently.
- Where a row's bits do not depend on the number of places (`jkv.model.row_invariance`), a step in which no row has a guess
  passes one place, and a row whose guesses have mostly been wrong makes few (`parts.drafting.Drafts`).
- In a chunk every row gets as many tokens as in plain decoding, and then waits for the slowest one. So compactions come after
  the same tokens, and the host sees no difference. Slots are reserved once for the whole chunk, or step by step where policies
  decide in each; what a rejected guess left in them is written over.
- A row never passes the end of its chunk inside a step, so it never needs more slots than in plain decoding.
- What layers keep outside of the pool loses nothing to a rejected guess: rings have slots for it, and recurrent states are
  those after the last accepted place.
- Where the model itself makes the guesses (`jkv.engine.page_drafts`), a step begins with their passes, and then overwrites all
  that they have written.
- A row whose policy decides in each step (`parts.drafting.why_no_guesses`) takes one token a step beside the others.

The rule of acceptance is that of speculative sampling (Leviathan et al., 2023; Chen et al., 2023), for guesses without
probabilities and draws with fixed keys.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jkv.cache import pool as pages
from jkv.cache import sealed_pages, states
from jkv.cache.attention import Cache
from jkv.engine import page_drafts
from jkv.engine.chunk import (
    TRACED,
    ChunkInputs,
    ChunkOutputs,
    Drawn,
    attention_of,
    carried_on,
    draw_tokens,
    rows_alive,
)
from jkv.engine.drafters import Drafter, DraftPages, is_token, places_of
from jkv.engine.parts.base import Carried, Step
from jkv.engine.parts.drafting import Drafts
from jkv.engine.state import State
from jkv.model import decoder, row_invariance
from jkv.model.params import Params


def decode_chunk(
    params: Params,
    state: State,
    inputs: ChunkInputs,
    carried: Carried,
    num_steps: int,
    draws: str,
    is_traced: bool,
    drafter: Drafter,
) -> tuple[State, ChunkOutputs, Carried]:
    """See `jkv.engine.programs.decode_chunk`."""
    row, places = jnp.arange(inputs.remaining.shape[0], dtype=jnp.int32), places_of(drafter)
    parts, drafting = inputs.parts.on, inputs.parts.draft
    assert drafting is not None
    is_active, zeros = rows_alive(inputs), jnp.zeros_like(row)
    quota, num_seen = jnp.where(is_active, jnp.minimum(inputs.remaining, num_steps), 0), state.cache.pool.logical_length
    # An evicted slot is the next token's, and a thought may start on a page of its own: neither is known before the chunk.
    by_step = inputs.rules is not None or inputs.parts.align is not None
    pool, address = (state.cache.pool, None) if by_step else pages.reserve(state.cache.pool, row, quota, num_steps)

    kv_format = getattr(state.cache.pool.kv, "format", None)
    narrows = (
        state.cache.tail is None
        and parts.get("adapters") is None
        and row_invariance.holds(params, kv_format, len(row) * places)
    )

    def placed(
        pool: pages.Pool, count: Int[Array, " B"], num_new: Int[Array, " B"], width: int
    ) -> tuple[pages.Pool, Int[Array, "L B K T"]]:
        """Where the next tokens go, in rows that have had `count` tokens in the chunk."""
        if address is None:
            return pages.reserve(pool, row, num_new, width)
        return pool, addresses_of(address, count, jnp.arange(width, dtype=jnp.int32) < num_new[:, None])

    def decoded_ahead(new: Step, count: Int[Array, " B"], carries: dict[str, Any]) -> Step:
        """The step with guesses of the model itself."""
        assert isinstance(drafter, DraftPages)
        num_guesses = jnp.maximum(new.num_new - 1, 0)
        pool, of_guesses = placed(new.cache.pool, count, num_guesses, places)
        ahead = new._replace(cache=new.cache._replace(pool=pool), num_new=num_guesses)
        ahead = page_drafts.guess(drafter, inputs, carries, ahead, of_guesses, count + 1, draws)
        pool = ahead.cache.pool
        if address is None:  # the step reserves slots again, after its parts
            pool = pages.give_back(pool, row, num_guesses, places)
        return ahead._replace(cache=ahead.cache._replace(pool=pool), num_new=new.num_new)

    def guess(first: Drawn, is_active: Bool[Array, " B"], count: Int[Array, " B"], drafts: Drafts) -> tuple[Array, Array]:
        """The tokens of the next step, and how many of them are new: the one that is drawn, and guesses of those after it."""
        history = jnp.concatenate([drafts.history, first.token[:, None]], axis=1)
        proposal = drafter.propose(history[:, 1:], drafting.prompt)
        num_drafts = jnp.minimum(
            proposal.length, is_token(proposal.token, params.config.vocab_size).sum(axis=1, dtype=jnp.int32)
        )
        may_draft = drafting.may_draft & ~first.is_last & (drafts.credit >= 0 if narrows else True)
        num_drafts = jnp.where(may_draft, jnp.maximum(num_drafts, 0), 0)
        num_new = jnp.where(is_active & (count < quota), jnp.minimum(1 + num_drafts, quota - count), 0)
        return jnp.concatenate([first.token[:, None], proposal.token], axis=1), num_new

    def step(loop: tuple[Any, ...], width: int) -> tuple[Any, ...]:
        """One pass of the first `width` places of each row."""
        (cache, logits), first, is_active, count, (all_tokens, num_new), carries, kept, counts = loop
        carries, runs, place = dict(carries), is_active & (count < quota), jnp.arange(width, dtype=jnp.int32)
        token, is_new = all_tokens[:, :width], place < num_new[:, None]

        position = cache.pool.logical_length[:, None] + place
        new = Step(params, cache, row, jnp.where(is_new, token, 0), num_new, runs)
        if isinstance(drafter, DraftPages) and width > 1:
            new = decoded_ahead(new, count, carries)
            all_tokens = token = new.token
        for name, part in parts.items():
            new, carries[name] = part.take(new, carries[name])
        pool, of_step = placed(new.cache.pool, count, num_new, width)
        new = new._replace(cache=new.cache._replace(pool=pool))
        has_next = runs & ~first.is_last & (count + 1 < inputs.remaining)  # of a row that takes one token
        cache, attend = attention_of(inputs, new, of_step, has_next)
        given = new.params, new.token, position, attend, cache, new.enter, new.observe, new.choose
        hidden, cache = decoder.forward(*given, rotates=False)
        of_places = decoder.unembed(new.params, hidden)
        then = draw_tokens(inputs, carries, of_places, position + 1, (count + 1)[:, None] + place, draws)

        drawn: Drawn = jax.tree.map(lambda x, y: jnp.concatenate([x[:, None], y[:, :-1]], axis=1), first, then)
        is_right = (token == drawn.token)[:, 1:] & is_new[:, 1:] & ~drawn.is_last[:, :-1]
        accepted = jnp.where(runs, 1 + jnp.cumprod(is_right.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32), 0)
        pool, dropped = pages.advance(cache.pool, row, accepted), None
        if address is None and width > 1:
            pool = pages.give_back(pool, row, num_new - accepted, width - 1)
        if cache.victim is not None:
            pool, dropped = pages.vacate(pool, cache.victim)
        if cache.states is not None:
            cache = states.accept(cache, accepted)

        def at_last(x: Array, otherwise: Array) -> Array:
            """Of the last accepted place, in rows that run."""
            return jnp.where(runs.reshape(-1, *[1] * (x.ndim - 2)), x[row, jnp.maximum(accepted - 1, 0)], otherwise)

        count = count + accepted
        ends = at_last(drawn.is_last, ~is_active) | (count >= inputs.remaining)
        of_tokens = {"token": token, "is_real": is_new} | drawn.out | of_step_alone(dropped, cache.is_read, width)
        for name, part in parts.items():
            of_tokens |= part.report(new, hidden, cache, carries[name])
        at = (count - accepted)[:, None] + place, place < accepted[:, None]
        kept = keep(kept, {name: x for name, x in of_tokens.items() if name in kept}, *at)
        carries["draft"] = drafts = carries["draft"].after(all_tokens, num_new, accepted)
        counts = counts[0] + runs.astype(jnp.int32), counts[1] + jnp.maximum(num_new - 1, 0), counts[2] + 1
        state, then = State(cache.after_pass(pool), at_last(of_places, logits)), jax.tree.map(at_last, then, first)
        is_active = is_active & ~ends
        return state, then, is_active, count, guess(then, is_active, count, drafts), carries, kept, counts

    def goes_on(loop: tuple[Any, ...]) -> Array:
        return (loop[2] & (loop[3] < quota)).any()

    def has_guesses(loop: tuple[Any, ...]) -> Array:
        return (loop[4][1] > 1).any()

    def steps(loop: tuple[Any, ...]) -> tuple[Any, ...]:
        """Steps without guesses, then steps with some. (With a branch in one loop, XLA would copy the pool.)"""
        loop = jax.lax.while_loop(lambda x: goes_on(x) & ~has_guesses(x), functools.partial(step, width=1), loop)
        return jax.lax.while_loop(lambda x: goes_on(x) & has_guesses(x), functools.partial(step, width=places), loop)

    state = state._replace(cache=state.cache._replace(pool=pool))
    carries = {name: part.begin(carried) for name, part in parts.items()}
    of_row = state.logits[:, None], pool.logical_length[:, None], zeros[:, None]
    first = jax.tree.map(lambda x: x[:, 0], draw_tokens(inputs, carries, *of_row, draws))
    shapes = {"token": first.token, "is_real": is_active} | first.out
    shapes |= shapes_of_reports(params, inputs, state.cache, carries, places)
    kept = {name: jnp.zeros((num_steps, *x.shape), x.dtype) for name, x in shapes.items() if is_traced or name not in TRACED}
    counts = zeros, zeros, jnp.int32(0)
    begin = state, first, is_active, zeros, guess(first, is_active, zeros, carries["draft"]), carries, kept, counts
    body = steps if narrows else functools.partial(step, width=places)
    state, _, is_running, count, _, carries, kept, counts = jax.lax.while_loop(goes_on, body, begin)
    pool = state.cache.pool if by_step else pages.give_back(state.cache.pool, row, quota - count, num_steps)
    if state.cache.tail is not None:
        pool = sealed_pages.seal_filled(state.cache._replace(pool=pool), num_seen)
    state = state._replace(cache=state.cache._replace(pool=pool))
    kept |= {name: jnp.moveaxis(kept[name], 1, 2) for name in ("dropped", "is_read") if name in kept}  # layers before rows
    names = dict(zip(("row_steps", "drafted", "num_loops"), counts, strict=True))
    outputs = ChunkOutputs(held_pages=pages.held_pages(pool), is_running=is_running, **kept, **names)
    return state, outputs, carried_on(inputs, carries)


def of_step_alone(
    dropped: Int[Array, "L B K"] | None, is_read: Bool[Array, "L B K MP"] | None, places: int
) -> dict[str, Array]:
    """What a step reports of its one token in rows that decide in each step, as outputs of tokens [B, T, L, ...]."""
    given = {"dropped": dropped, "is_read": is_read}
    by_row = {name: jnp.moveaxis(x, 0, 1)[:, None] for name, x in given.items() if x is not None}
    return {name: jnp.broadcast_to(x, (len(x), places, *x.shape[2:])) for name, x in by_row.items()}


def addresses_of(
    address: Int[Array, "L B K steps"], count: Int[Array, " B"], is_new: Bool[Array, "B T"]
) -> Int[Array, "L B K T"]:
    """Where the tokens of a step go, in rows that have had `count` tokens of those that addresses are reserved for."""
    at = count[:, None] + jnp.arange(is_new.shape[1], dtype=jnp.int32)
    taken = jnp.take_along_axis(address, jnp.minimum(at, address.shape[3] - 1)[None, :, None], axis=3)
    return jnp.where(is_new[None, :, None], taken, pages.NULL_PAGE)


def keep(
    kept: dict[str, Array], of_tokens: dict[str, Array], index: Int[Array, "B T"], is_kept: Bool[Array, "B T"]
) -> dict[str, Array]:
    """A chunk's outputs `[steps, B, ...]`, with the outputs of a step's tokens `[B, T, ...]` written at `index`."""
    row, num_steps = jnp.arange(len(index), dtype=jnp.int32)[:, None], len(kept["token"])
    at = jnp.where(is_kept, index, num_steps)
    return {name: x.at[at, row].set(of_tokens[name].astype(x.dtype), mode="drop") for name, x in kept.items()}


def shapes_of_reports(
    params: Params, inputs: ChunkInputs, cache: Cache, carries: dict[str, Any], places: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes [B, ...] of what a step and its parts report of a token."""

    def report() -> dict[str, Array]:
        row, table = jnp.arange(len(inputs.remaining), dtype=jnp.int32), cache.pool.page_table
        is_read = None if inputs.reads is None else jnp.zeros(table.shape, bool)
        out = of_step_alone(None if inputs.rules is None else table[..., 0], is_read, places)
        token = jnp.zeros((len(row), places), jnp.int32)
        hidden = jnp.zeros((*token.shape, params.config.width), params.embedding.dtype)
        new = Step(params, cache, row, token, row, row > 0)
        for name, part in inputs.parts.on.items():
            new, carry = part.take(new, carries[name])
            out |= part.report(new, hidden, new.cache, carry)
        return {name: x[:, 0] for name, x in out.items()}

    return jax.eval_shape(report)
