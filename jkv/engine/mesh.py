"""The programs of `jkv.engine.programs` on a mesh of devices, whose axis "tensor" splits the KV heads.

Each shard has its own pool, allocator and page ids for its part of the KV heads, with their query heads, page tables and last
queries. A whole program runs inside one `jax.shard_map`, where the state looks like that of a single device. Shards exchange
data only to sum the residual stream, to gather the logits, from which all draw the same tokens, to gather the scores where a
policy compares heads, and to reduce the few numbers that a program returns for all heads. Devices that hold copies of the same
KV heads have equal pools, and exchange what a policy reads of their queries too (`jkv.model.sharding`).

Outside a program, an array of pages holds the pages of all pools, one after the other; `free_top` has one entry for each. How
each array is split follows from its annotation (`jkv.model.sharding`).
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jkv.checks import counted, shown, words
from jkv.engine import programs
from jkv.engine import state as device_state
from jkv.engine.device_program import DeviceProgram
from jkv.engine.parts.base import Carried
from jkv.engine.processes import check_processes
from jkv.engine.programs import ChunkOutputs
from jkv.engine.state import Snapshot, State
from jkv.errors import refused
from jkv.eviction import Needs
from jkv.model import weights
from jkv.model.params import ModelConfig, Params
from jkv.model.sharding import (
    COPIES,
    HEADS,
    P,
    check_divides,
    fitted_all,
    is_spec,
    local_config,
    num_parts,
    part_of,
    placed,
    specs_of,
    with_copies,
)

DATA = "data"  # the axis of a mesh that counts replicas (`jkv.replicas`)
# Static arguments of programs.
SETTINGS = "num_steps", "draws", "is_traced", "evict", "owns_all", "unrotated", "num_pages", "drafter"


def arrange(mesh: Mesh, config: ModelConfig | None = None) -> Mesh:
    """The mesh, reduced to its axis "tensor", and to that of copies where the model's KV heads need one.

    Raises:
      ValueError: no axis "tensor", or another axis of more than one device.
    """
    shape = dict(mesh.shape)
    if HEADS not in shape:
        rule = f'The mesh of an engine must split KV heads over an axis "{HEADS}"; got {shape}. Rename its axis.'
        raise refused(rule, mesh="unsupported")
    if mesh.size > num_parts(mesh):
        raise refused(
            f'The mesh of an engine must split only KV heads, over an axis "{HEADS}"; got {shape}. jkv.generate, jkv.Rollout '
            f'and jkv.Replicas run one engine for each of the {mesh.size // num_parts(mesh)} rows of an axis "{DATA}".',
            mesh="unsupported",
        )
    if COPIES in shape:
        others = [axis for axis, name in enumerate(mesh.axis_names) if name not in (HEADS, COPIES)]
        order = mesh.axis_names.index(HEADS), mesh.axis_names.index(COPIES), *others
        mesh = Mesh(mesh.devices.transpose(order).reshape(shape[HEADS], shape[COPIES]), (HEADS, COPIES))
    else:
        mesh = Mesh(mesh.devices.reshape(-1), (HEADS,))
    return mesh if config is None else with_copies(mesh, config)


def check_mesh(mesh: Mesh, config: ModelConfig) -> None:
    """Refuses a mesh that an engine cannot run this model on.

    Raises:
      ValueError: another split than of KV heads, devices of some other processes, or sizes that do not divide, with the
        arithmetic.
    """
    mesh = arrange(mesh, config)
    check_processes(mesh)
    check_divides(config, mesh.size)


def mesh_for(mesh: Mesh | None, params: Params) -> Mesh | None:
    """The mesh of an engine, arranged: the given one, else that of its weights (`jkv.load(..., mesh=...)`); None if none.

    Raises:
      ValueError: a mesh that the model cannot be split over.
    """
    place = getattr(params.embedding, "sharding", None)
    if mesh is None and isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
        mesh = place.mesh if place.mesh.size > 1 and HEADS in place.mesh.axis_names else None
    if mesh is None:
        return None
    check_mesh(mesh, params.config)
    return arrange(mesh, params.config)


def read_mesh(text: str, replicas: bool = True) -> Mesh:
    """The mesh that a command line asks for: `data=4,tensor=2` are four replicas of two devices, the first of this process.

    Args:
      text: sizes of the axes "data" and "tensor"; what is left out is 1.
      replicas: whether the command runs several.

    Raises:
      ValueError: another axis, no number of devices, several replicas of a command that runs one, or more devices than there
        are.
    """
    sizes: dict[str, int] = {}
    for word in words(text):
        name, _, number = map(str.strip, word.partition("="))
        if name in sizes or not number.isdecimal() or not int(number[:9]):
            raise refused(
                f"A mesh is written as axes with their numbers of devices, such as {HEADS}=4 or {DATA}=4,{HEADS}=2; got "
                f"{shown(text)}.",
                mesh="invalid",
            )
        sizes[name] = int(number[:9])
    if not sizes or not sizes.keys() <= {DATA, HEADS}:
        raise refused(
            f'A mesh of the command line has the axes "{DATA}" (replicas) and "{HEADS}" (devices of each); got {shown(text)}. '
            f"Write {HEADS}=N, or {DATA}=M,{HEADS}=N.",
            mesh="invalid",
        )
    shape = sizes.get(DATA, 1), sizes.get(HEADS, 1)
    if shape[0] > 1 and not replicas:
        rule = f"This command runs one engine, and no replicas; got {shown(text)}. Write {HEADS}=N alone."
        raise refused(rule, mesh="unsupported")
    devices, count = jax.local_devices(), shape[0] * shape[1]
    if count > len(devices):
        rule = f"A mesh must have at most the {counted(len(devices), 'device')} of this process; got {shown(text)}. Lower it."
        raise refused(rule, mesh="does_not_fit")
    mesh = Mesh(np.array(devices[:count]).reshape(shape), (DATA, HEADS))
    return mesh if shape[0] > 1 else Mesh(mesh.devices[0], (HEADS,))


# Placement.


def num_pools(mesh: Mesh | None) -> int:
    """The pools of a mesh, each of which has a part of the KV heads; devices with copies of a part have the same pool."""
    return 1 if mesh is None else mesh.shape[HEADS]


def state_specs(state: Any) -> Any:
    """The specs of a state, whose leaves may be `jax.ShapeDtypeStruct`."""
    return with_free_top(specs_of(State, state, "state"), P(HEADS))


def place_gate(gate: Any, params: Params, mesh: Mesh | None) -> Any:
    """The arrays of a gate on the devices of the weights; a mesh splits their KV heads."""
    if mesh is None:
        return jax.device_put(gate, weights.place_of(params))
    mesh = arrange(mesh, params.config)
    return jax.device_put(gate, placed(mesh, specs_of(type(gate), gate, "gate"), gate))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device has a copy of."""
    return NamedSharding(arrange(mesh), P())


