"""Models of timm, with their BatchNorms that are followed by an activation."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.timm_without_torchvision import in_a_process

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None, reason="needs timm: pip install --no-deps timm (it asks for torchvision)"
)


@pytest.mark.slow
def test_models_lose_batch_norms_and_leave_the_library():
    found = in_a_process("models")
    assert {name for name, figures in found.items() if figures["removed"] == 0} == {"densenet121"}
    assert all(figures["plain"] < 1e-6 and figures["copy"] < 1e-5 for figures in found.values())
