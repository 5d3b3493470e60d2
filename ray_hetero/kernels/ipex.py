"""Intel Extension for PyTorch, on CPU ranks, where its build is for the torch that is there."""

from __future__ import annotations

import importlib

from ray_hetero.compat.cpu_site import installed_version
from ray_hetero.log import logger
from ray_hetero.preflight.checks import IPEX_PACKAGE, ipex_matches

MODULE = "intel_extension_for_pytorch"


def use_ipex() -> bool:
    """Import it if it matches; under another torch the import would end the process.

    Returns:
        Whether it is used.

    """
    ipex, torch = installed_version(IPEX_PACKAGE), installed_version("torch")
    if ipex is None or torch is None or not ipex_matches(ipex, torch):
        return False
    importlib.import_module(MODULE)
    logger.info("IPEX %s is used, it matches torch %s", ipex, torch)
    return True
