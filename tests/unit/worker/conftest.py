"""Fixtures of the tests of kept experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kept_case import Case


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A checkpoint with experts, and a folder that keeps them."""
    from kept_case import Case

    return Case(tmp_path)


@pytest.fixture
def at_least_info(caplog: pytest.LogCaptureFixture) -> None:
    """Records of this project's log from INFO on."""
    caplog.set_level("INFO", "vllm.ray_hetero")
