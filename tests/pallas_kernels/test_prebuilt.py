"""The library that a wheel brings: used where it runs, and left alone where it does not."""

import platform
import shutil

import pytest

from pallas_kernels import native_library, prebuilt
from pallas_kernels.native_library import UnavailableError

pytestmark = pytest.mark.skipif(
    platform.machine() not in prebuilt.PROCESSORS or not any(map(shutil.which, native_library.COMPILERS)),
    reason="no compiler, or a processor without prebuilt libraries",
)


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A library beside its source."""
    monkeypatch.setattr(prebuilt, "FLAGS", ("-O0", "-std=c++17", "-shared", "-fPIC"))
    source = tmp_path / "native.cc"
    source.write_text('extern "C" int Answer() { return 42; }\n')
    return source, prebuilt.compile_into(tmp_path, source)


def test_it_is_used_where_it_runs(built):
    source, path = built
    assert path.name == "native-{}-ffi{}.{}.so".format(platform.machine(), *prebuilt.ffi_version())
    assert prebuilt.load(source, ("Answer",)).Answer() == 42
    with pytest.raises(UnavailableError, match="lacks Question"):
        prebuilt.load(source, ("Question",))


def test_an_older_minor_version_of_the_interface_is_taken_and_a_newer_one_is_not(built, monkeypatch):
    source, _ = built
    major, minor = prebuilt.ffi_version()
    for version, is_taken in (((major, minor + 2), True), ((major, minor - 1), False), ((major + 1, minor), False)):
        monkeypatch.setattr(prebuilt, "ffi_version", lambda version=version: version)
        assert (prebuilt.load(source, ("Answer",)) is not None) == is_taken, version


def test_it_is_left_alone_on_another_processor(built, monkeypatch):
    source, path = built
    path.rename(path.with_name(path.name.replace(platform.machine(), "riscv64")))
    assert prebuilt.load(source, ("Answer",)) is None
    path.with_name(path.name.replace(platform.machine(), "riscv64")).rename(path)
    monkeypatch.setitem(prebuilt.FEATURES, platform.machine(), {"avx99"})
    assert prebuilt.load(source, ("Answer",)) is None
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(UnavailableError, match="this is riscv64"):
        prebuilt.compile_into(path.parent, source)


def test_without_one_the_source_is_compiled_on_first_use(tmp_path):
    assert prebuilt.load(tmp_path / "native.cc", ("Answer",)) is None
