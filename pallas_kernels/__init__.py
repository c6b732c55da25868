"""The hot paths of the paged cache: one folder per kernel, each with a plain-JAX reference of the same signature, the oracle.

R = B*K rows with one KV head each. Letters (the alphabet of `jax.nn.dot_product_attention`, extended):
B batch rows, T new tokens, S cache slots, M slots kept, I pairs of pages, L layers, W remembered queries, N query heads, K KV
heads, G = N // K, H head size, P pages, MP pages of a row, C attention columns, D channels of a
hidden state. This package never imports `jkv`.
"""

import inspect

from pallas_kernels import choice, dispatch

# The table of kernels, one line each. Dispatch, benchmark and tests find everything else in the kernel's folder.
from pallas_kernels.add_norm import add_norm as add_norm
from pallas_kernels.attention_mass import attention_mass as attention_mass
from pallas_kernels.block_distance import block_distance as block_distance
from pallas_kernels.block_product import block_product as block_product
from pallas_kernels.key_redundancy import key_redundancy as key_redundancy
from pallas_kernels.largest_slots import largest_slots as largest_slots
from pallas_kernels.log_softmax import log_softmax as log_softmax
from pallas_kernels.paged_attention import paged_attention as paged_attention
from pallas_kernels.replay_attention import replay_attention as replay_attention
from pallas_kernels.rotate_append import rotate_append as rotate_append
from pallas_kernels.row_product import row_product as row_product
from pallas_kernels.row_sum import row_sum as row_sum
from pallas_kernels.sealed_attention import sealed_attention as sealed_attention
from pallas_kernels.take_slots import take_slots as take_slots

KERNELS = {name: dispatch.kernel_in(name) for name, value in vars().copy().items() if inspect.isfunction(value)}
choice.NAMES.update({name: tuple(kernel.implementations) for name, kernel in KERNELS.items()})
