"""One place for what every test runs under: shapes checked, dtypes strict, programs cached between runs."""

import contextlib
import gc
import inspect
import math
import os
import signal
import sys
from collections import Counter, defaultdict
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

from tests.support import selection
from tests.support.shapes import writes_shapes

ROOT = Path(__file__).parent.parent
FILES = [*ROOT.glob("jkv/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py"), *ROOT.glob("research/**/*.py")]
SHAPED = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in FILES if "jaxtyping" in file.read_text()]
# Files that write no shapes are left to mypy: the check takes most of the time of the host's loop.
HOOK = install_import_hook([name.removesuffix(".__init__") for name in SHAPED], "tests.support.shapes.checked")
jax.config.update("jax_numpy_dtype_promotion", "strict")
ON_GPU = os.environ["JAX_PLATFORMS"] == "cuda"
if ON_GPU:
    jax.config.update("jax_default_matmul_precision", "highest")  # the references' products, which would be in TF32
# Outside of the checkout, so that the next one finds it; JAX's keys hold its version, the device and the flags.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jkv" / "tests"
MOST_CACHED = 8 << 30  # bytes
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))  # of what the tests start, too
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C, which tests press


gc.set_threshold(100_000, 20, 100)  # tracing makes many objects that live on; looking through them is a tenth of the time


@pytest.fixture(autouse=True, scope="session")
def check_shapes_alone():
    """Functions that write no shapes are left to mypy, also in files that write some: checking them is a fifth of the time."""
    modules = [sys.modules[name] for name in SHAPED if name in sys.modules]
    owners = [*modules, *(kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass))]
    for owner in owners:
        for member in vars(owner).values():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if inspect.isfunction(function) and not writes_shapes(function):
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


def pytest_sessionstart():
    """Forgets the compiled programs that were not used for longest, where those of earlier runs take too much of the disk.

    JAX's own limit looks through the whole folder for each program. Workers may read and write meanwhile: a program that one of
    them does not find is compiled.
    """
    if "PYTEST_XDIST_WORKER" in os.environ or not CACHE.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):  # another run does it at this moment
        files = sorted(
            ((file, file.stat()) for file in CACHE.iterdir()), key=lambda one: -max(one[1].st_atime, one[1].st_mtime)
        )
        total = 0
        for file, status in files:
            total += status.st_size
            if total > MOST_CACHED:
                file.unlink()


def may_run_every_day(item):
    """Whether neither a mark `slow` nor a condition of a mark `everyday` keeps a case for runs by name."""
    conditions = [mark.kwargs["where"] for mark in item.iter_markers("everyday") if mark.kwargs]
    return not item.get_closest_marker("slow") and all(
        where(*(item.callspec.params[name] for name in inspect.signature(where).parameters)) for where in conditions
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """Marks what does not run every day as `slow`, and puts the longest files first: `tests/support/selection.py`.

    `@pytest.mark.everyday(where=lambda name, dtype: ...)` makes the rest of a sweep `slow`: every value of each parameter runs
    every day, not their product. A function with the mark `@pytest.mark.everyday` alone has no limit of seconds.
    """
    record = selection.read_record()
    functions = defaultdict(dict)
    for item in items:
        function, case = selection.split(item.nodeid.removeprefix("tests/"))
        if may_run_every_day(item):
            functions[function][case] = item
    chosen, of_file = set(), Counter()
    for function, cases in functions.items():
        measured = record.get(function)
        is_whole = any(not mark.kwargs for item in cases.values() for mark in item.iter_markers("everyday"))
        for case in selection.choose(cases, measured, math.inf if is_whole else selection.limit_of(function)):
            chosen.add(cases[case])
            of_file[cases[case].path] += (measured or {}).get(case, 0.0 if measured is None else selection.UNMEASURED)
    for item in items:
        if item not in chosen:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: -of_file[item.path])


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Programs go between two files once they are many: Linux allows a process 65,530 mappings, and each takes a few."""
    from jkv.engine import device_program

    yield
    # An engine lets them go at a quarter of the limit, in the midst of a file, which may count compilations.
    if device_program.num_mappings() > device_program.most_mappings() // 8:
        jax.clear_caches()


@pytest.fixture(scope="session")
def model():
    """A tiny random model, shared."""
    import jkv

    return jkv.testing.tiny_model()


@pytest.fixture(scope="module")
def short_prefills():
    """Prompts are prefilled in chunks of 4 and 16 tokens, which compile soon."""
    from jkv.engine import chunk_inputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_inputs, "OF_CPU", chunk_inputs.PrefillPrograms((4, 16), 8))
        yield
