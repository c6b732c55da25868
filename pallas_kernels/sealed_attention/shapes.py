"""The arguments of real calls: a decode step of a model whose pages are sealed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.models import Case, ModelShape, Workload, of
from pallas_kernels.sealed import PAGES, SEALED, Records, SealedFormat, arrays_of, page_bytes, seal

CASES = (Case("decode step, kvarn"),)


def format_of(workload: Workload) -> SealedFormat:
    """The format, with pages of the workload or the nearest size that it takes."""
    page = min(PAGES, key=lambda page: abs(page - workload.page_size))
    return dataclasses.replace(SEALED["kvarn"], page=page)


def max_pages(workload: Workload) -> int:
    """Pages of a row."""
    return -(-workload.slots // format_of(workload).page)


def shape_of(model: ModelShape, workload: Workload) -> tuple[int, int, int, int]:
    """The shape of a pool with the pages of every row in one layer, and the null page."""
    num_pages = 1 + workload.num_rows(model) * max_pages(workload)
    return num_pages, 2, format_of(workload).page, model.head_size


def arguments(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """Shapes of the query, the records, the page table, and the number of pages of every row."""
    form, num_pages, size = format_of(workload), shape_of(model, workload)[0], model.head_size
    arrays: Any = {name: of(dtype, *shape) for name, (shape, dtype) in arrays_of(num_pages, size, form).items()}
    records = Records(**arrays, format=form, dtype=jnp.dtype(workload.dtype))
    rows = workload.num_rows(model)
    query = of(workload.dtype, rows, model.group, size)
    return query, records, of(jnp.int32, rows, max_pages(workload)), of(jnp.int32, rows)


def values(model: ModelShape, workload: Workload) -> tuple[Any, ...]:
    """Normal queries, keys and values; all rows are full, with pages in random order."""
    query, _, page_table, num_pages = arguments(model, workload)
    keys, shape = jax.random.split(jax.random.key(0), 3), shape_of(model, workload)
    pages = 1 + jax.random.permutation(keys[2], shape[0] - 1)
    return (
        jax.random.normal(keys[0], query.shape, query.dtype),
        jax.jit(lambda key: seal(jax.random.normal(key, shape, workload.dtype), format_of(workload)))(keys[1]),
        pages.reshape(page_table.shape).astype(jnp.int32),
        jnp.full(num_pages.shape, max_pages(workload), jnp.int32),
    )


def num_bytes(model: ModelShape, workload: Workload) -> int:
    """Bytes of records, read once, of queries, read, and of outputs, written; tables do not count."""
    form = format_of(workload)
    pages = workload.num_rows(model) * max_pages(workload)
    rest = 2 * workload.num_rows(model) * model.group * model.head_size * jnp.dtype(workload.dtype).itemsize
    return pages * page_bytes(model.head_size, workload.dtype, form, form.page) + rest
