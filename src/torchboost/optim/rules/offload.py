"""Adam with its state and update on the host, for devices without memory for them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchboost.core.arguments import check_number
from torchboost.core.torch_private import foreach
from torchboost.errors import IncompatibleError
from torchboost.optim.rules.adam import Adam
from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.masters import has_master, pieces, widened
from torchboost.optim.rules.options import Pipeline, rule_arguments
from torchboost.optim.tensors import aligned, is_dense, places_by, same_layout

MEBIBYTE = 2**20

ON_HOST = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
"""State entries of this rule. The memory of transforms remains on its device."""

GRAIN = 256
"""Tensors are cut at multiples of this many entries, so that vector kernels round as for the whole tensor."""

SMALLEST_CHUNK = 8192
"""Bytes that hold a grain of the widest types."""


class AdamOffload(Adam):
    """:class:`Adam` with its state in host memory and its update on the host, by torch's fused CPU kernel.

    For parameters on an accelerator, gradients and weights are copied to a page-locked buffer, chunk by chunk. While
    the host updates a chunk, the next one is copied to the host and the last one to the device, on separate streams.
    When the step returns, further work on the current stream is ordered after the new weights. The weights equal
    ``torch.optim.Adam(fused=True)`` on the CPU (``AdamW`` with ``decoupled_weight_decay``) bit for bit, for any
    ``chunk_mebibytes``. Parameters on the CPU are updated in place.

    Cost: no device memory. Per float32 weight 8 bytes on the host (12 with ``amsgrad``), and per step 8 bytes copied to
    the host and 4 to the device. With master weights 12, 2 and 2. Checkpoints have torch's layout: they load into
    ``torch.optim.AdamW`` on any device and back, and the state remains on the host. Transforms run on the device of the
    gradients. With master weights they see float32 copies of the gradients on the device, and the parameter instead of
    the master.

    Limits: real parameters without gaps in memory, dense gradients, no DTensor on an accelerator (FSDP2 has
    ``CPUOffloadPolicy``). Several devices are processed one after another. ``GradScaler`` unscales before the step.

    Source: J. Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", arXiv 2101.06840, and MindSpore's
    ``AdamOffload``, whose epsilon is ``eps_uncorrected``.

    Other arguments, and errors, are those of :class:`Adam`.

    Args:
        lr: As in :class:`Adam`. A tensor on a device costs a synchronisation.
        nesterov: As in :class:`Adam`. torch has no fused kernel for it, nor for ``eps_uncorrected``.
        master_weights: Keep a float32 copy of bfloat16 and float16 parameters on the host, and float32 moments.
        chunk_mebibytes: Size of each of the two page-locked buffers, in MiB, at least 1/128. The state of parameters on
            an accelerator is page-locked too, so that it is never swapped out.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = AdamOffload(model.parameters(), lr=1e-3, weight_decay=0.01, decoupled_weight_decay=True)
    """

    kept = (*Adam.kept, "chunk_mebibytes")
    kernel_unscales = False  # the scale is on the device: if unscaled there, an overflow copies nothing

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
        **common: Unpack[Pipeline],
    ) -> None:
        check_number("chunk_mebibytes", chunk_mebibytes, above=True)
        if chunk_mebibytes * MEBIBYTE < SMALLEST_CHUNK:
            raise ValueError(f"chunk_mebibytes: found {chunk_mebibytes!r}; give at least {SMALLEST_CHUNK / MEBIBYTE}.")
        self.chunk_mebibytes = float(chunk_mebibytes)
        arguments = rule_arguments(locals(), **_kernel(locals()))
        del arguments["defaults"]["chunk_mebibytes"]
        UpdateRule.__init__(self, **arguments)

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse a choice of kernel, which this class makes itself."""
        for name, refused in (("foreach", True), ("capturable", True), ("fused", False)):
            if group.get(name) is refused:
                raise ValueError(f"{name}: found {refused}; {type(self).__name__} chooses its kernel; leave it out.")

    def check_grad(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Refuse sparse gradients, parameters that are complex or have gaps, and DTensors on an accelerator."""
        if grad.layout is not torch.strided or not (self._far(param) and has_master(param, group)):
            UpdateRule.check_grad(self, param, grad, group)
        if param.is_complex() or not is_dense(param):
            raise IncompatibleError(
                f"{type(self).__name__} needs real parameters without gaps in memory, found one of {param.dtype}, "
                f"shape {tuple(param.shape)}, strides {param.stride()}. Give it to Adam."
            )
        if self._far(param) and getattr(param, "placements", None) is not None:
            raise IncompatibleError(
                f"{type(self).__name__} does not take a DTensor on {param.device}, found one of shape "
                f"{tuple(param.shape)}. Use fully_shard(..., offload_policy=CPUOffloadPolicy()) with Adam."
            )

    def adopted(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved group with the kernel that this class chooses."""
        return {**super().adopted(group), **_kernel(group)}

    def init_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a step of 0 and moments of 0, on the host."""
        dtype = torch.float32 if has_master(param, group) else param.dtype
        moments = {key: self._host_like(param, dtype).zero_() for key in self.state_keys(group)[1:]}
        return {"step": torch.zeros((), dtype=torch.float32, device="cpu"), **moments}

    def _far(self, param: Tensor) -> bool:
        return param.device.type != "cpu"

    def _host_like(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=_pinnable(like.device))

    def _loaded(self, param: Tensor, group: Mapping[str, Any], key: str, value: Any) -> Any:
        if key not in ON_HOST[1:] or not isinstance(value, Tensor):
            return super()._loaded(param, {**group, "fused": None}, key, value)
        wide = key == "master" or has_master(param, group)
        return self._host_like(param, torch.float32 if wide else param.dtype).copy_(value)

    def _worked(
        self, param: Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the parameter itself if it is on a device, because transforms cannot use its master on the host."""
        if not self._far(param) or not has_master(param, group):
            return super()._worked(param, state, group)
        if "master" not in state:
            master = self._host_like(param, torch.float32).copy_(param)
            state = {**{key: widened(value) for key, value in state.items()}, "master": master}
        elif (master := self._stamps.current(param, state["master"])) is not state["master"]:
            state = {**state, "master": self._host_like(param, torch.float32).copy_(master)}
        return param, param.grad, state

    def _update_all(self, work: Sequence[Batch]) -> None:
        """Update tensors on the host in place, and the rest in one pass per device over all groups."""
        jobs: dict[torch.device, list[_Job]] = {}
        for group, batch in zip(self.param_groups, work, strict=True):
            options, places = _host_options(group), places_by(map(self._far, batch.params))
            for place in places.get(True, ()):
                param, grad, state = batch.params[place], batch.grads[place], batch.states[place]
                job = self._job(options, param, grad, state, master=has_master(param, group))
                jobs.setdefault(param.device, []).append(job)
            for part in pieces(batch.select(places.get(False, ())) if True in places else batch):
                if part.params:
                    self.update(options, part)
        lanes: dict[torch.device, _Lane] = self.__dict__.setdefault("_lanes", {})
        for device, listed in jobs.items():
            if device not in lanes:
                lanes[device] = self._lane(device)
            self._stream(lanes[device], listed)

    def _job(
        self, options: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any], *, master: bool
    ) -> _Job:
        keys = self.state_keys(options)[1:]
        for key in (*keys, "master") if master else keys:
            if not same_layout(state[key], param):
                state[key] = self._host_like(param, state[key].dtype).copy_(state[key])
        moments = {key: _flat(state[key]) for key in keys}
        weight = _flat(state["master"]) if master else None
        return _Job(options, _flat(param), _flat(aligned(grad, param)), state["step"], moments, weight)

    def _lane(self, device: torch.device) -> _Lane:
        module = torch.get_device_module(device)
        return _Lane(device, module if hasattr(module, "Stream") else None)

    def _stream(self, lane: _Lane, jobs: Sequence[_Job]) -> None:
        """Update all jobs chunk by chunk. Return when all copies are queued and ordered before the device's work."""
        chunks, largest = _packed([(len(job.param), job.width) for job in jobs], self.chunk_mebibytes)
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

    def _update_staged(self, staged: Sequence[_Staged]) -> None:
        """Update the pieces of a chunk and write the new weights to the buffer."""
        for _, run in itertools.groupby(staged, key=lambda pair: id(pair[0].options)):
            listed = list(run)
            weights = [regions[1] if job.master is None else job.master for job, regions in listed]
            grads = [regions[0] if len(regions) == 2 else regions[2].copy_(regions[0]) for _, regions in listed]
            # The update increments a copy. A parameter in several pieces is counted once, at the end.
            states: list[dict[str, Any]] = [{**job.moments, "step": job.step.clone()} for job, _ in listed]
            self.update(listed[0][0].options, Batch(weights, grads, states))
            for job, regions in listed:
                if job.master is not None:
                    regions[1].copy_(job.master)


