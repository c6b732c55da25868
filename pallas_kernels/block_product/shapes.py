"""The arguments of real calls: gate and up of a layer, for the tokens of a decode step and of a piece of a prompt."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blocks import BLOCKS, Blocks
from pallas_kernels.models import Case, ModelShape, Workload, of

CASES = (
    *(Case(f"decode step, {kind}", options={"kind": kind}) for kind in BLOCKS),
    Case("piece of a prompt, Q4_K", {"batch": 64}, {"kind": "Q4_K"}),
)
WIDER = 4  # of the inner width of a block
LARGEST = 256  # weights of a block, of which a row has whole ones


def arguments(model: ModelShape, workload: Workload, kind: str = "Q4_K") -> tuple[Any, ...]:
    """Shapes of the hidden state and of two matrices; the width is taken to be that of all query heads, in whole blocks."""
    width = -(-model.num_query_heads * model.head_size // LARGEST) * LARGEST
    data = of(jnp.uint8, WIDER * width, width // BLOCKS[kind].weights * BLOCKS[kind].bytes)
    return of(workload.dtype, workload.batch, width), Blocks(data, kind), Blocks(data, kind)


def values(model: ModelShape, workload: Workload, kind: str = "Q4_K") -> tuple[Any, ...]:
    """Normal numbers, and random codes with small scales."""
    x, *matrices = arguments(model, workload, kind)
    rng = np.random.default_rng(0)
    filled = [one.replace(data=jnp.asarray(random_rows(rng, one.data.shape, kind))) for one in matrices]
    return jax.random.normal(jax.random.key(0), x.shape, x.dtype), *filled


def random_rows(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    """Rows of random blocks, uint8 [rows, bytes], whose scales are small."""
    rows, num_bytes = shape
    blocks = rng.integers(0, 256, (rows, num_bytes // BLOCKS[kind].bytes, BLOCKS[kind].bytes), np.uint8)
    for at in BLOCKS[kind].scales:
        scale = rng.normal(scale=0.01, size=(*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = scale.view(np.uint8)
    return blocks.reshape(shape)


def num_bytes(model: ModelShape, workload: Workload, kind: str = "Q4_K") -> int:
    """Bytes of the blocks, read once, and of the rows."""
    x, matrix, _ = arguments(model, workload, kind)
    rows = x.size + 2 * workload.batch * matrix.data.shape[0]
    return int(2 * matrix.data.size + rows * jnp.dtype(workload.dtype).itemsize)
