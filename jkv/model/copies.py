"""KV heads that several devices of a mesh hold, because there are more devices than heads.

The axis `HEADS` of a mesh then splits the KV heads, one for each part, and the axis `COPIES` the query heads of each. Every
copy computes the same keys and values and keeps the same pages. What a policy reads of queries is gathered, or summed, over the
copies, so all of them evict the slots that one device evicts. Without such an axis these functions return their argument.
"""

import jax
from jaxtyping import Array, Shaped

from jkv.model.params import ModelConfig

HEADS = "tensor"  # the mesh axis that splits KV heads
COPIES = "copies"  # the one along which devices hold copies of them


def num_copies(config: ModelConfig, num_devices: int) -> int:
    """How many devices hold each KV head; 1 unless they are a multiple of the heads, which `may_be_copied`."""
    heads = config.num_kv_heads
    return num_devices // heads if may_be_copied(config) and heads < num_devices and num_devices % heads == 0 else 1


def may_be_copied(config: ModelConfig) -> bool:
    """Whether all layers split their heads alike: none has another number of KV heads, and none a recurrent state."""
    return config.delta_net is None and config.window_kv_heads in (0, config.num_kv_heads)


def copies_here() -> int:
    """The size of the axis `COPIES` where a program is traced; 1 outside of a mesh that has it."""
    try:
        return jax.lax.axis_size(COPIES)
    except NameError:  # no such axis
        return 1


def sum_over_copies(x: Shaped[Array, "*A"]) -> Shaped[Array, "*A"]:
    """The sum of what the copies have of their query heads."""
    return jax.lax.psum(x, COPIES) if copies_here() > 1 else x


def mean_over_copies(x: Shaped[Array, "*A"]) -> Shaped[Array, "*A"]:
    """The mean of what the copies have of their query heads."""
    return jax.lax.pmean(x, COPIES) if copies_here() > 1 else x


def gather_copies(x: Shaped[Array, "*A"], axis: int) -> Shaped[Array, "*B"]:
    """All query heads of the KV heads here, which are at `axis`."""
    return jax.lax.all_gather(x, COPIES, axis=axis, tiled=True) if copies_here() > 1 else x
