"""Adam with its state and update on the host, for devices without memory for them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchboost.core.arguments import check_number
from torchboost.core.torch_private import foreach
from torchboost.errors import IncompatibleError
from torchboost.optim.rules.adam import Adam, as_real
from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.masters import has_master, pieces
from torchboost.optim.rules.options import Pipeline, rule_arguments
from torchboost.optim.tensors import is_dense, same_layout

__all__ = ["AdamOffload", "OffloadPlan"]

_KIND = attrgetter("dtype", "device")

MEBIBYTE = 2**20

ON_HOST = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
"""State entries of this rule; the memory of transforms stays on its device."""

GRAIN = 256
"""Tensors are cut at multiples of this many entries, so that vector kernels round as for the whole tensor."""

ALIGNMENT = 64

SMALLEST_CHUNK = 8192
"""Bytes that hold a grain of the widest type."""


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """The cost of a step of :class:`AdamOffload` in bytes, if every parameter has a gradient.

    The bytes moved, divided by the speed of the link (PCIe 4.0 x16: about 25 GB/s each way), are a lower bound of the
    step's time. The update on the host reads and writes the state in addition to the copies.

    Args:
        bytes_to_host: Gradients and weights copied to the host per step.
        bytes_to_device: New weights copied back per step.
        state_bytes: Moments, master weights and step counts on the host.
        staging_bytes: Page-locked buffers for the copies.
        chunks: Number of chunks per step; with one, nothing overlaps.
    """

    bytes_to_host: int
    bytes_to_device: int
    state_bytes: int
    staging_bytes: int
    chunks: int


class AdamOffload(Adam):
    """:class:`Adam` with its state in host memory and its update on the host, by torch's fused CPU kernel.

    For parameters on an accelerator, gradients and weights are copied to a page-locked buffer, chunk by chunk. While
    the host updates a chunk, the next one is copied to the host and the last one to the device, on separate streams.
    When the step returns, further work on the current stream is ordered after the new weights. The weights equal those
    of ``torch.optim.Adam(fused=True)`` on the CPU (``AdamW`` with ``decoupled_weight_decay``) bit for bit, for any
    ``chunk_mebibytes``. Parameters on the CPU are updated in place.

    Cost: no device memory. Per float32 weight 8 bytes on the host (12 with ``amsgrad``); per step 8 bytes copied to the
    host and 4 to the device; with master weights 12, 2 and 2. :meth:`plan` returns the sums. Checkpoints have torch's
    layout: they load into ``torch.optim.AdamW`` on any device and back, and the state stays on the host. Transforms run
    on the device of the gradients; with master weights they see float32 copies of the gradients on the device, and the
    parameter instead of the master.

    Limits: dense gradients; no DTensor on an accelerator (FSDP2 has ``CPUOffloadPolicy``); several devices are
    processed one after another. ``GradScaler`` unscales before the step.

    Source: J. Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv 2101.06840; MindSpore's
    ``AdamOffload``, whose epsilon is ``eps_uncorrected``.

    Args:
        params: See :class:`Adam`.
        lr: See :class:`Adam`; a tensor on a device costs a synchronisation.
        betas: See :class:`Adam`.
        eps: See :class:`Adam`.
        weight_decay: See :class:`Adam`.
        amsgrad: See :class:`Adam`.
        nesterov: See :class:`Adam`; torch has no fused kernel for it.
        decoupled_weight_decay: See :class:`Adam`.
        bias_correction: See :class:`Adam`.
        eps_uncorrected: See :class:`Adam`; torch has no fused kernel for it.
        maximize: See :class:`Adam`.
        master_weights: Keep a float32 copy of bfloat16 and float16 parameters on the host, and float32 moments.
        chunk_mebibytes: Size of each of the two buffers, in MiB, at least 1/128.
        pin_memory: Also page-lock the state of parameters on an accelerator, so that it is never swapped out. The
            buffers are always page-locked.
        **common: ``transforms`` and ``nonfinite``, see :class:`~torchboost.optim.UpdateRule`.

    Raises:
        TypeError, ValueError: An option is invalid, or two exclude each other.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = AdamOffload(model.parameters(), lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True)
        >>> optimizer.plan().state_bytes
        88
    """

    packs_moments = rounds = False

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Any = 0.0,
        *,
        amsgrad: bool = False,
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        bias_correction: bool = True,
        eps_uncorrected: bool = False,
        maximize: bool = False,
        master_weights: bool = True,
        chunk_mebibytes: float = 64.0,
        pin_memory: bool = True,
        **common: Unpack[Pipeline],
    ) -> None:
        check_number("chunk_mebibytes", chunk_mebibytes, above=True)
        if chunk_mebibytes * MEBIBYTE < SMALLEST_CHUNK:
            raise ValueError(f"chunk_mebibytes: found {chunk_mebibytes!r}; give at least {SMALLEST_CHUNK / MEBIBYTE}.")
        if not isinstance(pin_memory, bool):
            raise TypeError(f"pin_memory: found {pin_memory!r}; give True or False.")
        self.chunk_mebibytes = float(chunk_mebibytes)
        self.pin_memory = pin_memory
        self._lanes: dict[torch.device, _Lane] = {}
        fused = None if nesterov or eps_uncorrected else True
        arguments = rule_arguments(locals(), foreach=None, capturable=False, moments_8bit=False)
        for name in self._buffer_options():
            del arguments["defaults"][name]
        UpdateRule.__init__(self, **arguments)

    def constructor_options(self) -> dict[str, Any]:
        """Return the constructor's arguments that the param groups do not hold, by name."""
        return {**super().constructor_options(), **self._buffer_options()}

    def plan(self) -> OffloadPlan:
        """Return the cost of a step; needs neither gradients nor state."""
        down = up = state = staging = chunks = 0
        sizes: dict[torch.device, list[tuple[int, list[int]]]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if not param.requires_grad:
                    continue
                master = has_master(param, group)
                own, count = param.dtype.to_real(), param.numel() * (2 if param.is_complex() else 1)
                worked = torch.float32 if master else own
                state += 4 + count * worked.itemsize * (len(self.state_keys(group)) - 1 + master)
                if self._far(param):
                    grad = worked if self.chain else own
                    down += count * (grad.itemsize if master else grad.itemsize + own.itemsize)
                    up += count * own.itemsize
                    regions = [dtype.itemsize for dtype in _regions(grad, own, worked)]
                    sizes.setdefault(param.device, []).append((count, regions))
        for tensors in sizes.values():
            packed, largest = _split(tensors, self._chunk_bytes())
            staging += min(len(packed), 2) * largest
            chunks += len(packed)
        return OffloadPlan(
            bytes_to_host=down, bytes_to_device=up, state_bytes=state, staging_bytes=staging, chunks=chunks
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # The scale would reach the kernel as a tensor on the device; if unscaled there, an overflow copies nothing.
        return False

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse a choice of kernel, which this class makes itself."""
        for name, refused in (("foreach", True), ("capturable", True), ("fused", False)):
            if group.get(name) is refused:
                raise ValueError(f"{name}: found {refused}; {type(self).__name__} chooses its kernel; leave it out.")

    def check_grad(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Refuse sparse gradients, and DTensors on an accelerator."""
        if grad.layout is not torch.strided or not (self._far(param) and has_master(param, group)):
            UpdateRule.check_grad(self, param, grad, group)
        if self._far(param) and getattr(param, "placements", None) is not None:
            raise IncompatibleError(
                f"{type(self).__name__} does not take a DTensor on {param.device}, found one of shape "
                f"{tuple(param.shape)}. Use fully_shard(..., offload_policy=CPUOffloadPolicy()) with Adam."
            )

    def init_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a step of 0 and moments of 0, on the host."""
        dtype = torch.float32 if has_master(param, group) else param.dtype
        moments = {key: self._host_like(param, dtype).zero_() for key in self.state_keys(group)[1:]}
        return {"step": torch.zeros((), dtype=torch.float32, device="cpu"), **moments}

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update tensors on the host in place."""
        super().update(group, as_real(batch, ON_HOST))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **self._buffer_options()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({key: state[key] for key in ("chunk_mebibytes", "pin_memory") if key in state})
        super().__setstate__(state)
        self.__dict__.setdefault("_lanes", {})
        for group in self.param_groups:
            group.update(_kernel(group))

    def _loaded(self, param: Tensor, group: Mapping[str, Any], key: str, value: Any) -> Any:
        if key not in ON_HOST or not isinstance(value, Tensor):
            return super()._loaded(param, group, key, value)
        kept = value.to("cpu", copy=True)
        return kept.pin_memory() if kept.ndim and self._pins(param.device) else kept

    def _buffer_options(self) -> dict[str, Any]:
        return {"chunk_mebibytes": self.chunk_mebibytes, "pin_memory": self.pin_memory}

    def _chunk_bytes(self) -> int:
        return int(self.chunk_mebibytes * MEBIBYTE)

    def _far(self, param: Tensor) -> bool:
        """Whether the parameter is on a device other than the CPU."""
        return param.device.type != "cpu"

    def _pins(self, device: torch.device) -> bool:
        return self.pin_memory and _pinnable(device)

    def _host_like(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=self._pins(like.device))

    def _worked(
        self, param: Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the parameter itself if it is on a device, because transforms cannot use its master on the host."""
        wide = has_master(param, group)
        if not self._far(param) or not wide:
            return super()._worked(param, state, group)
        if "master" not in state:
            state = {**state, "master": self._host_like(param, torch.float32).copy_(param)}
        elif (master := self._stamps.current(param, state["master"])) is not state["master"]:
            state = {**state, "master": self._host_like(param, torch.float32).copy_(master)}
        return param, param.grad, state

    def _update_all(self, work: Sequence[Batch]) -> None:
        """Update in place what the kernel supports, and the rest in one pass per device over all groups."""
        jobs: dict[torch.device, list[_Job]] = {}
        for group, batch in zip(self.param_groups, work, strict=True):
            options = _host_options(group)
            near = batch if self._settled(batch, group) else self._divided(batch, group, options, jobs)
            for part in pieces(near):
                if part.params:
                    self.update(options, part)
        for device, listed in jobs.items():
            if device not in self._lanes:
                self._lanes[device] = self._lane(device)
            self._stream(self._lanes[device], listed)

    def _settled(self, batch: Batch, group: Mapping[str, Any]) -> bool:
        """Whether all of a batch is on the host in the kernel's layout; checked without a Python loop over tensors."""
        lists = [batch.params, batch.grads, *map(batch.state, self.state_keys(group)[1:])]
        kinds = list(map(_KIND, batch.params))
        return not any(map(self._far, batch.params)) and all(
            all(map(Tensor.is_contiguous, tensors)) and list(map(_KIND, tensors)) == kinds for tensors in lists
        )

    def _divided(
        self, batch: Batch, group: Mapping[str, Any], options: dict[str, Any], jobs: dict[torch.device, list[_Job]]
    ) -> Batch:
        """Return what the kernel can update in place, and add the rest to the jobs of its device."""
        near = Batch([], [], [])
        keys = self.state_keys(group)[1:]
        for param, grad, state in zip(batch.params, batch.grads, batch.states, strict=True):
            master = has_master(param, group)
            dtype = torch.float32 if master else param.dtype
            model = param if is_dense(param) else torch.empty_like(param, device="meta")
            for key in (*keys, "master") if master else keys:  # usually nothing is copied
                if state[key].device.type != "cpu" or state[key].dtype != dtype or not same_layout(state[key], model):
                    state[key] = self._host_like(param, dtype).copy_(state[key])
            # torch's kernel reads memory in order and ignores the strides.
            if self._far(param) or model is not param or not same_layout(param, grad):
                jobs.setdefault(param.device, []).append(_job(options, param, grad, state, keys, master=master))
            else:
                near.params.append(param)
                near.grads.append(grad)
                near.states.append(state)
        return near

    def _lane(self, device: torch.device) -> _Lane:
        module = None if device.type == "cpu" else torch.get_device_module(device)
        return _Lane(device, module if hasattr(module, "Stream") else None)

    def _stream(self, lane: _Lane, jobs: Sequence[_Job]) -> None:
        """Update all jobs chunk by chunk; return when all copies are queued and ordered before the device's work."""
        sizes = [(job.param.numel(), [dtype.itemsize for dtype in job.regions()]) for job in jobs]
        chunks, largest = _split(sizes, self._chunk_bytes())
        lane.reserve(min(len(chunks), 2), largest)
        lane.begin()
        try:
            ahead = _fetched(lane, 0, jobs, chunks[0]) if chunks else []
            for number in range(len(chunks)):
                staged, slot = ahead, number % 2
                if number + 1 < len(chunks):
                    ahead = _fetched(lane, 1 - slot, jobs, chunks[number + 1])
                lane.wait(slot)
                self._update_staged(staged)
                lane.copy("up", slot, [job.param for job, _ in staged], [regions[1] for _, regions in staged])
        finally:
            lane.end()
        foreach.add_([job.step for job in jobs], 1)
        for job in jobs:
            if job.gappy is not None:
                job.gappy[0].copy_(job.gappy[1])

    def _update_staged(self, staged: Sequence[_Staged]) -> None:
        """Update the pieces of a chunk and leave the new weights in the buffer."""
        for _, run in itertools.groupby(staged, key=lambda pair: id(pair[0].options)):
            listed = list(run)
            weights = [regions[1] if job.master is None else job.master for job, regions in listed]
            grads = [regions[0] if len(regions) == 2 else regions[2].copy_(regions[0]) for _, regions in listed]
            # The update increments a copy; a parameter in several pieces is counted once, at the end.
            states: list[dict[str, Any]] = [{**job.moments, "step": job.step.clone()} for job, _ in listed]
            self.update(listed[0][0].options, Batch(weights, grads, states))
            for job, regions in listed:
                if job.master is not None:
                    regions[1].copy_(job.master)


@dataclass(slots=True)
class _Job:
    """A parameter to update on the host, as flat real tensors with one order of entries, most of them views.

    Args:
        options: Of the update.
        param: Read and written on its device.
        grad: On the same device.
        step: Updates so far, on the host; incremented by 1.
        moments: State of the update by name, on the host.
        master: The tensor that the host updates in place of the parameter's value, if there is one.
        gappy: A parameter with gaps and its copy without, of which ``param`` is a view.
    """

    options: dict[str, Any]
    param: Tensor
    grad: Tensor
    step: Tensor
    moments: dict[str, Tensor]
    master: Tensor | None
    gappy: tuple[Tensor, Tensor] | None = None

    def regions(self) -> list[torch.dtype]:
        """Return the types of its tensors in a buffer."""
        return _regions(self.grad.dtype, self.param.dtype, (self.param if self.master is None else self.master).dtype)

    def cut(self, start: int, stop: int) -> _Job:
        """Return the job of some of the entries."""
        if stop - start == self.param.numel():
            return self
        moments = {key: value[start:stop] for key, value in self.moments.items()}
        master = None if self.master is None else self.master[start:stop]
        return _Job(self.options, self.param[start:stop], self.grad[start:stop], self.step, moments, master)


_Staged = tuple[_Job, list[Tensor]]
"""Some entries of a parameter, and their gradient, weight and perhaps cast gradient in a buffer."""


class _Piece(NamedTuple):
    """Some entries of a job, and their place in the buffer in bytes."""

    job: int
    start: int
    length: int
    offset: int


class _Lane:
    """Two host buffers ("slots") for one device, and the copies "down" and "up", on one stream per direction.

    Both directions overlap with each other and with the host.

    Args:
        device: The device.
        module: The module with streams and events, such as ``torch.cuda``; None copies at once.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.slots: list[Tensor] = []
        self._device, self._module = device, module
        if module is not None:
            self._edge = module.Event()
            self._streams = {way: module.Stream(device=device) for way in ("down", "up")}
            self._done = {(way, slot): module.Event() for way in self._streams for slot in range(2)}

    def reserve(self, count: int, size: int) -> None:
        """Make slots of at least this size, page-locked so that copies overlap with the host; they are kept."""
        if len(self.slots) < count or any(slot.numel() < size for slot in self.slots):
            self.slots = []  # freed first
            host = {"dtype": torch.uint8, "device": "cpu", "pin_memory": _pinnable(self._device)}
            self.slots = [torch.empty(size, **host) for _ in range(count)]

    def begin(self) -> None:
        """Order the copies after the work queued on the device so far."""
        if self._module is not None:
            self._edge.record(self._module.current_stream(self._device))
            for stream in self._streams.values():
                stream.wait_event(self._edge)

    def copy(self, way: str, slot: int, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue copies from a slot up to the device, or down to it once its last content is on the device."""
        if self._module is None:
            return self.queue(targets, sources)
        if way == "down":
            self._streams[way].wait_event(self._done["up", slot])
        with self._module.stream(self._streams[way]):
            self.queue(targets, sources)
        self._done[way, slot].record(self._streams[way])

    def wait(self, slot: int) -> None:
        """Block the host until the slot is filled."""
        if self._module is not None:
            self._done["down", slot].synchronize()

    def end(self) -> None:
        """Order the device's further work after the copies; the host does not wait."""
        if self._module is not None:
            self._edge.record(self._streams["up"])
            self._module.current_stream(self._device).wait_event(self._edge)

    def queue(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue the copies on the current stream; into and from page-locked buffers the calls return at once."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=self._module is not None)


def _job(
    options: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any], keys: Sequence[str], *, master: bool
) -> _Job:
    """Return the job of a parameter whose state is on the host in its order of entries."""
    dense = param if is_dense(param) else torch.empty_like(param).copy_(param)
    if not same_layout(grad, dense):
        grad = torch.empty_like(dense, dtype=grad.dtype).copy_(grad)
    return _Job(
        options=options,
        param=_flat(dense),
        grad=_flat(grad),
        step=state["step"],
        moments={key: _flat(state[key]) for key in keys},
        master=_flat(state["master"]) if master else None,
        gappy=None if dense is param else (param, dense),
    )


def _fetched(lane: _Lane, slot: int, jobs: Sequence[_Job], chunk: Sequence[_Piece]) -> list[_Staged]:
    """Queue the copies of the gradients and weights of a chunk, and return its pieces."""
    staged: list[_Staged] = []
    for index, start, length, offset in chunk:
        regions = []
        for dtype in jobs[index].regions():
            regions.append(lane.slots[slot][offset : offset + length * dtype.itemsize].view(dtype))
            offset += _padded(length * dtype.itemsize)
        staged.append((jobs[index].cut(start, start + length), regions))
    # If the host has a master, it does not need the weight.
    plain = [pair for pair in staged if pair[0].master is None]
    targets = [regions[0] for _, regions in staged] + [regions[1] for _, regions in plain]
    lane.copy("down", slot, targets, [job.grad for job, _ in staged] + [job.param for job, _ in plain])
    return staged


def _split(sizes: Sequence[tuple[int, Sequence[int]]], limit: int) -> tuple[list[list[_Piece]], int]:
    """Pack tensors into chunks of at most ``limit`` bytes; those that do not fit are cut at multiples of a grain.

    Args:
        sizes: Per tensor the number of entries, and the bytes per entry in each region of the buffer.
        limit: Bytes, at least :data:`SMALLEST_CHUNK`.

    Returns:
        The chunks, and the bytes of the largest.
    """
    chunks: list[list[_Piece]] = []
    used, largest = limit, 0
    for job, (count, itemsizes) in enumerate(sizes):
        start = 0
        while start < count:
            room = max(limit - used - ALIGNMENT * len(itemsizes), 0) // sum(itemsizes)
            length = count - start if count - start <= room else room // GRAIN * GRAIN
            if length == 0:
                chunks.append([])
                used = 0
                continue
            chunks[-1].append(_Piece(job, start, length, used))
            used += sum(_padded(length * size) for size in itemsizes)
            largest = max(largest, used)
            start += length
    return chunks, largest


def _regions(grad: torch.dtype, param: torch.dtype, worked: torch.dtype) -> list[torch.dtype]:
    """Return the types of the regions of a buffer: gradient, weight, and the gradient cast for the host."""
    return [grad, param] if grad == worked else [grad, param, worked]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _flat(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.as_strided((real.numel(),), (1,))


def _pinnable(device: torch.device) -> bool:
    return device.type not in ("cpu", "mps", "meta") and torch.accelerator.is_available()


def _kernel(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that choose torch's fused kernel, or ours where torch has none."""
    fused = None if group["nesterov"] or group["eps_uncorrected"] else True
    return {"foreach": None, "fused": fused, "capturable": False}


def _host_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the kernel on the host, with numbers in place of tensors."""
    numbers = {key: float(group[key]) for key in ("lr", "weight_decay") if isinstance(group[key], Tensor)}
    return {**group, **numbers, "betas": tuple(map(float, group["betas"])), **_kernel(group)}
