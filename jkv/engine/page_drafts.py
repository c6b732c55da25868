"""Guesses by the model itself, which decodes ahead over a few pages of each row's own cache (`jkv.draft_pages`).

A drafter sees tokens, and this one needs the cache. So its `propose` only gives the number of guesses, and the step that is to
check them calls `guess` first.

A guess is a plain decode step on a view of the pool, in which each row's table has its first page and its newest ones. Its key
and value are written where the exact step writes the key and value of the same token: in its slot, or its place of a ring. The
exact step overwrites them before it reads any. So no second cache is needed, nothing is restored, and the exact step's bits do
not depend on guesses. Nothing else of a view is kept: neither lengths, nor last queries, bounds of pages or recurrent states.

A guess is drawn by the key of its own position, as the exact step draws. So where both distributions are near each other, they
mostly draw the same token, at any temperature. If the view has the whole row, the distributions are equal up to rounding.

TriForce (Sun et al., 2024, arXiv 2404.11912) also drafts over a part of the model's own cache. It chooses the part by
attention, which decode kernels do not return by page. Here the choice is by place. It is not by bounds of pages, as a pool has
them for Quest alone, whose rows take one token a step.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jkv.cache.attention import Cache
from jkv.cache.pool import LOG_WEIGHT, Pool, num_pages_of
from jkv.engine.chunk import ChunkInputs, attention_of, draw_tokens
from jkv.engine.drafters import DraftPages
from jkv.engine.parts.base import Step
from jkv.model import decoder


def guess(
    drafter: DraftPages,
    inputs: ChunkInputs,
    carries: Mapping[str, Any],
    new: Step,
    address: Int[Array, "L B K T"],
    number: Int[Array, " B"],
    draws: str,
) -> Step:
    """The step with guesses after the first token of each row.

    `new.num_new` is the number of guesses of each row. Guess t follows from the token at place t, whose key and value go to
    `address[..., t]`. `number` counts the tokens that a row draws in the chunk before its first guess.
    """
    view, num_seen, params = view_of(new.cache.pool, drafter), new.cache.pool.logical_length, new.params
    if inputs.parts.adapters is not None:
        params = inputs.parts.adapters.take(new, None)[0].params
    inputs = inputs._replace(rules=None, reads=None, sinks=None)  # of rows without guesses

    def draft(place: Int[Array, ""], loop: tuple[Any, ...]) -> tuple[Any, ...]:
        kv, windows, states, token = loop
        pool = view.replace(kv=kv, length=view.length + place, logical_length=num_seen + place)
        runs = place < new.num_new
        one = jax.lax.dynamic_slice_in_dim(token, place, 1, axis=1)
        at = jax.lax.dynamic_slice_in_dim(address, place, 1, axis=3)
        step = Step(params, Cache(pool, None, windows=windows, states=states), new.row, one, runs.astype(jnp.int32), runs)
        cache, attend = attention_of(inputs, step, at, runs)
        position = pool.logical_length[:, None]
        hidden, cache = decoder.forward(params, one, position, attend, cache, rotates=False)
        logits = decoder.unembed(params, hidden)
        drawn = draw_tokens(inputs, carries, logits, position + 1, (number + place)[:, None], draws)
        token = jax.lax.dynamic_update_slice_in_dim(token, jnp.where(runs[:, None], drawn.token, 0), place + 1, axis=1)
        return cache.pool.kv, cache.windows, cache.states, token

    begin = new.cache.pool.kv, new.cache.windows, new.cache.states, new.token
    kv, windows, _, token = jax.lax.fori_loop(0, new.num_new.max(), draft, begin)
    cache = new.cache._replace(pool=new.cache.pool.replace(kv=kv), windows=windows)
    return new._replace(cache=cache, token=token)


def view_of(pool: Pool, drafter: DraftPages) -> Pool:
    """The pool with tables of each row's first page, its newest pages, and the pages of the tokens guessed next.

    In: pages 0 to 6 of a row, `pages=3` -> Out: pages 0, 5, 6, and lengths without the slots of pages 1 to 4.
    """
    num_after = num_pages_of(drafter.drafts, pool.page_size)
    num_pages, max_pages = drafter.pages + num_after, pool.page_table.shape[3]
    num_left_out = jnp.maximum(num_pages_of(pool.length, pool.page_size) - drafter.pages, 0)
    index = jnp.arange(min(num_pages, max_pages), dtype=jnp.int32)
    entry = jnp.where(index == 0, 0, jnp.minimum(index + num_left_out[..., None], max_pages - 1))
    slot_data = {}
    if LOG_WEIGHT in pool.slot_data:
        by_page = pool.slot_data[LOG_WEIGHT].reshape(*pool.page_table.shape, pool.page_size)
        weight = jnp.take_along_axis(by_page, entry[..., None], axis=3)
        slot_data = {LOG_WEIGHT: weight.reshape(*pool.length.shape, -1)}
    return pool.replace(
        page_table=jnp.take_along_axis(pool.page_table, entry, axis=3),
        length=pool.length - num_left_out * pool.page_size,
        slot_data=slot_data,
        vacant_slot=None,
        bounds=None,
    )
