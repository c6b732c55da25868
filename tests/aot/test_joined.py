"""Programs for GPUs read weights where they lie, joined or not: none writes a matrix of weights before it multiplies by it."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from jkv.checkpoints.model_shapes import find_shape
from jkv.model.joined import join_weights, separate_weights
from tests.aot import gpu_kernels, targets
from tests.aot.test_programs import shapes_on
from tests.support import programs

DTYPES = {"h200": jnp.bfloat16, "t4": jnp.float32}
LAYOUTS = {"joined": join_weights, "separate": separate_weights}
CONFIGS = {
    "r1-qwen-1.5b": programs.R1_QWEN,
    "qwen3.5-9b": dataclasses.replace(find_shape("qwen3.5-9b")[1], num_layers=2, state_layers=(0,)),
}
CASES = [(target, name, "r1-qwen-1.5b") for target in DTYPES for name in ("decode-r_kv", "prefill")]
CASES += [("h200", "decode-r_kv", "qwen3.5-9b")]


def written(text, params):
    """What a program launches that makes an array of the shape of a layer's matrix, joined or not, transposed or not.

    What a kernel joins in its registers (the computation of a fusion) is not written.
    """
    wanted = set()
    for given in (join_weights(params), separate_weights(params)):
        for record in (one for weights in given.layers for one in (weights, weights.delta) if one is not None):
            shapes = [leaf.shape for leaf in vars(record).values() if len(getattr(leaf, "shape", ())) == 2]
            wanted |= {shape for rows, columns in shapes for shape in ((rows, columns), (columns, rows))}
    wanted = {f"{rows},{columns}" for rows, columns in wanted if rows * columns > 2**20}
    inside = set(re.findall(r"(?:calls|to_apply)=%([\w.-]+)", text))
    found = []
    for computation in re.split(r"\n}\n+", text):
        head = re.search(r"^(?:ENTRY )?%([\w.-]+) ", computation, re.MULTILINE)
        if head and head[1] not in inside:
            for name, made, kind in re.findall(r"%(\S+) = (\(.*?\)|\S+) ([\w-]+)\(", computation):
                is_passive = kind in ("parameter", "get-tuple-element", "bitcast", "tuple", "while")
                if not is_passive and wanted & set(re.findall(r"\[([\d,]+)\]", made)):
                    found.append(name)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("target", "name", "model"), CASES)
def test_weights_are_read_where_they_lie(target, name, model, layout):
    program = programs.PROGRAMS[name]
    settings = {"dtype": DTYPES[target], "layout": LAYOUTS[layout], "num_rows": 4}
    shapes = shapes_on(target, CONFIGS[model], needs=program.needs, **settings)
    compiled = targets.compile_for(target, program.trace, shapes)
    assert not written(compiled.as_text(), shapes.params)


@pytest.mark.parametrize("megabytes", [32, 4096])
def test_what_xla_joins_on_an_old_gpu_is_found(megabytes):
    """A planted fault: XLA's own limit, and a higher one, by which a T4 copied most of its weights at every step."""
    program = programs.PROGRAMS["decode-r_kv"]
    shapes = shapes_on("t4", needs=program.needs, dtype=jnp.float32, layout=separate_weights, num_rows=4)
    options = {"xla_gpu_dot_merger_threshold_mb": megabytes}
    compiled = targets.compile_for("t4", program.trace, shapes, compiler_options=options)
    assert len(written(compiled.as_text(), shapes.params)) == (2 if megabytes == 32 else 4)  # of two layers


@pytest.mark.parametrize("line", ["%copy.1 = f32[1536,8960] copy(%p)", "%a = (f32[17920,1536], u32[]) copy-start(%p)"])
def test_copies_of_a_single_and_of_a_transposed_matrix_are_found(line):
    params = shapes_on("t4", dtype=jnp.float32).params
    assert len(written(f"%body (p: f32[]) -> f32[] {{\n  {line}\n", params)) == 1


def test_separate_matrices_cost_kernels_and_joined_ones_none():
    """The kernels of a layer in both forms, as docs/kernel-notes.md has them."""
    counts = {}
    for name, layout in LAYOUTS.items():
        program, kernels = programs.PROGRAMS["decode-r_kv"], []
        for num_layers in (2, 3):
            shapes = shapes_on("h200", programs.R1_LLAMA, num_layers=num_layers, needs=program.needs, layout=layout)
            kernels.append(len(gpu_kernels.kernels_of(program.trace, shapes)))
        counts[name] = kernels[1] - kernels[0]
    assert counts == {"joined": 10, "separate": 11}