# On a shard.


def local_bytes(params: Any, num_shards: int, copies: int = 1) -> int:
    """Bytes of weights, or of a gate's, or of their shapes on each shard: its part of split arrays, a copy of the others.

    `copies` is how many shards hold each KV head.
    """
    if num_shards == 1:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))

    def of_shard(spec: Any, arrays: Any) -> int:
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
        return size if spec == P() else size * copies // num_shards if HEADS in spec else size // num_shards

    specs = specs_of(type(params), params, "params")
    return sum(jax.tree.leaves(jax.tree.map(of_shard, specs, params, is_leaf=is_spec)))


def to_shard(argument: Any) -> Any:
    """An argument as one shard's program takes it: a state with one allocator, or weights whose partial sums are reduced."""
    if isinstance(argument, State):
        return with_free_top(argument, argument.cache.pool.free_top[0])
    if isinstance(argument, Params):
        return part_of(argument)
    return argument


def from_shard(result: Any) -> Any:
    """A result of one shard's program, as `jax.shard_map` gathers it."""
    if isinstance(result, State):
        return with_free_top(result, result.cache.pool.free_top[None])
    return result


def with_free_top(state: Any, free_top: Any) -> Any:
    """The state with another `free_top`."""
    return state._replace(cache=state.cache._replace(pool=state.cache.pool.replace(free_top=free_top)))


def decode_chunk(**arguments: Any) -> tuple[State, ChunkOutputs, Carried]:
    """`programs.decode_chunk` on a shard; `held_pages` counts all shards."""
    state, outputs, carried = programs.decode_chunk.function(**arguments)
    return state, outputs._replace(held_pages=jax.lax.psum(outputs.held_pages, HEADS)), carried


def prefill_chunk(**arguments: Any) -> tuple[State, Any, Any, Any]:
    """`programs.prefill_chunk` on a shard; pages in use are counted over all shards."""
    state, hidden, held, experts = programs.prefill_chunk.function(**arguments)
    return state, hidden, jax.lax.psum(held, HEADS), experts


