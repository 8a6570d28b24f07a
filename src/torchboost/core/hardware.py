"""Properties of the hardware that algorithms depend on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchboost.measure.machine import PAYS, Kind, half_speed

__all__ = ["HalfPrecision", "device_fault", "half_precision", "half_precision_is_fast"]


def device_fault(device: torch.device | str) -> str | None:
    """Return in one line why ``device`` cannot hold a tensor; None if it can."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None


@dataclass(frozen=True, slots=True)
class HalfPrecision:
    """Whether autocast to bfloat16 is expected to save time on a device.

    Attributes:
        fast: The decision.
        reason: One clause that says what the decision is based on.
    """

    fast: bool
    reason: str


def half_precision(device: torch.device | str, convolutions: int | None = None) -> HalfPrecision:
    """Decide whether ``device`` computes a network faster in bfloat16 than in float32.

    The decision is based on a short measurement, made once per process
    (:func:`~torchboost.measure.machine.half_speed`). bfloat16 must be at least 1.1 times as fast as float32: in matrix
    products, and if the network has convolutions, in these too. If a CUDA device cannot be measured, it counts as fast
    from compute capability 8.0 on (on ROCm always). Other devices, such as MPS, are not measured and count as slow.

    Args:
        device: A device or its name. ``"cuda"`` means the current CUDA device.
        convolutions: Number of convolutions in the network. If it is not known, both products must be fast.

    Cost: on the CPU 0.1 s for each kind of product, at the first call in a process.

    Example:
        >>> import torch
        >>> half_precision(torch.device("mps")).reason
        'the speed of bfloat16 is not measured on mps'
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        return HalfPrecision(False, f"the speed of bfloat16 is not measured on {device.type}")
    if device.type == "cuda" and not torch.cuda.is_available():
        return HalfPrecision(False, "there is no CUDA device here")
    kinds: tuple[Kind, ...] = ("matrix product",) if convolutions == 0 else ("matrix product", "convolution")
    said: list[str] = []
    for kind in kinds:
        found = half_speed(kind, device)
        if found.ratio is None and device.type == "cuda":
            return _by_capability(device)
        if not found.half_pays:
            limit = f" (autocast pays from {1 / PAYS:.2f} times on down)" if found.is_judged else ""
            return HalfPrecision(False, f"{found}{limit}")
        said.append(str(found))
    return HalfPrecision(True, ", and ".join(said))


def half_precision_is_fast(device: torch.device | str, convolutions: int | None = None) -> bool:
    """Return the decision of :func:`half_precision` without its reason."""
    return half_precision(device, convolutions).fast


def _by_capability(device: torch.device) -> HalfPrecision:
    major, minor = torch.cuda.get_device_capability(device)
    return HalfPrecision(
        (major, minor) >= (8, 0),
        f"bfloat16 could not be timed here; this GPU has compute capability {major}.{minor}, fast are 8.0 and newer",
    )
