"""Builds the native modules where there is a compiler; the package installs without one too."""

from __future__ import annotations

import os
import sys
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.errors import BaseError, CCompilerError
from setuptools.extension import Extension

WITHOUT = {
    "placement._native": "measuring memory bandwidth",
    "ray_hetero._streaming_linear": "linear layers at the bandwidth of the socket",
    "ray_hetero._expert_handover": "expert ranks beside GPU stages",
    "tests.native.emulated._emulated_levels": "tests of kernels for other processors",
}
"""What is missing without each module."""


class OptionalBuild(build_ext):
    """A native module that cannot be built costs one line, not the installation."""

    def finalize_options(self) -> None:
        """Leave out what only tests need, unless the modules come to lie in the source tree."""
        super().finalize_options()
        if not (self.inplace or self.editable_mode or SANITIZERS):
            self.extensions = [one for one in self.extensions if not is_for_tests(one)]

    def build_extension(self, extension: Extension) -> None:
        """Build, or say why not and what is missing without it."""
        extension.extra_compile_args += sanitized()
        extension.extra_link_args += sanitized()
        try:
            super().build_extension(extension)
        except (BaseError, CCompilerError, OSError) as error:
            print(
                f"ray-hetero: {extension.name} was not built ({error}). The package works without "
                f"it, except for {WITHOUT[extension.name]}. For it, install a C++17 compiler "
                "(Debian: apt install g++) and install ray-hetero again.",
                file=sys.stderr,
            )


LEVELS = os.environ.get("RAY_HETERO_LEVELS", "*").split(",")
"""Levels of instruction sets to compile, like avx2,portable,emulated; for shorter builds while
working."""


SANITIZERS = os.environ.get("RAY_HETERO_SANITIZERS", "")
"""Sanitisers of the compiler to build with, like address,undefined; `make sanitize` sets it."""


def sanitized() -> list[str]:
    """Options of the compiler and the linker for these sanitisers."""
    if not SANITIZERS:
        return []
    # The last -O is the one that counts.  A report ends the process, so that no test passes by it.
    return [f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer",
            "-g1", "-O1"]  # fmt: skip


def is_for_tests(extension: Extension) -> bool:
    """Whether a module is no part of the package."""
    return extension.name.startswith("tests.")


def emulated_levels() -> list[Extension]:
    """The module of levels whose instructions are emulated; none if its level is not asked for."""
    folder = "tests/native/emulated"
    if not {"*", "emulated"} & set(LEVELS):
        # One that was built before would meet kernels that have changed.
        for old in glob(f"{folder}/*.so"):
            os.remove(old)
        return []
    return [
        Pybind11Extension(
            "tests.native.emulated._emulated_levels",
            sorted(glob(f"{folder}/*.cpp")),
            depends=sorted(glob(f"{folder}/*.h") + glob("csrc/kernels/**/*.h", recursive=True)),
            include_dirs=["csrc/kernels", "tests/native"],
            cxx_std=17,
            # What instructions round by themselves must not be contracted.  GCC 12 takes scales for
            # not initialised that each case of their type sets.
            extra_compile_args=["-O1", "-ftree-vectorize", "-ffp-contract=off", "-Wall", "-Wextra",
                                "-Wno-psabi", "-Wno-maybe-uninitialized", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]  # fmt: skip


# Each level is a file of its own, and a core compiles each.
ParallelCompile().install()

setup(
    ext_modules=[
        Pybind11Extension(
            "placement._native",
            ["csrc/placement/native.cpp"],
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
            optional=True,
        ),
        Pybind11Extension(
            "ray_hetero._streaming_linear",
            [
                *sorted(glob("csrc/kernels/bindings/*.cpp")),
                *(
                    path
                    for level in LEVELS
                    for path in sorted(glob(f"csrc/kernels/levels/{level}.cpp"))
                ),
            ],
            depends=sorted(glob("csrc/kernels/**/*.h", recursive=True)),
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            optional=True,
        ),
        Pybind11Extension(
            "ray_hetero._expert_handover",
            ["csrc/handover/expert_handover.cpp"],
            depends=[*sorted(glob("csrc/handover/*.h")), "csrc/expert_call.h"],
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
            optional=True,
        ),
        *emulated_levels(),
    ],
    cmdclass={"build_ext": OptionalBuild},
)