@dataclass(slots=True)
class _Job:
    """Entries of a parameter to update on the host, as flat views with one order of entries."""

    options: dict[str, Any]
    param: Tensor
    grad: Tensor
    step: Tensor
    moments: dict[str, Tensor]
    master: Tensor | None
    """The host updates it instead of the parameter's value, if there is one."""

    @property
    def regions(self) -> list[torch.dtype]:
        """The types of its tensors in a buffer: gradient, weight, and the gradient cast for the host."""
        worked = self.param if self.master is None else self.master
        plain = [self.grad.dtype, self.param.dtype]
        return plain if self.grad.dtype == worked.dtype else [*plain, worked.dtype]

    @property
    def width(self) -> int:
        """Bytes per entry in a buffer."""
        return sum(dtype.itemsize for dtype in self.regions)

    def cut(self, start: int, stop: int) -> _Job:
        moments = {key: value[start:stop] for key, value in self.moments.items()}
        master = None if self.master is None else self.master[start:stop]
        return _Job(self.options, self.param[start:stop], self.grad[start:stop], self.step, moments, master)


_Staged = tuple[_Job, list[Tensor]]
"""Some entries of a parameter, and their gradient, weight and perhaps cast gradient in a buffer."""

_Piece = tuple[int, int, int]
"""Number of a job, and the first and the last of its entries plus 1."""


