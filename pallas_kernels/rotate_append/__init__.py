"""What a decode step does to its new tokens before attention: rotate queries and keys, append to the pool, remember queries."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.quantised import Numbers
from pallas_kernels.rotate_append import gpu, reference, tpu


def at_once(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tokens that may share a page."""
    return lambda *args, places=1: run(*args)


def place_by_place(run: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation that takes tokens of different pages: those of one place of each row at a time."""

    def run_each(
        kv: Any, projected: Any, cos: Any, sin: Any, address: Any, ring: Any, ring_at: Any, layer: Any, places: int = 1
    ) -> Any:
        address, queries = address if layer is None else address[layer], []
        for place in range(places):
            of_place = (None if x is None else x[place::places] for x in (projected, cos, sin, address, ring_at))
            projected_B, cos_B, sin_B, address_B, ring_at_B = of_place
            kv, query, ring = run(kv, projected_B, cos_B, sin_B, address_B, ring, ring_at_B)
            queries.append(query)
        return kv, jnp.stack(queries, axis=1).reshape(-1, *queries[0].shape[1:]), ring

    return run_each


IMPLEMENTATIONS = {
    "tpu": Implementation(place_by_place(tpu.rotate_append), "tpu", at_once(tpu.why_not), reads_codes=True, reads_groups=True),
    "gpu": Implementation(at_once(gpu.rotate_append), "cuda", at_once(gpu.why_not), reads_codes=True, reads_groups=True),
    "reference": Implementation(at_once(reference.rotate_append)),
}


def rotate_append(
    kv: Numbers,
    projected: Float[Array, "B heads H"],
    cos: Float[Array, "B half"],
    sin: Float[Array, "B half"],
    address: Int[Array, "*L B K"],
    ring: Float[Array, "C N H"] | None = None,
    ring_at: Int[Array, " B"] | None = None,
    layer: Int[Array, ""] | int | None = None,
    *,
    places: int = 1,
    implementation: str | None = None,
) -> tuple[Numbers, Float[Array, "B N H"], Float[Array, "C N H"] | None]:
    """The pool with each row's new token, the rotated queries, and the ring of queries.

    The pool is `[P, 2, page, H]`: floats, or codes with scales, which the rotated key and the value get here.
    Donate pool and ring, or they are copied. `projected` holds a token's query heads, key heads and value heads, in this
    order, not rotated. Channel c < `half` turns with channel c + `half`, as in Hugging Face; channels from 2 * `half` on are
    unchanged. The key and value of KV head k go to `address[b, k]`, which is `page * page_size + offset`. Tokens that are not
    stored go to page 0, the null page, which may hold anything. No two others may share a page, but for the `places` tokens of
    each sequence, which follow each other here. The queries of a row go to
    entry `ring_at[b]` of the ring. With `layer`, addresses are those of all layers, and the kernel reads those of this layer in
    place.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    return call(
        "rotate_append", IMPLEMENTATIONS, implementation, kv, projected, cos, sin, address, ring, ring_at, layer, places=places
    )
