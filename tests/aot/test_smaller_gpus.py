"""GPUs with less than an H200: 163 KiB (A100) or 99 KiB (L4, RTX 3090) of shared memory a program, and no conversion of fp8.

Where a kernel would not compile, plain XLA runs. A refused conversion of fp8 would even end the process: LLVM aborts.
"""

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels import KERNELS, choice
from pallas_kernels.bench import gradients
from pallas_kernels.dispatch import best
from pallas_kernels.models import MODELS, Workload
from tests.aot import targets
from tests.aot.test_kernels import CALLS
from tests.aot.test_programs import shapes_on
from tests.support import programs

SMALLEST = "rtx3090"
CAPABILITIES = {"a100": (8, 0), "rtx3090": (8, 6), "l4": (8, 9)}
HEADS = (64, 96, 128, 256)
WITH_FP8 = "block_distance", "paged_attention", "rotate_append"  # that convert codes


def calls():
    """Every call of every kernel, those of int8 with fp8 too; everyday with 128 channels on the GPU that has least."""
    for kernel, (_, implementations, shapes) in KERNELS.items():
        if not any(one.platform == "cuda" for one in implementations.values()):
            continue
        for case in shapes.CASES:
            of_bytes = case.workload.get("kv_format") == "int8"
            for workload in [case.workload] + [case.workload | {"kv_format": "fp8"}] * of_bytes:
                for target in targets.SMALLER_GPUS:
                    for head_size in HEADS:
                        for dtype in (jnp.bfloat16, jnp.float32):
                            is_slow = target != SMALLEST or head_size != 128
                            name = f"{kernel}-{case.name}-{workload.get('kv_format')}-{target}-{head_size}-{dtype.__name__}"
                            marks = [pytest.mark.slow] if is_slow else []
                            yield pytest.param(
                                kernel, case, workload, target, head_size, dtype, marks=marks, id=name.replace(" ", "_")
                            )


@pytest.mark.parametrize(("kernel", "case", "workload", "target", "head_size", "dtype"), list(calls()))
def test_what_is_chosen_compiles(kernel, case, workload, target, head_size, dtype):
    call, implementations, shapes = KERNELS[kernel]
    if head_size & (head_size - 1) and (workload.get("kv_format") == "int4" or kernel == "sealed_attention"):
        pytest.skip("rotated pages have heads of a power of two; engines refuse others")
    model = MODELS["r1-llama-8b"]._replace(head_size=head_size)
    with choice.tracing_for(CAPABILITIES[target]):
        args = shapes.arguments(model, Workload(page_size=16, layers=1, dtype=dtype)._replace(**workload), **case.options)
        chosen = best(implementations, "cuda", *args)
    has_fp8 = workload.get("kv_format") != "fp8" or CAPABILITIES[target] >= choice.FP8_CAPABILITY
    assert has_fp8 or kernel not in WITH_FP8 or chosen == "reference"
    run = functools.partial(call, implementation=None)
    compiled = targets.compile_kernel(target, gradients(run) if case.is_gradient else run, args)
    assert (CALLS["cuda"] in compiled.as_text()) == (chosen != "reference")


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8", "int4"])
@pytest.mark.parametrize("name", ["decode-r_kv", "prefill", "compact-r_kv"])
def test_programs_compile_in_every_format(name, kv_dtype):
    program = programs.PROGRAMS[name]
    shapes = shapes_on(SMALLEST, needs=program.needs, num_rows=4, kv_dtype=kv_dtype)
    targets.compile_for(SMALLEST, program.trace, shapes)


@pytest.mark.parametrize("kernel", WITH_FP8)
def test_a_kernel_says_what_a_gpu_lacks(kernel):
    _, implementations, shapes = KERNELS[kernel]
    workload = Workload(page_size=16, layers=1, kv_format="fp8")
    args = shapes.arguments(MODELS["r1-llama-8b"], workload)
    found = {}
    for target, capability in CAPABILITIES.items():
        with choice.tracing_for(capability):
            found[target] = implementations["gpu"].why_not(*args)
    assert found["l4"] is None
    assert found["a100"].startswith("fp8 needs compute capability 8.9, and this GPU has 8.0")
    assert found["rtx3090"].startswith("fp8 needs compute capability 8.9, and this GPU has 8.6")
