"""Marks the wheel as one for a platform and any Python 3: the library is loaded by ctypes and has no Python ABI."""

import os

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class PlatformDistribution(Distribution):
    """A distribution for one platform only. setuptools calls the method by this name."""

    def has_ext_modules(self) -> bool:
        """Returns true, although the library is not an extension module."""
        return True


class AnyPythonWheel(bdist_wheel):
    """A wheel for any Python 3, and for the platform that deploy/wheels/build.py compiled the library for."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the tags of Python, ABI and platform."""
        return "py3", "none", os.environ["PENSTOCK_WHEEL_PLATFORM"]


setup(distclass=PlatformDistribution, cmdclass={"bdist_wheel": AnyPythonWheel})
