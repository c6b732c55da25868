"""How arrays are split follows from their annotations, and what names no axes is an error."""

import inspect
import math
import subprocess
import sys
import typing
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jkv.cache.attention import Cache
from jkv.cache.pool import Pool
from jkv.engine import mesh, programs
from jkv.engine.parts.steering import Steering
from jkv.engine.programs import ChunkInputs
from jkv.engine.state import Snapshot, State, empty_state
from jkv.eviction import Needs
from jkv.model.params import ModelConfig, Params
from jkv.model.sampling import SamplingRows
from jkv.model.sharding import BOTH, EXPERTS, SPLIT, SPLIT_WEIGHTS, leaf_hints, letters_of, spec_of, specs_of
from jkv.model.sharding import P as Spec
from jkv.model.weight_shapes import weight_shapes
from jkv.testing import TINY, adapted, unfolded

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig("llama", 41, 10, 3, 14, 7, 6, 22, 64, qkv_bias=True, qk_norm=True)
SIZES = {"L": 3, "B": 5, "N": 14, "K": 7, "H": 6, "D": 10, "F": 22, "V": 41, "P": 12, "MP": 9, "page": 4, "W": 8, "S": 36}


@pytest.fixture(scope="module")
def one():
    return Mesh(jax.devices()[:1], ("tensor",))


@pytest.mark.parametrize(
    ("letters", "split", "spec"),
    [
        ("", SPLIT, Spec()),
        ("L B K MP", SPLIT, Spec(None, None, "tensor")),
        ("P 2 page H", SPLIT, Spec("tensor")),
        ("L B W N H", SPLIT, Spec(None, None, None, BOTH)),
        ("L B K MP*page", SPLIT, Spec(None, None, "tensor")),
        ("B V", SPLIT, Spec()),  # logits are gathered
        ("D V", SPLIT_WEIGHTS, Spec(None, BOTH)),
        ("D K*H", SPLIT_WEIGHTS, Spec(None, "tensor")),  # several devices may hold a KV head
        ("V D", SPLIT_WEIGHTS, Spec(BOTH)),
        ("D N*H", SPLIT_WEIGHTS, Spec(None, BOTH)),
        ("F D", SPLIT_WEIGHTS, Spec(BOTH)),
        ("D", SPLIT_WEIGHTS, Spec()),
        ("X F D", SPLIT_WEIGHTS, Spec(None, BOTH)),
        ("X F D", SPLIT_WEIGHTS | {EXPERTS}, Spec(BOTH)),
        ("X D", SPLIT_WEIGHTS | {EXPERTS}, Spec(BOTH)),
        ("F D", SPLIT_WEIGHTS | {EXPERTS}, Spec(BOTH)),  # of a shared block
        ("D choices", SPLIT_WEIGHTS | {EXPERTS}, Spec()),
    ],
)
def test_letters_decide_how_an_array_is_split(letters, split, spec):
    assert spec_of(letters, split) == spec


@pytest.mark.parametrize("letters", ["B Q", "...", "*B V", "H*N D", "B N*Q"])
def test_an_unknown_axis_is_refused(letters):
    with pytest.raises(ValueError, match=r"must be one of A, B, D, .* or a number"):
        spec_of(letters)


def test_two_axes_that_would_both_be_split_are_refused():
    with pytest.raises(ValueError, match=r"At most one axis .*'B N K'"):
        spec_of("B N K")


# Planted mistakes.


class Planted(NamedTuple):
    """Inputs of a chunk, with a field that names no axes."""

    remaining: Int[Array, " B"]
    planted: Any


def with_argument(state: State, row: Int[Array, " B"], planted: Any) -> State: ...


def with_no_annotation(state: State, row: Int[Array, " B"], planted) -> State: ...


def with_a_number(state: State, row: Int[Array, " B"], planted: int) -> State: ...


def with_a_field(state: State, control: Planted | None) -> State: ...


def with_a_result(state: State) -> tuple[State, Any]: ...


def with_an_unknown_axis(state: State, planted: Float[Array, "B unheard"]) -> State: ...


