"""What decides in a process which kernels run."""

from __future__ import annotations

import os
from typing import Any

import torch

from torchboost.core.torch_versions import cpu_capabilities

__all__ = ["kernel_switches", "matmul_backends"]

_VARIABLES = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY"),
    "MKL_ENABLE_INSTRUCTIONS",
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "LD_PRELOAD"),
)
"""Environment variables that change which kernels run, and on which cores."""


def kernel_switches() -> list[Any]:
    """Return the environment variables and the flags of torch that change kernels, and what the processor can do.

    Plain values, for a key. If they differ between two processes, what was measured in one does not count in the other.
    """
    cpu = cpu_capabilities()
    return [
        [[name, os.environ.get(name)] for name in _VARIABLES],
        [[name, str(value)] for name, value in sorted(cpu.items())],
        torch.backends.cpu.get_cpu_capability(),
        bool(torch.backends.mkldnn.enabled),
        bool(torch.backends.cudnn.enabled),
        bool(torch.backends.cudnn.benchmark),
        _matmul_precision(),
        [str(backend.fp32_precision) for backend in _backends()],
        torch.are_deterministic_algorithms_enabled(),
    ]


def matmul_backends() -> dict[str, Any]:
    """Return what holds the precision of float32 matrix products, by its name in ``torch.backends``."""
    mkldnn: Any = torch.backends.mkldnn
    return {"cuda.matmul": torch.backends.cuda.matmul, "mkldnn.matmul": mkldnn.matmul}


def _backends() -> list[Any]:
    mkldnn, cudnn, cuda = torch.backends.mkldnn, torch.backends.cudnn, torch.backends.cuda
    return [torch.backends, mkldnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn, cudnn, cudnn.conv, cudnn.rnn, cuda.matmul]


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set the precisions of single backends, which are described too
        return "by backend"
