"""The content of pages, moved between the pool and host memory when rows are swapped out and in."""

from typing import Annotated, Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jkv.cache.pool import Pool
from pallas_kernels.quantised import put


class PageContent(NamedTuple):
    """The content of pages, by KV head."""

    kv: Annotated[Any, "K I 2 page H"]  # floats or a `Quantised`
    position: Int[Array, "K I page"]
    bounds: Float[Array, "K I 2 H"] | None


def read_pages(pool: Pool, page: Int[Array, "K I"]) -> PageContent:
    """The content of some pages of each KV head, to be swapped out."""
    kv = jax.tree.map(lambda x: x[page], pool.kv)
    return PageContent(kv, pool.position[page], None if pool.bounds is None else pool.bounds[page])


def write_pages(pool: Pool, page: Int[Array, "K I"], content: PageContent) -> Pool:
    """Writes the result of `read_pages` into other pages; content for NULL_PAGE is discarded."""
    whole = PageContent(pool.kv, pool.position, pool.bounds)
    return pool.replace(**put(whole, (page,), content)._asdict())
