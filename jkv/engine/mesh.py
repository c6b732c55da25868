"""The programs of `jkv.engine.programs` over a mesh of devices: KV heads split over the axis "tensor", rows over the axis
"data".

A shard is the device side of an engine in small: a pool with an allocator and page ids of its own, for its part of the KV heads
(with their query heads, page tables and last queries) and of the rows. Each program runs whole inside one `jax.shard_map`,
where it sees an ordinary `State`. Shards meet where the residual stream is summed, in the gathered logits, from which all draw
the same tokens, and in the few numbers that a program tells of all heads together. Weights are split as in Megatron-LM (arXiv
1909.08053): columns of query, key, value, gate and up, rows of out and down, tokens of the embeddings.

Outside, an array of pages holds those of all shards, one shard after the other; `free_top` has one entry a shard.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jkv.cache.attention import Cache
from jkv.cache.in_step_eviction import StepRules
from jkv.cache.page_selection import ReadRules
from jkv.cache.pool import Seat
from jkv.engine import chunk_inputs as control
from jkv.engine import programs
from jkv.engine.programs import AlignRules, Control, Emitted, Snapshot, State
from jkv.model.params import LayerParams, LowRank, ModelConfig, Params
from jkv.policies import Needs, Policy
from jkv.reasoning.steering import SteerRules

P: Any = PartitionSpec  # of any type: it stands where a record has arrays
ROWS, HEADS = "data", "tensor"  # the axes of a mesh
SETTINGS = ("num_steps", "draws", "is_traced", "tells_hidden", "evict", "owns_all")  # of programs: static
READS_ONLY = ("measure_pages", "look", "read_pages")  # programs to which the state is not donated


def arrange(mesh: Mesh) -> Mesh:
    """The mesh with both axes, in order: one that lacks "data" does not split rows.

    Raises:
      ValueError: another axis of more than one device, or no axis "tensor".
    """
    others = {name: size for name, size in mesh.shape.items() if name not in (ROWS, HEADS) and size > 1}
    if HEADS not in mesh.shape or others:
        raise ValueError(f'A mesh splits KV heads over an axis "{HEADS}" and rows over "{ROWS}"; got {dict(mesh.shape)}.')
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(HEADS), -1)
    return Mesh(devices.reshape(-1, mesh.shape[HEADS]), (ROWS, HEADS))


def check_mesh(mesh: Mesh, config: ModelConfig) -> None:
    """Refuses a mesh that an engine cannot run this model on.

    Raises:
      ValueError: rows split, devices of another process, or heads, widths or tokens that do not divide; with the arithmetic.
    """
    shape = arrange(mesh).shape
    if shape[ROWS] > 1:
        raise ValueError(
            f'An engine splits KV heads alone, over the axis "{HEADS}"; got {dict(mesh.shape)}. For more rows, run one engine '
            f"for each of the {shape[ROWS]} replicas, on a mesh of its own."
        )
    if any(device.process_index != jax.process_index() for device in mesh.devices.flat):
        raise ValueError("All devices of an engine's mesh must belong to this process, whose loop sees every token.")
    check_divides(config, shape[HEADS])


def check_divides(config: ModelConfig, num_shards: int) -> None:
    """Refuses a number of shards that a model's heads, widths or tokens do not divide into; with the arithmetic."""
    for field in ("num_kv_heads", "num_query_heads", "mlp_width", "vocab_size"):
        size = getattr(config, field)
        if size % num_shards:
            raise ValueError(
                f'{field}={size} must be a multiple of the {num_shards} devices of the axis "{HEADS}"; '
                f"{size} / {num_shards} = {size / num_shards:.2f}. Take a mesh of fewer devices."
            )


def check_policy(policy: Policy, num_shards: int) -> None:
    """Refuses a policy that compares the KV heads of different shards.

    Raises:
      ValueError: its scope is not "head", and there is more than one shard.
    """
    if num_shards > 1 and policy.evict is not None and policy.evict.scope != "head":
        raise ValueError(
            f"{policy.name} chooses slots by the scores of all KV heads together (scope {policy.evict.scope!r}), and a mesh of "
            f'{num_shards} shards keeps them apart. Take one whose heads choose for themselves (scope "head"), or an '
            "engine without a mesh."
        )


# Where arrays lie.


def param_specs(params: Params) -> Params:
    """How weights are split."""
    columns, rows = P(None, HEADS), P(HEADS)
    layer = LayerParams(
        attention_norm=P(),
        query=columns,
        key=columns,
        value=columns,
        out=rows,
        mlp_norm=P(),
        gate=columns,
        up=columns,
        down=rows,
        query_bias=P(HEADS),
        key_bias=P(HEADS),
        value_bias=P(HEADS),
        query_norm=P(),
        key_norm=P(),
    )
    layers = (layer,) * len(params.layers)
    plain = params.replace(embedding=rows, layers=layers, final_norm=P(), unembedding=columns)
    return jax.tree.map(adapter_specs, plain, params, is_leaf=is_spec)


