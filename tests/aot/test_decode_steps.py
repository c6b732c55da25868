"""Decode steps at the sizes of production: few kernels, one CUDA graph, nothing computed twice, 64-bit addresses."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

from jkv.engine.device_program import LEAST_ROWS
from jkv.model.eight_bits import quantise_weights
from pallas_kernels import KERNELS, choice
from pallas_kernels.models import MODELS, Workload
from pallas_kernels.paged_attention import gpu as attention
from pallas_kernels.rotate_append import gpu as appending
from tests.aot import decode_steps, targets
from tests.aot.decode_steps import SETTINGS
from tests.support import programs

ON_GPUS = [one for one in SETTINGS if targets.TARGETS[one.target][0] == "cuda"]
ON_TPUS = [one for one in SETTINGS if one not in ON_GPUS]
EVERYDAY = {("h200", 110, 1, 1152), ("h200", 110, 128, 1152), ("h100", 25, 32, 16_384), ("tpu-v6e", 25, 32, 1152)}
MOST_LAYER, MOST_STEP = 11, 400  # kernels of R1-Llama-8B
LARGE = 13_000_000  # pages of 16 slots and heads of 128: a pool of 106 GB


def marked(settings):
    def mark(one):
        is_slow = (one.target, *one[2:5]) not in EVERYDAY
        return pytest.param(one, marks=[pytest.mark.slow] * is_slow, id="-".join(map(str, one[:5])))

    return [mark(one) for one in settings]


def skip_without_compiler(target):
    if reason := targets.why_missing(target):
        pytest.skip(reason)


@pytest.mark.everyday
@pytest.mark.parametrize("setting", marked(ON_GPUS))
def test_a_step_on_a_gpu_is_one_graph_of_few_kernels(setting):
    skip_without_compiler(setting.target)
    step = decode_steps.step_of(setting)
    assert step.layer_kernels <= MOST_LAYER
    assert step.kernels(decode_steps.MODELS[setting.model].num_layers) <= MOST_STEP
    assert step.command_buffers == 1
    assert step.computed_twice == 0
    assert step.temporary_bytes < 2e6 * max(32, setting.batch)


@pytest.mark.parametrize("batch", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_a_step_of_four_tokens_of_each_row_has_hardly_more_kernels_than_one_of_one(batch):
    skip_without_compiler("h200")
    plain = decode_steps.Setting("h200", "r1-llama-8b", 110, batch, 1152)
    one, four = (decode_steps.step_of(setting) for setting in (plain, plain._replace(drafts=3)))
    num_layers = decode_steps.MODELS[plain.model].num_layers
    print(one, four)
    assert four.layer_kernels <= one.layer_kernels
    assert four.kernels(num_layers) <= 1.05 * one.kernels(num_layers)
    assert four.computed_twice == 0


@pytest.mark.parametrize("setting", marked(ON_TPUS))
def test_a_step_on_a_tpu_copies_no_pool_and_computes_nothing_twice(setting):
    skip_without_compiler(setting.target)
    step = decode_steps.step_of(setting)
    assert step.computed_twice == 0
    assert step.temporary_bytes < 1e9


def test_what_is_computed_twice_is_found():
    """A planted fault: XLA's own limit of memory, and its scatter in place of the kernel."""
    skip_without_compiler("h200")
    with choice.choose("rotate_append=reference"):
        planted = decode_steps.compiled_step(ON_GPUS[2], 2, xla_gpu_memory_limit_slop_factor=95)
    assert decode_steps.computed_twice(planted.program) > 0
    assert planted.kernels > decode_steps.compiled_step(ON_GPUS[2], 2).kernels


def test_products_are_not_cut_by_a_rule_of_thumb():
    """A planted fault: without the options, XLA adds the parts of three products per layer in kernels of their own."""
    skip_without_compiler("h200")
    usual = {"xla_gpu_experimental_force_split_k": 0, "xla_gpu_dot_merger_threshold_mb": 32}
    two, three = (decode_steps.compiled_step(ON_GPUS[1], layers, **usual).kernels for layers in (2, 3))
    assert three - two > MOST_LAYER


@pytest.mark.parametrize("num_pages", [10_000, LARGE])
@pytest.mark.parametrize("kernel", [attention.paged_attention, appending.rotate_append], ids=["attention", "append"])
def test_pages_of_a_large_pool_are_addressed_with_64_bits(kernel, num_pages):
    skip_without_compiler("h200")
    is_attention = kernel is attention.paged_attention
    shapes = KERNELS[kernel.__name__].shapes
    args = list(shapes.arguments(MODELS["r1-llama-8b"], Workload(batch=32, page_size=16, layers=1)))
    args[1 if is_attention else 0] = jax.ShapeDtypeStruct((num_pages, 2, 16, 128), jnp.bfloat16)
    (text,) = [text for name, text in triton_kernels(kernel, args) if name == kernel.__name__]
    offsets = [line.rsplit("x", 1)[1].strip(">") for line in text.splitlines() if "tt.addptr" in line and "bf16" in line]
    assert offsets.count("i64") == (2 if num_pages == LARGE else 0)  # keys and values; the rest is small
    assert offsets.count("i32") > 0


def triton_kernels(run, args):
    """Name and Triton code of each kernel of a call."""
    sharding = targets.sharding_of("h200")
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tuple(args))
    with targets.described("cuda"), choice.compiling_for("cuda"):
        lowered = jax.jit(lambda *args: run(*args)).trace(*args).lower(lowering_platforms=("cuda",))
    found = []

    def visit(operation):
        for block in (block for region in operation.regions for block in region.blocks):
            for inner in block.operations:
                if inner.operation.name == "stablehlo.custom_call":
                    found.append(code_of(inner.attributes["mhlo.backend_config"]))
                visit(inner.operation)

    visit(lowered.compiler_ir().operation)
    return found


def code_of(config):
    from jaxlib.triton import dialect

    code = ir.StringAttr(config["ir"]).value_bytes
    with ir.Context() as context:
        dialect.register_dialect(context)
        return ir.StringAttr(config["name"]).value, str(ir.Module.parse(code))


@pytest.mark.parametrize(("target", "model"), [("h200", "r1-llama-8b"), ("tpu-v6e", "r1-qwen-1.5b")])
def test_codes_of_weights_become_floats_inside_of_products(target, model):
    """No matrix of floats is written: the memory that a step reads is that of codes."""
    skip_without_compiler(target)
    config = dataclasses.replace(decode_steps.MODELS[model], num_layers=2)
    platform, _, page_size = targets.TARGETS[target]
    sharding, rows = targets.sharding_of(target), max(32, LEAST_ROWS.get(platform, 1))
    sizes = {"page_size": page_size, "num_rows": rows, "slots": 1152, "pool_gb": 10}
    shapes = programs.shapes_of(config, dtype=jnp.bfloat16, sharding=sharding, needs=programs.QUERIES, **sizes)
    codes = jax.tree.map(lambda x: x.update(sharding=sharding), quantise_weights(shapes.params, "int8"))
    floats, coded = (
        targets.compile_for(target, programs.decode, shapes._replace(params=params)) for params in (shapes.params, codes)
    )
    one_matrix = 2 * config.width**2  # of the smallest, in bfloat16
    assert coded.memory_analysis().temp_size_in_bytes < floats.memory_analysis().temp_size_in_bytes + one_matrix // 2
