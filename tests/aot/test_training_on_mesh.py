"""The loss of a replay and its gradient, compiled for meshes of TPUs and GPUs, and for a long text on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jkv.model.sampling import SamplingRows
from jkv.model.sharding import shardings
from jkv.model.weight_shapes import weight_shapes
from jkv.replay.columns import Columns
from jkv.rl import policy_loss
from jkv.rl.batch import Batch
from tests.aot import targets
from tests.support import programs

GB = 10**9
MESHES = {"tpu-v5e": ("v5e:2x2", (2, 2)), "h200": ("1x1x2", (1, 2))}  # the topology, and devices by data and tensor


def batch_of(config, rows, length, place):
    """The shapes of a replayed batch."""

    def leaf(*sizes, dtype=jnp.int32, heads=None):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place(P("data", *([None, heads] if heads else []))))

    wide = leaf(rows, dtype=jnp.float32)
    ended = leaf(rows, config.num_layers, config.num_kv_heads, length, dtype=jnp.uint8, heads="tensor")
    values = leaf(rows, length, dtype=jnp.float32)
    return Batch(
        token=leaf(rows, length),
        mask=leaf(rows, length, dtype=jnp.bool_),
        sampled=values,
        advantage=values,
        settings=SamplingRows(wide, wide, leaf(rows), wide),
        columns=Columns(leaf(rows, 256), ended),
        start=leaf(rows),
    )


def compiled(target, topology, shape, config, rows, length, remat=True):
    """The gradient of the loss; on a mesh of one device without a mesh."""
    if reason := targets.why_missing(target):
        pytest.skip(reason)
    platform = targets.TARGETS[target][0]
    options = {"topology": topology, "target_config": targets.GPUS[target]} if platform == "cuda" else {}
    devices = topologies.get_topology_desc(topology, platform=platform, **options).devices
    on = Mesh(np.reshape(devices[: np.prod(shape)], shape), ("data", "tensor"))
    params = weight_shapes(config, jnp.bfloat16)
    params = jax.tree.map(lambda x, place: x.update(sharding=place), params, shardings(params, on))
    batch = batch_of(config, rows, length, lambda spec: NamedSharding(on, spec))
    mesh = on if on.size > 1 else None
    step = jax.jit(jax.value_and_grad(lambda params, batch: policy_loss(params, batch, mesh=mesh, remat=remat)[0]))
    return targets.compile_for(target, step.trace, params, batch)


@pytest.mark.parametrize("target", MESHES)
def test_a_mesh_gathers_logits_and_no_queries_keys_or_values(target):
    config = dataclasses.replace(programs.R1_LLAMA, num_layers=2)
    program = compiled(target, *MESHES[target], config, rows=4, length=2048)
    text = program.as_text()
    assert any(name in text for name in ("tpu_custom_call", "triton"))
    gathered = [line for line in text.splitlines() if " all-gather" in line and "all-gather-done" not in line]
    assert gathered
    assert all(f",{config.vocab_size}]" in line for line in gathered), "Only logits are gathered."


def test_a_layer_of_a_long_text_takes_little_memory():
    """32,768 tokens of Llama-8B on one device: what one more layer keeps is a few times the residual stream."""
    length, sizes = 32_768, {}
    for num_layers in (1, 3):
        config = dataclasses.replace(programs.R1_LLAMA, num_layers=num_layers)
        sizes[num_layers] = compiled("h200", "1x1x1", (1, 1), config, 1, length).memory_analysis().temp_size_in_bytes
    stream = 2 * length * programs.R1_LLAMA.width  # bytes of the residual stream in bfloat16
    print(f"{sizes[1] / GB:.2f} GB with one layer, {(sizes[3] - sizes[1]) / 2 / GB:.2f} GB for each more")
    assert (sizes[3] - sizes[1]) / 2 <= 4 * stream
