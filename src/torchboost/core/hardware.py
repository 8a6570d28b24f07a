"""Properties of the machine that algorithms depend on: the speed of bfloat16, defects and switches of kernels."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchboost.core.files import Record, load_record, record_folder, store_record
from torchboost.core.torch_private import AnyConv, cpu_capabilities
from torchboost.measure.machine import PAYS, Kind, Products, half_speed
from torchboost.measure.stopwatch import device_name, processor_name

__all__ = [
    "HalfPrecision",
    "device_fault",
    "half_precision",
    "is_on_cpu",
    "kernel_switches",
    "matmul_backends",
    "unsafe_channels_last",
]

_VARIABLES = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY"),
    "MKL_ENABLE_INSTRUCTIONS",
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "LD_PRELOAD"),
)
"""Environment variables that change which kernels run, and on which cores."""
_BLOCK = 16
"""Channels that one AVX-512 register holds. AVX2 kernels fail below 8."""


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

    The decision is based on a short measurement (:func:`~torchboost.measure.machine.half_speed`). bfloat16 must be at
    least 1.25 times as fast as float32: in matrix products, and if the network has convolutions, in these too. If a
    CUDA device cannot be measured, it counts as fast from compute capability 8.0 on (on ROCm always). Other devices,
    such as MPS, are not measured and count as slow.

    The decision is made once per machine: it is kept in the folder ``bfloat16`` of
    :func:`~torchboost.core.files.record_folder`, for the processor, the number of threads, the device, torch's version
    and the switches of kernels (:func:`kernel_switches`). If other programs used the machine meanwhile, so that the
    measurement exceeded its time limit, it counts for this process only. To measure again, delete the folder.

    Args:
        device: A device or its name. ``"cuda"`` means the current CUDA device.
        convolutions: Number of convolutions in the network. If it is not known, both products must be fast.

    Cost: on the CPU 0.1 s for each kind of product, once per machine, without a cache folder once per process. A
    process decides once.

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
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    kinds: tuple[Kind, ...] = ("matrix product",) if convolutions == 0 else ("matrix product", "convolution")
    reasons: list[str] = []
    for kind in kinds:
        decision = _decision(kind, device, _key(kind, device), record_folder("bfloat16"))
        if decision is None:
            major, minor = torch.cuda.get_device_capability(device)
            capability = f"this GPU has compute capability {major}.{minor}, fast are 8.0 and newer"
            return HalfPrecision((major, minor) >= (8, 0), f"bfloat16 could not be timed here; {capability}")
        if not decision.fast:
            return decision
        reasons.append(decision.reason)
    return HalfPrecision(True, ", and ".join(reasons))


class _Measured(Record):
    """A measurement that is kept on disk."""

    products: Products


@functools.cache
def _decision(kind: Kind, device: torch.device, key: str, folder: Path | None) -> HalfPrecision | None:
    """Decide about one kind of product, as before on this machine; None if a GPU could not be measured."""
    record = load_record(folder, key, _Measured)
    if record is not None and record.products.is_judged and record.products.in_time:
        products, origin = record.products, ", as measured earlier on this machine"
    else:
        products, origin = half_speed(kind, device), ""
        if products.ratio is None and device.type == "cuda":
            return None
        if products.is_judged and products.in_time:
            store_record(folder, _Measured(key=key, products=products))
    slow = products.is_judged and not products.half_pays
    limit = f" (autocast pays from {1 / PAYS:.2f} times on down)" if slow else ""
    return HalfPrecision(products.half_pays, f"{products}{origin}{limit}")


def _key(kind: Kind, device: torch.device) -> str:
    machine = [processor_name(), torch.get_num_threads(), device_name(device), torch.__version__]
    return hashlib.sha256(json.dumps([kind, *machine, *kernel_switches()]).encode()).hexdigest()


def kernel_switches() -> list[Any]:
    """Return the environment variables and the flags of torch that change kernels, and what the processor can do.

    Plain values, for a key. If they differ between two processes, what was measured in one does not count in the other.
    """
    mkldnn, cudnn, cuda = torch.backends.mkldnn, torch.backends.cudnn, torch.backends.cuda
    precisions: list[Any] = [torch.backends, mkldnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]
    precisions += [cudnn, cudnn.conv, cudnn.rnn, cuda.matmul]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set the precisions of single backends, which are described too
        precision = "by backend"
    return [
        [[name, os.environ.get(name)] for name in _VARIABLES],
        [[name, str(value)] for name, value in sorted(cpu_capabilities().items())],
        torch.backends.cpu.get_cpu_capability(),
        bool(mkldnn.enabled),
        bool(cudnn.enabled),
        bool(cudnn.benchmark),
        precision,
        [str(each.fp32_precision) for each in precisions],
        torch.are_deterministic_algorithms_enabled(),
    ]


def matmul_backends() -> dict[str, Any]:
    """Return what holds the precision of float32 matrix products, by its name in ``torch.backends``."""
    mkldnn: Any = torch.backends.mkldnn
    return {"cuda.matmul": torch.backends.cuda.matmul, "mkldnn.matmul": mkldnn.matmul}


def unsafe_channels_last(model: nn.Module) -> str | None:
    """Return why training ``model`` channels-last on the CPU goes wrong; None if it does not.

    The gradient of a 1x1 kernel with a stride above 1 and fewer than 16 input channels in a group is written past its
    buffer. The process then crashes, hangs, or computes wrong gradients. Source:
    https://github.com/uxlfoundation/oneDNN/issues/6035, found in the oneDNN of torch 2.13.

    Two kinds go wrong on narrow images. A convolution of one channel with a stride above 1 in the last dimension alone
    computes wrong outputs if they are one entry wide. A kernel that is one entry wide, but has a dilation and a stride
    above 1 in that dimension, crashes the process if the inputs are one entry wide and padded.

    ``torch.compile`` makes the inputs of convolutions channels-last too.
    """
    for name, module in model.named_modules():
        if not isinstance(module, AnyConv) or not is_on_cpu(module):
            continue
        # Not module.weight: a parametrised weight is computed when it is read, and spectral_norm changes its buffers.
        kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
        channels = module.out_channels if module.transposed else module.in_channels
        narrowest = min(channels, module.in_channels) // module.groups
        layer = f"{name or 'the model'} is a convolution with a kernel of {kernel}, stride {stride}"
        if set(kernel) == {1} and max(stride) > 1 and narrowest < _BLOCK:
            return (
                f"{layer} and {narrowest} channels, whose gradient oneDNN computes wrongly in this format "
                "(oneDNN issue 6035)"
            )
        if kernel[-1] == 1:
            wrong = stride[-1] > 1 and dilation[-1] > 1
        else:
            wrong = channels == 1 and stride[-1] > 1 and stride[-2:-1] == (1,)
        if wrong:
            return f"{layer} and dilation {dilation}, which oneDNN computes wrongly in this format on narrow images"
    return None


def is_on_cpu(module: nn.Module) -> bool:
    """Whether all parameters of a module are on the CPU."""
    return all(parameter.device.type == "cpu" for parameter in module.parameters())
