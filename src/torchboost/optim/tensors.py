"""Tensors of a step: the batch of a group, memory layouts, sparse values, and which gradients were checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from torchboost.core.torch_private import foreach, sparse_values
from torchboost.core.wrapping import living
from torchboost.distributed.agreement import several

_DTYPE, _LAYOUT, _DEVICE = attrgetter("dtype"), attrgetter("layout"), attrgetter("device")


def holds_a_part(optimizer: Optimizer) -> bool:
    """Whether an optimizer is inside a ``ZeroRedundancyOptimizer``, which gives each rank some of the parameters.

    torch gives the inner optimizer no reference to it, so all objects are searched. Cost: tens of milliseconds on
    several ranks. FSDP2 does not need this, because a DTensor knows its ranks.
    """
    if not (several() and dist.get_world_size() > 1):
        return False
    # If there is such an optimizer, its module is imported already. Importing it here would raise warnings.
    kind: Any = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    outers: Any = () if kind is None else torch.compiler.disable(living)(kind)
    return any(getattr(outer, "optim", None) is optimizer for outer in outers)


def all_finite(grads: Sequence[Tensor]) -> bool:
    """Whether all gradients are finite, including sparse ones. Cost: one read, and one synchronisation per device."""
    filled = [values for grad in grads if (values := values_of(grad)).numel()]
    norms = foreach.norm(filled, float("inf")) if filled else []
    return all(bool(torch.stack(of_one).isfinite().all()) for of_one in by_device(norms).values())


def places_by(keys: Iterable[Hashable]) -> dict[Any, list[int]]:
    """Return the places of each key in the list, by key, in the order in which the keys first appear."""
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Return the tensors of each device."""
    return {device: [tensors[at] for at in places] for device, places in places_by(map(_DEVICE, tensors)).items()}


def values_of(grad: Tensor) -> Tensor:
    """Return the values of a gradient, for a sparse one the values of its stored rows."""
    return sparse_values(grad) if grad.layout is torch.sparse_coo else grad


def is_rows(grad: Tensor) -> bool:
    """Whether a gradient is sparse and consists of whole rows."""
    return grad.layout is torch.sparse_coo and grad.sparse_dim() == 1


def merge_sparse(grads: list[Tensor]) -> None:
    """Merge duplicate rows of sparse gradients. Dense gradients are not changed."""
    for position, grad in enumerate(grads):
        if grad.layout is torch.sparse_coo:
            grads[position] = grad.coalesce()


def forget_scale(optimizer: Optimizer) -> None:
    """Drop the loss scale after a step that raised. ``GradScaler`` does not, so the next step would use it."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def stand_in(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a dense tensor with the shape of ``like``, for checks. It holds one undefined number in memory."""
    return torch.empty((), dtype=dtype, device=like.device).expand(like.shape)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of the axes."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((t, s) for t, s in zip(tensor.stride(), tensor.shape, strict=True) if s > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(value: Tensor, model: Tensor) -> bool:
    """Whether two tensors of equal shape have equal strides, axes of length one aside."""
    if value.stride() == model.stride():
        return True
    axes = zip(model.shape, value.stride(), model.stride(), strict=True)
    return all(stride == expected for size, stride, expected in axes if size > 1)


def aligned(value: Tensor, model: Tensor) -> Tensor:
    """Return ``value``, or a copy of it, in the memory layout of ``model``, which has the same shape.

    Kernels that take lists of tensors read all of them in the memory order of the first.
    """
    if same_layout(value, model):
        return value
    return torch.empty_like(model, dtype=value.dtype, memory_format=torch.preserve_format).copy_(value)


def writable(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy if its entries share memory, as in gradients that ``autograd.grad`` expands.

    torch refuses to change such a tensor in place. Sparse tensors are returned as they are.
    """
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor
    shared = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.contiguous() if shared else tensor


@dataclass(slots=True)
class Batch:
    """The parameters of a group that have a gradient, as parallel lists."""

    params: list[Tensor]
    """The tensors to update in place: the parameters, or their float32 masters."""
    grads: list[Tensor]
    """Their gradients, in the precision of ``params``."""
    states: list[dict[str, Any]]
    layout: list[tuple[int, ...]] | None = None
    """Strides of ``params``, if already known."""

    def state(self, key: str) -> list[Tensor]:
        """Return one entry of all states."""
        return [state[key] for state in self.states]

    def select(self, places: Sequence[int]) -> Batch:
        """Return the batch of some of the parameters, by position."""
        params, grads, states = self.params, self.grads, self.states
        return Batch([params[at] for at in places], [grads[at] for at in places], [states[at] for at in places])

    def align(self, keys: Sequence[str]) -> None:
        """Give gradients and the entries ``keys`` of the states the memory layout of their parameter."""
        layout = _strides(self.params) if self.layout is None else self.layout
        if _strides(self.grads) != layout:
            self.grads[:] = [aligned(grad, param) for grad, param in zip(self.grads, self.params, strict=True)]
        for key in keys:
            entries = [state.get(key) for state in self.states]
            present = [entry for entry in entries if entry is not None]
            if len(present) == len(entries) and _strides(present) == layout:
                continue
            for entry, param, state in zip(entries, self.params, self.states, strict=True):
                if entry is not None:
                    state[key] = aligned(entry, param)


class Checked:
    """A record, per group, of the options and of the dense gradients that passed the checks.

    The options count as checked while they are the same objects, gradients until a flag or :func:`_facts` changes.
    """

    def __init__(self) -> None:
        self._options: dict[int, tuple[list[Any], list[Any]]] = {}
        self._gradients: dict[int, tuple[list[Tensor], tuple[Any, ...]]] = {}

    def options(self, number: int, group: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None]) -> None:
        """Check the options of a group, unless the same options were checked last."""
        if torch.compiler.is_compiling():
            return check(group)
        values, flags = self._options.get(number, ([], []))
        if len(values) == len(group) and all(map(is_, values, group.values())):
            return
        check(group)
        # Whether a gradient is usable may depend on whether a number is 0, but not on the number.
        plain = (bool, int, float, type(None))
        now = [(k, type(v), bool(v) if isinstance(v, plain) else None) for k, v in group.items() if k != "params"]
        if now != flags:
            self._gradients.pop(number, None)
        self._options[number] = list(group.values()), now

    def layout(self, number: int, params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[tuple[int, ...]] | None:
        """Return the strides of the parameters if the record covers these gradients, else None."""
        if torch.compiler.is_compiling() or number not in self._gradients:
            return None
        _, facts = self._gradients[number]
        return facts[1] if facts == _facts(params, grads) else None

    def note(self, number: int, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Record that all of these gradients were checked, unless they are of several kinds or sparse."""
        self._gradients.pop(number, None)
        if torch.compiler.is_compiling() or any(type(param) not in (Tensor, torch.nn.Parameter) for param in params):
            return  # tensor subclasses may change their contents in other ways
        facts = _facts(params, grads)
        if facts[4] == {torch.strided} and len(facts[2]) == len(facts[3]) == 1:
            self._gradients[number] = list(params), facts  # kept alive, so that their ids are not reused


def _facts(params: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the facts that can differ from step to step: parameters, their strides and devices, kinds of gradients."""
    kinds = set(map(_DEVICE, params)), set(map(_DTYPE, grads)), set(map(_LAYOUT, grads))
    return list(map(id, params)), _strides(params), *kinds


def _strides(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return list(map(Tensor.stride, tensors))
