"""What differs between the versions of torch that this package works with, from 2.9 on.

No other module asks which version of torch runs. If the oldest supported version moves on, what is marked with a
later one can go. Private names that have moved are in :mod:`torchboost.core.torch_private`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchboost.core.torch_private import (
    foreach,
    guards_every_flag,
    guards_of_every_flag,
    module_hooks,
    older_cpu_flags,
    overrides_dispatch,
)

__all__ = [
    "UNSUPPORTED_SHARDS",
    "compiler_follows_flags",
    "cpu_capabilities",
    "default_device",
    "following_flags",
    "follows_flags",
    "foreach_lerp",
    "foreach_norm",
    "marked_as_following",
    "store_in_order",
]

UNSUPPORTED_SHARDS = (RuntimeError, AssertionError)
"""What an operator raises that cannot compute with a DTensor: in 2.9 not always a ``RuntimeError``."""

_VERSION: Any = torch.__version__
_BEFORE_2_11, _BEFORE_2_12, _BEFORE_2_13 = ((2, minor) > _VERSION for minor in (11, 12, 13))


def cpu_capabilities() -> dict[str, Any]:
    """Return what the processor can do: ``torch.cpu.get_capabilities``, before 2.11 what bfloat16 needs only."""
    read: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", older_cpu_flags)
    return read()


def default_device() -> torch.device:
    """Return where tensors are made. In 2.9 ``get_default_device`` raises after ``torch.set_default_device(None)``."""
    return torch.empty(0).device


def foreach_lerp(starts: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Return ``start + weight * (end - start)`` of each pair, which before 2.13 works one by one for a DTensor only."""
    if _BEFORE_2_13 and any(map(overrides_dispatch, starts)):
        return [torch.lerp(start, end, weight) for start, end in zip(starts, ends, strict=True)]
    return list(foreach.lerp(starts, ends, weight))


def foreach_norm(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the norm of each tensor. Before 2.11 a sum of norms of shards is wrong if they are not reduced first."""
    norms: Sequence[Tensor] = foreach.norm(tensors)
    return list(map(_reduced, norms)) if _BEFORE_2_11 else norms


def _reduced(norm: Tensor) -> Tensor:
    if not overrides_dispatch(norm):
        return norm
    from torch.distributed.tensor import DTensor, Replicate

    return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim) if isinstance(norm, DTensor) else norm


def following_flags(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function whose graphs check ``requires_grad`` of every parameter, as all do from 2.12 on."""
    if not _BEFORE_2_12:
        return compiled

    def call(*args: Any, **kwargs: Any) -> Any:
        with guards_of_every_flag():
            return compiled(*args, **kwargs)

    return call


_Call = TypeVar("_Call", bound=Callable[..., Any])


def marked_as_following(call: _Call) -> _Call:
    """Mark a function of this package that calls compiled code only through :func:`following_flags`; return it."""
    vars(call)["follows_flags"] = True
    return call


def follows_flags(call: Any) -> bool:
    """Whether what a module calls was marked by :func:`marked_as_following`."""
    return inspect.isroutine(call) and getattr(call, "follows_flags", False)


def compiler_follows_flags() -> bool:
    """Whether graphs of other functions than :func:`following_flags` do so; before 2.12 if a setting of torch is off.

    Otherwise a graph that was made while a layer is frozen never trains it again (pytorch#139476).
    """
    return not _BEFORE_2_12 or guards_every_flag()


def store_in_order(module: nn.Module) -> None:
    """Store the hooks of a module in the order in which they are called. Call it after ``prepend=True``.

    That moves an entry of an ``OrderedDict``. The compiler of torch 2.9 to 2.11 goes by the order of insertion, and
    fails with "Guard check failed" if the two differ.
    """
    for hooks in module_hooks(module):
        if list(hooks) != list(dict.keys(hooks)):
            entries = list(hooks.items())
            hooks.clear()
            hooks.update(entries)
