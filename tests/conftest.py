"""One place for what every test runs under: shapes checked, dtypes strict, programs cached between runs."""

import os
import signal
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).parent.parent
FILES = [*ROOT.glob("jkv/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]
SHAPED = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in FILES if "jaxtyping" in file.read_text()]
# Files that write no shapes are left to mypy: the check takes most of the time of the host's loop.
HOOK = install_import_hook([name.removesuffix(".__init__") for name in SHAPED], "beartype.beartype")
jax.config.update("jax_numpy_dtype_promotion", "strict")
CACHE = ROOT / ".cache" / f"jax-{jax.__version__}"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C, which tests press


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Each file's programs go when it is done: Linux allows a process 65,530 mappings, and every program takes a few."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def model():
    """A tiny random model, shared."""
    import jkv

    return jkv.testing.tiny_model()
