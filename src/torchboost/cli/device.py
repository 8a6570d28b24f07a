"""The option ``--device``."""

from __future__ import annotations

import torch

from torchboost.core.hardware import device_fault

__all__ = ["usable_device"]


def usable_device(device: str) -> torch.device:
    """Return the device that the user named.

    Raises:
        ValueError: torch does not know it, or it cannot hold a tensor here.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"--device: {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    fault = device_fault(found)
    if fault is not None:
        raise ValueError(f"--device: {device!r} cannot be used here: {fault}")
    return found
