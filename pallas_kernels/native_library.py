"""A kernel's C++ library: compiled on first use, kept in the user's cache folder, and checked before its code runs.

The folder must belong to this user, and nobody else may write to it. A library's name ends with the digest of its content, so
that a damaged, cut or replaced file is recognised, removed and compiled again. `pallas_kernels.native_target` calls `load`.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jaxlib

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-w")
LARGEST = 1 << 26  # bytes of a library
INCLUDED = re.compile(rb'^#include "(\.\./\w+\.h)"', re.MULTILINE)  # what kernels share
COMPILE_SECONDS = 120.0  # that a compiler may take
WAIT_SECONDS = 150.0  # for another process that compiles


class UnavailableError(Exception):
    """Why a library can be neither found nor made."""


class Library(NamedTuple):
    """A library's file, and its content when it was checked."""

    path: Path
    content: bytes


def load(source: Path, symbols: Sequence[str]) -> ctypes.CDLL:
    """The library of a C++ file, which must have these symbols.

    Warns when the cache folder cannot be used: the library is then compiled for this process alone.

    Raises:
      UnavailableError: no compiler, one that fails, or a library that the system does not load.
    """
    found = find_compiler()
    stem = f"{source.parent.name}-{key_of(source, found)}"
    try:
        library = kept_or_compiled(cache_folder(), stem, source, found)
    except OSError as error:
        warnings.warn(
            f"jkv compiles {source.name} for this process alone, since its cache folder cannot be used: {error}. Correct the "
            "folder, or set XDG_CACHE_HOME to another one.",
            stacklevel=2,
        )
        try:
            with tempfile.TemporaryDirectory(prefix="jkv-") as alone:
                compile_into(Path(alone), stem, source, found)
                return loaded(find(Path(alone), stem), symbols)
        except OSError as error:
            raise UnavailableError(f"no folder can hold the library: {error}") from error
    return loaded(library, symbols)


def find_compiler() -> str:
    """The machine's C++ compiler.

    Raises:
      UnavailableError: there is none.
    """
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if os.name != "posix" or found is None:
        raise UnavailableError(f"it needs a C++ compiler ({', '.join(COMPILERS)}) on the path")
    return found


def key_of(source: Path, compiler: str) -> str:
    """A digest of what a library is made from: the source and its headers, JAX, the compiler, its flags and the processor."""
    made_by = f"{jaxlib.__version__} {compiler} {FLAGS} {processor()}"
    return hashlib.sha256(text_of(source) + made_by.encode()).hexdigest()[:16]


def text_of(source: Path) -> bytes:
    """A C++ file, and then the headers of this package that it includes."""
    text = source.read_bytes()
    return text + b"".join((source.parent / name.decode()).read_bytes() for name in INCLUDED.findall(text))


def processor() -> str:
    """The features of the processor, on which `-march=native` depends; several machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def cache_folder() -> Path:
    """The folder of compiled libraries and programs, made where there is none; nobody but its owner may enter it.

    It is `JKV_CACHE` where that is an absolute path, else `jkv` in the user's cache folder.

    Raises:
      OSError: a link, another user's folder, one that others may write to, or one that cannot be made.
    """
    own, chosen = os.environ.get("JKV_CACHE", ""), os.environ.get("XDG_CACHE_HOME", "")
    if own and own.lower() != "off" and not os.path.isabs(own):
        raise OSError(f"JKV_CACHE must be off or an absolute path; got {own!r}")
    try:
        folder = (Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache") / "jkv"
        folder = Path(own) if os.path.isabs(own) else folder
    except RuntimeError as error:  # a user without a home
        raise OSError(str(error)) from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(f"{folder} must be a folder, and no link to one")
    if reason := why_not_own(status):
        raise OSError(f"{folder} {reason}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def why_not_own(status: os.stat_result) -> str | None:
    """Why somebody else may have written a file or folder; None when only this user can have."""
    if status.st_uid != os.geteuid():
        return f"must belong to user {os.geteuid()}; it belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"must be writable by its owner alone; its mode is {stat.S_IMODE(status.st_mode):o}"
    return None


def content_of(path: Path) -> bytes:
    """The content of a library's file, checked.

    Raises:
      OSError: it is a link or no file, others may have written it, or its content is not what its name says.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if reason := why_not_own(status):
            raise OSError(f"{path} {reason}")
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_size > LARGEST:
            raise OSError(f"{path} must be a file of at most {LARGEST} bytes with one name")
        content = file.read()
    if digest_of(content) != path.stem.rpartition("-")[2]:
        raise OSError(f"{path} must have the digest in its name; it is damaged")
    return content