class _Lane:
    """Two host buffers ("slots") for one device, and the copies "down" and "up", on one stream per direction.

    ``module`` has streams and events, such as ``torch.cuda``. None copies at once.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.slots: list[Tensor] = []
        self._device, self._module = device, module
        if module is not None:
            self._edge = module.Event()
            self._streams = {way: module.Stream(device=device) for way in ("down", "up")}
            self._done = {(way, slot): module.Event() for way in self._streams for slot in range(2)}

    def reserve(self, count: int, size: int) -> None:
        """Make and keep slots of at least this size, page-locked so that copies overlap with the host."""
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
        """Order the device's further work after the copies. The host does not wait."""
        if self._module is not None:
            self._edge.record(self._streams["up"])
            self._module.current_stream(self._device).wait_event(self._edge)

    def queue(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue the copies on the current stream. With page-locked buffers the calls return at once."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=self._module is not None)


def _fetched(lane: _Lane, slot: int, jobs: Sequence[_Job], chunk: Sequence[_Piece]) -> list[_Staged]:
    """Queue the copies of the gradients and weights of a chunk, and return its pieces."""
    staged: list[_Staged] = []
    offset = 0
    for number, start, stop in chunk:
        regions = []
        for dtype in jobs[number].regions:
            regions.append(lane.slots[slot][offset : offset + (stop - start) * dtype.itemsize].view(dtype))
            offset += _grains(stop - start) * GRAIN * dtype.itemsize
        staged.append((jobs[number].cut(start, stop), regions))
    # If the host has a master, it does not need the weight.
    plain = [pair for pair in staged if pair[0].master is None]
    targets = [regions[0] for _, regions in staged] + [regions[1] for _, regions in plain]
    lane.copy("down", slot, targets, [job.grad for job, _ in staged] + [job.param for job, _ in plain])
    return staged


def _packed(sizes: Sequence[tuple[int, int]], mebibytes: float) -> tuple[list[list[_Piece]], int]:
    """Pack tensors, given as numbers of entries and bytes per entry, into chunks of this size, cut between grains.

    Returns the chunks and the bytes of the largest one.
    """
    chunks: list[list[_Piece]] = []
    limit = int(mebibytes * MEBIBYTE)
    used, largest = limit, 0
    for number, (count, width) in enumerate(sizes):
        start = 0
        while start < count:
            grains = min((limit - used) // (GRAIN * width), _grains(count - start))
            if not grains:
                chunks.append([])
                used = 0
                continue
            stop = min(start + grains * GRAIN, count)
            chunks[-1].append((number, start, stop))
            used += grains * GRAIN * width
            largest, start = max(largest, used), stop
    return chunks, largest


def _grains(count: int) -> int:
    return -(-count // GRAIN)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _pinnable(device: torch.device) -> bool:
    return device.type not in ("cpu", "mps", "meta") and torch.accelerator.is_available()


def _kernel(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that choose torch's fused kernel, or ours if torch has none."""
    fused = None if group.get("nesterov") or group.get("eps_uncorrected") else True
    return {"foreach": None, "fused": fused, "capturable": False}


def _host_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the kernel on the host, with numbers instead of tensors."""
    numbers = {key: float(group[key]) for key in ("lr", "weight_decay") if isinstance(group[key], Tensor)}
    return {**group, **numbers, "betas": tuple(map(float, group["betas"])), **_kernel(group)}
