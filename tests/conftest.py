"""One place for what every test runs under: shapes checked, dtypes strict, programs cached between runs."""

import gc
import inspect
import json
import os
import re
import signal
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

# `JAX_PLATFORMS=cuda python -m pytest tests/pallas_kernels -k gpu` runs the GPU's kernels on a GPU in place of the interpreter.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes most of the time of the tests, and a third of that without optimisation. `XLA_FLAGS= python -m pytest ...`
# compiles as users do; `.ci/run` runs so what is about rounding.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * metadata.version("jax").startswith("0.10.")  # later ones do not know it
    if os.environ["JAX_PLATFORMS"] == "cpu"
    else "",
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest
from jaxtyping import install_import_hook

from tests.support import everyday

ROOT = Path(__file__).parent.parent
FILES = [*ROOT.glob("jkv/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]
SHAPED = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in FILES if "jaxtyping" in file.read_text()]
# Files that write no shapes are left to mypy: the check takes most of the time of the host's loop.
HOOK = install_import_hook([name.removesuffix(".__init__") for name in SHAPED], "beartype.beartype")
jax.config.update("jax_numpy_dtype_promotion", "strict")
ON_GPU = os.environ["JAX_PLATFORMS"] == "cuda"
if ON_GPU:
    jax.config.update("jax_default_matmul_precision", "highest")  # the references' products, which would be in TF32
CACHE = ROOT / ".cache" / f"jax-{jax.__version__}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))  # of what the tests start, too
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C, which tests press


# Files that take longest, those first: no worker is left with a long one when the other has nothing to do.
LONGEST = (
    "engine/test_faults.py",
    "policies/test_conformance.py",
    "engine/test_mesh.py",
    "repository/test_docs.py",
    "repository/test_page_commands.py",
    "evaluation/test_probe.py",
    "engine/test_engine.py",
    "bench/test_benchmarks.py",
    "analysis/test_recall.py",
    "cli/test_cli.py",
    "grpo/test_grpo.py",
    "engine/test_turns.py",
    "engine/test_prefix_cache.py",
    "rl/test_mesh.py",
    "engine/test_quantised_pages.py",
    "pallas_kernels/test_paged_attention_gpu.py",
    "evaluation/test_window_leads.py",
    "evaluation/test_leads.py",
    "evaluation/test_experiments.py",
    "evaluation/test_compare.py",
    "test_rollout.py",
    "test_generate.py",
    "policies/test_protection.py",
    "analysis/test_foresee.py",
    "cache/test_in_step_eviction.py",
    "model/test_numbers.py",
    "engine/test_prompts.py",
    "engine/test_sharer.py",
    "serving/test_loads.py",
    "cli/test_interrupts.py",
    "repository/test_notebooks.py",
    "pallas_kernels/test_quantised.py",
    "pallas_kernels/test_paged_attention.py",
    "pallas_kernels/test_replay_attention.py",
    "evaluation/test_generations.py",
)


gc.set_threshold(100_000, 20, 100)  # tracing makes many objects that live on; looking through them is a tenth of the time
SHAPES = re.compile(r"\b(Float|Int|UInt|Bool|Array|Key)\d*\[")


@pytest.fixture(autouse=True, scope="session")
def check_shapes_alone():
    """Functions that write no shapes are left to mypy, also in files that write some: checking them is a fifth of the time."""
    modules = [sys.modules[name] for name in SHAPED if name in sys.modules]
    owners = [*modules, *(kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass))]
    for owner in owners:
        for member in vars(owner).values():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if inspect.isfunction(function) and not SHAPES.search(str(inspect.signature(function))):
                function.__no_type_check__ = True


@pytest.fixture(autouse=True, scope="session")
def compile_gpu_kernels():
    """On a GPU, its kernels run there, whatever a test says."""
    if ON_GPU:
        from jax.experimental import pallas

        from pallas_kernels import launch

        def compiled(*args, interpret, **settings):
            return pallas.pallas_call(*args, interpret=False, **settings)

        launch.pl = SimpleNamespace(pallas_call=compiled)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Two workers; none for a single file, which starts sooner by itself."""
    return 0 if len(config.args) == 1 and config.args[0].partition("::")[0].endswith(".py") else 2


def is_everyday(item, chosen):
    """Whether a test runs every day: by `chosen`, the cases of the tests that take long, and the conditions of its marks."""
    conditions = [mark.kwargs.get("where") for mark in item.iter_markers("everyday")]
    function, case = everyday.split(item.nodeid.removeprefix("tests/"))
    if None not in conditions and case not in chosen.get(function, (case,)):
        return False
    conditions = [where for where in conditions if where is not None]
    return all(where(*(item.callspec.params[name] for name in inspect.signature(where).parameters)) for where in conditions)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """The longest files first, the others as they are.

    `@pytest.mark.everyday(where=lambda name, dtype: ...)` makes the rest of a sweep `slow`: every value of each parameter runs
    every day, not their product. Of the tests that take long, `tests/everyday.json` has the cases that run every day; it does
    not count for a test with the mark `@pytest.mark.everyday` alone.
    """
    chosen = json.loads(everyday.FILE.read_text())
    for item in items:
        if not is_everyday(item, chosen):
            item.add_marker(pytest.mark.slow)
    rank = {ROOT / "tests" / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Programs go between two files once they are many: Linux allows a process 65,530 mappings, and each takes a few."""
    from jkv.engine import mappings

    yield
    # An engine lets them go at a quarter of the limit, in the midst of a file, which may count compilations.
    if mappings.num_mappings() > mappings.limit() // 8:
        jax.clear_caches()


@pytest.fixture(scope="session")
def model():
    """A tiny random model, shared."""
    import jkv

    return jkv.testing.tiny_model()


@pytest.fixture(scope="module")
def short_prefills():
    """Prompts are prefilled in chunks of 4 and 16 tokens, which compile soon."""
    from jkv.engine import prefill

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "SIZES", (4, 16))
        yield
