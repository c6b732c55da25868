"""What eviction costs compared with decoding, on a wide random model.

Device programs as the engine dispatches them, on caches filled with random keys; everything in one process and in turns, the
median of several rounds. R-KV's scoring and compaction are compared with what their arithmetic would take at two matrix rates
of the same run, of a large square product and of products of their own shape (keys by keys, a head size deep), and with the
decode steps between two compactions; a step of H2O and of TOVA, whose eviction is inside, with a step of the full cache at
the same length.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jkv.bench.fixtures import fill, new_inputs, new_state, usual_page_size
from jkv.bench.rounds import medians_in_turns, seconds_of
from jkv.engine import programs
from jkv.engine.parts.base import Carried
from jkv.engine.scheduler import CHUNKS
from jkv.engine.state import State
from jkv.model.params import Model, Params
from jkv.policies import full, h2o, r_kv, tova
from jkv.reports import Report, digits, footnote, markdown
from research.bench.step_breakdown import compact as compact_rows

MOST_NUMBERS = 1 << 24  # of one side of the matrix products whose rate is measured


def measure(model: Model, batch: int, budget: int, interval: int, rounds: int, report: Report = print) -> dict[str, Any]:
    """R-KV's compaction, steps that evict inside, and the bytes that compaction takes for a while.

    Raises:
      ValueError: an interval that is not whole chunks of the engine.
    """
    if interval < 1 or interval % CHUNKS[0]:
        raise ValueError(f"interval must be a multiple of a chunk's {CHUNKS[0]} steps; got {interval}.")
    sizes: dict[str, Any] = {"batch": batch, "budget": budget, "interval": interval}
    figures: dict[str, Any] = {"model": model.name, **sizes}
    for name, part in {"r_kv": cost_of_compaction, "steps": cost_of_steps, "memory": memory_of_redundancy}.items():
        figures[name] = part(model.params, **sizes, page_size=usual_page_size(), rounds=rounds)
        report({name: figures[name]})
    return figures


def table(record: dict[str, Any]) -> str:
    """Eviction compared with decoding."""
    one, steps = record["r_kv"], record["steps"]
    rows = [
        ("R-KV's scoring and compaction, s", one["compaction_seconds"]),
        (f"{record['interval']} decode steps between two of them, s", one["decode_seconds_between"]),
        ("compaction by decoding", f"{one['share_of_decode']:.1%}"),
        ("compaction by its own arithmetic at the rate of products of its shape", one["times_own_arithmetic"]["own_shape"]),
        ("the same at the rate of large square products", one["times_own_arithmetic"]["square"]),
        *((f"a step of `{name}` by one of `full`", ratio) for name, ratio in steps["times_full"].items() if name != "full"),
    ]
    caption = f"{record['model']}, batch {record['batch']}, budget {record['budget']}, steps on {steps['slots']} slots."
    return f"{caption}\n\n{markdown(('what', 'figure'), rows)}\n\n{footnote(record)}"


def cost_of_compaction(params: Params, batch: int, budget: int, interval: int, page_size: int, rounds: int) -> dict[str, Any]:
    """Scoring and compaction of all rows against their own arithmetic, and against the steps between two of them."""
    config, policy = params.config, r_kv(budget, interval)
    evict: Any = policy.evict
    slots = budget + interval
    holder = {"state": new_state(params, policy, batch, slots, page_size)}
    row = jnp.arange(batch, dtype=jnp.int32)
    inputs = new_inputs(params, policy, batch)

    def compact() -> State:
        holder["state"] = compact_rows(holder["state"], policy, batch, config.num_layers)
        return holder["state"]

    def decode() -> State:
        for _ in range(interval // CHUNKS[0]):
            holder["state"], *_ = programs.decode_chunk(params, holder["state"], inputs, Carried(), CHUNKS[0], "greedy")
        return holder["state"]

    def time_compact() -> float:
        holder["state"] = fill(programs.release(holder["state"], row), jax.random.key(1), slots)
        return seconds_of(compact, after=holder["state"])

    seconds = medians_in_turns({"compact": time_compact, "decode": functools.partial(seconds_of, decode)}, rounds)
    heads = config.num_layers * batch * config.num_kv_heads
    flops = heads * 2 * config.head_size * slots * (slots + config.group_size * evict.needs.window)
    rates = {"square": matrix_rate(rounds, 2048, 2048), "own_shape": matrix_rate(rounds, slots, config.head_size)}
    return {
        "compaction_seconds": digits(seconds["compact"]),
        "decode_seconds_between": digits(seconds["decode"]),
        "share_of_decode": digits(seconds["compact"] / seconds["decode"]),
        "own_gflop": digits(flops / 1e9),
        "matrix_gflop_per_second": {name: digits(rate / 1e9) for name, rate in rates.items()},
        "times_own_arithmetic": {name: digits(seconds["compact"] / (flops / rate)) for name, rate in rates.items()},
    }


def cost_of_steps(params: Params, batch: int, budget: int, interval: int, page_size: int, rounds: int) -> dict[str, Any]:
    """Decode steps that evict inside against steps of the full cache, all on as many slots."""
    slots, row = budget + interval, jnp.arange(batch, dtype=jnp.int32)
    policies = {"full": full(), "h2o": h2o(slots), "tova": tova(slots)}
    states, inputs_of = {}, {}
    for name, policy in policies.items():
        states[name] = new_state(params, policy, batch, slots + CHUNKS[0], page_size)
        inputs_of[name] = new_inputs(params, policy, batch)

    def decode(name: str) -> State:
        state, *_ = programs.decode_chunk(params, states[name], inputs_of[name], Carried(), CHUNKS[0], "greedy")
        states[name] = state
        return state

    def time_step(name: str) -> float:
        states[name] = fill(programs.release(states[name], row), jax.random.key(1), slots)
        return seconds_of(functools.partial(decode, name), after=states[name]) / CHUNKS[0]

    step = medians_in_turns({name: functools.partial(time_step, name) for name in policies}, rounds)
    ratios = {name: digits(seconds / step["full"]) for name, seconds in step.items()}
    return {"slots": slots, "step_seconds": {name: digits(seconds) for name, seconds in step.items()}, "times_full": ratios}


def memory_of_redundancy(params: Params, batch: int, budget: int, interval: int, page_size: int, rounds: int) -> dict[str, Any]:
    """Temporary bytes of a compaction as slots double; what is linear at most doubles."""
    config, policy = params.config, r_kv(budget, interval)
    evict: Any = policy.evict
    leaf = jax.ShapeDtypeStruct
    temporary = {}
    for slots in (2560, 5120, 10240):
        state = jax.eval_shape(functools.partial(new_state, params, policy, batch, slots, page_size))
        row, budgets = leaf((1,), jnp.int32), leaf((config.num_layers, 1, config.num_kv_heads), jnp.int32)
        traced = programs.compact.trace(state, row, budgets, row, leaf((2, 1), jnp.int32), evict=evict.static, is_traced=False)
        temporary[slots] = traced.lower().compile().memory_analysis().temp_size_in_bytes
    return {"temporary_bytes": temporary}


def matrix_rate(rounds: int, size: int, depth: int) -> float:
    """Floating-point operations a second of a float32 product of [size, depth] and [depth, size], several in a row."""
    count = max(1, min(2048**3 // (size**2 * depth), MOST_NUMBERS // (size * depth)))
    x = jax.random.normal(jax.random.key(0), (count, size, depth))

    @jax.jit
    def multiply(x: Array) -> Array:
        return jax.lax.map(lambda one: (one @ one.T)[0], x)

    seconds = medians_in_turns({"product": lambda: seconds_of(lambda: multiply(x), after=x)}, rounds)["product"]
    return 2 * count * size**2 * depth / seconds
