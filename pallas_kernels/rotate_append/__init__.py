"""What a decode step does to its new tokens before attention: rotate queries and keys, append to the pool, remember queries."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.quantised import Numbers
from pallas_kernels.rotate_append import gpu, reference, tpu

IMPLEMENTATIONS = {
    "tpu": Implementation(tpu.rotate_append, "tpu", tpu.why_not, reads_codes=True, reads_groups=True),
    "gpu": Implementation(gpu.rotate_append, "cuda", gpu.why_not, reads_codes=True, reads_groups=True),
    "reference": Implementation(reference.rotate_append),
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
    implementation: str | None = None,
) -> tuple[Numbers, Float[Array, "B N H"], Float[Array, "C N H"] | None]:
    """The pool with each row's new token, the rotated queries, and the ring of queries.

    The pool is `[P, 2, page, H]`: floats, or codes with scales, which the rotated key and the value get here.
    Donate pool and ring, or they are copied. `projected` holds a token's query heads, key heads and value heads, in this
    order, not rotated. Channel c < `half` turns with channel c + `half`, as in Hugging Face; channels from 2 * `half` on are
    unchanged. The key and value of KV head k go to `address[b, k]`, which is `page * page_size + offset`. Tokens that are not
    stored go to page 0, the null page, which may hold anything; no two others may share a page. The queries of a row go to
    entry `ring_at[b]` of the ring. With `layer`, addresses are those of all layers, and the kernel reads those of this layer in
    place.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    return call("rotate_append", IMPLEMENTATIONS, implementation, kv, projected, cos, sin, address, ring, ring_at, layer)
