"""No device program copies the pool on a TPU or GPU, by compiling for each without having it."""

import dataclasses

import jax.numpy as jnp
import pytest

from jkv.testing import assert_no_pool_copy
from tests import programs
from tests.aot import targets

# A minute or so each on a TPU; what they add to their likes is compiled for the H200 and the CPU.
SLOW = {
    (target, name) for target in ("tpu-v5e", "tpu-v6e") for name in ("decode-full", "compact-streaming_llm", "compact-random")
} | {("tpu-v6e", name) for name in ("leave", "sit", "drop", "write_pages")}
CASES = [
    pytest.param(target, name, marks=[pytest.mark.slow] if (target, name) in SLOW else [], id=f"{target}-{name}")
    for target in targets.TARGETS
    for name in programs.PROGRAMS
]


def shapes_on(target: str, *, window: int = 0, keeps_mass: bool = False, num_layers: int = 2) -> programs.Shapes:
    """Skips a target whose compiler is not installed; one that is installed and fails is an error."""
    if reason := targets.why_missing(target):
        pytest.skip(reason)
    config = dataclasses.replace(programs.R1_QWEN, num_layers=num_layers)
    page_size, sharding = targets.TARGETS[target][2], targets.sharding_of(target)
    return programs.shapes_of(
        config, dtype=jnp.bfloat16, page_size=page_size, window=window, sharding=sharding, keeps_mass=keeps_mass
    )


@pytest.mark.parametrize(("target", "name"), CASES)
def test_program_updates_the_pool_in_place(target, name):
    trace, window, keeps_mass = programs.PROGRAMS[name]
    is_unrolled = name.startswith(("decode", "prefill"))  # two layers are enough; those of the others are scanned
    shapes = shapes_on(target, window=window, keeps_mass=keeps_mass, num_layers=2 if is_unrolled else programs.DEEP)
    assert_no_pool_copy(targets.compile_for(target, trace(shapes)), shapes.state.cache.pool)


@pytest.mark.slow
@pytest.mark.parametrize("target", targets.TARGETS)
def test_decoding_all_layers_updates_the_pool_in_place(target):
    program = programs.PROGRAMS["decode-r_kv"]
    shapes = shapes_on(target, window=program.window, num_layers=programs.DEEP)
    assert_no_pool_copy(targets.compile_for(target, program.trace(shapes)), shapes.state.cache.pool)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("tpu-v5e", "undonated"),
        ("tpu-v5e", "sliced-keys"),
        ("tpu-v5e", "sliced-index-append"),
        ("h200", "undonated"),
        ("h200", "sliced-keys"),
    ],
)
def test_planted_copy_is_found(target, name):
    shapes = shapes_on(target)
    compiled = targets.compile_for(target, programs.PLANTED[name](shapes))
    with pytest.raises(AssertionError, match="is it donated" if name == "undonated" else "copied"):
        assert_no_pool_copy(compiled, shapes.state.cache.pool)
