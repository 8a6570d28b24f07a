"""Copy a model for tracing, so that the model itself is never run or changed."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.covering import is_our_hook
from torchboost.core.torch_private import beneath_compiled, module_hooks

__all__ = ["large_plain_tensors", "parameter_bytes", "twin"]

_LARGE = 2**20
"""Above this many bytes, an array that a module keeps as a plain attribute is lent to a copy that is only run here."""


def twin(model: nn.Module, *, numbers: bool = True, lend: bool = False) -> nn.Module:
    """Return a deep copy in eval mode that computes what the forward of ``model`` itself computes.

    The copy is not compiled, and has neither the covers and hooks of this package nor Accelerate's mixed precision
    around ``forward``. Activations that the model keeps as attributes are detached from their graph.

    Args:
        model: A bare module; not changed.
        numbers: If False, the parameters of the copy are on the device ``meta``, without memory.
        lend: If True, the copy reads large arrays and tensors that are plain attributes (a memory bank, a data set)
            where the model has them. It cannot write to arrays; see :func:`large_plain_tensors` for tensors.

    Raises:
        TypeError: The model holds something that cannot be copied, or a part that is its own copy.
    """
    try:
        made = copy.deepcopy(model, _copied_otherwise(model, numbers, lend))
    except Exception as error:  # attributes of the user's modules may raise anything
        raise TypeError(
            f"this {type(model).__name__} cannot be copied ({type(error).__name__}: {error}); keep what cannot be "
            "copied outside the model."
        ) from error
    _check_parted(model, made)
    for hooks in _hooks(made):
        for key in [key for key, hook in hooks.items() if is_our_hook(hook)]:
            del hooks[key]
    for original, module in zip(model.modules(), made.modules(), strict=True):
        _uncast(module)
        _uncompile(module, original)
    return made.eval()


def _copied_otherwise(model: nn.Module, numbers: bool, lend: bool) -> dict[int, Any]:
    """Return what stands in the copy for objects of the original, by their ids."""
    kept = list(_kept(model))
    computed = [one for one in kept if isinstance(one, Tensor) and not one.is_leaf]
    memo: dict[int, Any] = {id(one): one.detach().clone() for one in computed}
    memo |= {id(hook): hook for hooks in _hooks(model) for hook in hooks.values() if is_our_hook(hook)}
    if lend:
        memo |= {id(tensor): tensor.detach() for tensor in large_plain_tensors(model, kept)}
        memo |= {id(one): _read_only(one) for one in kept if _is_large_array(one)}
    if not numbers:
        plain = [p for p in model.parameters() if type(p) is nn.Parameter]
        memo |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in plain}
    return memo


def large_plain_tensors(model: nn.Module, kept: Iterable[Any] | None = None) -> list[Tensor]:
    """Return the tensors that a copy with ``lend`` shares with the model.

    Args:
        model: The original.
        kept: What its modules keep as plain attributes, if known.
    """
    found = [one for one in (_kept(model) if kept is None else kept) if type(one) is Tensor and one.is_leaf]
    large = [one for one in found if not one.requires_grad and one.layout is torch.strided and one.nbytes > _LARGE]
    own = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())} if large else set()
    return [one for one in large if _memory(one) not in own]


def parameter_bytes(model: nn.Module) -> int:
    """Return the size of all parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _hooks(model: nn.Module) -> Iterator[dict[int, Any]]:
    for module in model.modules():
        yield from module_hooks(module)


def _kept(model: nn.Module) -> Iterator[Any]:
    """Yield what modules keep as plain attributes, also inside containers and objects."""
    waiting: list[Any] = [vars(module) for module in model.modules()]
    seen: dict[int, Any] = {}  # an id is only unique while its object lives
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (nn.Module, type, types.ModuleType)):
            continue
        if isinstance(value, (str, bytes, int, float, complex)):
            continue
        seen[id(value)] = value
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif type(value).__reduce_ex__ is object.__reduce_ex__ and not isinstance(value, Tensor):
            waiting += vars(value).values() if hasattr(value, "__dict__") else ()
        yield value


def _is_large_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return value.nbytes > _LARGE and not value.dtype.hasobject


def _read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _check_parted(model: nn.Module, made: nn.Module) -> None:
    """Refuse a copy that holds modules, parameters or buffers of the original: it must be possible to change it."""
    parts = {*model.modules(), *model.parameters(), *model.buffers()}
    shared = next((part for part in (*made.modules(), *made.parameters(), *made.buffers()) if part in parts), None)
    if shared is not None:
        raise TypeError(
            f"this {type(model).__name__} cannot be copied: a {type(shared).__name__} in it is its own copy "
            "(__deepcopy__ returns it); keep it outside the model, or let __deepcopy__ return a copy."
        )


def _uncompile(module: nn.Module, original: nn.Module) -> None:
    """Undo ``original.forward = torch.compile(original.forward)`` in a copy, which would call the original's."""
    beneath = beneath_compiled(vars(module).get("forward"))
    if isinstance(beneath, types.MethodType) and beneath.__self__ is original:
        del module.forward
        if beneath.__func__ is not type(module).forward:
            module.forward = types.MethodType(beneath.__func__, module)


def _uncast(module: nn.Module) -> None:
    """Remove Accelerate's mixed precision from the forward of a module in a copy.

    Accelerate sets a ``forward`` on the instance that enters autocast and casts the outputs, and stores the original
    one. Its own function for the removal follows ``__wrapped__`` through all inner wrappers too.
    """
    operations = sys.modules.get("accelerate.utils.operations")
    forward = vars(module).get("forward")
    function = getattr(forward, "__func__", forward)
    casting = getattr(function, "__wrapped__", None)
    if operations is None or not isinstance(casting, operations.ConvertOutputsToFp32):
        return
    del module.forward
    beneath = vars(module).pop("_original_forward", None)
    if isinstance(beneath, types.MethodType) and beneath.__self__ is module:
        if beneath.__func__ is not type(module).forward:
            module.forward = beneath
    elif beneath is not None:
        module.forward = beneath
