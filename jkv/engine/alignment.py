"""Thoughts that start on a page of their own, so that sharing compares whole pages (`jkv.reasoning.sharing`)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jkv.cache import pool as pages


class AlignRules(NamedTuple):
    """Which rows start each thought on a new page, and how far they are in a thought (`jkv.reasoning.sharing`)."""

    is_aligning: Bool[Array, " B"]
    was_end: Bool[Array, " B"]  # whether the last token ended a thought
    since: Int[Array, " B"]  # tokens since the last thought that started a page
    is_end: Bool[Array, " V"]  # whether a token ends a thought


def start_page(
    align: AlignRules, pool: pages.Pool, token: Int[Array, " B"], is_active: Bool[Array, " B"]
) -> tuple[AlignRules, pages.Pool]:
    """The pool with a new page for each row whose next token starts a thought; `Sharing.append` does the same on the host.

    After less than half a page of text, a thought continues in the same page, so that no row is more than half empty.
    """
    is_end = align.is_end[token]
    starts = align.is_aligning & is_active & align.was_end & ~is_end & (2 * align.since >= pool.page_size)
    since = jnp.where(is_active, jnp.where(starts, 0, align.since) + 1, align.since)
    align = align._replace(was_end=jnp.where(is_active, is_end, align.was_end), since=since)
    return align, pages.fill_page(pool, starts)
