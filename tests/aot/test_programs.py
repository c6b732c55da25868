"""No device program copies the pool on a TPU or GPU, by compiling for each without having it."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jkv.checkpoints.model_shapes import find_shape
from jkv.engine import chunk_inputs
from jkv.engine.chunk_inputs import LARGE as LARGE_CHUNK
from jkv.model.params import ModelConfig
from jkv.testing import assert_no_pool_copy, find_copies, unfolded
from tests.aot import targets
from tests.aot.gpu_kernels import code_of
from tests.support import programs

PROGRAM_TARGETS = ("tpu-v5e", "tpu-v6e", "h200")

MODELS = {"r1-qwen-1.5b": programs.R1_QWEN, "r1-llama-8b": programs.R1_LLAMA}
KERNELS = {
    "decode-r_kv": ("paged_attention",),
    "prefill": ("replay_attention",),
    "compact-r_kv": ("attention_mass", "key_redundancy", "take_slots"),
}

OF_OTHERS = {"decode-": ("paged_attention",), "prefill-": ("replay_attention",), "compact-": ("take_slots",)}  # by prefix
GB = {"tpu-v4": 32, "tpu-v5e": 16, "tpu-v5p": 95, "tpu-v6e": 32, "tpu7x": 96, "h200": 141}  # of a device's memory

LARGE = [
    pytest.param(target, model, marks=[pytest.mark.slow] if is_slow else [], id=f"{target}-{model}")
    for target in targets.WITH_KERNELS
    for model in MODELS
    for is_slow in [model == "r1-llama-8b" and target != "h200"]
]

WRITING = ("prefill", "compact-r_kv", "decode-r_kv", "decode-h2o", "fork", "attach", "write_pages")  # prefixes of names
TWO = ("decode-r_kv", "compact-r_kv")  # with quantised pages on a TPU, every day
OF_LIKES = ("-h2o", "-quest", "-moving-sinks", "-seal", "-skip_kv", "-share")  # what differs from another program in little
# A minute or so each on a TPU; what they add to their likes is compiled for the H200 and the CPU.
SLOW = {
    (target, name) for target in ("tpu-v5e", "tpu-v6e") for name in ("decode-full", "compact-streaming_llm", "compact-random")
}
SLOW |= {("tpu-v6e", name) for name in programs.PROGRAMS}  # but for those of `KERNELS`
SLOW |= {
    (target, name)
    for target in ("tpu-v5e", "tpu-v6e")
    for name in programs.PROGRAMS
    if name.endswith(OF_LIKES) and name not in ("decode-h2o", "decode-quest")
}
CASES = [
    pytest.param(target, name, marks=[pytest.mark.slow] if (target, name) in SLOW else [], id=f"{target}-{name}")
    for target in PROGRAM_TARGETS
    for name in programs.PROGRAMS
    if name not in KERNELS
]


def shapes_on(
    target: str,
    config: ModelConfig = programs.R1_QWEN,
    *,
    num_layers: int = 2,
    needs: Any = programs.NOTHING,
    dtype: Any = jnp.bfloat16,
    **settings: Any,
) -> programs.Shapes:
    """Skips a target whose compiler is not installed; one that is installed and fails is an error."""
    if reason := targets.why_missing(target):
        pytest.skip(reason)
    config = dataclasses.replace(config, num_layers=num_layers)
    settings = {"page_size": targets.TARGETS[target][2]} | settings
    return programs.shapes_of(config, dtype=dtype, sharding=targets.sharding_of(target), needs=needs, **settings)


@pytest.mark.tested("ahead of time", value="target")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("target", "model"), LARGE)
def test_a_large_model_runs_the_kernels_and_copies_no_pool(target, model, name):
    """Two layers of the weights and the whole pool: what the others add is their weights."""
    program = programs.PROGRAMS[name]
    shapes = shapes_on(target, MODELS[model], needs=program.needs)
    compiled, pool = targets.compile_for(target, program.trace, shapes), shapes.state.cache.pool
    # XLA for TPU 7x puts the embeddings in another layout before it decodes.
    weights = jax.tree.leaves(shapes.params) if (target, name) == ("tpu7x", "decode-r_kv") else []
    assert_no_pool_copy(compiled, pool, other_bytes=sum(x.size * x.dtype.itemsize for x in weights))
    assert_runs(compiled, KERNELS[name])
    # The model with all layers, where one device has room for it: a mesh of two v5e is `test_mesh`'s.
    memory, layer = compiled.memory_analysis(), sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes.params.layers[0]))
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes + (MODELS[model].num_layers - 2) * layer
    needed += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert needed < GB[target] * 10**9 or (target, model) == ("tpu-v5e", "r1-llama-8b")


def assert_runs(compiled: jax.stages.Compiled, kernels: tuple[str, ...]) -> None:
    """Asserts that a program calls kernels of those names, and does not compute them by plain XLA."""
    lines = compiled.as_text().splitlines()
    calls = [line for line in lines if re.search(r'custom_call_target="(tpu_custom_call|.*triton)"', line)]
    for kernel in kernels:
        assert any(kernel in line for line in calls), f"{kernel} is computed by plain XLA"


@pytest.mark.parametrize(("target", "name"), CASES)
def test_program_updates_the_pool_in_place(target, name):
    program = programs.PROGRAMS[name]
    is_unrolled = name.startswith(("decode", "prefill"))  # two layers are enough; those of the others are scanned
    shapes = shapes_on(target, num_layers=2 if is_unrolled else programs.DEEP, needs=program.needs)
    compiled = targets.compile_for(target, program.trace, shapes)
    assert_no_pool_copy(compiled, shapes.state.cache.pool)
    assert_runs(compiled, next((kernels for prefix, kernels in OF_OTHERS.items() if name.startswith(prefix)), ()))


@pytest.mark.everyday(where=lambda target, kv_dtype, name: kv_dtype == "int8" and (target == "h200" or name in TWO))
@pytest.mark.parametrize(("target", "kv_dtype"), [("h200", "int8"), ("h200", "fp8"), ("tpu-v5e", "int8")])
@pytest.mark.parametrize("name", [*KERNELS, "decode-quest", "fork"])
def test_a_program_reads_quantised_pages_by_the_kernels_and_updates_them_in_place(target, kv_dtype, name):
    """Codes and scales; 64 rows, beside which the activations of a prefill are small."""
    program, rows = programs.PROGRAMS[name], 64
    layers = 2 if name.startswith(("decode", "prefill")) else programs.DEEP
    shapes = shapes_on(target, num_layers=layers, needs=program.needs, num_rows=rows, kv_dtype=kv_dtype)
    compiled = targets.compile_for(target, program.trace, shapes)
    assert_no_pool_copy(compiled, shapes.state.cache.pool)
    kernels = {"decode-quest": ("paged_attention", "rotate_append"), "fork": ()}
    assert_runs(compiled, (kernels | KERNELS)[name])


@pytest.mark.everyday(where=lambda target, name: target == "h200" or name in (*TWO, "write_pages"))
@pytest.mark.parametrize("target", ["h200", "tpu-v5e"])
@pytest.mark.parametrize("name", [*KERNELS, "decode-quest", "fork", "write_pages"])
def test_a_program_updates_pages_of_int4_in_place(target, name):
    """Kernels read and write codes of 4 bits; plain XLA writes those of prompts. Nothing is padded."""
    program, rows = programs.PROGRAMS[name], 64
    layers = 2 if name.startswith(("decode", "prefill")) else programs.DEEP
    shapes = shapes_on(target, num_layers=layers, needs=program.needs, num_rows=rows, kv_dtype="int4")
    compiled, pool = targets.compile_for(target, program.trace, shapes), shapes.state.cache.pool
    assert_no_pool_copy(compiled, pool)
    of_decode = ("paged_attention", "rotate_append") if name.startswith("decode") else ()
    assert_runs(compiled, of_decode or KERNELS.get(name, ()))
    needed = shapes.state, shapes.params if layers == 2 else None
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(needed))
    assert compiled.memory_analysis().argument_size_in_bytes < 1.05 * num_bytes


@pytest.mark.everyday(where=lambda target, name: target == "t4" and not name.endswith(OF_LIKES))
@pytest.mark.parametrize(
    ("target", "name"), [("t4", name) for name in programs.PROGRAMS] + [("v100", name) for name in KERNELS]
)
def test_an_old_gpu_runs_every_program_by_plain_xla(target, name):
    run_by_plain_xla(target, name, jnp.float32)


def run_by_plain_xla(target, name, dtype):
    program = programs.PROGRAMS[name]
    shapes = shapes_on(target, needs=program.needs, dtype=dtype)
    of_prompt = {"num_tokens": chunk_inputs.OF_OTHERS.sizes[-1]} if name.startswith("prefill") else {}
    trace = functools.partial(program.trace, **of_prompt)
    compiled = targets.compile_for(target, trace, shapes)
    assert "triton" not in compiled.as_text()
    assert_no_pool_copy(compiled, shapes.state.cache.pool)


def test_an_old_gpu_decodes_in_float16():
    run_by_plain_xla("t4", next(name for name in programs.PROGRAMS if name.startswith("decode")), jnp.float16)


@pytest.mark.parametrize("target", ["tpu-v5e", "h200"])
def test_decoding_reads_unfolded_weights_where_they_lie(target):
    """As tunix holds them: the program needs no more beside its arguments than with weights in our own layout.

    But on a TPU, which pads the two heads of a key's or value's weights: it lays these out anew for each chunk.
    """
    if reason := targets.why_missing(target):
        pytest.skip(reason)
    program = programs.PROGRAMS["decode-r_kv"]
    config = dataclasses.replace(programs.R1_QWEN, num_layers=2)
    settings = {"dtype": jnp.bfloat16, "page_size": targets.TARGETS[target][2], "sharding": targets.sharding_of(target)}
    memory = [
        targets.compile_for(target, program.trace, programs.shapes_of(config, needs=program.needs, layout=layout, **settings))
        .memory_analysis()
        .temp_size_in_bytes
        for layout in (lambda params: params, unfolded)
    ]
    keys_and_values = 2 * config.num_layers * config.width * config.num_kv_heads * config.head_size * 2
    assert memory[1] <= memory[0] + 2**20 + keys_and_values * target.startswith("tpu")


@pytest.mark.tested("ahead of time", model="qwen3-30b-a3b", value="target")
@pytest.mark.parametrize("target", ["h200", "tpu-v5e"])
def test_decoding_reads_experts_where_they_lie(target):
    """And on a GPU a prefill does: two layers of Qwen3-30B-A3B, whose experts are 1.2 GB a layer."""
    config = find_shape("qwen3-30b-a3b")[1]
    program = programs.PROGRAMS["decode-r_kv"]
    shapes = shapes_on(target, config, needs=program.needs)
    compiled = targets.compile_for(target, program.trace, shapes)
    assert_no_pool_copy(compiled, shapes.state.cache.pool)
    one = 2 * config.mlp_width * config.width  # bytes of a matrix of an expert
    assert compiled.memory_analysis().temp_size_in_bytes < config.num_experts * one / 10
    few = targets.compile_for(target, program.trace, shapes_on(target, config, needs=program.needs, num_rows=2))
    copies = 2 if target == "h200" else 4  # in two layers, of the experts that two tokens choose; XLA for TPU transposes them
    assert few.memory_analysis().temp_size_in_bytes < copies * 3 * 2 * config.num_active_experts * one
    if target == "h200":
        shapes = shapes_on(target, config)
        prefill = targets.compile_for(target, programs.PROGRAMS["prefill"].trace, shapes)
        inner = 2 * LARGE_CHUNK * config.num_experts * config.mlp_width * 2
        assert prefill.memory_analysis().temp_size_in_bytes < 2 * inner


@pytest.mark.tested("ahead of time", model="gpt-oss-20b", value="target")
@pytest.mark.parametrize(
    ("target", "name"),
    [("h200", "decode-full"), ("h200", "prefill"), ("tpu-v5e", "decode-full"), ("tpu-v6e", "decode-full")],
)
def test_gpt_oss_copies_no_pool(target, name):
    """Two layers of gpt-oss-20b, one of them with a window.

    XLA for TPU lays heads of 64 out anew: it copies the rings, which are small, and in a prefill the pool.
    """
    config = dataclasses.replace(find_shape("gpt-oss-20b")[1], num_layers=2, window_layers=(0,))
    shapes = shapes_on(target, config)
    compiled = targets.compile_for(target, programs.PROGRAMS[name].trace, shapes)
    assert_runs(compiled, ("paged_attention",) if name == "decode-full" and target == "h200" else ())
    assert not find_copies(compiled.as_text(), shapes.state.cache.pool.kv.shape)
    if target == "h200":
        assert not find_copies(compiled.as_text(), shapes.state.cache.windows.kv.shape)


@pytest.mark.tested("ahead of time", model="qwen3.5-9b", value="target")
@pytest.mark.parametrize(
    ("target", "name"),
    [
        *(("h200", name) for name in ("decode-r_kv", "prefill", "fork")),
        ("tpu-v5e", "decode-r_kv"),
        *(pytest.param("tpu-v5e", name, marks=pytest.mark.slow) for name in ("prefill", "fork")),
        pytest.param("tpu-v6e", "decode-r_kv", marks=pytest.mark.slow),
    ],
)
def test_qwen3_5_copies_no_pool_and_no_states(target, name):
    """Two layers of Qwen3.5-9B, the first with a recurrent state, and rows whose states do not fit the vector memory of a TPU.

    There XLA moves smaller ones into that memory and back, which is how a step reads and writes them.
    """
    config = dataclasses.replace(find_shape("qwen3.5-9b")[1], num_layers=2, state_layers=(0,))
    program = programs.PROGRAMS[name]
    shapes = shapes_on(target, config, needs=program.needs, num_rows=32 if name == "fork" else 128, slots=256)
    compiled = targets.compile_for(target, program.trace, shapes)
    if name.startswith("decode"):
        assert_runs(compiled, ("paged_attention",))
    (states,) = shapes.state.cache.states
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert not find_copies(text, shapes.state.cache.pool.kv.shape)
    assert not find_copies(text, states.memory.shape)
    assert memory.alias_size_in_bytes >= 4 * states.memory.size + 2 * shapes.state.cache.pool.kv.size
    if (target, name) == ("h200", "decode-r_kv"):  # nor the matrices of the layer with a state, to join them
        assert memory.temp_size_in_bytes < 2 * config.width * config.delta_net.num_channels / 2


@pytest.mark.tested("ahead of time", model="qwen3.5-35b-a3b", value="target")
@pytest.mark.parametrize("target", ["h200", pytest.param("tpu-v5e", marks=pytest.mark.slow)])
def test_qwen3_5_with_experts_copies_no_pool_and_no_states(target):
    """Two layers of Qwen3.5-35B-A3B, the first with a recurrent state; experts are 1.6 GB a layer."""
    config = dataclasses.replace(find_shape("qwen3.5-35b-a3b")[1], num_layers=2, state_layers=(0,))
    program = programs.PROGRAMS["decode-r_kv"]
    shapes = shapes_on(target, config, needs=program.needs, num_rows=128, slots=256)
    compiled = targets.compile_for(target, program.trace, shapes)
    assert_runs(compiled, ("paged_attention",))
    (states,) = shapes.state.cache.states
    for stored in (shapes.state.cache.pool.kv, states.memory, shapes.params.layers[0].experts.gate):
        assert not find_copies(compiled.as_text(), stored.shape)


GEMMAS = {  # two layers of one kind each, and in E4B two that share them
    "gemma3-4b": {"num_layers": 2, "window_layers": (0,)},
    "gemma4-31b": {"num_layers": 2, "window_layers": (0,)},
    "gemma4-e4b": {"num_layers": 4, "window_layers": (0, 2), "num_sharing_layers": 2},
}


@pytest.mark.tested("ahead of time", value="target")
@pytest.mark.everyday(where=lambda target, model, name: (target, name) == ("h200", "decode-full") or model == "gemma4-e4b")
@pytest.mark.parametrize("target", ["h200", "tpu-v5e"])
@pytest.mark.parametrize("model", GEMMAS)
@pytest.mark.parametrize("name", ["decode-full", "prefill"])
def test_gemma_copies_neither_pool_nor_rings(target, model, name):
    """Both geometries of Gemma 4. A GPU has no kernel for its heads of 512 channels."""
    config = dataclasses.replace(find_shape(model)[1], **GEMMAS[model])
    shapes = shapes_on(target, config, num_layers=config.num_layers, num_rows=16)
    compiled = targets.compile_for(target, programs.PROGRAMS[name].trace, shapes)
    assert_runs(compiled, ("paged_attention",) if name == "decode-full" else ())
    for stored in (shapes.state.cache.pool.kv, shapes.state.cache.windows.kv):
        assert not find_copies(compiled.as_text(), stored.shape)


@pytest.mark.tested("ahead of time", model="glm-4.5-air", value="target")
@pytest.mark.parametrize(
    ("target", "name"),
    [("h200", "decode-r_kv"), ("h200", "prefill"), ("tpu-v5e", "decode-r_kv"), ("tpu-v6e", "decode-r_kv")],
)
def test_glm_copies_neither_pool_nor_experts(target, name):
    """Two layers of GLM-4.5-Air, the first without experts; those of the second are 4.4 GB. The engine returns them."""
    config = dataclasses.replace(find_shape("glm-4.5-air")[1], num_layers=2)
    program = programs.PROGRAMS[name]
    shapes = shapes_on(target, config, needs=program.needs)
    compiled = targets.compile_for(target, functools.partial(program.trace, returns_experts=True), shapes)
    assert_runs(compiled, KERNELS[name])
    if name == "prefill":  # whose values in all experts are larger than a tenth of the pool
        inner = 2 * LARGE_CHUNK * config.num_experts * config.mlp_width * 2
        assert_no_pool_copy(compiled, shapes.state.cache.pool, other_bytes=2 * inner)
    else:
        assert_no_pool_copy(compiled, shapes.state.cache.pool)
        one = 2 * config.mlp_width * config.width  # bytes of a matrix of an expert
        assert compiled.memory_analysis().temp_size_in_bytes < config.num_experts * one / 10


@pytest.mark.tested("ahead of time", value="target")
@pytest.mark.parametrize("shape", ["olmo3-7b", "phi-4", "smollm3-3b", "qwen3-8b", "magistral-small"])
@pytest.mark.parametrize("target", ["h200", "tpu-v5e", "tpu-v6e"])
def test_a_family_decodes_without_a_copy_of_its_pool(target, shape):
    config = find_shape(shape)[1]
    windows = (0,) if config.window_layers else ()
    # All 32 heads of OLMo-3 are KV heads: a v5e has no room for the windows of more rows.
    rows = {"num_rows": 8} if (target, shape) == ("tpu-v5e", "olmo3-7b") else {}
    shapes = shapes_on(target, dataclasses.replace(config, num_layers=2, window_layers=windows), **rows)
    compiled = targets.compile_for(target, programs.PROGRAMS["decode-full"].trace, shapes)
    assert not find_copies(compiled.as_text(), shapes.state.cache.pool.kv.shape)
    assert_runs(compiled, ("paged_attention",))


@pytest.mark.parametrize("name", [name for name in programs.PROGRAMS if name.startswith(WRITING) and "-quest" not in name])
def test_a_gpu_writes_no_place_by_compare_and_swap(name):
    """XLA does where a place may come twice, and whatever is masked out waits for its turn; only bounds of pages need it."""
    program = programs.PROGRAMS[name]
    assert swaps(program.trace, shapes_on("h200", needs=program.needs)) == []


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "kvarn"])
def test_a_prefill_writes_no_code_by_compare_and_swap(kv_dtype):
    sizes = {"kv_dtype": kv_dtype} | ({"page_size": 128} if kv_dtype == "kvarn" else {})
    assert swaps(programs.PROGRAMS["prefill"].trace, shapes_on("h200", MODELS["r1-llama-8b"], **sizes)) == []


def test_a_prefill_writes_no_window_by_compare_and_swap():
    config = dataclasses.replace(find_shape("gpt-oss-20b")[1], num_layers=2, window_layers=(0,))
    assert swaps(programs.PROGRAMS["prefill"].trace, shapes_on("h200", config)) == []


def swaps(trace: Any, shapes: Any) -> list[str]:
    """The kernels of a program on an H200 that compare and swap."""
    return [kernel for kernel, text in code_of(trace, shapes).items() if re.search(r"atom[.\w]*\.cas\.", text)]


@pytest.mark.parametrize("target", PROGRAM_TARGETS)
def test_measuring_pages_copies_none(target):
    shapes = shapes_on(target, num_layers=programs.DEEP, needs=programs.SHARING)
    compiled, pool = targets.compile_for(target, programs.measure_pages, shapes), shapes.state.cache.pool
    assert_runs(compiled, ("block_distance",))
    assert not find_copies(compiled.as_text(), pool.kv.shape)
    assert compiled.memory_analysis().temp_size_in_bytes < pool.kv.size * pool.kv.dtype.itemsize // 10


@pytest.mark.parametrize("target", PROGRAM_TARGETS)
def test_decoding_all_layers_updates_the_pool_in_place(target):
    program = programs.PROGRAMS["decode-r_kv"]
    shapes = shapes_on(target, num_layers=programs.DEEP, needs=program.needs)
    assert_no_pool_copy(targets.compile_for(target, program.trace, shapes), shapes.state.cache.pool)


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
    compiled = targets.compile_for(target, programs.PLANTED[name], shapes)
    with pytest.raises(AssertionError, match="is it donated" if name == "undonated" else "copied"):
        assert_no_pool_copy(compiled, shapes.state.cache.pool)
