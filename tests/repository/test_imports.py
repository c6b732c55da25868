"""Who may import whom: kernels know nothing of the cache, the model nothing of policies, nobody the command line."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RANKS = [  # from the ground up: a module may import those of lower ranks, and its own package
    {"pallas_kernels"},
    {"jkv.errors", "jkv.pytrees"},
    {"jkv.checks", "jkv.notebook", "jkv.program_cache", "jkv.text_files"},
    {"jkv.limits", "jkv.statistics", "jkv.reports", "jkv.resuming", "jkv.tidy"},
    {"jkv.model"},
    {"jkv.checkpoints"},
    {"jkv.cache"},
    {"jkv.reasoning"},
    {"jkv.forms"},
    {"jkv.eviction", "jkv.replay"},
    {"jkv.policies"},
    {"jkv.engine"},
    {"jkv.progress"},
    {"jkv.replicas"},
    {"jkv.generate"},
    {"jkv.rollout", "jkv.planning", "jkv.analysis", "jkv.rl"},
    {"jkv.viz", "jkv.testing"},
    {"jkv.evaluation", "jkv.verify"},
    {"jkv.integrations", "jkv.serving"},
    {"jkv.bench"},
    {"jkv.cli"},
    {"jkv", "jkv.__main__"},
    {"research"},
]
RANK_OF = {name: rank for rank, names in enumerate(RANKS) for name in names}
FILES = sorted([*ROOT.glob("jkv/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py"), *ROOT.glob("research/**/*.py")])


def room_of(module):
    """The ranked name that a module belongs to: its package, or itself where it lies at the top."""
    while module not in RANK_OF:
        package = module.rpartition(".")[0]
        assert package, f"{module} is outside the ranks: add it to RANKS"
        module = package
    return module


def name_of(path):
    """A file's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path):
    """The project's modules that a file imports: in functions, and for annotations alone, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inner]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("jkv", "pallas_kernels", "research"))


MODULES = {name_of(path): path for path in FILES}


def test_a_module_imports_only_what_lies_below_it():
    faults = [
        f"{own} must not import {name}"
        for own, path in MODULES.items()
        for name in imports_of(path)
        if room_of(name) != room_of(own) and RANK_OF[room_of(name)] >= RANK_OF[room_of(own)]
    ]
    assert not faults, "\n".join(faults)


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: set(imports_of(path)) & MODULES.keys() - {name} for name, path in MODULES.items()}
    while leaves := {name for name, others in graph.items() if not others & graph.keys()}:
        graph = {name: others for name, others in graph.items() if name not in leaves}
    assert not graph, {name: sorted(others & graph.keys()) for name, others in graph.items()}


LINES = [[], ["--help"], ["policies"], ["models"], ["plan", "tiny-reasoner", "--device", "t4"]]  # as light as the package


def test_the_package_and_light_commands_import_nothing_that_jax_does_not():
    code = f"""
import contextlib, io, sys
import jax, jax.numpy
before = set(sys.modules)
import jkv
from jkv.cli import main
for line in {LINES}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(line)
print(*set(sys.modules) - before)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    imported = set(out.stdout.split())
    packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert packages <= {"jkv", "pallas_kernels", "jax", "jaxtyping", "numpy", "wadler_lindig"}
    of_one_platform = ("jax.experimental.pallas.", "jax._src.pallas.triton", "jax._src.pallas.mosaic.core")
    assert not [name for name in imported if name.startswith(of_one_platform)]
