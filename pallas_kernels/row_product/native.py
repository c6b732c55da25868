"""C++ for a CPU, called by XLA: each matrix is read once for all rows, and a row's bits do not depend on how many there are.

How the library comes about says `pallas_kernels.native_target`.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import native_target
from pallas_kernels.row_product import reference

SOURCE = Path(__file__).with_name("native.cc")
MOST_ROWS = {"float32": 32, "bfloat16": 128, "int8": 128, "float8_e4m3fn": 128}  # with more, XLA's product is as fast
TARGET = native_target.target_of(SOURCE)
why_no_library = functools.partial(native_target.why_no_library, SOURCE)


def why_not(x: Any, *matrices: Any, by_output: bool = False, dtype: Any = None) -> str | None:
    """Why the library cannot take these arguments; None when it can."""
    if reason := native_target.why_left_to_xla():
        return reason
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x must be float32 or bfloat16; got {x.dtype}"
    dtypes = {jnp.dtype(one.dtype).name for one in matrices}
    if len(dtypes) != 1 or not dtypes <= set(MOST_ROWS):
        return f"matrices must have one dtype of {', '.join(MOST_ROWS)}; got {', '.join(sorted(dtypes))}"
    if by_output and any(map(reference.is_code, matrices)):
        return "matrices [F, D] must hold floats"
    if (rows := x.size // x.shape[-1]) > (most := MOST_ROWS[dtypes.pop()]):
        return f"x must have at most {most} rows of such matrices; got {rows}"
    return why_no_library()


def row_product(
    x: Float[Array, "*B D"], *matrices: Any, by_output: bool = False, dtype: Any = None
) -> tuple[Float[Array, "*B _F"], ...]:
    """See `pallas_kernels.row_product`."""
    sums = products(by_output, x.reshape(-1, x.shape[-1]), *matrices)
    if dtype is None:
        dtype = x.dtype if reference.is_code(matrices[0]) else jnp.result_type(x, matrices[0])
    return tuple(one.reshape(*x.shape[:-1], -1).astype(dtype) for one in sums)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def products(by_output: bool, x: Float[Array, "R D"], *matrices: Any) -> list[Float[Array, "R _F"]]:
    """The products in float32. Their derivatives are those of XLA's products."""
    results = [jax.ShapeDtypeStruct((x.shape[0], one.shape[0 if by_output else 1]), jnp.float32) for one in matrices]
    call = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")
    return list(call(x.astype(jnp.float32), *matrices, is_by_output=by_output))


@products.defjvp
def derivative(by_output: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """The products, and how they change with x and the matrices."""
    run = functools.partial(reference.row_product, by_output=by_output, dtype=jnp.float32)
    changes = list(run(tangents[0], *primals[1:]))
    for i, (matrix, change) in enumerate(zip(primals[1:], tangents[1:], strict=True)):
        if not reference.is_code(matrix):
            changes[i] += run(primals[0], change)[0]
    return products(by_output, *primals), changes
