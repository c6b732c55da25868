"""Decoding large models over a mesh: each device has room for its part of the weights and of the pool, which is not copied.

More rows than one engine has room for are those of replicas: each runs this program on devices of its own.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from jkv.cache import pool
from jkv.checkpoints.model_shapes import find_shape
from jkv.engine import mesh, scheduler
from jkv.engine.parts.base import Carried
from jkv.engine.programs import ChunkInputs
from jkv.eviction import Needs
from jkv.model.params import ModelConfig
from jkv.model.sampling import SamplingRows
from jkv.model.sharding import placed, shardings
from jkv.model.weight_shapes import weight_shapes
from jkv.testing import assert_no_pool_copy, find_copies
from tests.aot import targets
from tests.support import programs

GB = 10**9
PAGE_SIZE, MAX_SLOTS = 128, 1024 + 128  # R-KV's budget and buffer

QWQ_32B = ModelConfig(
    family="qwen2",
    vocab_size=152_064,
    width=5120,
    num_layers=64,
    num_query_heads=40,
    num_kv_heads=8,
    head_size=128,
    mlp_width=27_648,
    max_positions=40_960,
    qkv_bias=True,
)


class Setup(NamedTuple):
    """A model on some devices, and the rows that decode together."""

    config: ModelConfig
    topology: str
    num_shards: int  # devices of an engine
    device_bytes: int
    num_rows: int  # of an engine


SETUPS = {
    "qwq-32b on 8 v5e": Setup(QWQ_32B, "v5e:2x4", 8, 16 * GB, 32),  # a v5e-16 has two of these, and 64 rows
    "qwq-32b on 4 v6e": Setup(QWQ_32B, "v6e:2x2", 4, 32 * GB, 64),
    "llama-8b on 2 v5e": Setup(programs.R1_LLAMA, "v5e:2x2", 2, 16 * GB, 32),
    "qwen-1.5b on 4 v5e": Setup(programs.R1_QWEN, "v5e:2x2", 4, 16 * GB, 64),  # each of its 2 KV heads on two devices
}


QWEN = find_shape("qwen3-30b-a3b")[1]
BY_WIDTH = dataclasses.replace(QWEN, whole_experts=False)
EXPERTS = {  # the split of experts -> with many rows, and with few
    "by number": (Setup(QWEN, "v6e:2x2", 4, 32 * GB, 32), Setup(QWEN, "v6e:2x2", 4, 32 * GB, 2)),
    "by width": (Setup(BY_WIDTH, "v6e:2x2", 4, 32 * GB, 32), Setup(BY_WIDTH, "v6e:2x2", 4, 32 * GB, 2)),
}


class Compiled(NamedTuple):
    """A decode program, and the pool of one device."""

    program: jax.stages.Compiled
    pool: Any


@functools.cache
def compiled(setup: Setup, num_layers: int) -> Compiled:
    """Some layers of the model, with the pages of all of its layers."""
    if reason := targets.why_missing("tpu-v5e"):
        pytest.skip(reason)
    config, rows = dataclasses.replace(setup.config, num_layers=num_layers), setup.num_rows
    described = topologies.get_topology_desc(setup.topology, platform="tpu").devices
    on = mesh.arrange(Mesh(np.asarray(described[: setup.num_shards]), ("tensor",)), config)
    max_pages = pool.num_pages_of(MAX_SLOTS, PAGE_SIZE)
    num_pages = setup.config.num_layers * rows * config.num_kv_heads * max_pages
    sizes = {"num_rows": rows, "num_pages": num_pages, "max_pages": max_pages, "page_size": PAGE_SIZE}
    make = functools.partial(mesh.empty_state, on, config, Needs(window=8), **sizes, dtype=jnp.bfloat16)

    def leaf(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=mesh.replicated(on))

    def on_devices(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), tree, shardings)

    params, state = weight_shapes(config, jnp.bfloat16), jax.eval_shape(make)
    params = on_devices(params, shardings(params, on))
    state = on_devices(state, placed(on, mesh.state_specs(state), state))
    wide = leaf(rows, dtype=jnp.float32)
    settings, key = SamplingRows(wide, wide, leaf(rows), wide), leaf(rows, 2, dtype=jnp.uint32)
    inputs = ChunkInputs(leaf(rows), leaf(rows, 1), settings, key)
    trace = mesh.program_on(on, "decode_chunk").trace
    program = targets.compile_for("tpu-v5e", trace, params, state, inputs, Carried(), scheduler.CHUNKS[0], "sampled")
    kv = state.cache.pool.kv
    of_device = jax.ShapeDtypeStruct((kv.shape[0] // mesh.num_pools(on), *kv.shape[1:]), kv.dtype)
    return Compiled(program, state.cache.pool.replace(kv=of_device))


def device_bytes(program: jax.stages.Compiled) -> int:
    """What the program needs of a device; what is donated is counted once."""
    memory = program.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )


def bytes_of_layers(setup: Setup, count: int) -> int:
    """Weights of some layers on one device; of query, key and value the compiler may keep another layout too."""
    layer = weight_shapes(dataclasses.replace(setup.config, num_layers=1), jnp.bfloat16).layers[0]
    twice = layer.query, layer.key, layer.value
    return count * sum(x.size * 2 for x in jax.tree.leaves((layer, twice))) // setup.num_shards


def check(name: str, num_layers: int) -> None:
    """The program has room with all layers of the model, those that were not compiled by arithmetic."""
    setup = SETUPS[name]
    program, of_device = compiled(setup, num_layers)
    kv, memory, text = of_device.kv, program.memory_analysis(), program.as_text()
    assert memory.alias_size_in_bytes >= kv.size * kv.dtype.itemsize
    assert not find_copies(text, kv.shape)
    assert "all-reduce" in text
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert any("paged_attention" in line for line in calls)
    needed = device_bytes(program) + bytes_of_layers(setup, setup.config.num_layers - num_layers)
    print(f"{name}, {num_layers} layers: {memory.temp_size_in_bytes / GB:.2f} GB of temporaries; {needed / GB:.2f} GB in all")
    assert needed < setup.device_bytes


@pytest.mark.parametrize("name", SETUPS)
def test_a_mesh_decodes_a_model_within_its_memory(name):
    check(name, num_layers=2)
    assert_no_pool_copy(*compiled(SETUPS[name], 2))


def test_copies_of_kv_heads_exchange_two_sums_a_layer():
    """As heads that are split; keys, values and queries stay where they are."""
    program, _ = compiled(SETUPS["qwen-1.5b on 4 v5e"], 2)
    assert collectives(program) == collectives(compiled(SETUPS["llama-8b on 2 v5e"], 2).program)


@pytest.mark.parametrize("name", SETUPS)
def test_a_mesh_decodes_all_layers_within_its_memory(name):
    check(name, num_layers=SETUPS[name].config.num_layers)


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """How often the program calls each kind of collective."""
    kinds = "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", program.as_text())) for kind in kinds}


def bytes_read(program: jax.stages.Compiled) -> float:
    """Bytes that a chunk of steps reads and writes, as the compiler counts them: its loop over steps once."""
    analysis = program.cost_analysis()
    return float(analysis["bytes accessed"])


def test_whole_experts_are_read_where_they_lie_and_parts_are_copied():
    """Two layers of Qwen3-30B-A3B on four v6e: why a mesh splits experts by their number.

    The parts by width are written in another layout, as large as they are. Of few rows, each device reads fewer of them.
    """
    (whole, whole_few), (part, part_few) = ([compiled(one, 2) for one in EXPERTS[split]] for split in EXPERTS)
    experts = 2 * 3 * 2 * QWEN.num_experts * QWEN.mlp_width * QWEN.width // 4  # bytes of a device's, in two layers
    for one, other in ((whole, part), (whole_few, part_few)):
        assert collectives(one.program) == collectives(other.program)
    assert_no_pool_copy(*whole)  # with two rows, the pool is so small that it is prefetched as a whole
    temporaries = [one.program.memory_analysis().temp_size_in_bytes for one in (whole, part, whole_few, part_few)]
    assert temporaries[0] < experts / 10
    assert temporaries[1] > experts
    assert max(temporaries[2:]) < experts / 10
    assert bytes_read(whole.program) < 0.6 * bytes_read(part.program)
    assert bytes_read(part_few.program) < 0.9 * bytes_read(whole_few.program)
