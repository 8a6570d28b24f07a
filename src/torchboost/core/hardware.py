"""Properties of the hardware that algorithms depend on."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter

from torchboost.core.kept import default_folder, keep, read_kept
from torchboost.core.kernels import kernel_switches
from torchboost.measure.machine import PAYS, STAYS, Kind, Products, half_speed
from torchboost.measure.stopwatch import device_name, processor_name

__all__ = ["HalfPrecision", "device_fault", "half_precision", "half_precision_is_fast"]

_LOG = logging.getLogger(__name__)


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
    :func:`~torchboost.core.native.cache_folder`, for the processor, the number of threads, the device, torch's version
    and what else changes kernels (:func:`~torchboost.core.kernels.kernel_switches`). If other programs used the machine
    meanwhile, so that the measurement exceeded its time limit, later processes measure again, until one has finished
    in time. Its result then replaces the earlier one; what counted as fast stays so from 1.1 times on. To measure
    again, delete the folder.

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
    said: list[str] = []
    for kind in kinds:
        found = _decision(kind, device, _key(kind, device), os.environ.get("TORCHBOOST_CACHE"))
        if found is None:
            return _by_capability(device)
        if not found.fast:
            return found
        said.append(found.reason)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What is kept of a measurement.

    Attributes:
        key: What it holds for.
        fast: The decision.
        found: The measurement.
        format: Version of the file.
    """

    key: str
    fast: bool
    found: Products
    format: Literal[1] = 1


_FILE = TypeAdapter(_Kept)


@functools.cache
def _decision(kind: Kind, device: torch.device, key: str, cache: str | None) -> HalfPrecision | None:
    """Decide about one kind of product, as before on this machine; None if a GPU could not be measured.

    The folder depends on ``cache``, the environment variable.
    """
    folder = default_folder("bfloat16")
    file = None if folder is None else folder / f"{key}.json"
    before = _load(file)
    if before is not None and before.found.in_time:
        return _said(before, earlier=True)
    found = half_speed(kind, device)
    if before is not None and not (found.is_judged and found.in_time):
        return _said(before, earlier=True)
    if not found.is_judged:
        return None if found.ratio is None and device.type == "cuda" else HalfPrecision(False, str(found))
    stays = before is not None and before.fast and found.ratio is not None and found.ratio >= STAYS
    now = _Kept(key=key, fast=found.half_pays or stays, found=found)
    _store(file, now)
    return _said(now)


def _said(kept: _Kept, *, earlier: bool = False) -> HalfPrecision:
    when = ", as measured earlier on this machine" if earlier else ""
    limit = "" if kept.fast else f" (autocast pays from {1 / PAYS:.2f} times on down)"
    return HalfPrecision(kept.fast, f"{kept.found}{when}{limit}")


def _key(kind: Kind, device: torch.device) -> str:
    machine = [processor_name(), torch.get_num_threads(), device_name(device), torch.__version__]
    return hashlib.sha256(json.dumps([kind, *machine, *kernel_switches()]).encode()).hexdigest()


def _load(file: Path | None) -> _Kept | None:
    if file is None:
        return None
    try:
        kept = _FILE.validate_json(read_kept(file))
        if kept.key != file.stem:
            raise ValueError(f"it is the entry of {kept.key}")
        if not kept.found.is_judged or not 0.0 < (kept.found.ratio or 0.0) < math.inf:
            raise ValueError(f"it holds a ratio of {kept.found.ratio} from {kept.found.pairs} pairs")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _LOG.debug("The kept decision about bfloat16 %s is not used: %s", file, error)
        return None
    return kept


def _store(file: Path | None, kept: _Kept) -> None:
    if file is None:
        return
    try:
        keep(file, _FILE.dump_json(kept) + b"\n")
    except OSError as error:
        _LOG.debug("The decision about bfloat16 is not kept in %s: %s", file, error)
