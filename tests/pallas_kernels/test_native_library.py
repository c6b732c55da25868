"""The compiled library's file: whose it is, whether it is whole, and what becomes of a compile that was killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pallas_kernels import native_library
from pallas_kernels.native_library import UnavailableError, load

ROOT = Path(__file__).parents[2]
SYMBOLS = ("Answer",)
pytestmark = pytest.mark.skipif(not any(map(shutil.which, native_library.COMPILERS)), reason="no C++ compiler")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answers" / "native.cc"
    path.parent.mkdir()
    path.write_text('extern "C" int Answer() { return 42; }\n')
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache folder, not made yet; libraries are compiled without optimisation, which is soon done."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native_library, "FLAGS", ("-O0", "-std=c++17", "-shared", "-fPIC"))
    return tmp_path / "cache" / "jkv"


@pytest.fixture
def compiles(monkeypatch):
    """Grows by one with each run of a compiler."""
    runs, real = [], native_library.run_compiler

    def run_compiler(*args):
        runs.append(args)
        real(*args)

    monkeypatch.setattr(native_library, "run_compiler", run_compiler)
    return runs


def library_in(folder):
    (path,) = folder.glob("*.so")
    return path


def test_a_header_of_another_text_is_another_library(source, folder, compiles):
    source.write_text('#include "../answer.h"\n')
    for answer in (42, 43):
        (source.parent.parent / "answer.h").write_text(f'extern "C" int Answer() {{ return {answer}; }}\n')
        assert load(source, SYMBOLS).Answer() == answer
    assert len(compiles) == 2


def test_a_library_is_compiled_once_into_a_folder_of_its_owner_alone(source, folder, compiles):
    assert load(source, SYMBOLS).Answer() == 42
    assert load(source, SYMBOLS).Answer() == 42
    assert len(compiles) == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    assert library_in(folder).stat().st_mode & 0o077 == 0
    assert {path.name for path in folder.iterdir()} == {"compile.lock", library_in(folder).name}


def test_a_folder_that_others_may_read_is_closed_to_them(source, folder):
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    load(source, SYMBOLS)
    assert folder.stat().st_mode & 0o777 == 0o700


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncated(path):
    path.write_bytes(path.read_bytes()[:4096])


def emptied(path):
    path.write_bytes(b"")


def writable(path):
    path.chmod(0o722)


def linked(path):
    path.rename(path.with_suffix(".kept"))
    path.symlink_to(path.with_suffix(".kept"))


def hard_linked(path):
    os.link(path, path.parent.parent / "other.so")


def fifo(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage", [flipped, truncated, emptied, writable, linked, hard_linked, fifo], ids=lambda damage: damage.__name__
)
def test_a_file_that_is_not_what_was_kept_is_compiled_again(damage, source, folder, compiles):
    before = load(source, SYMBOLS)
    damage(library_in(folder))
    assert load(source, SYMBOLS).Answer() == 42
    assert before.Answer() == 42  # damage in place does not reach who has loaded it
    assert len(compiles) == 2
    assert library_in(folder).stat().st_nlink == 1
    assert load(source, SYMBOLS).Answer() == 42
    assert len(compiles) == 2


def test_a_planted_library_is_not_loaded(source, folder, tmp_path):
    """One that is whole, and named as an older version named its libraries, or with another one's digest."""
    load(source, SYMBOLS)
    path = library_in(folder)
    planted = tmp_path / "planted.cc"
    planted.write_text(
        'extern "C" int Answer() { return 666; }\n__attribute__((constructor)) void Start() { __builtin_trap(); }'
    )
    for name in (path.name, path.stem.rpartition("-")[0] + ".so", path.stem[:-32] + "0" * 32 + ".so"):
        subprocess.run(["c++", "-shared", "-fPIC", str(planted), "-o", str(folder / name)], check=True)
    assert load(source, SYMBOLS).Answer() == 42


def test_a_folder_that_others_may_write_to_is_not_used(source, folder, compiles):
    folder.mkdir(parents=True)
    folder.chmod(0o775)
    with pytest.warns(
        UserWarning, match="jkv must be writable by its owner alone; its mode is 775. Correct the folder, or set"
    ):
        assert load(source, SYMBOLS).Answer() == 42
    assert not list(folder.iterdir())
    assert len(compiles) == 1
    assert not Path(compiles[0][1]).parent.exists()  # where it was compiled


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("link", "must be a folder, and no link to one"),
        ("file", "must be a folder, and no link to one"),
        ("nowhere", "No such file or directory"),
        ("no home", "Could not determine home directory"),
    ],
)
def test_what_is_no_folder_of_this_user_is_not_used(kind, words, source, folder, tmp_path, monkeypatch):
    folder.parent.mkdir()
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        folder.touch()
    elif kind == "nowhere":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/jkv")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(UserWarning, match=words):
        assert load(source, SYMBOLS).Answer() == 42
    assert not list((tmp_path / "elsewhere").glob("*"))


