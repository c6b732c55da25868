"""The hot paths of the paged cache, one folder a kernel; each has a plain-JAX reference with the same signature, the oracle.

R = B*K rows with one KV head each. Letters (the alphabet of `jax.nn.dot_product_attention`, extended):
B batch rows, T new tokens, S cache slots, M slots kept, I pairs of pages, L layers, W remembered queries, N query heads, K KV
heads, G = N // K, H head size, P pages, MP pages of a row, C attention columns. This package never imports `jkv`.
"""

from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.block_distance import block_distance
from pallas_kernels.key_redundancy import key_redundancy
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.replay_attention import replay_attention
from pallas_kernels.take_slots import take_slots

__all__ = ["attention_mass", "block_distance", "key_redundancy", "paged_attention", "replay_attention", "take_slots"]
