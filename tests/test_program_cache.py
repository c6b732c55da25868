"""The disk cache of compiled programs: when it is on, whose folder it takes, and how large that becomes."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from jkv import program_cache

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """JAX's configuration as a process begins with it, whose cache folder is `tmp_path / "cache"`."""
    fresh = SimpleNamespace(
        jax_compilation_cache_dir=None, jax_enable_compilation_cache=True, jax_persistent_cache_min_compile_time_secs=1.0
    )
    fresh.update = lambda name, value: setattr(fresh, name, value)
    monkeypatch.setattr(program_cache, "jax", SimpleNamespace(config=fresh))
    monkeypatch.delenv("JAX_ENABLE_COMPILATION_CACHE", raising=False)
    monkeypatch.setenv("JKV_CACHE", str(tmp_path / "cache"))
    return fresh


def keep():
    """`keep_programs` as a new process calls it, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program_cache.keep_programs.__wrapped__()


def test_the_folder_is_private_and_one_for_each_kind_of_processor(config, tmp_path, monkeypatch):
    keep()
    first = Path(config.jax_compilation_cache_dir)
    assert first.parent == tmp_path / "cache" / "programs"
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert config.jax_persistent_cache_min_compile_time_secs == program_cache.LEAST_SECONDS
    config.jax_compilation_cache_dir = None
    monkeypatch.setattr(program_cache, "processor", lambda: "another")
    keep()
    assert Path(config.jax_compilation_cache_dir) != first


def test_the_default_folder_is_in_the_user_s_cache(config, tmp_path, monkeypatch):
    monkeypatch.delenv("JKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    keep()
    assert Path(config.jax_compilation_cache_dir).is_relative_to(tmp_path / "xdg" / "jkv")


def test_the_caller_s_own_settings_win(config, monkeypatch):
    config.jax_persistent_cache_min_compile_time_secs = 5.0
    keep()
    assert config.jax_persistent_cache_min_compile_time_secs == 5.0
    config.jax_compilation_cache_dir = "mine"
    keep()
    assert config.jax_compilation_cache_dir == "mine"
    config.jax_compilation_cache_dir, config.jax_enable_compilation_cache = None, False
    keep()
    assert config.jax_compilation_cache_dir is None
    config.jax_enable_compilation_cache = True
    monkeypatch.setenv("JKV_CACHE", "OFF")
    keep()
    assert config.jax_compilation_cache_dir is None


def test_a_folder_that_others_may_write_to_is_refused(config, tmp_path, monkeypatch):
    """Whoever writes there chooses what this process runs."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.warns(UserWarning, match=r"Compiled programs are not kept.*writable by its owner alone.*JKV_CACHE=off"):
        program_cache.keep_programs.__wrapped__()
    monkeypatch.setenv("JKV_CACHE", "here")
    with pytest.warns(UserWarning, match="JKV_CACHE must be off or an absolute path; got 'here'"):
        program_cache.keep_programs.__wrapped__()
    assert config.jax_compilation_cache_dir is None


def test_the_least_recently_read_programs_make_room(tmp_path):
    for age, name in enumerate(("new", "old", "oldest", "read")):
        file = tmp_path / "sub" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(100))
        os.utime(file, (1000 if name == "read" else 100 - age, 100 - age))
    program_cache.bound(tmp_path, 400)
    assert len(list((tmp_path / "sub").iterdir())) == 4
    program_cache.bound(tmp_path, 250)
    assert {file.name for file in (tmp_path / "sub").iterdir()} == {"new", "read"}


PROCESS = """
import sys
import jax
from jkv.program_cache import keep_programs

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
keep_programs()
assert jax.jit(lambda x: x * 3 + 1)(2.0) == 7
print(bool(hits), "transformers" in sys.modules)
"""


def test_a_second_process_reads_what_the_first_one_compiled(tmp_path):
    environment = os.environ | {
        "JKV_CACHE": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    del environment["JAX_COMPILATION_CACHE_DIR"]
    for is_kept in ("False", "True"):
        done = subprocess.run([sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [is_kept, "False"], done.stderr


FIRST_CALL = """
import sys
import jkv
from jkv.engine.clocks import COMPILING

for word in ("torch", "transformers", "jax.experimental.pallas.tpu", "orbax.checkpoint", "matplotlib"):
    assert word not in sys.modules, word
counts = [len([name for name in sys.modules if name.partition(".")[0] not in ("jkv", "pallas_kernels")])]
model = jkv.load("tiny-reasoner")
counts += [COMPILING.count, len(sys.modules)]
jkv.generate(model, "b=3;c=7;d=b*c;?d", max_new_tokens=4, progress=False)
counts += [COMPILING.count]
jkv.generate(model, "b=3;?b", max_new_tokens=4, progress=False)
print(*counts, COMPILING.count, "jax.experimental.pallas.tpu" in sys.modules)
"""


def test_a_first_call_imports_and_compiles_little():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True, check=True)
    *counts, imports_mosaic = done.stdout.split()
    others, loading, _, first, second = map(int, counts)
    assert others < 1100
    assert loading == 0
    assert first <= 5
    assert second - first <= 4  # for another number of pages
    assert imports_mosaic == "False"