def compact(**arguments: Any) -> tuple[State, Any, Any, Any]:
    """`programs.compact` on a shard; a position is left if any head of any shard keeps it, and scores of all are counted."""
    first = jax.lax.axis_index(HEADS) * arguments["state"].cache.pool.page_table.shape[2]
    state, dropped, is_left, kinds = programs.compact.function(**arguments | {"first_head": first})
    is_left = None if is_left is None else jax.lax.psum(is_left.astype(jnp.int32), HEADS) > 0
    return state, dropped, is_left, jax.lax.psum(kinds, HEADS)


def measure_pages(**arguments: Any) -> Any:
    """`programs.measure_pages` on a shard, summed over all shards."""
    return jax.lax.psum(programs.measure_pages.function(**arguments), HEADS)


ON_SHARD: dict[str, Any] = {
    "decode_chunk": decode_chunk,
    "prefill_chunk": prefill_chunk,
    "compact": compact,
    "measure_pages": measure_pages,
}


# Programs on the mesh.


def program_on(mesh: Mesh, name: str) -> Any:
    """A program of `jkv.engine.programs` on a mesh, jitted, with the same signature.

    Raises:
      ValueError: an argument, result or field whose annotation names no axes; or a mesh that `arrange` refuses.
    """
    mesh, program = arrange(mesh), getattr(programs, name)
    shard_program = ON_SHARD.get(name, inspect.unwrap(program))
    signature, hints = inspect.signature(program), typing.get_type_hints(inspect.unwrap(program), include_extras=True)
    arguments = {key: hints.get(key) for key in signature.parameters if key not in SETTINGS}
    for key, hint in arguments.items():
        specs_of(hint, name=f"{name}: {key}")
    results = hints.get("return")
    specs_of(results, name=f"{name}: its result")

    @functools.wraps(program)
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        settings = {key: value for key, value in bound.items() if key in SETTINGS}
        arrays = {key: value for key, value in bound.items() if key not in SETTINGS}

        def on_shard(arrays: dict[str, Any]) -> Any:
            result = shard_program(**{key: to_shard(value) for key, value in arrays.items()}, **settings)
            return jax.tree.map(from_shard, result, is_leaf=lambda x: isinstance(x, State))

        specs = {key: argument_specs(arguments[key], value, key) for key, value in arrays.items()}
        out = result_specs(results, specs.get("state"))
        in_specs, out = fitted_all((specs,), mesh), fitted_all(out, mesh)
        return jax.shard_map(on_shard, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False)(arrays)

    settings = [key for key in signature.parameters if key in SETTINGS]
    # A program that returns no state only reads it.
    donated = [key for key in programs.DONATED if key in arguments] if State in (results, *typing.get_args(results)) else ()
    return DeviceProgram(run, {"static_argnames": settings, "donate_argnames": donated})


def argument_specs(hint: Any, value: Any, name: str) -> Any:
    """The specs of a program's argument."""
    return state_specs(value) if hint is State else specs_of(hint, value, name)


def result_specs(hint: Any, state: Any) -> Any:
    """The specs of a program's result; a returned state is split like the argument, and a row has what the state has."""
    if hint is State:
        return state
    if typing.get_origin(hint) is tuple:
        return tuple(result_specs(member, state) for member in typing.get_args(hint))
    specs = specs_of(hint)
    if hint is Snapshot and state.cache.states is None:
        specs = specs._replace(beside=specs.beside._replace(states=None))
    return specs


PROGRAMS = tuple(name for name, value in vars(programs).items() if isinstance(value, DeviceProgram))


@functools.lru_cache(maxsize=8)
def programs_on(mesh: Mesh) -> Any:
    """All programs on a mesh, by their names in `jkv.engine.programs`; cached, so that equal meshes compile once."""
    return types.SimpleNamespace(**{name: program_on(mesh, name) for name in PROGRAMS})


def empty_state(mesh: Mesh, config: ModelConfig, needs: Needs, **settings: Any) -> State:
    """`jkv.engine.state.empty_state` on a mesh; `num_pages` counts all shards."""
    return state_maker(mesh, config, needs, **settings)()


def state_maker(mesh: Mesh, config: ModelConfig, needs: Needs, *, num_pages: int, **settings: Any) -> Callable[[], State]:
    """A function that makes `empty_state`; it compiles only once."""
    mesh = arrange(mesh, config)
    make_shard = functools.partial(
        device_state.empty_state, local_config(config, mesh.size), needs, num_pages=num_pages // num_pools(mesh), **settings
    )
    specs = fitted_all(state_specs(jax.eval_shape(make_shard)), mesh)
    return jax.jit(jax.shard_map(lambda: from_shard(make_shard()), mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))
