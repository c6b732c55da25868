"""For which GPU kernels are chosen, and choosing them by hand."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.checkpoints import weight_reading
from jkv.engine.device_program import ProgramsFor, device_program, programs_for
from pallas_kernels import KERNELS, choice, dispatch
from pallas_kernels.dispatch import Implementation, best, call
from pallas_kernels.models import MODELS, Workload

TABLE = {
    "gpu": Implementation(lambda x: x + 1, "cuda"),
    "cpu": Implementation(lambda x: x + 2, "cpu"),
    "reference": Implementation(lambda x: x + 3),
}


def gpus(*capabilities):
    return [SimpleNamespace(platform="gpu", compute_capability=one) for one in capabilities]


@pytest.mark.parametrize(
    ("devices", "lowest"),
    [
        (gpus("7.5"), (7, 5)),
        (gpus("9.0", "8.0"), (8, 0)),
        (gpus("10.0", "9.0"), (9, 0)),  # as numbers, not as text
        ([SimpleNamespace(platform="tpu")], None),
        (gpus("gfx90a", None), None),  # an AMD GPU's is no number
        ([SimpleNamespace(platform="cpu")], None),
    ],
)
def test_a_program_of_several_gpus_must_run_on_the_lowest(devices, lowest):
    assert choice.lowest_capability(devices) == lowest


@pytest.mark.parametrize(
    ("capability", "name"), [((7, 0), "reference"), ((7, 5), "reference"), ((8, 0), "gpu"), ((12, 0), "gpu")]
)
@pytest.mark.parametrize("kernel", [name for name, kernel in KERNELS.items() if "gpu" in kernel.implementations])
def test_triton_kernels_run_from_ampere_on(kernel, capability, name):
    _, table, shapes = KERNELS[kernel]
    args = shapes.arguments(MODELS["r1-qwen-1.5b"], Workload(batch=2, page_size=16, layers=1))
    with choice.tracing_for(capability):
        assert best(table, "cuda", *args) == name
    assert best(table, "cuda", *args) == "gpu"  # nothing is known of the GPU


def test_one_warning_tells_of_an_old_gpu_and_a_choice_that_cannot_run_is_refused(monkeypatch):
    choice.warn_of_old_gpu.cache_clear()
    monkeypatch.setattr(dispatch, "own_platform", lambda: "cuda")
    with choice.tracing_for((7, 5)):
        with pytest.warns(UserWarning, match=r"compute capability 7\.5, below 8\.0.*float32"):
            assert call("first", TABLE, None, jnp.float32(0)) in (2, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call("second", TABLE, None, jnp.float32(0))
        with pytest.raises(ValueError, match=r"needs compute capability 8\.0, and this GPU has 7\.5"):
            call("first", TABLE, "gpu", jnp.float32(0))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it pretends that there are GPUs")
def test_a_program_is_traced_anew_for_another_gpu_or_choice():
    counted = []

    @jax.jit
    def program(x):
        counted.append(choice.capability())
        return x + 1

    for capability in (None, (7, 5), (9, 0), (7, 5), None):
        with choice.tracing_for(capability):
            program(1.0)
    assert counted == [None, (7, 5), (9, 0)]


def test_weights_of_an_old_gpu_are_float32(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(choice, "own_capability", lambda: (7, 5))
    with warnings.catch_warnings(record=True):
        assert weight_reading.computes_in_float32()
    monkeypatch.setattr(choice, "own_capability", lambda: (8, 0))
    assert not weight_reading.computes_in_float32()


def test_the_reference_can_be_chosen_for_all_kernels_or_for_one(monkeypatch):
    monkeypatch.setattr(dispatch, "TAKEN", {})
    assert call("paged_attention", TABLE, None, jnp.float32(0)) == 2
    with choice.choose("reference"):
        assert call("paged_attention", TABLE, None, jnp.float32(0)) == 3
        assert call("paged_attention", TABLE, "cpu", jnp.float32(0)) == 2  # a call's own choice comes first
    with choice.choose("take_slots=reference"):
        assert call("paged_attention", TABLE, None, jnp.float32(0)) == 2
        assert call("take_slots", TABLE, None, jnp.float32(0)) == 3
    assert dispatch.taken("cpu") == {"paged_attention": "cpu, reference", "take_slots": "reference"}


@pytest.mark.parametrize("text", ["nonsense", "paged_attention", "paged_attention=nonsense", "other=reference", "=", "gpu"])
def test_an_unknown_choice_is_refused_before_anything_compiles(text, model):
    with pytest.raises(ValueError, match=r'must be "auto", "reference", or pairs like .*take_slots'):
        jkv.Engine(model, kernels=text)


def test_an_engine_computes_with_the_kernels_that_were_chosen(model):
    settings = {"max_new_tokens": 24, "stop_ids": (), "page_size": 4, "progress": False}
    policy = jkv.r_kv(budget=16, interval=8, window=4)
    chosen = [jkv.generate(model, [1, 2, 3], policy=policy, kernels=kernels, **settings) for kernels in ("auto", "reference")]
    np.testing.assert_allclose(chosen[0].logprobs, chosen[1].logprobs, atol=1e-4)
    assert "reference" in chosen[1].stats.kernels["paged_attention"]
    assert chosen[0].logprobs.tobytes() != chosen[1].logprobs.tobytes()  # the compiled kernel rounds otherwise


def test_the_programs_of_an_engine_are_for_its_own_devices():
    assert programs_for(TABLE, jax.devices(), None) is TABLE
    programs = programs_for(SimpleNamespace(tell=device_program()(lambda: choice.capability())), gpus("7.5"), None)
    assert isinstance(programs, ProgramsFor)
    assert programs.tell() == (7, 5)


IN_A_PROCESS = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None  # a JAX without it
import jax, jax.numpy as jnp, pallas_kernels
from pallas_kernels import KERNELS, choice, dispatch
from pallas_kernels.models import MODELS, Workload
chosen, told = set(), set()
dispatch.own_platform = lambda: "cuda"
for call, table, shapes in (kernel for kernel in KERNELS.values() if "gpu" in kernel.implementations):
    args = shapes.arguments(MODELS["r1-qwen-1.5b"], Workload(batch=2, page_size=16, layers=1), **shapes.CASES[0].options)
    chosen.add(dispatch.best(table, "cuda", *args))
    try:
        jax.eval_shape(lambda *args: call(*args, implementation="gpu"), *args)
    except ValueError as error:
        told.add("no Triton backend of Pallas" in str(error))
print(*chosen, choice.chosen("take_slots"), *told)
"""


def test_a_jax_without_triton_and_a_choice_of_the_environment(monkeypatch):
    monkeypatch.setenv("JKV_KERNELS", "take_slots=reference")
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["reference", "reference", "True"]
