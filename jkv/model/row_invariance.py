"""Whether the bits of a token's pass through the decoder depend on how many tokens pass beside it.

Where they do not, programs for other numbers of rows, or of tokens of each row, give a token the same bits.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jkv.model.params import Params, is_blocks
from pallas_kernels import KERNELS
from pallas_kernels.choice import chosen
from pallas_kernels.dispatch import runs_native
from pallas_kernels.quantised import Format

VECTOR = 16  # numbers of the widest vectors


def holds(params: Params, kv_format: Any, num_rows: int) -> bool:
    """Whether they do not, for up to `num_rows` tokens and pages of this format (None: of floats); by shapes and dtypes alone.

    That is so on a CPU with compiled kernels, in float32 (weights and pages may have 8 bits), without experts and recurrent
    layers: products, norms, attention and softmaxes then add up in one order, and all else is computed number by number. The
    sizes of a token must be multiples of the processor's vector size, as in real models: XLA computes remainders differently.
    Pages in 4 bits, and sealed ones, are rotated by products of XLA's. A shard of a mesh has a part of these sizes.
    """
    config = params.config
    sizes = config.width, config.mlp_width, config.sharing_mlp_width, config.head_size // 2, config.vocab_size
    is_by_slot = kv_format is None or (isinstance(kv_format, Format) and kv_format.group is None)
    is_plain = params.axis is None and all(layer.experts is None and layer.delta is None for layer in params.layers)
    if not is_plain or not is_by_slot or any(size % VECTOR for size in sizes) or params.embedding.dtype != jnp.float32:
        return False
    matrices = jax.tree.leaves(params, is_leaf=is_blocks)
    blocks = [one for one in matrices if is_blocks(one)]
    floats = [one for one in matrices if not is_blocks(one) and one.ndim > 1]
    x = jax.ShapeDtypeStruct((num_rows, config.width), jnp.float32)
    heads = jax.ShapeDtypeStruct((num_rows, config.num_query_heads, config.head_size), jnp.float32)
    logits = jax.ShapeDtypeStruct((num_rows, config.vocab_size), jnp.float32)
    calls: dict[str, Any] = {"row_sum": (heads,), "log_softmax": (logits,)}
    calls |= {"row_product": (x, floats[0])} if floats else {}
    calls |= {"block_product": (x, blocks[0])} if blocks else {}

    is_native = (runs_native(kernel, KERNELS[kernel].implementations, *args) for kernel, args in calls.items())
    return chosen("paged_attention") in (None, "native") and all(is_native)
