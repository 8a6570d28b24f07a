"""What a training call shows of work that can be left out, and contexts in which single kinds of it are left out."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from torchboost.algorithms.unpad import masks_among
from torchboost.calibration.passes import Pass, Passes, numbers_of
from torchboost.core.algorithm import Attachment
from torchboost.core.forward import cover_forward
from torchboost.core.torch_private import DispatchMode, has_saved_tensor_hooks, is_view
from torchboost.measure.stopwatch import Clock

__all__ = [
    "ClockAt",
    "FrozenPart",
    "HostWaits",
    "Kept",
    "Padded",
    "Seen",
    "UselessMask",
    "same",
    "seen_in",
    "without_argument",
    "without_dropout",
]

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


@dataclass(frozen=True, kw_only=True)
class Padded:
    """A call of a module with padded sequences.

    Args:
        name: Of the module.
        module: The module.
        mask: True at tokens. Shape (batch, length).
    """

    name: str
    module: nn.Module
    mask: Tensor

    @property
    def share(self) -> float:
        """The share of padded positions."""
        return 1 - float(self.mask.float().mean())

    @property
    def columns(self) -> float:
        """The share of positions in columns that hold padding alone."""
        return 1 - float(self.mask.any(0).float().mean())


@dataclass(frozen=True, kw_only=True)
class UselessMask:
    """An argument of a module that may be left out: all of its entries are one, or all are zero.

    Args:
        name: Of the module.
        module: The module.
        argument: The name of the argument.
        tensor: The argument.
    """

    name: str
    module: nn.Module
    argument: str
    tensor: Tensor


@dataclass(kw_only=True)
class Seen:
    """What the modules of a model were called with, outer modules first."""

    padded: list[Padded] = field(default_factory=list)
    masks: list[UselessMask] = field(default_factory=list)


def seen_in(passes: Passes, root: str) -> Seen:
    """Look at the arguments of all modules in one pass.

    Args:
        passes: Passes of the model.
        root: The name of the model, with which those of its parts begin; empty without one.
    """
    seen = Seen()
    handles = [
        module.register_forward_pre_hook(partial(_look, seen, ".".join(filter(None, (root, name)))), with_kwargs=True)
        for name, module in passes.model.named_modules()
    ]
    try:
        with passes.prepared():
            passes.run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _look(seen: Seen, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(module.forward)
        arguments = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return
    if not seen.padded:
        masks = masks_among(module, args, kwargs)
        seen.padded += [Padded(name=name, module=module, mask=mask) for mask in masks]
    for argument, value in arguments.items():
        optional = signature.parameters[argument].default is None
        if optional and len(seen.masks) < _MOST_MASKS and _is_constant(value):
            seen.masks.append(UselessMask(name=name, module=module, argument=argument, tensor=value))


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
    pairs = [(first.outputs, second.outputs), (first.gradients, second.gradients)]
    return all(len(a) == len(b) and all(map(_alike, a, b)) for a, b in pairs)


def _alike(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    if first.shape != second.shape:
        return False
    before, after = numbers_of(first), numbers_of(second)
    if not torch.equal(before.isfinite(), after.isfinite()):
        return False
    before, after = before.nan_to_num(), after.nan_to_num()
    difference = float(torch.linalg.vector_norm(after - before))
    return difference <= _EQUAL * float(torch.linalg.vector_norm(before))


class Kept(TorchFunctionMode):
    """Inside of it autograd keeps what checkpoints with ``use_reentrant=False`` would compute again.

    Autograd hands a tensor that it saves to the innermost hooks only. Functions inside a checkpoint, or inside
    ``save_on_cpu``, get hooks here that keep it.

    Args:
        count: Only count, and change nothing.

    Attributes:
        bytes: Of the results of functions inside checkpoints: about what is kept then.
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
            with saved_tensors_hooks(Tensor.detach, _itself):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self.bytes += sum(r.nbytes for r in _tensors(result) if r.requires_grad and not is_view(r))
        return result


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class FrozenPart(TorchFunctionMode):
    """Looks for the function of a forward pass that first uses a trained tensor.

    Args:
        frozen: The frozen parameters.

    Attributes:
        calls: How many functions were called before it.
        used: Frozen parameters that were used until then -> how many entries they have.
    """

    def __init__(self, frozen: Sequence[Tensor]) -> None:
        super().__init__()
        self._frozen = {id(parameter): parameter.numel() for parameter in frozen}
        self._found, self.calls = False, 0
        self.used: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of a function of torch."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._found:
            return result
        tensors, results = [*_tensors(args), *_tensors(kwargs)], [*_tensors(result)]
        trained = any(tensor.requires_grad for tensor in tensors)
        if trained and any(tensor.requires_grad for tensor in results):
            self._found = True
            return result
        self.calls += 1
        if results and not trained:  # to read an attribute of a parameter is not to use it
            self.used |= {id(t): self._frozen[id(t)] for t in tensors if id(t) in self._frozen}
        return result


class ClockAt(TorchFunctionMode):
    """Reads a clock when it is entered, and after some functions.

    Args:
        clock: The clock.
        calls: The number of functions.

    Attributes:
        seconds: Between the two readings.
    """

    def __init__(self, clock: Clock, calls: int) -> None:
        super().__init__()
        self._clock, self._left, self.seconds = clock, calls, 0.0

    def __enter__(self) -> Self:
        """Read the clock."""
        super().__enter__()
        self._began = self._clock()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of a function of torch."""
        if not self._left:
            self.seconds = self._clock() - self._began
        self._left -= 1
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results of a function of torch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


class HostWaits(DispatchMode):
    """Counts the operators in which the host waits for the device.

    These are readings of a number, such as ``.item()``, copies to the CPU, and functions whose result has a shape that
    depends on numbers, such as an index of booleans.

    Args:
        device: Type of the device.

    Attributes:
        places: Where the host waited, as ``file:line function`` -> how many times.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self.places: dict[str, int] = {}

    @property
    def count(self) -> int:
        """How many times the host waited."""
        return sum(self.places.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of an operator."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._waits(func.overloadpacket.__name__, args, kwargs, result):
            place = _place()
            self.places[place] = self.places.get(place, 0) + 1
        return result

    def _waits(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> bool:
        given = [tensor for tensor in _tensors(args) if tensor.device.type == self._device]
        if not given:
            return False
        if name in _COPIES:
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            return waits and isinstance(result, Tensor) and result.device.type == "cpu"
        if name in ("index", "index_put", "index_put_", "_unsafe_index"):
            return any(tensor.dtype is torch.bool for tensor in _tensors(args[1]))
        return name in _WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None)


def _place() -> str:
    """Return the innermost line that is neither of torch nor of torchboost."""
    for frame, line in traceback.walk_stack(None):
        file = Path(frame.f_code.co_filename)
        if _HOME in file.parents:
            if file.name in ("passes.py", "trial.py"):
                break
        elif _TORCH not in file.parents and not file.name.startswith("<"):
            return f"{file.name}:{line} {frame.f_code.co_name}"
    return "the backward pass"


@contextmanager
def without_dropout(passes: Passes) -> Iterator[None]:
    """Let passes compute with dropout at zero."""
    passes.without_dropout = True
    try:
        yield
    finally:
        passes.without_dropout = False
