"""What the hardware is fast at, as far as an algorithm depends on it."""

from __future__ import annotations

import torch

__all__ = ["device_fault", "half_precision_is_fast"]


def device_fault(device: torch.device | str) -> str | None:
    """Return in one line why no tensor can be put on ``device`` here; None where one can."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None


def half_precision_is_fast(device: torch.device | str) -> bool:
    """Whether ``device`` has instructions for bfloat16, so that autocast saves time instead of costing some.

    CPU: AVX512-BF16 or AMX, with oneDNN in this build of torch. CUDA: compute capability 8.0 or newer (on ROCm
    every supported device). Everything else, MPS and ARM included, was never measured and counts as slow.

    Args:
        device: A device or its name; ``"cuda"`` asks for the current one.

    Example:
        >>> import torch
        >>> half_precision_is_fast(torch.device("mps"))
        False
    """
    device = torch.device(device)
    if device.type == "cpu":
        # Older versions of torch cannot be asked: then nothing is promised.
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()
        fast = capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)
        return bool(fast) and torch.backends.mkldnn.is_available()
    if device.type == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)
    return False
