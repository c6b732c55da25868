"""Which implementation a kernel runs."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import KERNELS, choice, dispatch
from pallas_kernels.dispatch import Implementation, best, call
from pallas_kernels.models import MODELS, Workload

TINY = MODELS["tiny-reasoner"]._replace(num_layers=1)
SMALL = Workload(batch=1, slots=16, page_size=8, dtype=jnp.float32, layers=1)


def table_of(**named):
    """Implementations that add different numbers, so that results show which one ran."""
    return {name: Implementation(functools.partial(jnp.add, i), *rest) for i, (name, rest) in enumerate(named.items(), 1)}


def never(reason):
    return lambda *args: reason


def test_none_takes_the_platform_s_own_and_a_name_takes_that_one():
    table = table_of(cpu=("cpu",), reference=())
    assert call("kernel", table, None, jnp.int32(0)) == 1
    assert call("kernel", table, "reference", jnp.int32(0)) == 2


def test_none_takes_the_first_that_can_take_the_arguments_and_else_the_reference():
    table = table_of(first=("cpu", never("too narrow")), second=("cpu",), third=("cpu",), reference=())
    assert call("kernel", table, None, jnp.int32(0)) == 2
    assert best(table, "cpu", jnp.int32(0)) == "second"
    table = table_of(first=("cpu", never("too narrow")), reference=())
    assert call("kernel", table, None, jnp.int32(0)) == 2
    assert best(table, "cpu", jnp.int32(0)) == "reference"


def test_another_platform_s_program_holds_its_own_implementation_alone():
    table = {
        "cpu": Implementation(lambda x: x - 1, "cpu"),
        "tpu": Implementation(lambda x: x * 3, "tpu"),
        "reference": Implementation(lambda x: x + 2),
    }
    run = jax.jit(functools.partial(call, "kernel", table, None))
    for platform, operation in (("cpu", "subtract"), ("tpu", "multiply"), ("cuda", "add")):
        with choice.compiling_for(platform):
            text = run.trace(jnp.int32(0)).lower(lowering_platforms=(platform,)).as_text()
        assert [name for name in ("subtract", "multiply", "add") if f"stablehlo.{name}" in text] == [operation]


def test_a_name_that_cannot_run_here_is_refused_with_every_reason():
    table = table_of(gpu=("cuda",), narrow=("cpu", never("heads must be even; got 3")), cpu=("cpu",), reference=())
    with pytest.raises(ValueError, match="cannot run as 'gpu'") as error:
        call("kernel", table, "gpu", jnp.int32(0))
    for words in (
        "it is for cuda, and this process computes on cpu",
        "narrow: heads must be even; got 3",
        "['cpu', 'reference']",
    ):
        assert words in str(error.value)
    with pytest.raises(ValueError, match="cannot run as 'narrow'"):
        call("kernel", table, "narrow", jnp.int32(0))


def test_empty_arguments_take_the_reference():
    table = table_of(cpu=("cpu",), reference=())
    assert call("kernel", table, None, jnp.zeros((0, 3))).shape == (0, 3)
    assert best(table, "cpu", jnp.zeros((0, 3))) == "reference"
    with pytest.raises(ValueError, match="an argument is empty"):
        call("kernel", table, "cpu", jnp.zeros((0, 3)))


def test_a_kernel_is_traced_for_the_platforms_of_this_process_alone(monkeypatch):
    traced = []
    table = {
        name: Implementation(lambda x, name=name: traced.append(name) or x, platform)
        for name, platform in (("tpu", "tpu"), ("gpu", "cuda"), ("cpu", "cpu"), ("reference", None))
    }
    call("kernel", table, None, jnp.zeros(2))
    assert traced == ["cpu"]
    with choice.compiling_for("tpu"):
        call("kernel", table, None, jnp.zeros(2))
    assert traced == ["cpu", "tpu"]
    monkeypatch.setattr(dispatch, "platforms_here", lambda: ("cpu", "cuda"))  # beside a GPU, arrays may be in host memory
    jax.eval_shape(functools.partial(call, "kernel", table, None), jnp.zeros(2))
    assert sorted(traced[2:]) == ["cpu", "gpu", "reference"]


def test_what_programs_take_is_noted_by_platform(monkeypatch):
    monkeypatch.setattr(dispatch, "TAKEN", {})
    monkeypatch.setattr(dispatch, "possible_platforms", lambda: dispatch.PLATFORMS)
    table = table_of(tpu=("tpu", lambda x: None if x.size > 1 else "too small"), reference=())
    call("some kernel", table, None, jnp.zeros(2))
    assert dispatch.taken("tpu") == {"some kernel": "tpu"}
    assert dispatch.taken("cuda") == dispatch.taken("cpu") == {"some kernel": "reference"}
    call("some kernel", table, None, jnp.zeros(1))
    assert dispatch.taken("tpu") == {"some kernel": "reference, tpu"}


def test_plain_xla_on_an_accelerator_is_not_silent(monkeypatch):
    monkeypatch.setattr(dispatch, "possible_platforms", lambda: dispatch.PLATFORMS)
    monkeypatch.setattr(dispatch, "own_platform", lambda: "tpu")
    table = table_of(tpu=("tpu", lambda x: None if x.size > 1 else "too small; got 1"), gpu=("cuda",), reference=())
    with pytest.warns(UserWarning, match="some kernel is computed by plain XLA on this tpu: tpu: too small; got 1"):
        call("some kernel", table, None, jnp.zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("some kernel", table, None, jnp.zeros(2))


def test_a_kernel_that_is_meant_for_other_platforms_is_plain_xla_without_a_warning(monkeypatch):
    """An unknown platform has no implementation of any kernel, and the warning says so."""
    table = table_of(gpu=("cuda",), reference=())
    monkeypatch.setattr(dispatch, "own_platform", lambda: "tpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("some kernel", table, None, jnp.zeros(1))
    monkeypatch.setattr(dispatch, "own_platform", lambda: "rocm")
    with pytest.warns(UserWarning, match="some kernel is computed by plain XLA on this rocm"):
        call("some kernel", table, None, jnp.zeros(1))


def small_call(name):
    """The arguments' shapes of a kernel's first real call, in a small size."""
    shapes = KERNELS[name].shapes
    case = shapes.CASES[0]
    return shapes.arguments(TINY, SMALL, **case.options)


@pytest.mark.parametrize("name", KERNELS)
def test_an_unknown_implementation_is_refused_naming_the_known_ones(name):
    kernel = KERNELS[name]
    with pytest.raises(ValueError, match=name) as error:
        jax.eval_shape(functools.partial(kernel.call, implementation="nonsense"), *small_call(name))
    assert str(sorted(kernel.implementations)) in str(error.value)
    assert "'nonsense'" in str(error.value)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_has_a_reference_that_can_be_named_and_takes_what_the_others_refuse(name):
    kernel, args = KERNELS[name], small_call(name)
    assert kernel.implementations["reference"].platform is None
    assert list(kernel.implementations)[-1] == "reference"  # the best comes first
    assert dispatch.refusals({"reference": kernel.implementations["reference"]}, "rocm", *args) == {}
    named, default = (jax.eval_shape(functools.partial(kernel.call, implementation=x), *args) for x in ("reference", None))
    assert named == default
