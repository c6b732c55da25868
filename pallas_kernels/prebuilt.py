"""A kernel's C++ library as a wheel brings it: compiled when the wheel was built, so that its user needs no compiler.

`JKV_PREBUILT=1 python -m build --wheel --no-isolation` makes such a wheel (`setup.py`). Its libraries run on x86 processors
with AVX2 and FMA (since about 2013) and on 64-bit ARM, on the JAX that they were built beside and on newer ones.
"""

import ctypes
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import jax

from pallas_kernels import native_library
from pallas_kernels.native_library import Library

FLAGS = ("-O3", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-w")
PROCESSORS = {"x86_64": ("-march=x86-64-v3",), "aarch64": ()}  # what each is compiled with
FEATURES = {"x86_64": {"avx2", "bmi2", "fma", "movbe"}, "aarch64": set[str]()}  # what it must then have
NAME = re.compile(r"\w+-(?P<machine>\w+)-ffi(?P<major>\d+)\.(?P<minor>\d+)\.so")


def ffi_version() -> tuple[int, int]:
    """The version of the interface between XLA and a library: it loads libraries of this and of older minor versions."""
    header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(found["MAJOR"]), int(found["MINOR"])


def compile_into(folder: Path, source: Path) -> Path:
    """Compiles the library of a C++ file into a folder; returns its path.

    Raises:
      UnavailableError: a processor of another kind, no compiler, or one that fails.
    """
    machine, (major, minor) = platform.machine(), ffi_version()
    if machine not in PROCESSORS:
        raise native_library.UnavailableError(f"libraries are prebuilt on {', '.join(PROCESSORS)}; this is {machine}")
    path = folder / f"{source.stem}-{machine}-ffi{major}.{minor}.so"
    compiler = native_library.find_compiler()
    options = [*FLAGS, *PROCESSORS[machine], "-I", jax.ffi.include_dir()]
    native_library.run_compiler([compiler, *options, str(source), "-o", str(path)], str(folder.resolve()))
    return path


def load(source: Path, symbols: Sequence[str]) -> ctypes.CDLL | None:
    """The prebuilt library beside a C++ file; None where there is none, or none for this processor and this JAX.

    Raises:
      UnavailableError: the system does not load it, or it lacks a symbol.
    """
    major, most = ffi_version()
    for path in sorted(source.parent.glob(f"{source.stem}-*.so")):
        if (name := NAME.fullmatch(path.name)) is None or name["machine"] != platform.machine():
            continue
        has_features = FEATURES[name["machine"]] <= {*native_library.processor().split()}
        if has_features and int(name["major"]) == major and int(name["minor"]) <= most:
            return native_library.loaded(Library(path, path.read_bytes()), symbols)
    return None
