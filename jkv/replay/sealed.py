"""Columns of a replay where the pool holds sealed pages: a token is read as floats first, and then from its page's record.

When it becomes a record depends on positions alone (`jkv.cache.sealed_pages`), so a trace need not say.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.cache.sealed_pages import is_record_from
from pallas_kernels.sealed import SealedFormat, straight_through

Columns = tuple[Any, Any, Any]  # begin, end, source: [n, K, C]; source None: column c is token c


def with_records(
    key: Float[Array, "n T K H"], value: Float[Array, "n T K H"], columns: Columns, format: SealedFormat
) -> tuple[Float[Array, "n S K H"], Float[Array, "n S K H"], Columns]:
    """Keys, values and columns of floats, followed by keys, values and columns of records, with the gradient of the floats.

    A column ends where its token becomes a record, and another one begins there; pages that no query reads so have none.
    """
    begin, end, source = columns
    num_tokens = key.shape[1]
    token = jnp.arange(num_tokens, dtype=jnp.int32) if source is None else source
    turn = jnp.broadcast_to(is_record_from(token, format.page), begin.shape)
    records = records_of(jnp.stack([key, value], axis=3), format)
    key, value = (jnp.concatenate([x, records[..., half, :]], axis=1) for half, x in ((0, key), (1, value)))
    late = jnp.where(turn < num_tokens, jnp.maximum(begin, turn), end)
    doubled = jnp.concatenate([begin, late], axis=-1), jnp.concatenate([jnp.minimum(end, turn), end], axis=-1)
    return key, value, (*doubled, None if source is None else jnp.concatenate([source, source + num_tokens], axis=-1))


def records_of(numbers: Float[Array, "n T K 2 H"], format: SealedFormat) -> Float[Array, "n T K 2 H"]:
    """What sealed pages give back of a sequence's keys and values; of a last page that is not full, anything."""
    samples, num_tokens, num_heads, _, size = numbers.shape
    padded = jnp.pad(numbers, [(0, 0), (0, -num_tokens % format.page), *[(0, 0)] * 3])
    by_page = padded.reshape(samples, -1, format.page, num_heads, 2, size)
    back = straight_through(jnp.transpose(by_page, (0, 1, 3, 4, 2, 5)), format)
    return jnp.transpose(back, (0, 1, 4, 2, 3, 5)).reshape(samples, -1, num_heads, 2, size)[:, :num_tokens]
