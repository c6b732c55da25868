"""`paged_attention` compiles for every target at the shapes of real models."""

import jax
import jax.numpy as jnp
import pytest

from jkv.testing import find_copies
from pallas_kernels.models import MODELS, Workload
from pallas_kernels.paged_attention import gpu, shapes, tpu
from tests.aot import targets

CASES = [(target, name) for target in targets.WITH_KERNELS for name in MODELS]
WORKLOADS = {
    "page 128": Workload(layers=1),
    "page 16": Workload(page_size=16, layers=1),
    "long": Workload(batch=16, slots=32_768, page_size=16, layers=1),
    "float32": Workload(dtype=jnp.float32, layers=1),
    "fp8": Workload(layers=None, kv_format="fp8"),
    "int4": Workload(layers=None, kv_format="int4"),
    "int4, float32": Workload(layers=None, kv_format="int4", dtype=jnp.float32),
}


@pytest.mark.parametrize(("target", "name"), CASES)
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_compiles(target, name, workload):
    kernel = gpu if target == "h200" else tpu
    for weighted, with_logits in ((False, False), (True, False), (True, True)):
        args = shapes.arguments(MODELS[name], workload, weighted=weighted)
        reason = kernel.why_not(*args, with_logits=with_logits)
        if reason is None:
            compiled = targets.compile_kernel(target, kernel.paged_attention, args, with_logits=with_logits)
            text, pool = compiled.as_text(), jax.tree.leaves(args[1])
            assert not any(find_copies(text, x.shape) for x in pool)
            assert compiled.memory_analysis().temp_size_in_bytes < sum(x.size * x.dtype.itemsize for x in pool) // 4
        else:
            assert kernel is tpu
            assert "head size" in reason if name == "tiny-reasoner" else "logits must take at most" in reason


@pytest.mark.parametrize(
    "target", [target if target == "tpu-v5e" else pytest.param(target, marks=pytest.mark.slow) for target in targets.TPUS]
)
@pytest.mark.parametrize("limit", ["table", "rows", "logits", "group"])
def test_what_is_not_refused_compiles_at_the_limit(target, limit):
    """The largest of each that `why_not` lets pass."""
    workload, with_logits = Workload(batch=16, page_size=16, layers=1), limit in ("logits", "group")

    def arguments(size):
        model, changed = MODELS["r1-qwen-1.5b"], workload
        if limit in ("table", "logits"):
            changed = workload._replace(slots=16 * size)
        if limit == "rows":
            changed = workload._replace(batch=size)
        if limit == "group":
            model = model._replace(num_query_heads=2 * size)
        query, kv, *rest = shapes.arguments(model, changed)
        return query, jax.ShapeDtypeStruct((4096, *kv.shape[1:]), kv.dtype), *rest

    def is_taken(size):
        return tpu.why_not(*arguments(size), with_logits=with_logits) is None

    largest = max(filter(is_taken, range(8, 130_000, 8)))
    assert not is_taken(largest + 8)
    targets.compile_kernel(target, tpu.paged_attention, arguments(largest), with_logits=with_logits)
