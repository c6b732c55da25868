"""Programs for GPUs read weights where they lie, joined or not: no matrix is written, and XLA joins none."""

import re

import jax.numpy as jnp
import pytest

from jkv.model.joined import GROUPS, join_weights, separate_weights
from jkv.model.weight_shapes import weight_shapes
from tests.aot import targets
from tests.aot.test_programs import shapes_on
from tests.support import programs

DTYPES = {"h200": jnp.bfloat16, "t4": jnp.float32}
LAYOUTS = {"joined": join_weights, "separate": separate_weights}


def joined_shapes(config):
    """The shapes of joined matrices, as XLA writes them."""
    records = [one for weights in join_weights(weight_shapes(config)).layers for one in (weights, weights.delta) if one]
    found = {getattr(record, field, None) for record in records for field in GROUPS} - {None}
    return {",".join(map(str, one.shape)) for one in found}


def written(text, config):
    """The instructions of a program, those inside of fusions too, that make an array of a joined matrix's shape."""
    pattern = re.compile(r"%(\S+) = \w+\[([\d,]+)\]\S* (\S+?)\(")
    passive = "parameter", "get-tuple-element", "bitcast"
    wanted = joined_shapes(config)
    return [match[1] for match in pattern.finditer(text) if match[2] in wanted and match[3] not in passive]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("target", "name"), [(target, name) for target in DTYPES for name in ("decode-r_kv", "prefill")])
def test_weights_are_read_where_they_lie(target, name, layout):
    program = programs.PROGRAMS[name]
    shapes = shapes_on(target, needs=program.needs, dtype=DTYPES[target], layout=LAYOUTS[layout])
    compiled = targets.compile_for(target, program.trace, shapes)
    assert not written(compiled.as_text(), shapes.params.config)


@pytest.mark.parametrize("target", DTYPES)
def test_what_xla_joins_is_found(target):
    """A planted fault: XLA's own rule, by which a GPU from before Ampere copied most weights at every step."""
    program = programs.PROGRAMS["decode-r_kv"]
    shapes = shapes_on(target, needs=program.needs, dtype=DTYPES[target], layout=separate_weights)
    options = {"xla_gpu_dot_merger_threshold_mb": 4096}
    compiled = targets.compile_for(target, program.trace, shapes, compiler_options=options)
    assert len(written(compiled.as_text(), shapes.params.config)) >= 4  # two a layer
    of_weights = sum(leaf.size for weights in shapes.params.layers for leaf in (weights.gate, weights.up))
    fewest = of_weights * 4 // shapes.params.config.num_layers  # bytes of what a layer copies
    assert (compiled.memory_analysis().temp_size_in_bytes > fewest) == (target == "t4")
