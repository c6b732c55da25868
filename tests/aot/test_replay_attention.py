"""`replay_attention`, forward and backward, compiles for every device and every real model, and takes no T x C memory."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as kernels
from pallas_kernels.models import MODELS, Workload
from pallas_kernels.replay_attention import gpu, shapes, tpu
from tests.aot import targets

DISTINCT = {shape[1:]: name for name, shape in MODELS.items()}.values()  # layers change nothing here
CASES = [(target, model) for target in targets.WITH_KERNELS for model in DISTINCT]
# Half a minute each: two targets compile the gradients of all models, the others those of the smallest.
GRADIENTS = [
    pytest.param(target, model, marks=[] if target in ("tpu-v5e", "h200") or model == "r1-qwen-1.5b" else [pytest.mark.slow])
    for target, model in CASES
]
# What the devices' compilers call a kernel of Pallas.
CALLS = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}


def kernel_of(target):
    return gpu if targets.TARGETS[target][0] == "cuda" else tpu


def replay(target, model, dtype):
    args = shapes.arguments(model, Workload(batch=2, dtype=dtype), tokens=1024, replayed=True)
    if target == "tpu7x" and dtype == jnp.float32:  # for it libtpu dies of XLA's gather of float32 rows, without any kernel
        return *args[:-1], None
    return args


def gradients(run):
    def total(query, key, value, *columns):
        return jnp.sum(run(query, key, value, *columns).astype(jnp.float32))

    return jax.grad(total, argnums=(0, 1, 2))


@pytest.mark.parametrize(("target", "model"), CASES, ids=["-".join(case) for case in CASES])
def test_a_chunk_of_a_prompt_compiles(target, model):
    kernel = kernel_of(target)
    for page_size, tokens in ((16, 256), (128, 1)):
        args = shapes.arguments(MODELS[model], Workload(page_size=page_size, slots=1168), tokens=tokens)
        assert kernel.why_not(*args) is None
        targets.compile_kernel(target, kernel.replay_attention, args)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(x, marks=[] if x == "tpu-v5e" or targets.TARGETS[x][0] == "cuda" else [pytest.mark.slow])
        for x in targets.WITH_KERNELS
    ],
)
def test_replay_of_sorted_columns_and_its_gradient_compile(target):
    run = functools.partial(kernel_of(target).replay_attention, sorts=True)
    args = replay(target, MODELS["r1-llama-8b"], jnp.bfloat16)
    for columns in (args, (*args[:-1], None)):
        targets.compile_kernel(target, gradients(run), columns)


@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v5p"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_replay_of_sorted_columns_compiles_for_all_widths_on_a_tpu(target, head_size, dtype):
    args = replay(target, MODELS["r1-llama-8b"]._replace(head_size=head_size), dtype)
    assert tpu.why_not(*args, sorts=True) is None
    targets.compile_kernel(target, gradients(functools.partial(tpu.replay_attention, sorts=True)), args)


def test_a_replay_of_many_rows_takes_several_calls_on_a_tpu_and_compiles():
    """Their list would not fit in scalar memory at once."""
    model, tokens = MODELS["r1-qwen-1.5b"], 16384
    args = shapes.arguments(model, Workload(batch=8), tokens=tokens, replayed=True)
    rows, columns = tpu.blocks_of(args[0], args[1], args[4], True)
    blocks = tokens * model.num_query_heads // model.num_kv_heads // rows, tokens // columns
    may_read = jax.ShapeDtypeStruct((8, model.num_kv_heads, *blocks), jnp.bool_)
    assert jax.eval_shape(tpu.tiles_to_visit, may_read).code.shape[0] == 2
    targets.compile_kernel("tpu-v5e", gradients(functools.partial(tpu.replay_attention, sorts=True)), args)


@pytest.mark.parametrize(("target", "model"), GRADIENTS, ids=["-".join(case) for case in CASES])
def test_replay_and_its_gradient_compile(target, model):
    """In sizes that share their tiles with longer ones."""
    kernel = kernel_of(target)
    for dtype in (jnp.bfloat16, jnp.float32) if model == "r1-qwen-1.5b" else (jnp.bfloat16,):
        args = replay(target, MODELS[model], dtype)
        assert kernel.why_not(*args) is None
        targets.compile_kernel(target, gradients(kernel.replay_attention), args)


@pytest.mark.parametrize(
    "target",
    [pytest.param(x, marks=[] if x in ("tpu-v5e", "h200") else [pytest.mark.slow], id=x) for x in targets.WITH_KERNELS],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_heads_doubled_for_sinks_compile(target, dtype):
    kernel, model = kernel_of(target), MODELS["r1-qwen-1.5b"]._replace(head_size=256)
    args = replay(target, model, dtype)
    assert kernel.why_not(*args) is None
    targets.compile_kernel(target, gradients(kernel.replay_attention), args)


@pytest.mark.parametrize("target", ["tpu-v5e", "h200"])
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_the_default_takes_memory_for_queries_and_columns_only(target, is_backward):
    run = functools.partial(kernels.replay_attention, implementation=None)
    size, model = 8192, MODELS["r1-qwen-1.5b"]
    args = shapes.arguments(model, Workload(batch=1), tokens=size, replayed=True)
    compiled = targets.compile_kernel(target, gradients(run) if is_backward else run, args)
    text = compiled.as_text()
    assert text.count(CALLS[targets.TARGETS[target][0]]) >= (3 if is_backward else 1)
    wide = sum(2 * size * heads * model.head_size for heads in (model.num_query_heads, 2 * model.num_kv_heads))
    assert compiled.memory_analysis().temp_size_in_bytes < (6 if is_backward else 3) * wide < size * size * 4


@pytest.mark.parametrize("target", ["tpu-v5e", "h200"])
def test_the_default_compiles_inside_a_rematerialized_layer(target):
    args = shapes.arguments(MODELS["r1-qwen-1.5b"], Workload(batch=1), tokens=1024, replayed=True)
    run = jax.checkpoint(functools.partial(kernels.replay_attention, implementation=None))
    assert CALLS[targets.TARGETS[target][0]] in targets.compile_kernel(target, gradients(run), args).as_text()
