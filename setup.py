"""Builds the native module if there is a compiler; without one the package is installed all the same."""

from __future__ import annotations

import sys

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import BaseError, CCompilerError
from setuptools.extension import Extension


class OptionalBuild(build_ext):
    """A native module that cannot be built costs one line, not the installation."""

    def build_extension(self, extension: Extension) -> None:
        """Build, or say why not and what is missing without it."""
        try:
            super().build_extension(extension)
        except (BaseError, CCompilerError, OSError) as error:
            print(
                f"ray-hetero: {extension.name} was not built ({error}). The package works without "
                "it, except for measuring memory bandwidth. For it, install a C++17 compiler "
                "(Debian: apt install g++) and install ray-hetero again.",
                file=sys.stderr,
            )

    def get_outputs(self) -> list[str]:
        """Only files that were built."""
        return [path for path in super().get_outputs() if self._built(path)]

    def copy_extensions_to_source(self) -> None:
        """Editable installs: skip what was not built."""
        self.extensions = [
            extension
            for extension in self.extensions
            if self._built(f"{self.build_lib}/{self.get_ext_filename(extension.name)}")
        ]
        super().copy_extensions_to_source()

    @staticmethod
    def _built(path: str) -> bool:
        from pathlib import Path

        return Path(path).exists()


setup(
    ext_modules=[
        Pybind11Extension(
            "placement._native",
            ["csrc/native.cpp"],
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
        )
    ],
    cmdclass={"build_ext": OptionalBuild},
)
