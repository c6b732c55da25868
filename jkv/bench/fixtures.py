"""What device programs are timed on: a random model, a pool filled with random keys, and the host's inputs of a chunk."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from jkv.cache import default_page_size
from jkv.cache import pool as pages
from jkv.cache.attention import Cache
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.model_shapes import read_shape
from jkv.engine.chunk_inputs import step_rules
from jkv.engine.programs import ChunkInputs
from jkv.engine.state import State, empty_state
from jkv.eviction import Needs, Policy
from jkv.model.eight_bits import quantise_weights
from jkv.model.joined import joins_by_default
from jkv.model.params import Model, ModelConfig, Params
from jkv.model.sampling import Sampling, rows_of
from jkv.model.weight_shapes import init_params

MOST_NEW = 512  # slots that are filled at a time, as their random numbers are stored twice


def model_of(name: str, dtype: Any = None) -> Model:
    """A TOML file's shape with random weights, in the device's usual type; or what `jkv.load` finds.

    Raises:
      ValueError: a file that describes no model.
    """
    if not name.endswith(".toml"):
        return checkpoint.load(name)
    return random_model(read_shape(Path(name)), Path(name).stem, dtype)


def random_model(config: ModelConfig, name: str, dtype: Any = None, weight_dtype: str | None = None) -> Model:
    """Random weights, joined on a GPU, bfloat16 on an accelerator and float32 on a CPU, or in 8 bits, and no tokenizer."""
    usual = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    params = init_params(config, jax.random.key(0), dtype=dtype or usual, joins=joins_by_default())
    return Model(quantise_weights(params, weight_dtype) if weight_dtype else params, None, name=name)


def usual_page_size() -> int:
    """The page size of an engine here that is not told one."""
    return default_page_size(jax.default_backend())


def new_state(params: Params, policy: Policy, batch: int, slots: int | np.ndarray, page_size: int) -> State:
    """An empty pool for `batch` rows of `slots` slots (one number, or one for each row), with what the policy needs."""
    each = pages.num_pages_of(np.broadcast_to(slots, batch), page_size)
    num_pages = params.config.num_layers * params.config.num_kv_heads * int(each.sum())
    sizes: Any = {"num_rows": batch, "num_pages": num_pages, "max_pages": int(each.max()), "page_size": page_size}
    return empty_state(params.config, Needs.of([policy]), **sizes, dtype=params.embedding.dtype)


def fill(state: State, key: PRNGKeyArray, slots: int | np.ndarray) -> State:
    """Random keys, values and queries in all rows, which are empty: so many slots, or a number for each row."""
    left = np.broadcast_to(slots, state.cache.pool.num_rows).astype(np.int32)
    width = min(int(left.max()), MOST_NEW)
    while left.any():
        key, own = jax.random.split(key)
        now = np.minimum(left, width)
        state, left = append_random(state, own, now, width), left - now
    return state


@functools.partial(jax.jit, static_argnames="width", donate_argnames="state")
def append_random(state: State, key: PRNGKeyArray, num_new: Int[Array, " B"], width: int) -> State:
    """`num_new` random keys and values more in each row, `width` at most, and random queries."""
    pool, ring = state.cache.pool, state.cache.query_ring
    layers, batch, heads, _ = pool.page_table.shape
    row = jnp.arange(batch, dtype=jnp.int32)
    pool, address = pages.reserve(pool, row, num_new, width)

    def append(kv: Array, layer: tuple[Int[Array, "R K T"], PRNGKeyArray]) -> tuple[Array, None]:
        at, key = layer
        new = jax.random.normal(key, (2, batch, width, heads, kv.shape[-1]), kv.dtype)
        return pages.append(pool.replace(kv=kv), at, new[0], new[1]).kv, None

    kv, _ = jax.lax.scan(append, pool.kv, (address, jax.random.split(key, layers)))
    ring = None if ring is None else jax.random.normal(key, ring.shape, ring.dtype)
    return state._replace(cache=Cache(pages.advance(pool.replace(kv=kv), row, num_new), ring))


def new_inputs(params: Params, policy: Policy, batch: int, running: int | None = None) -> ChunkInputs:
    """Greedy rows that never stop, of which the first `running` run, or all."""
    arrays: Any = {
        "remaining": np.where(np.arange(batch) < (batch if running is None else running), 1 << 20, 0).astype(np.int32),
        "stop_ids": np.full((batch, 1), -1, np.int32),
        "sampling": rows_of([Sampling(temperature=0.0)] * batch),
        "key": np.zeros((batch, 2), np.uint32),
    }
    rules = step_rules(dict.fromkeys(range(batch), policy), batch, params.config.num_layers, {}) if policy.needs.mass else None
    return jax.device_put(ChunkInputs(**arrays, rules=rules))
