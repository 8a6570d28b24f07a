"""Adam with its state and update on the host, for devices without memory for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchboost.core.arguments import check_number
from torchboost.errors import IncompatibleError
from torchboost.optim.memory_layout import is_dense, same_layout
from torchboost.optim.pipeline import GradientTransform
from torchboost.optim.rules.adam import Adam
from torchboost.optim.rules.base import Batch, Nonfinite, UpdateRule
from torchboost.optim.rules.masters import has_master, pieces
from torchboost.optim.rules.options import arguments
from torchboost.optim.rules.staging import SMALLEST_CHUNK, Job, Staging, StreamTransfer, Transfer, split

__all__ = ["AdamOffload", "OffloadPlan"]

_KIND = attrgetter("dtype", "device")

MEBIBYTE = 2**20

ON_HOST = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
"""State entries of this rule; the memory of transforms stays on its device."""


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
        transforms: See :class:`~torchboost.optim.rules.base.UpdateRule`.
        nonfinite: See :class:`~torchboost.optim.rules.base.UpdateRule`.

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
        transforms: Sequence[GradientTransform] = (),
        nonfinite: Nonfinite = "ignore",
    ) -> None:
        check_number("chunk_mebibytes", chunk_mebibytes, above=True)
        if chunk_mebibytes * MEBIBYTE < SMALLEST_CHUNK:
            raise ValueError(f"chunk_mebibytes: found {chunk_mebibytes!r}; give at least {SMALLEST_CHUNK / MEBIBYTE}.")
        if not isinstance(pin_memory, bool):
            raise TypeError(f"pin_memory: found {pin_memory!r}; give True or False.")
        self.chunk_mebibytes = float(chunk_mebibytes)
        self.pin_memory = pin_memory
        self._stagings: dict[torch.device, Staging] = {}
        options = arguments(locals(), "chunk_mebibytes", "pin_memory")
        super().__init__(**options, fused=None if nesterov or eps_uncorrected else True)

    def constructor_options(self) -> dict[str, Any]:
        """Return the constructor's arguments that the param groups do not hold, by name."""
        own = {"chunk_mebibytes": self.chunk_mebibytes, "pin_memory": self.pin_memory}
        return {**super().constructor_options(), **own}

    def plan(self) -> OffloadPlan:
        """Return the cost of a step; needs neither gradients nor state."""
        down = up = state = staging = chunks = 0
        sizes: dict[torch.device, list[tuple[int, tuple[int, ...]]]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                if not param.requires_grad:
                    continue
                wide = has_master(param, group)
                count, own = _real([param])[0].numel(), _real([param])[0].element_size()
                worked = 4 if wide else own
                state += 4 + count * worked * (len(self.state_keys(group)) - 1 + wide)
                if self._far(param):
                    grad = 4 if wide and self.chain else own
                    down += count * (grad if wide else grad + own)
                    up += count * own
                    itemsizes = (grad, own, *((worked,) if grad != worked else ()))
                    sizes.setdefault(param.device, []).append((count, itemsizes))
        for tensors in sizes.values():
            packed = list(split(tensors, self._chunk_bytes()))
            ends = [chunk[-1].end(tensors[chunk[-1].job][1]) for chunk in packed]
            staging += min(len(packed), 2) * max(ends, default=0)
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

    def update(self, group: Mapping[str, Any], batch: Batch) -> None:
        """Update tensors on the host in place."""
        if any(param.is_complex() for param in batch.params):
            batch = Batch(_real(batch.params), _real(batch.grads), [_real_state(state) for state in batch.states])
        super().update(_host_options(group), batch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this rule, of :class:`Adam` or of torch's; the tensors are copied to the host.

        Raises:
            ValueError: The groups differ, or a state does not have the shape of its parameter; nothing was changed.
        """
        # torch copies every tensor to its parameter's device, which may lack memory; other objects it does not copy.
        handle = self.register_load_state_dict_pre_hook(_hold)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "chunk_mebibytes": self.chunk_mebibytes, "pin_memory": self.pin_memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({key: state[key] for key in ("chunk_mebibytes", "pin_memory") if key in state})
        held = {param: entries for param, entries in state["state"].items() if isinstance(param, Tensor)}
        for param, entries in held.items():
            entries.update({k: _brought(entries[k], pinned=self._pins(param.device)) for k in ON_HOST if k in entries})
        super().__setstate__(state)
        self.__dict__.setdefault("_stagings", {})
        for group in self.param_groups:
            own = group["nesterov"] or group["eps_uncorrected"]
            group.update(foreach=None, capturable=False, fused=None if own else True)

    def _chunk_bytes(self) -> int:
        return int(self.chunk_mebibytes * MEBIBYTE)

    def _far(self, param: Tensor) -> bool:
        """Whether the parameter is on a device other than the CPU."""
        return param.device.type != "cpu"

    def _transfer(self, device: torch.device) -> Transfer:
        module = None if device.type == "cpu" else torch.get_device_module(device)
        return StreamTransfer(module, device) if hasattr(module, "Stream") else Transfer()

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
        jobs: dict[torch.device, list[Job]] = {}
        for group, batch in zip(self.param_groups, work, strict=True):
            options = _host_options(group)
            near = batch if self._settled(batch, group) else self._divided(batch, group, options, jobs)
            for part in pieces(near):
                if part.params:
                    self.update(options, part)
        for device, listed in jobs.items():
            self._staging(device).run(listed, self.update)

    def _settled(self, batch: Batch, group: Mapping[str, Any]) -> bool:
        """Whether all of a batch is on the host in the kernel's layout; checked without a Python loop over tensors."""
        lists = [batch.params, batch.grads, *map(batch.state, self.state_keys(group)[1:])]
        kinds = list(map(_KIND, batch.params))
        return not any(map(self._far, batch.params)) and all(
            all(map(Tensor.is_contiguous, tensors)) and list(map(_KIND, tensors)) == kinds for tensors in lists
        )

    def _divided(
        self,
        batch: Batch,
        group: Mapping[str, Any],
        options: Mapping[str, Any],
        jobs: dict[torch.device, list[Job]],
    ) -> Batch:
        """Return what the kernel can update in place, and add the rest to the jobs of its device."""
        near = Batch([], [], [])
        for param, grad, state in zip(batch.params, batch.grads, batch.states, strict=True):
            self._settle(param, state, group)
            # torch's kernel reads memory in order and ignores the strides.
            if self._far(param) or not is_dense(param) or not same_layout(param, grad):
                moments = {key: state[key] for key in self.state_keys(group)[1:]}
                master = state["master"] if has_master(param, group) else None
                job = Job(options, param, grad, state["step"], moments, master)
                jobs.setdefault(param.device, []).append(job)
            else:
                near.params.append(param)
                near.grads.append(grad)
                near.states.append(state)
        return near

    def _settle(self, param: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Bring the state to the device, precision and memory layout of its use; usually nothing is copied."""
        wide = has_master(param, group)
        dtype = torch.float32 if wide else param.dtype
        model = param if is_dense(param) else torch.empty_like(param, device="meta")
        for key in (*self.state_keys(group)[1:], *(("master",) if wide else ())):
            value = state[key]
            if value.device.type != "cpu" or value.dtype != dtype or not same_layout(value, model):
                state[key] = self._host_like(param, dtype).copy_(value)

    def _staging(self, device: torch.device) -> Staging:
        if device not in self._stagings:
            self._stagings[device] = Staging(self._transfer(device), self._chunk_bytes(), pinned=_pinnable(device))
        return self._stagings[device]


class _Held:
    """Hide a state's entry from ``Optimizer.load_state_dict``."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _hold(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    known = {index for group in state_dict["param_groups"] for index in group["params"]}
    held = dict(state_dict["state"])
    for index in known & held.keys():
        held[index] = {key: _Held(value) if key in ON_HOST else value for key, value in held[index].items()}
    return {**state_dict, "state": held}


def _brought(value: Any, *, pinned: bool) -> Any:
    """Return a state's entry on the host, as a copy if it was given for loading."""
    if isinstance(value, _Held):
        value = value.value
        value = value.clone() if isinstance(value, Tensor) and value.device.type == "cpu" else value
    if not isinstance(value, Tensor):
        return value
    value = value.cpu()
    return value.pin_memory() if pinned and value.ndim and not value.is_pinned() else value


def _pinnable(device: torch.device) -> bool:
    return device.type not in ("cpu", "mps", "meta") and torch.accelerator.is_available()


def _host_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for the kernel on the host, with numbers in place of tensors."""
    own = group["nesterov"] or group["eps_uncorrected"]
    numbers = {key: float(group[key]) for key in ("lr", "weight_decay") if isinstance(group[key], Tensor)}
    betas = tuple(float(beta) for beta in group["betas"])
    return {**group, **numbers, "betas": betas, "foreach": None, "fused": not own, "capturable": False}


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def _real_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: torch.view_as_real(value) if isinstance(value, Tensor) and value.is_complex() else value
        for key, value in state.items()
    }