def without_a_result(state: State): ...


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (with_argument, r"release: planted must name its axes.*typing\.Any names none"),
        (with_no_annotation, "release: planted must name its axes.*None names none"),
        (with_a_number, "release: planted must name its axes.*int.*SETTINGS"),
        (with_a_field, r"release: control\.planted must name its axes"),
        (with_a_result, r"release: its result\[1\] must name its axes"),
        (with_an_unknown_axis, "release: planted: Axis 'unheard'"),
        (without_a_result, "release: its result must name its axes"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_names_no_axes_is_an_error_when_the_program_is_built(program, message, one, monkeypatch):
    monkeypatch.setattr(programs, "release", program)
    with pytest.raises(ValueError, match=message):
        mesh.program_on(one, "release")


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (programs.ChunkInputs, "decode_chunk: inputs.planted"),
        (SamplingRows, "decode_chunk: inputs.sampling.planted"),
        (Steering, "decode_chunk: inputs.parts.steer.planted"),
        (programs.ChunkOutputs, r"decode_chunk: its result\[1\].planted"),
        (Cache, "decode_chunk: state.cache.planted"),
        (Pool, "decode_chunk: state.cache.pool.planted"),
        (Params, "decode_chunk: params.planted"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_new_field_of_any_record_needs_axes(record, name, one, monkeypatch):
    """As if it were written there without axes."""
    if hasattr(record, "_fields"):
        monkeypatch.setattr(record, "_fields", (*record._fields, "planted"))
    else:
        field = next(iter(record.__dataclass_fields__.values()))
        monkeypatch.setitem(record.__dataclass_fields__, "planted", field)
    monkeypatch.setitem(record.__annotations__, "planted", Any)
    with pytest.raises(ValueError, match=f"{name} must name its axes"):
        mesh.program_on(one, "decode_chunk")


# Annotations against arrays.


def assert_fits(hint, value, name, seen):
    """Every array has the shape of its letters, in the sizes of SIZES."""
    if value is None:
        return
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if (letters := letters_of(hint)) is not None:
        sizes = [math.prod(int(x) if x.isdigit() else SIZES[x] for x in axis.split("*")) for axis in letters.split()]
        assert value.shape == tuple(sizes), name
        seen.append(name)
    elif hasattr(hint, "_fields"):
        for field, member in typing.get_type_hints(hint, include_extras=True).items():
            assert_fits(member, getattr(value, field), f"{name}.{field}", seen)
    elif isinstance(hint, type):
        for field, member in leaf_hints(hint).items():
            assert_fits(member, getattr(value, field), f"{name}.{field}", seen)
    elif isinstance(value, dict):
        for key, part in value.items():
            assert_fits(members[1], part, f"{name}[{key}]", seen)
    elif isinstance(value, tuple) and not hasattr(value, "_fields"):
        for i, part in enumerate(value):
            assert_fits(members[0], part, f"{name}[{i}]", seen)
    else:
        assert_fits(members[0], value, name, seen)


def make_state():
    needs = Needs(window=SIZES["W"], mass=True, carried=("one", "two"), gate=True, bounds=True, sharing=True)
    return empty_state(CONFIG, needs, num_rows=SIZES["B"], num_pages=SIZES["P"] - 1, max_pages=SIZES["MP"], page_size=4)


def test_every_array_of_the_state_has_the_axes_of_its_annotation():
    state, seen = make_state(), []
    assert_fits(State, state, "state", seen)
    assert len(seen) == len(jax.tree.leaves(state)) == 17
    assert_fits(Snapshot, programs.snapshot_row(state, jnp.int32(0)), "snapshot", seen := [])
    assert len(seen) == 11


def test_every_weight_has_the_axes_of_its_annotation():
    params, seen = weight_shapes(CONFIG), []
    assert_fits(Params, params, "params", seen)
    assert len(seen) == len(jax.tree.leaves(params)) == 3 + 3 * 14


@pytest.mark.parametrize("form", [lambda x: x, unfolded, adapted], ids=["plain", "unfolded", "adapted"])
def test_weights_in_any_form_have_a_spec_for_each_array(form):
    params = jax.eval_shape(form, weight_shapes(CONFIG))
    specs = specs_of(Params, params, "params")
    count = len(jax.tree.leaves(params))
    assert len(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, Spec))) == count
    layer = specs.layers[2]
    if form is adapted:
        assert (layer.query.down, layer.query.up) == (Spec(), Spec(None, BOTH))
        assert (layer.out.down, layer.out.up) == (Spec(BOTH), Spec())
    else:
        assert (layer.query, layer.out, layer.query_norm) == (Spec(None, BOTH), Spec(BOTH), Spec())


def test_what_is_absent_has_no_spec():
    specs = specs_of(ChunkInputs, ChunkInputs(jnp.zeros(2), jnp.zeros((2, 1)), None, None), "control")
    assert specs.remaining == Spec()
    assert specs.rules is specs.parts.steer is specs.parts.align is None
    assert specs_of(ChunkInputs).parts.steer["vector"] == Spec()
    state = empty_state(TINY, Needs(), num_rows=2, num_pages=4, max_pages=2, page_size=4)
    split = mesh.state_specs(state)
    assert split.cache.query_ring is split.cache.pool.bounds is None
    assert split.cache.pool.free_top == Spec("tensor")  # one entry a pool
    assert split.cache.pool.poison is False


def test_every_program_says_how_its_arguments_are_split():
    assert len(mesh.PROGRAMS) == 17
    assert {"decode_chunk", "prefill_chunk", "compact"} < set(mesh.PROGRAMS)
    for name in mesh.PROGRAMS:
        assert set(inspect.signature(getattr(programs, name)).parameters) - set(mesh.SETTINGS) >= {"state"}


SPECS = """
import inspect, typing
from jkv.engine import mesh, programs
from jkv.model.sharding import specs_of
hints = {name: typing.get_type_hints(inspect.unwrap(getattr(programs, name)), include_extras=True) for name in mesh.PROGRAMS}
found = repr({(name, key): specs_of(x) for name, one in hints.items() for key, x in one.items() if key not in mesh.SETTINGS})
"""


def test_annotations_are_the_same_with_and_without_the_shape_checks_of_the_tests():
    names: dict[str, Any] = {}
    exec(SPECS, names)
    code = f"{SPECS}\nimport sys\nassert 'beartype' not in sys.modules\nprint(found)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "beartype" in sys.modules
    assert done.stdout.strip() == names["found"]
    assert names["found"].count("tensor") > 50


def test_a_plain_annotation_may_name_axes_too():
    assert specs_of(Annotated[Any, "L K MP"]) == Spec(None, "tensor")
    assert specs_of(int | Int[Array, "K"] | None) == Spec("tensor")
