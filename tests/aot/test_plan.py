"""What `jkv.plan` says of memory against the compiler's own analysis of the programs that an engine of that plan would run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jkv
from jkv.cache.pool import num_pages_of
from jkv.engine import chunk_inputs
from jkv.engine.state import empty_state
from jkv.eviction import Needs
from jkv.model.joined import join_weights
from jkv.model.weight_shapes import weight_shapes
from tests.aot import targets
from tests.support import programs

DEVICES = {"tpu-v5e": "v5e", "h200": "h200", "t4": "t4"}
LENGTH = 4096
MODELS = {"r1-qwen-1.5b": programs.R1_QWEN, "r1-llama-8b": programs.R1_LLAMA}
# A decode program of all layers takes a minute or more to compile for a TPU; what more layers add is the same of each.
CASES = [
    ("h200", "r1-qwen-1.5b", "decode", 28),
    ("h200", "r1-qwen-1.5b", "prefill", 28),
    ("h200", "r1-qwen-1.5b", "compaction", 28),
    ("t4", "r1-qwen-1.5b", "decode", 28),
    pytest.param("t4", "r1-qwen-1.5b", "prefill", 28, marks=pytest.mark.slow),
    pytest.param("t4", "r1-qwen-1.5b", "compaction", 28, marks=pytest.mark.slow),
    ("h200", "r1-qwen-1.5b", "cutting decode", 4),
    pytest.param("h200", "r1-qwen-1.5b", "penalising decode", 4, marks=pytest.mark.slow),
    ("tpu-v5e", "r1-llama-8b", "decode", 4),
    ("tpu-v5e", "r1-qwen-1.5b", "penalising decode", 4),
    pytest.param("tpu-v5e", "r1-qwen-1.5b", "cutting decode", 4, marks=pytest.mark.slow),
    ("tpu-v5e", "r1-qwen-1.5b", "prefill", 4),
    ("tpu-v5e", "r1-qwen-1.5b", "compaction", 8),
]
DRAWS = {"cutting decode": jkv.Sampling(top_p=0.9), "penalising decode": jkv.Sampling(top_p=0.9, presence_penalty=1.0)}
TRACES = {
    "decode": programs.decode,
    "cutting decode": functools.partial(programs.decode, draws="truncated"),
    "penalising decode": functools.partial(programs.decode, draws="truncated", penalises=True),
    "prefill": programs.prefill,
    "compaction": functools.partial(programs.compact, "r_kv"),
}


def shapes_of(plan, config, policy, target):
    """The weights and the state of the engine that was planned."""
    sharding, engine = targets.sharding_of(target), plan.engine
    make = functools.partial(
        empty_state,
        config,
        Needs.of([policy]),
        num_rows=engine["max_running"],
        num_pages=engine["num_pages"],
        max_pages=num_pages_of(engine["max_slots"], engine["page_size"]),
        page_size=engine["page_size"],
        dtype=jnp.dtype(plan.dtype),
    )

    def leaf(*sizes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    weights = weight_shapes(config, jnp.dtype(plan.dtype))
    trees = join_weights(weights) if targets.TARGETS[target][0] == "cuda" else weights, jax.eval_shape(make)
    return programs.Shapes(*jax.tree.map(lambda x: leaf(*x.shape, dtype=x.dtype), trees), leaf)


@pytest.mark.parametrize(("target", "model", "name", "num_layers"), CASES, ids=lambda value: str(value))
def test_planned_bytes_are_the_compilers(target, model, name, num_layers):
    if reason := targets.why_missing(target):
        pytest.skip(reason)
    config = dataclasses.replace(MODELS[model], num_layers=num_layers)
    policy = jkv.r_kv(programs.BUDGET, programs.INTERVAL)
    device = dataclasses.replace(jkv.DEVICES[DEVICES[target]], memory=10**12)
    plan = jkv.plan(config, device, policy, length=LENGTH, batch=programs.NUM_ROWS, sampling=DRAWS.get(name, jkv.Sampling()))
    shapes = shapes_of(plan, config, policy, target)
    trace = TRACES[name]
    if (target, name) == ("t4", "prefill"):
        trace = functools.partial(trace, num_tokens=chunk_inputs.OF_OTHERS.sizes[-1])
    program = targets.compile_for(target, trace, shapes)
    if "decode" in name:
        assert " sort(" not in program.as_text()
    memory = program.memory_analysis()
    # Arguments: weights and state, padded on a TPU, and what the host tells about rows. XLA leaves out what nobody reads.
    planned = plan.own.state_bytes + (name != "compaction") * plan.weight_bytes
    assert planned <= memory.argument_size_in_bytes <= 1.005 * planned
    scratch = getattr(plan.own.scratch, name.split()[-1])
    taken = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert taken <= scratch
    total, found = planned + scratch, memory.argument_size_in_bytes + taken
    if name == "compaction":  # the weights lie there all the same
        total, found = total + plan.weight_bytes, found + plan.weight_bytes
    print(f"{target} {model} {name}: scratch {taken / 1e6:.1f} MB, planned {scratch / 1e6:.1f}; all {total / found - 1:+.2%}")
    assert abs(total / found - 1) < 0.05
