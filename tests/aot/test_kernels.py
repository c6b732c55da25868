"""Every kernel of the table compiles for every target on which it has an implementation, at its calls by real models."""

import functools

import pytest

from pallas_kernels import KERNELS
from pallas_kernels.bench import gradients
from pallas_kernels.dispatch import best
from pallas_kernels.models import MODELS, Workload
from tests.aot import targets

CALLS = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}  # the name of a kernel of Pallas in a compiled program
DISTINCT = {shape[1:]: name for name, shape in MODELS.items()}.values()  # the number of layers changes only the pool
MAIN = ("tpu-v5e", "h200")


def cases():
    """The first call of each kernel on all targets for all models, the others on two targets for one model."""
    for kernel, (_, implementations, shapes) in KERNELS.items():
        for target in targets.WITH_KERNELS:
            platform, _, page_size = targets.TARGETS[target]
            if not any(one.platform == platform for one in implementations.values()):
                continue
            for index, case in enumerate(shapes.CASES):
                for model in DISTINCT:
                    is_slow = index > 0 and (target not in MAIN or model != "r1-qwen-1.5b")
                    marks = [pytest.mark.slow] if is_slow else []
                    name = f"{kernel}-{case.name.replace(' ', '_')}-{target}-{model}"
                    yield pytest.param(kernel, case, target, model, page_size, marks=marks, id=name)


def is_everyday(kernel, case, target, model):
    """Each kernel on two targets, and one kernel on every target."""
    is_first = case == KERNELS[kernel][2].CASES[0] and model == "r1-qwen-1.5b"
    return is_first and (target in MAIN or kernel == "paged_attention")


@pytest.mark.everyday
@pytest.mark.everyday(where=is_everyday)
@pytest.mark.parametrize(("kernel", "case", "target", "model", "page_size"), list(cases()))
def test_a_real_call_compiles(kernel, case, target, model, page_size):
    call, implementations, shapes = KERNELS[kernel]
    workload = Workload(page_size=page_size, layers=1)._replace(**case.workload)
    args, platform = shapes.arguments(MODELS[model], workload, **case.options), targets.TARGETS[target][0]
    chosen = best(implementations, platform, *args)
    if chosen == "reference":
        has_none = not any(one.reads_codes for one in implementations.values() if one.platform == platform)
        assert model == "tiny-reasoner" or ("kv_format" in case.workload and has_none)  # narrow heads, or quantised pages
        return
    run = functools.partial(call, implementation=None)
    compiled = targets.compile_kernel(target, gradients(run) if case.is_gradient else run, args)
    assert CALLS[platform] in compiled.as_text()
