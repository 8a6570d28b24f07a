"""Properties of the hardware that algorithms depend on."""

from __future__ import annotations

import torch

__all__ = ["device_fault", "half_precision_is_fast"]


def device_fault(device: torch.device | str) -> str | None:
    """Return in one line why ``device`` cannot hold a tensor; None if it can."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None


def half_precision_is_fast(device: torch.device | str) -> bool:
    """Whether ``device`` has instructions for bfloat16, so that autocast saves time.

    CPU: AVX512-BF16 or AMX, with oneDNN in this build of torch. CUDA: compute capability 8.0 or newer (on ROCm
    every supported device). Other devices, including MPS and ARM, were not measured and count as slow.

    Args:
        device: A device or its name. ``"cuda"`` means the current CUDA device.

    Example:
        >>> import torch
        >>> half_precision_is_fast(torch.device("mps"))
        False
    """
    device = torch.device(device)
    if device.type == "cpu":
        # Older versions of torch do not report capabilities. They count as slow.
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()
        fast = capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)
        return bool(fast) and torch.backends.mkldnn.is_available()
    if device.type == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)
    return False