def test_another_user_s_folder_and_file_are_not_used(source, folder, monkeypatch):
    load(source, SYMBOLS)
    path, owner = library_in(folder), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(OSError, match=f"jkv must belong to user {owner + 1}; it belongs to user {owner}"):
        native_library.cache_folder()
    with pytest.raises(OSError, match=f"so must belong to user {owner + 1}; it belongs to user {owner}"):
        native_library.content_of(path)


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_a_relative_cache_home_is_ignored(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native_library.cache_folder() == tmp_path / ".cache" / "jkv"


def test_a_symbol_that_is_missing_is_named(source, folder):
    with pytest.raises(UnavailableError, match="must have the symbols Answer, Question; it lacks Question"):
        load(source, ("Answer", "Question"))


def test_a_library_that_the_system_does_not_load_is_an_error_with_its_reason(source, folder):
    source.write_text('extern "C" int Nowhere(); int (*needed)() = Nowhere; extern "C" int Answer() { return needed(); }')
    with pytest.raises(UnavailableError, match=r"the system does not load .*Nowhere"):
        load(source, SYMBOLS)


def compiler_of(text, folder, monkeypatch):
    """Puts a shell script in the place of the compiler."""
    folder.mkdir()
    (folder / "c++").write_text("#!/bin/sh\n" + text)
    (folder / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_compiler_that_takes_too_long_is_ended_with_its_children(source, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(native_library, "COMPILE_SECONDS", 0.5)
    compiler_of(f"sleep 60 2> /dev/null & echo $! > {tmp_path / 'child'}; wait\n", tmp_path / "bin", monkeypatch)
    with pytest.raises(UnavailableError, match=r"took more than 0\.5 seconds"):
        load(source, SYMBOLS)
    child = int((tmp_path / "child").read_text())
    assert wait_for(lambda: is_gone(child))
    assert [path.name for path in folder.iterdir()] == ["compile.lock"]


def test_a_compiler_that_writes_nothing_is_an_error(source, folder, tmp_path, monkeypatch):
    compiler_of("exit 0\n", tmp_path / "bin", monkeypatch)
    with pytest.raises(UnavailableError, match=r"c\+\+ failed to build the library: it ended with status 0"):
        load(source, SYMBOLS)


def is_gone(process):
    """Whether a process has ended, also where nobody has asked for its status."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(is_so, seconds=20):
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return is_so()


LOADS = """
import sys
from pathlib import Path
from pallas_kernels import native_library
native_library.FLAGS = ("-O0", "-std=c++17", "-shared", "-fPIC")
assert native_library.load(Path(sys.argv[1]), ("Answer",)).Answer() == 42
"""


def start(source, **settings):
    return subprocess.Popen([sys.executable, "-c", LOADS, str(source)], cwd=ROOT, env=os.environ | settings)


def test_a_killed_compile_leaves_nothing_that_the_next_one_keeps(source, folder, tmp_path, monkeypatch, compiles):
    with monkeypatch.context() as patched:
        compiler_of("touch $TMPDIR/half.s; exec sleep 5\n", tmp_path / "bin", patched)
        process = start(source)
        assert wait_for(lambda: list(folder.glob("build-*/half.s")))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert list(folder.glob("build-*"))
    assert load(source, SYMBOLS).Answer() == 42  # the dead process holds no lock
    assert {path.name for path in folder.iterdir()} == {"compile.lock", library_in(folder).name}


def test_processes_that_start_together_compile_once(source, folder, tmp_path, monkeypatch):
    compiler = shutil.which("c++")
    compiler_of(f'echo x >> {tmp_path / "runs"}; sleep 0.5; exec {compiler} "$@"\n', tmp_path / "bin", monkeypatch)
    processes = [start(source) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tmp_path / "runs").read_text() == "x\n"


def test_a_lock_that_is_not_released_ends_in_a_compile_for_this_process_alone(source, folder, monkeypatch):
    import fcntl

    monkeypatch.setattr(native_library, "WAIT_SECONDS", 0.2)
    native_library.cache_folder()
    with (folder / "compile.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.warns(UserWarning, match="another process has held .*compile.lock for 0.2 seconds"):
            assert load(source, SYMBOLS).Answer() == 42
    assert [path.name for path in folder.iterdir()] == ["compile.lock"]


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_processes_killed_at_any_moment_never_leave_a_library_that_is_not_whole(source, folder, compiles, kills):
    began = time.monotonic()
    assert start(source).wait() == 0
    whole = time.monotonic() - began
    for i in range(kills):
        shutil.rmtree(folder)
        process = start(source)
        time.sleep(whole * (0.3 + 0.7 * i / kills))
        process.kill()
        process.wait()
        compiles.clear()
        assert load(source, SYMBOLS).Answer() == 42
        assert {path.name for path in folder.iterdir()} == {"compile.lock", library_in(folder).name}
