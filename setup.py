"""Adds the CPU library to what is installed; everything else is in pyproject.toml.

The library has no Python ABI, so one wheel is right for every Python 3 of a platform.
"""

import runpy
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

PACKAGE = "kernels/cpu"
"""The folder of penstock.kernels.cpu."""
builder = runpy.run_path(str(Path(__file__).parent / PACKAGE / "build.py"))


class BuildCpu(Command):
    """Compiles the CPU library, next to the sources in an editable install; without a compiler there is none."""

    description = "compile the CPU library"
    user_options: ClassVar[list[tuple[str, str, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        """setuptools sets editable_mode after this."""
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        """The folder that a wheel is made from."""
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Builds the library, if a source is newer than what is there."""
        # Only Linux can serve; the client runs elsewhere too.
        if sys.platform == "linux":
            builder["build_if_possible"](Path(PACKAGE) if self.editable_mode else self._installed().parent)

    def get_source_files(self) -> list[str]:
        """What the source distribution needs for this."""
        return [str(path.relative_to(Path(__file__).parent)) for path in builder["source_files"]()]

    def get_outputs(self) -> list[str]:
        """Returns the library's path in the folder of the wheel."""
        return [str(self._installed())]

    def get_output_mapping(self) -> dict[str, str]:
        """Maps the library to its path in the source tree, for an editable install."""
        return {str(self._installed()): str(Path(PACKAGE) / builder["LIBRARY"])} if self.editable_mode else {}

    def _installed(self) -> Path:
        return Path(self.build_lib or "") / "penstock" / PACKAGE / builder["LIBRARY"]


class Build(build):
    """A build that includes the library."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_cpu", None)]


class PlatformDistribution(Distribution):
    """A distribution for one platform only. setuptools calls the method by this name."""

    def has_ext_modules(self) -> bool:
        """Though none is an extension module."""
        return True


class AnyPythonWheel(bdist_wheel):
    """A wheel for this platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI, platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=PlatformDistribution,
    cmdclass={"bdist_wheel": AnyPythonWheel, "build": Build, "build_cpu": BuildCpu},
)