def adapter_specs(spec: P, weight: Any) -> Any:
    """How a weight is split; of an adapter, the part that faces the split side of its base."""
    if not isinstance(weight, LowRank):
        return spec
    down, up = (P(HEADS), P()) if spec == P(HEADS) else (P(), P(None, HEADS))
    return weight.replace(base=spec, down=down, up=up)


def state_specs(state: State) -> State:
    """How the pool and what lies beside it are split."""
    of_pages, of_heads = P((ROWS, HEADS)), P(None, ROWS, HEADS)
    pool = state.cache.pool.replace(
        kv=of_pages,
        position=of_pages,
        refcount=of_pages,
        free_stack=of_pages,
        free_top=of_pages,
        bounds=of_pages,
        page_table=of_heads,
        length=of_heads,
        hole=of_heads,
        slot_data=dict.fromkeys(state.cache.pool.slot_data, of_heads),
        logical_length=P(ROWS),
    )
    return State(Cache(pool, query_ring=P(None, ROWS, None, HEADS)), logits=P(ROWS))


def control_specs(given: Control) -> Control:
    """How what is told about rows is split."""
    row = P(ROWS)
    return Control(
        remaining=row,
        stop_ids=row,
        sampling=row,
        rules=None if given.rules is None else StepRules(P(None, ROWS), row, row, row, row),
        reads=None if given.reads is None else ReadRules(row, row, row),
        sinks=row,
        steer=None if given.steer is None else SteerRules(row, row, row, row, P(), P()),
        align=None if given.align is None else AlignRules(row, row, row, P()),
    )


def placed(mesh: Mesh, specs: Any, tree: Any) -> Any:
    """The tree with, for each array, its `NamedSharding`."""

    def below(spec: P, arrays: Any) -> Any:
        return jax.tree.map(lambda _: NamedSharding(mesh, spec), arrays)

    return jax.tree.map(below, specs, tree, is_leaf=is_spec)


def is_spec(x: Any) -> bool:
    """Whether something is a specification, which stands for all arrays below it."""
    return isinstance(x, P)


def shardings(params: Params, mesh: Mesh) -> Params:
    """Where each weight (or shape: `jkv.model.params.weight_shapes`) lies on a mesh, as `jkv.model.checkpoint.restore` takes
    it.
    """
    return placed(arrange(mesh), param_specs(params), params)


def shard(params: Params, mesh: Mesh) -> Params:
    """The weights on a mesh; those that are there already stay."""
    return jax.device_put(params, shardings(params, mesh))


def everywhere(mesh: Mesh) -> NamedSharding:
    """A copy on each device."""
    return NamedSharding(arrange(mesh), P())


SEAT = Seat(P(None, HEADS), P(None, HEADS), P(), P(None, HEADS), P(None, HEADS))
SNAPSHOT = Snapshot(SEAT, P(), P(None, None, HEADS))
BY_STEP, BY_STEP_AND_HEAD = P(None, ROWS), P(None, None, ROWS, HEADS)
EMITTED = Emitted(
    token=BY_STEP,
    log_prob=BY_STEP,
    is_real=BY_STEP,
    held_pages=P(),
    is_running=P(ROWS),
    dropped=BY_STEP_AND_HEAD,
    is_read=BY_STEP_AND_HEAD,
    steered=BY_STEP,
    hidden=BY_STEP,
    log_prob_full=BY_STEP,
)
ARGUMENTS: dict[str, Any] = {  # of programs; others are everywhere
    "params": param_specs,
    "state": state_specs,
    "control": control_specs,
    "snapshot": lambda _: SNAPSHOT,
    "seat": lambda _: SEAT,
    "is_own": lambda _: P(None, HEADS),
    "page": lambda _: P(HEADS),
    "content": lambda _: P(HEADS),
}
RESULTS: dict[str, Any] = {  # from the state's
    "decode_chunk": lambda state: (state, EMITTED),
    "prefill_chunk": lambda state: (state, P()),
    "compress": lambda state: (state, P(None, None, HEADS), P()),
    "measure_pages": lambda state: P(),
    "take_pages": lambda state: state,
    "release": lambda state: state,
    "look": lambda state: SNAPSHOT,
    "leave": lambda state: (state, SNAPSHOT),
    "fork": lambda state: state,
    "sit": lambda state: state,
    "drop": lambda state: state,
    "read_pages": lambda state: P(HEADS),
    "write_pages": lambda state: state,
}


# What a shard does.


def local_bytes(params: Params, num_shards: int) -> int:
    """Bytes of the weights (or shapes) that each of some shards holds: its part of what is split, and a copy of the rest."""

    def of_shard(spec: P, arrays: Any) -> int:
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
        return size if spec == P() else size // num_shards

    return sum(jax.tree.leaves(jax.tree.map(of_shard, param_specs(params), params, is_leaf=is_spec)))


