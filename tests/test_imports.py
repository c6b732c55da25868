"""Who may import whom: kernels know nothing of the cache, the model nothing of policies, nobody the command line."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [  # each may import those above it, and its own
    {"pallas_kernels"},
    {"jkv.checks", "jkv.devices", "jkv.interrupts", "jkv.params", "jkv.text", "jkv.timing", "jkv.words"},
    {"jkv.each_step", "jkv.model", "jkv.page_choice", "jkv.pool", "jkv.sampling", "jkv.sentences", "jkv.sinks", "jkv.steering"},
    {"jkv.formal"},
    {"jkv.steps"},
    {"jkv.sharing"},
    {"jkv.architectures", "jkv.attention", "jkv.policies", "jkv.testing"},
    {"jkv.checkpoint", "jkv.programs", "jkv.requests", "jkv.score", "jkv.weights"},
    {"jkv.memory", "jkv.results", "jkv.samples", "jkv.shapes", "jkv.swap"},
    {"jkv.control", "jkv.sharer"},
    {"jkv.mesh"},
    {"jkv.engine"},
    {"jkv.generate", "jkv.rl", "jkv.roofline", "jkv.scratch"},
    {"jkv.rollout"},
    {"jkv.estimate"},
    {"jkv.plan"},
    {"jkv.extract", "jkv.verify"},
    {"jkv.analysis", "jkv.redundancy"},
    {"jkv.viz"},
    {"jkv.tasks"},
    {"jkv.bench", "jkv.integrations"},
    {"jkv.tasks.grpo"},
    {"jkv.cli"},
    {"jkv", "jkv.__main__"},
]
FORBIDDEN = {
    "jkv.model": {"jkv.policies", "jkv.pool"},
    "jkv.pool": {"jkv.model"},
    "jkv.policies": {"jkv.attention", "jkv.model"},
}
FILES = sorted([*ROOT.glob("jkv/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")])


def group_of(module):
    """The layered name that a module belongs to."""
    names = {name for layer in LAYERS for name in layer}
    while module not in names:
        module = module.rpartition(".")[0]
        assert module, "a module outside the layers: add it to LAYERS"
    return module


def imports_of(path):
    """The project's modules that a file imports, function-level imports included, type-checking ones not."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                deeper = ROOT / node.module.replace(".", "/") / alias.name
                is_module = deeper.with_suffix(".py").exists() or deeper.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_lies_below_it(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    own = group_of(module)
    rank = next(i for i, layer in enumerate(LAYERS) if own in layer)
    for name in imports_of(path):
        if name.split(".")[0] not in ("jkv", "pallas_kernels"):
            continue
        other = group_of(name)
        assert other not in FORBIDDEN.get(own, ()), f"{module} must not import {name}"
        level = next(i for i, layer in enumerate(LAYERS) if other in layer)
        assert level <= rank, f"{module} must not import {name}, which lies above it"


def test_importing_the_package_pulls_in_no_heavy_optional_library():
    heavy = ["transformers", "orbax", "torch", "optax", "tqdm", "matplotlib"]
    code = f"import jkv, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"
