"""How device programs are compiled, and the rows that the pool has beside those that run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.engine import device_program as compiling
from jkv.engine import mesh, programs
from jkv.engine.device_program import DeviceProgram, device_program
from jkv.testing import tiny_model


@device_program(static_argnames="times", donate_argnames="x")
def multiplied(x, times=2):
    """A documented function."""
    return x * times


def test_a_program_is_jitted_with_its_settings_and_keeps_its_name():
    x = jnp.arange(3.0)
    assert multiplied(x, times=3).tolist() == [0, 3, 6]
    assert x.is_deleted()
    assert (multiplied.__name__, multiplied.__doc__) == ("multiplied", "A documented function.")
    before = multiplied.num_compiled()
    multiplied(jnp.arange(3.0), times=3)
    assert multiplied.num_compiled() == before
    multiplied(jnp.arange(3.0), times=4)
    assert multiplied.num_compiled() == before + 1


def test_it_is_compiled_with_the_options_of_its_platform(monkeypatch):
    """An option that XLA does not know fails when the program is compiled, not before."""
    monkeypatch.setitem(compiling.OPTIONS, "cpu", {"no_such_option": 1})
    program = DeviceProgram(lambda x: x + 1, {})
    program.trace(jnp.ones(2))
    with pytest.raises(Exception, match="no_such_option"):
        program(jnp.ones(2))


def test_xla_knows_the_options_of_every_platform():
    for options in compiling.OPTIONS.values():
        assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2


def test_inside_a_program_another_one_is_called_as_a_function(monkeypatch):
    """XLA takes options only of a whole program."""
    inner = DeviceProgram(lambda x: x + 1, {})
    monkeypatch.setitem(compiling.OPTIONS, "cpu", {"xla_gpu_dot_merger_threshold_mb": 1})
    assert jax.jit(lambda x: inner.function(x) * 2)(1) == 4
    with pytest.raises(ValueError, match="top-level"):
        jax.jit(lambda x: inner(x) * 2)(1)


def test_every_program_of_the_engine_is_one_and_every_program_runs_on_a_mesh():
    assert {"decode_chunk", "prefill_chunk", "compact", "take_pages", "fork", "release"} <= set(mesh.PROGRAMS)
    assert all(isinstance(getattr(programs, name), DeviceProgram) for name in mesh.PROGRAMS)


@pytest.mark.parametrize("policy", [jkv.r_kv(16, 8, window=4), jkv.h2o(16), jkv.quest(16)], ids=str)
def test_a_row_that_never_runs_changes_nothing(monkeypatch, policy):
    """Pools of a GPU have two rows at least."""
    settings = {"max_new_tokens": 60, "stop_ids": (), "page_size": 4, "max_running": 1, "return_trace": True}
    prompts = [[5, 6, 7, 8], [9, 3, 4]]
    expected = jkv.generate(tiny_model(), prompts, policy, **settings)
    monkeypatch.setattr("jkv.engine.runner.LEAST_ROWS", {"cpu": 2})
    got = jkv.generate(tiny_model(), prompts, policy, **settings)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
    assert got.stats.compactions == expected.stats.compactions
