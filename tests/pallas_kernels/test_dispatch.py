"""Which implementation a kernel runs."""

import importlib

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as kernels
from pallas_kernels.dispatch import choose

FLOATS, INTS, BOOLS = (lambda *shape, dtype=dtype: jnp.zeros(shape, dtype) for dtype in (jnp.float32, jnp.int32, bool))
SMALL_CALLS = {
    "attention_mass": (FLOATS(1, 1, 1, 2), FLOATS(1, 3, 2), BOOLS(1, 3), BOOLS(1, 1)),
    "block_distance": (FLOATS(2, 2, 3, 2), INTS(1, 1, 1), INTS(1, 1, 1), INTS(1)),
    "key_redundancy": (FLOATS(1, 3, 2), BOOLS(1, 3)),
    "paged_attention": (FLOATS(1, 1, 2), FLOATS(2, 2, 3, 2), INTS(1, 1), INTS(1)),
    "replay_attention": (FLOATS(1, 3, 1, 2), FLOATS(1, 3, 1, 2), FLOATS(1, 3, 1, 2), INTS(1, 3), INTS(1, 1, 3), INTS(1, 1, 3)),
    "take_slots": (FLOATS(2, 2, 3, 2), INTS(1, 1), INTS(1, 1)),
}


def test_none_takes_the_platform_s_own_and_a_name_takes_that_one():
    table = {"cpu": lambda x: x + 1, "reference": lambda x: x + 2}
    assert choose("kernel", table, None)(jnp.int32(0)) == 1
    assert choose("kernel", table, "reference")(jnp.int32(0)) == 2


def test_none_takes_the_reference_where_the_platform_has_nothing_of_its_own():
    assert choose("kernel", {"reference": lambda x: x + 2}, None)(jnp.int32(0)) == 2
    table = {"cpu": lambda x: x - 1, "reference": lambda x: x + 2}
    lowered = jax.jit(choose("kernel", table, None)).trace(jnp.int32(0)).lower(lowering_platforms=("tpu",))
    assert "subtract" not in lowered.as_text()
    assert "add" in lowered.as_text()


@pytest.mark.parametrize("name", kernels.__all__)
def test_an_unknown_implementation_is_refused_naming_the_known_ones(name):
    known = sorted(importlib.import_module(f"pallas_kernels.{name}").IMPLEMENTATIONS)
    with pytest.raises(ValueError, match=name) as error:
        getattr(kernels, name)(*SMALL_CALLS[name], implementation="nonsense")
    assert str(known) in str(error.value)
    assert "'nonsense'" in str(error.value)


@pytest.mark.parametrize("name", kernels.__all__)
def test_every_kernel_has_a_reference_that_can_be_named(name):
    getattr(kernels, name)(*SMALL_CALLS[name], implementation="reference")
