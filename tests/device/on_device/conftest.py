"""Convolutions in full float32, as on the CPU: by default torch computes them in TF32 on a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def no_tf32_in_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
