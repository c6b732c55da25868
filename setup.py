"""What pyproject.toml cannot say: with JKV_PREBUILT=1, a wheel brings the CPU kernels compiled, for its own platform."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
IS_PREBUILT = os.environ.get("JKV_PREBUILT", "0") not in ("", "0")


class BuildWithLibraries(build_py):
    """Compiles every kernel's C++ file into the folder that becomes the wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # files of an earlier build would be packed too
        super().run()
        if IS_PREBUILT and not self.editable_mode:
            sys.path.insert(0, str(ROOT))
            try:
                from pallas_kernels import prebuilt
            except ImportError as error:
                raise SystemExit(
                    f"JKV_PREBUILT=1 compiles against JAX's headers: build with --no-isolation ({error})."
                ) from None
            for source in ROOT.glob("pallas_kernels/*/*.cc"):
                prebuilt.compile_into(Path(self.build_lib, *source.parent.relative_to(ROOT).parts), source)


class PlatformWheel(bdist_wheel):
    """A wheel with compiled libraries is for one platform, and for every Python there."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        return ("py3", "none", system) if IS_PREBUILT else (python, abi, system)


class WithLibraries(Distribution):
    """What holds compiled files is installed for one platform."""

    def has_ext_modules(self) -> bool:
        return IS_PREBUILT


setup(cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel}, distclass=WithLibraries)