def local_config(config: ModelConfig, num_shards: int) -> ModelConfig:
    """A model of a shard's heads and a shard's part of the feed-forward block."""
    parts = {field: getattr(config, field) // num_shards for field in ("num_query_heads", "num_kv_heads", "mlp_width")}
    return dataclasses.replace(config, **parts)


def entered(argument: Any) -> Any:
    """An argument as a program knows it: a state with a pool of one allocator, weights whose partial sums are to be added."""
    if isinstance(argument, State):
        return with_free_top(argument, argument.cache.pool.free_top[0])
    if isinstance(argument, Params):
        return argument.replace(config=local_config(argument.config, jax.lax.axis_size(HEADS)), axis=HEADS)
    return argument


def left(result: Any) -> Any:
    """A result as it looks from outside."""
    if isinstance(result, State):
        return with_free_top(result, result.cache.pool.free_top[None])
    return result


def with_free_top(state: State, free_top: Any) -> State:
    """The state with another form of the number of free pages."""
    return state._replace(cache=state.cache._replace(pool=state.cache.pool.replace(free_top=free_top)))


def decode_chunk(**arguments: Any) -> tuple[State, Emitted]:
    """A shard's `programs.decode_chunk`, with the pages that all of them hold."""
    state, emitted = programs.decode_chunk(**arguments)
    return state, emitted._replace(held_pages=jax.lax.psum(emitted.held_pages, (ROWS, HEADS)))


def compress(**arguments: Any) -> tuple[State, Any, Any]:
    """A shard's `programs.compress`, with the positions that are left in any head of any shard."""
    first = jax.lax.axis_index(HEADS) * arguments["state"].cache.pool.page_table.shape[2]
    state, dropped, is_left = programs.compress(**arguments | {"first_head": first})
    return state, dropped, None if is_left is None else jax.lax.psum(is_left.astype(jnp.int32), HEADS) > 0


def measure_pages(**arguments: Any) -> Any:
    """Sums over the heads of all shards (`programs.measure_pages`)."""
    return jax.lax.psum(programs.measure_pages(**arguments), HEADS)


ON_SHARD: dict[str, Any] = {"decode_chunk": decode_chunk, "compress": compress, "measure_pages": measure_pages}


# What an engine calls.


def program_on(mesh: Mesh, name: str) -> Any:
    """One of `jkv.engine.programs` over a mesh, jitted, of the same signature.

    Raises:
      ValueError: rows split, for another program than `decode_chunk`: the others count a row among all.
    """
    mesh, program = arrange(mesh), getattr(programs, name)
    if mesh.shape[ROWS] > 1 and name != "decode_chunk":
        raise ValueError(f'Only decode_chunk may split rows, over the axis "{ROWS}"; got {name} on {dict(mesh.shape)}.')
    on_one = ON_SHARD.get(name, program)
    signature = inspect.signature(program)

    @functools.wraps(program)
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        settings = {key: value for key, value in bound.items() if key in SETTINGS}
        arrays = {key: value for key, value in bound.items() if key not in SETTINGS}

        def on_shard(arrays: dict[str, Any]) -> Any:
            result = on_one(**{key: entered(value) for key, value in arrays.items()}, **settings)
            return jax.tree.map(left, result, is_leaf=lambda x: isinstance(x, State))

        specs = {key: ARGUMENTS[key](value) if key in ARGUMENTS else P() for key, value in arrays.items()}
        results = RESULTS[name](specs.get("state"))
        return jax.shard_map(on_shard, mesh=mesh, in_specs=(specs,), out_specs=results, check_vma=False)(arrays)

    settings = [key for key in signature.parameters if key in SETTINGS]
    return jax.jit(run, static_argnames=settings, donate_argnames=() if name in READS_ONLY else "state")


@functools.lru_cache(maxsize=8)
def programs_on(mesh: Mesh) -> Any:
    """All programs over a mesh, by their names in `jkv.engine.programs`; those of an equal mesh are the same, and compile
    once.
    """
    return types.SimpleNamespace(**{name: program_on(mesh, name) for name in RESULTS})


def empty_state(mesh: Mesh, config: ModelConfig, needs: Needs, **settings: Any) -> State:
    """`control.empty_state` on a mesh: rows and pages are those of all shards together, each of which takes its share."""
    return state_maker(mesh, config, needs, **settings)()


def state_maker(
    mesh: Mesh, config: ModelConfig, needs: Needs, *, num_rows: int, num_pages: int, **settings: Any
) -> Callable[[], State]:
    """What makes `empty_state`, compiled once for as many calls as there are."""
    mesh = arrange(mesh)
    num_shards = mesh.shape[HEADS]
    share = functools.partial(
        control.empty_state,
        local_config(config, num_shards),
        needs,
        num_rows=num_rows // mesh.shape[ROWS],
        num_pages=num_pages // mesh.size,
        **settings,
    )
    specs = state_specs(jax.eval_shape(share))
    return jax.jit(jax.shard_map(lambda: left(share()), mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))
