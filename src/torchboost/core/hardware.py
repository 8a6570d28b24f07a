"""The machine as algorithms meet it: cores, the speed of bfloat16, defects of kernels, random generators."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchboost.core.torch_private import AnyConv
from torchboost.measure.machine import PAYS, Kind, half_speed

_GROUPS = Path("/sys/fs/cgroup")
_BLOCK = 16
"""Channels that one AVX-512 register holds. AVX2 kernels fail below 8."""


def device_fault(device: torch.device | str, dtype: torch.dtype = torch.float32) -> str | None:
    """Return in one line why ``device`` cannot hold a tensor of ``dtype``, or None if it can."""
    try:
        torch.empty(0, device=device, dtype=dtype)
    except (RuntimeError, AssertionError, TypeError) as error:
        return str(error).splitlines()[0]
    return None


class HalfPrecision(NamedTuple):
    """Whether autocast to bfloat16 is expected to save time on a device, and why, in one clause."""

    fast: bool
    reason: str


def half_precision(device: torch.device | str, convolutions: int | None = None) -> HalfPrecision:
    """Decide whether ``device`` computes a network faster in bfloat16 than in float32.

    bfloat16 must be at least 1.25 times as fast as float32 in a short measurement
    (:func:`~torchboost.measure.machine.half_speed`): of matrix products, and unless the number of ``convolutions`` in
    the network is 0, of these too. If a CUDA device cannot be measured, it counts as fast from compute capability 8.0
    on (on ROCm always). Other devices, such as MPS, are not measured and count as slow.

    Cost: on the CPU 0.1 s for each kind of product, once per process and number of threads.

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
        decision = _decision(kind, device, torch.get_num_threads())
        if decision is None:
            major, minor = torch.cuda.get_device_capability(device)
            capability = f"this GPU has compute capability {major}.{minor}, fast are 8.0 and newer"
            return HalfPrecision((major, minor) >= (8, 0), f"bfloat16 could not be timed here; {capability}")
        if not decision.fast:
            return decision
        reasons.append(decision.reason)
    return HalfPrecision(True, ", and ".join(reasons))


@functools.cache
def _decision(kind: Kind, device: torch.device, threads: int) -> HalfPrecision | None:
    """Decide about one kind of product, once per number of threads. Return None if a GPU could not be measured."""
    products = half_speed(kind, device)
    if products.ratio is None and device.type == "cuda":
        return None
    slow = products.is_judged and not products.half_pays
    limit = f" (autocast pays from {1 / PAYS:.2f} times on down)" if slow else ""
    return HalfPrecision(products.half_pays, f"{products}{limit}")


def matmul_backends() -> dict[str, Any]:
    """Return the holders of the precision of float32 matrix products, by their names in ``torch.backends``."""
    mkldnn: Any = torch.backends.mkldnn
    return {"cuda.matmul": torch.backends.cuda.matmul, "mkldnn.matmul": mkldnn.matmul}


def matmul_precision() -> tuple[str | None, dict[str, str]]:
    """Return the precision of float32 matrix products, None if backends were set one by one, and by backend."""
    try:
        products = torch.get_float32_matmul_precision()
    except RuntimeError:
        products = None
    return products, {name: backend.fp32_precision for name, backend in matmul_backends().items()}


class ProcessSettings:
    """The number of CPU threads and the precision of float32 products, kept for one of several trainings in a process.

    Switches such as ``threads`` change them, and the other trainings would follow.
    """

    def __init__(self) -> None:
        self._kept = _settings()

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Set them for the block, keep what it changes, and restore at its end what was set before it."""
        before = _settings()
        _set(self._kept)
        try:
            yield
        finally:
            self._kept = _settings()
            _set(before)


def _settings() -> tuple[int, tuple[str | None, dict[str, str]]]:
    return torch.get_num_threads(), matmul_precision()


def _set(wanted: tuple[int, tuple[str | None, dict[str, str]]]) -> None:
    threads, (products, by_backend) = wanted
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    if matmul_precision() == wanted[1]:
        return
    if products is not None:
        torch.set_float32_matmul_precision(products)
    for name, backend in matmul_backends().items():
        backend.fp32_precision = by_backend[name]


def unsafe_channels_last(model: nn.Module) -> str | None:
    """Return why training ``model`` channels-last on the CPU goes wrong, also compiled, or None if it does not.

    The gradient of a 1x1 kernel with a stride above 1 and fewer than 16 input channels in a group is written past its
    buffer. The process then crashes, hangs, or computes wrong gradients. Source:
    https://github.com/uxlfoundation/oneDNN/issues/6035, found in the oneDNN of torch 2.13.

    Two kinds go wrong on narrow images. A convolution of one channel with a stride above 1 in the last dimension alone
    computes wrong outputs if they are one entry wide. A kernel that is one entry wide, but has a dilation and a stride
    above 1 in that dimension, crashes the process if the inputs are one entry wide and padded.
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


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter, the CPU without one."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def accelerators(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the devices of tensors that draw random numbers of their own: all but the CPU and ``meta``."""
    devices = {tensor.device for tensor in tensors}
    return sorted((device for device in devices if device.type not in ("cpu", "meta")), key=str)


def generator_states(devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the states of torch's default generators: of the CPU, and of each of these devices."""
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


def set_generator_states(states: Sequence[Tensor], devices: Sequence[torch.device]) -> None:
    """Set the states that :func:`generator_states` has returned for these devices."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, device)


class Streams:
    """The default random generators of torch, Python and NumPy as they are now. Other threads must not draw meanwhile.

    Args:
        devices: Accelerators, in addition to the CPU.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._devices, self._torch = devices, generator_states(devices)
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def restore(self) -> None:
        """Restore the generators."""
        set_generator_states(self._torch, self._devices)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def drawn(self) -> bool:
        """Whether the generators of torch were used since."""
        return not all(map(torch.equal, generator_states(self._devices), self._torch))

    def used(self) -> bool:
        """Whether any of the generators was used since."""
        numpy: Any = np.random.get_state()
        return self.drawn() or random.getstate() != self._python or not all(map(np.array_equal, numpy, self._numpy))


@contextlib.contextmanager
def streams_kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore the :class:`Streams` at the end of the block."""
    streams = Streams(devices)
    try:
        yield
    finally:
        streams.restore()


def usable_cores(groups: Path = _GROUPS) -> float:
    """Return the processors that this process may use: by its affinity, and by the CPU quota of its container.

    With several ranks on a machine (``LOCAL_WORLD_SIZE``, as torchrun sets it) each gets an equal part.
    """
    try:
        allowed: float = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        allowed = os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return min(allowed, cpu_quota(groups)) / (max(int(ranks), 1) if ranks.isdigit() else 1)


def cpu_quota(groups: Path = _GROUPS) -> float:
    """Return the quota in processors, of version 2 or 1 of control groups, or infinity without a quota."""
    with contextlib.suppress(OSError, ValueError, IndexError, ZeroDivisionError):
        limit, period = (groups / "cpu.max").read_text(encoding="ascii").split()[:2]
        return float("inf") if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        limit, period = ((groups / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else float("inf")
    return float("inf")
