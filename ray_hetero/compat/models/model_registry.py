"""vLLM's model registry: classes that import torchvision, and where a class is inspected."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ray_hetero.compat.patching import replace
from ray_hetero.errors import UnsupportedError

LIBRARY = "torchvision"


def load_models_without_torchvision() -> None:
    """Let vLLM load the class of a model whose module imports torchvision, which is not there.

    Replaces: `_LazyRegisteredModel.load_model_cls` of the registry of models.
    Why: the modules of Qwen3.5, MiniMax-M3, GLM-5 Next and others import Transformers' processing
    of images and videos, which imports torchvision where it is first read, also for text alone.
    Its default builds are for CUDA and cannot be imported beside a CPU build of torch.
    Can go when: Transformers imports torchvision where it is used.
    """
    from vllm.model_executor.models import registry

    def make(stock: Any) -> Any:
        def load_model_cls(self: Any) -> Any:
            try:
                return stock(self)
            except ModuleNotFoundError as error:
                if (error.name or "").split(".")[0] != LIBRARY:
                    raise
            with _absent_library():
                return stock(self)

        return load_model_cls

    replace(registry._LazyRegisteredModel, "load_model_cls", make)


class _Absent(ModuleType):
    """A module, or anything in it, of a library that is not installed: it has every name, and
    says what is missing when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise UnsupportedError(
            f"{self.__name__} is needed for images and videos, and {LIBRARY} is not "
            "installed here. "
            "Ask with text only, or install the build of torchvision that belongs to your torch "
            "(for a CPU build of torch: from the package index that torch came from)."
        )


class _AbsentLibrary(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds all modules of the library that is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != LIBRARY:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


@contextmanager
def _absent_library() -> Iterator[None]:
    """Show the imports of a model's modules a library that has every name."""
    finder = _AbsentLibrary()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        # Nobody else is to take it for installed.
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == LIBRARY]:
            del sys.modules[name]


def inspect_here() -> None:
    """On a CPU platform, let the registry look at a model's class in this process.

    Replaces: `registry._run_in_subprocess` of vllm.model_executor.models.
    Why: an architecture that its cache does not know is looked at in a process of its own, which
    imports vLLM once more, about ten seconds of a first start.  That is to keep CUDA from being
    initialised by the import of a model, which without GPUs cannot happen.
    Can go when: vLLM looks in the same process where its platform is the CPU.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        replace(registry, "_run_in_subprocess", lambda stock: _run_here)


def _run_here(function: Callable[[], Any]) -> Any:
    return function()
