"""Bytes of a slot in a pool's format: what budgets in bytes are divided by, and what pools and plans count."""

from typing import NamedTuple

import jax.numpy as jnp

from jkv.checks import size
from jkv.model.params import ModelConfig, Params
from pallas_kernels.quantised import Format
from pallas_kernels.sealed import SealedFormat, page_bytes

POSITION_BYTES = 4


class SlotSize(NamedTuple):
    """The bytes of a slot, and in how many layers and KV heads a token has one."""

    of_head: int
    num_layers: int
    num_kv_heads: int
    name: str  # of the numbers or codes

    @property
    def whole(self) -> int:
        """Bytes of a slot in every layer and KV head."""
        return self.of_head * self.num_layers * self.num_kv_heads

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers x {self.num_kv_heads} KV heads x {self.of_head} bytes of a slot in {self.name} = "
            f"{size(self.whole)}"
        )


def slot_bytes(head_size: int, dtype: jnp.dtype, kv_format: Format | None = None) -> int:
    """Bytes of a slot in one layer and KV head: its key, its value and its position; its part of a sealed page, rounded up.

    Raises:
      ValueError: heads that the format cannot take.

    >>> from pallas_kernels.quantised import FORMATS
    >>> [slot_bytes(128, jnp.dtype("bfloat16"), kv_format) for kv_format in (None, FORMATS["int8"], FORMATS["int4"])]
    [516, 268, 148]
    """
    page = kv_format.page if isinstance(kv_format, SealedFormat) else 1
    return -(-page_bytes(head_size, dtype, kv_format, page) // page) + POSITION_BYTES


def slot_size(config: ModelConfig, dtype: jnp.dtype, kv_format: Format | None = None) -> SlotSize:
    """The size of a slot of a model."""
    name = jnp.dtype(dtype).name if kv_format is None else kv_format.name
    return SlotSize(slot_bytes(config.head_size, dtype, kv_format), config.num_paged_layers, config.num_kv_heads, name)


def slot_size_of(params: Params, kv_format: Format | None = None) -> SlotSize:
    """The size of a slot of a loaded model, whose pool has the dtype of its weights unless it is quantised."""
    return slot_size(params.config, params.embedding.dtype, kv_format)