def digest_of(content: bytes) -> str:
    """What a library's name says of its content."""
    return hashlib.sha256(content).hexdigest()[:32]


def find(folder: Path, stem: str, removes_damaged: bool = False) -> Library | None:
    """A whole library of this stem in a folder."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        try:
            return Library(path, content_of(path))
        except OSError:
            if removes_damaged:
                path.unlink(missing_ok=True)
    return None


def kept_or_compiled(folder: Path, stem: str, source: Path, compiler: str) -> Library | None:
    """The library that the cache folder holds; compiled if it holds none that is whole."""
    if library := find(folder, stem):
        return library
    with compile_lock(folder):
        if library := find(folder, stem, removes_damaged=True):  # another process compiled it meanwhile
            return library
        for leftover in folder.glob("build-*"):  # only who has the lock compiles: these processes are dead
            shutil.rmtree(leftover, ignore_errors=True)
        compile_into(folder, stem, source, compiler)
        return find(folder, stem)


@contextlib.contextmanager
def compile_lock(folder: Path) -> Iterator[None]:
    """Lets one process at a time compile. The system releases the lock of a process that dies.

    Raises:
      OSError: another process holds the lock for too long, or the file system has no locks.
    """
    import fcntl

    path, patience = folder / "compile.lock", time.monotonic() + WAIT_SECONDS
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > patience:
                    raise OSError(f"another process has held {path} for {WAIT_SECONDS:g} seconds") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def compile_into(folder: Path, stem: str, source: Path, compiler: str) -> None:
    """Compiles a library into a folder, where it appears as a whole or not at all.

    Raises:
      UnavailableError: the compiler fails.
      OSError: the folder cannot be written to.
    """
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder, ignore_cleanup_errors=True) as build:
        part = Path(build) / "part.so"
        run_compiler([compiler, *FLAGS, "-I", jax.ffi.include_dir(), str(source), "-o", str(part)], build)
        with part.open("rb+") as file:
            digest = digest_of(file.read())
            os.fsync(file.fileno())
        part.chmod(0o700)
        part.replace(folder / f"{stem}-{digest}.so")


def run_compiler(command: Sequence[str], folder: str) -> None:
    """Runs a compiler with its temporary files in a folder, and ends all of its processes when it takes too long."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": folder},
        start_new_session=True,  # Ctrl-C is for this process
    )
    try:
        message = child.communicate(timeout=COMPILE_SECONDS)[1].decode(errors="replace").strip()
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise UnavailableError(f"{command[0]} took more than {COMPILE_SECONDS:g} seconds to build the library") from None
        raise
    if child.returncode or not Path(command[-1]).is_file():
        reason = message[-300:] or f"it ended with status {child.returncode}"
        raise UnavailableError(f"{command[0]} failed to build the library: {reason}")


def loaded(library: Library | None, symbols: Sequence[str]) -> ctypes.CDLL:
    """A checked library in this process, with all of its symbols."""
    if library is None:
        raise UnavailableError("the library could not be read as it was written")
    try:
        found = load_content(library) if hasattr(os, "memfd_create") else ctypes.CDLL(str(library.path))
    except OSError as error:
        raise UnavailableError(f"the system does not load {library.path}: {error}") from error
    if missing := [symbol for symbol in symbols if not hasattr(found, symbol)]:
        raise UnavailableError(f"{library.path} must have the symbols {', '.join(symbols)}; it lacks {', '.join(missing)}")
    return found


def load_content(library: Library) -> ctypes.CDLL:
    """The very bytes that were checked, from memory: what becomes of the file later does not matter."""
    descriptor = os.memfd_create(library.path.name)  # stays open, since the loader knows a library by its name
    with open(descriptor, "wb", closefd=False) as file:
        file.write(library.content)
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
