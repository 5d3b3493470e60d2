"""The native module of this machine, and which of its tests can run here."""

from __future__ import annotations

import pytest

from ray_hetero import streaming_linear

native = streaming_linear._native
needs_bf16 = pytest.mark.skipif(
    native is None or not native.has_bf16(), reason="needs the native module and AVX-512-BF16"
)
