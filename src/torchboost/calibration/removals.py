"""Avoidable work that a training call shows, and contexts that skip single kinds of it."""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from torchboost.algorithms.unpad import marks_padding, masks_among
from torchboost.calibration.passes import Pass, Passes, relative
from torchboost.core.algorithm import Attachment
from torchboost.core.forward import cover_forward, tensors_in
from torchboost.core.torch_private import DispatchMode, has_saved_tensor_hooks, is_view

_EQUAL = 1e-4
"""Relative difference up to which two passes computed the same."""
_MOST_MASKS = 64
_HOME = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_WAITING = (
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "item"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
)
"""Operators whose result, or its shape, the host must know."""
_COPIES = ("_to_copy", "copy_")


class Padded(NamedTuple):
    """A call of a module with padded sequences. ``mask`` of shape (batch, length) is True at tokens."""

    name: str
    module: nn.Module
    mask: Tensor


class UselessMask(NamedTuple):
    """An argument of a module that may be omitted: all of its entries are one, or all are zero."""

    name: str
    module: nn.Module
    argument: str
    tensor: Tensor


class Seen(NamedTuple):
    """Findings in the arguments of the modules.

    Args:
        padded: The first call with padding of the outermost module that has one. None without.
        useless: Masks that may mask nothing.
        masked: Whether an argument tells where another one has padding, be there some or none.
    """

    padded: Padded | None
    useless: list[UselessMask]
    masked: bool


def seen_in(passes: Passes, root: str) -> Seen:
    """Look at the arguments of all modules in one pass, outer modules first. Names begin with ``root``, if any."""
    padded: Padded | None = None
    masks, masked = list[UselessMask](), False

    def look(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal padded, masked
        try:
            signature = inspect.signature(module.forward)
            arguments = signature.bind_partial(*args, **kwargs).arguments
        except (TypeError, ValueError):
            return
        if padded is None:
            padded = next((Padded(name, module, mask) for mask in masks_among(module, args, kwargs)), None)
        masked = masked or marks_padding(module, args, kwargs)
        for argument, value in arguments.items():
            if signature.parameters[argument].default is None and len(masks) < _MOST_MASKS and _is_constant(value):
                masks.append(UselessMask(name, module, argument, value))

    with ExitStack() as hooks:
        for name, module in passes.model.named_modules():
            hook = partial(look, ".".join(filter(None, (root, name))))
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        with passes.prepared():
            passes.run()
    return Seen(padded, masks, masked)


def _is_constant(value: Any) -> bool:
    """Whether a value is a tensor of zeros or of ones with two dimensions or more."""
    if type(value) is not Tensor or value.ndim < 2 or not value.numel() or value.requires_grad or value.is_complex():
        return False
    first = value.flatten()[0]
    return bool(((first == 0) | (first == 1)) & (value == first).all())


def without_argument(mask: UselessMask) -> Attachment:
    """Call a module with None in place of an argument."""
    signature = inspect.signature(mask.module.forward)

    def around(forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments[mask.argument] = None
        return forward(module, *bound.args, **bound.kwargs)

    return cover_forward(mask.module, around)


def same(first: Pass, second: Pass) -> bool:
    """Whether two passes gave the same outputs and gradients up to rounding."""
    if len(first.outputs) != len(second.outputs):
        return False
    pairs = zip([*first.outputs, *first.gradients], [*second.outputs, *second.gradients], strict=True)
    return all(a is b if a is None or b is None else relative(a, b) <= _EQUAL for a, b in pairs)


class Kept(TorchFunctionMode):
    """Inside of it autograd keeps tensors that checkpoints with ``use_reentrant=False`` would compute again.

    Autograd hands a tensor that it saves to the innermost hooks only. Functions inside a checkpoint, or inside
    ``save_on_cpu``, get hooks here that keep it.

    Args:
        count: Only count, and change nothing.

    Attributes:
        bytes: Of the results of functions inside checkpoints, about as many as are kept then.
    """

    def __init__(self, *, count: bool = False) -> None:
        super().__init__()
        self._count, self.bytes = count, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of a function of torch."""
        kwargs = kwargs or {}
        if not has_saved_tensor_hooks():
            return func(*args, **kwargs)
        if not self._count:
            with saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self.bytes += sum(r.nbytes for r in tensors_in(result) if r.requires_grad and not is_view(r))
        return result


@contextmanager
def each_end(model: nn.Module, look: Callable[[nn.Module, Any], object]) -> Iterator[None]:
    """Inside of it, ``look`` sees each module of a model when its call ends, with its output."""

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        look(module, output)

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(hook).remove)
        yield


class HostWaits(DispatchMode):
    """Counts the operators in which the host waits for a type of device.

    These are readings of a number, such as ``.item()``, copies to the CPU, and functions whose result has a shape that
    depends on numbers, such as an index of booleans.

    Attributes:
        places: Where the host waited, as ``file:line function`` -> how many times.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of an operator."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._waits(func.overloadpacket.__name__, args, kwargs, result):
            self.places[_place()] += 1
        return result

    def _waits(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> bool:
        given = [tensor for tensor in tensors_in(args) if tensor.device.type == self._device]
        if not given:
            return False
        if name in _COPIES:
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            return waits and isinstance(result, Tensor) and result.device.type == "cpu"
        if name in ("index", "index_put", "index_put_", "_unsafe_index"):
            return any(tensor.dtype is torch.bool for tensor in tensors_in(args[1]))
        return name in _WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None)


def _place() -> str:
    """Return the innermost line that is neither of torch nor of torchboost."""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        file = Path(frame.f_code.co_filename)
        if _HOME in file.parents:
            if file.name in ("passes.py", "trial.py"):
                break
        elif _TORCH not in file.parents and not file.name.startswith("<"):
            return f"{file.name}:{line} {frame.f_code.co_name}"
    return "the backward pass"
