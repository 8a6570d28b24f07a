"""A small cache on disk of measured choices, so that the second start of a training does not measure again."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchboost.calibration.choice import Choice, Machine
from torchboost.core.algorithm import Algorithm
from torchboost.core.files import Record, load_record, record_folder, store_record
from torchboost.core.hardware import kernel_switches
from torchboost.core.torch_private import buffer_slots, child_slots, compiled_call, parameter_slots
from torchboost.core.wrapping import hookable

__all__ = ["ChoiceCache", "key_of"]

_MOST_ENTRIES, _DEEPEST = 64, 8
"""Longest container that is described entry by entry, and the deepest nesting."""
_ADDRESSES = 1 << 40
"""Integers from here on are addresses and hashes, which differ in each process."""
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def key_of(
    model: nn.Module,
    optimizer: Optimizer,
    inputs: Any,
    *,
    candidates: Iterable[Algorithm],
    machine: Machine,
    conditions: Mapping[str, Any] | None = None,
    others: Sequence[Optimizer] = (),
) -> str:
    """Return a key that two runs share if a choice of levers that was measured in one is right for the other.

    It is the SHA-256 checksum of a description in plain values:

    - each module: its type, its plain attributes and its configuration, the instructions of its ``forward``,
      and shape, precision, memory format, device and ``requires_grad`` of each parameter and buffer;
    - each optimizer: its class, the options of its groups, and which parameters are in which group;
    - the inputs: containers and dataclasses of tensors, other objects by their type;
    - the candidates with their settings, the conditions, the machine, and the switches of the process that change
      kernels.

    Values of tensors and learning rates do not count. Of other numbers that are not integers, such as a weight decay,
    it counts whether they are 0.

    Cost: some milliseconds for a ResNet-50. Nothing is called or copied, and no values of tensors are read.

    Args:
        model: Before any lever of the trial changes it.
        optimizer: The optimizer over its parameters.
        inputs: What the model is called with, such as ``(args, kwargs)``.
        candidates: The levers of the trial with their settings, in its order.
        machine: Where the trial takes place: ``Machine.of(device)``.
        conditions: What else the choice depends on, by name, such as the length of the run.
        others: More optimizers over its parameters.

    Returns:
        64 hexadecimal digits.
    """
    walk = _Description()
    autocast = [
        [device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
        for device in sorted({p.device.type for p in model.parameters()})
        if torch.amp.is_autocast_available(device)
    ]
    description = [
        [[name, walk.module(module)] for name, module in model.named_modules()],
        [walk.optimizer(one) for one in (optimizer, *others)],
        walk.value(inputs, exact=False),
        [repr(candidate) for candidate in candidates],
        sorted(machine.model_dump().items()),
        sorted((conditions or {}).items()),
        [kernel_switches(), autocast],
    ]
    return hashlib.sha256(repr(description).encode()).hexdigest()


class _Description:
    """Describes objects. What comes again is named by its number, so that sharing counts and cycles end."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, Any]] = {}  # keeps the objects, so that no other one gets their address

    def module(self, module: nn.Module) -> list[Any]:
        forward = vars(module).get("forward", type(module).forward)
        attributes = sorted((name, value) for name, value in vars(module).items() if name[0] != "_")
        tensors = {**parameter_slots(module), **buffer_slots(module)}
        return [
            _kind(module),
            [*child_slots(module)],
            _code(forward),
            compiled_call(module) is not None,
            [[name, self.value(value)] for name, value in (*attributes, *tensors.items())],
        ]

    def optimizer(self, optimizer: Optimizer) -> list[Any]:
        inner = hookable(optimizer)
        switches = {name: value for name, value in vars(inner).items() if isinstance(value, bool) and name[0] != "_"}
        groups = [
            [
                isinstance(group.get("lr"), Tensor),
                # A schedule adds numbers of its own to a group.
                self.value({k: v for k, v in group.items() if k != "lr" and (k in inner.defaults or v is True)}),
                [self.value(parameter) for parameter in group["params"]],
            ]
            for group in optimizer.param_groups
        ]
        return [_kind(optimizer), _kind(inner), self.value(switches), groups]

    def value(self, value: Any, *, exact: bool = True, depth: int = 0) -> Any:
        """Describe a value.

        Args:
            value: Anything.
            exact: Whether integers and names count. Otherwise only their types do.
            depth: How many containers it is in.
        """
        try:
            return self._value(value, exact, depth)
        except Exception as error:  # classes of users may raise anything
            return [_kind(value), type(error).__name__]

    def _value(self, value: Any, exact: bool, depth: int) -> Any:
        if value is None or isinstance(value, (bool, torch.dtype)):
            return repr(value)
        if isinstance(value, (int, float, str)):
            return _plain(value) if exact else type(value).__name__
        if isinstance(value, (type, *_FUNCTIONS)):
            return [getattr(value, "__qualname__", ""), None if isinstance(value, type) else _code(value)]
        if id(value) in self._numbers:
            return self._numbers[id(value)][0]
        self._numbers[id(value)] = len(self._numbers), value
        if isinstance(value, Tensor):
            return _tensor(value)
        entries = _entries(value) if depth < _DEEPEST else None
        if entries is None or len(entries) > _MOST_ENTRIES:
            return [_kind(value), None if entries is None else len(entries)]
        return [_kind(value), [[name, self.value(each, exact=exact, depth=depth + 1)] for name, each in entries]]


def _entries(value: Any) -> list[tuple[str, Any]] | None:
    """Return the entries of a container, a dataclass or a configuration; None for another object."""
    if isinstance(value, (list, tuple)):
        return [("", entry) for entry in value]
    if isinstance(value, Mapping):
        named = [(repr(k), entry) for k, entry in value.items() if k is None or isinstance(k, (bool, int, str))]
        return sorted(named, key=lambda entry: entry[0])
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    if hasattr(type(value), "to_dict"):
        return sorted((name, entry) for name, entry in vars(value).items() if name[0] != "_")
    return None


def _plain(value: float | str) -> str:
    if isinstance(value, str):
        return str.__str__(value) if str.isidentifier(value) else "text"
    if isinstance(value, int):
        return "address" if abs(value) >= _ADDRESSES else int.__repr__(value)
    return "0" if value == 0 else "not 0"


def _tensor(tensor: Tensor) -> list[Any]:
    if is_lazy(tensor) or tensor.is_nested:
        return [_kind(tensor)]
    memory = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    form = [_kind(tensor), *tensor.shape, tensor.dtype, memory, tensor.device, tensor.requires_grad]
    return [str(each) for each in form]


def _code(function: Any) -> list[Any] | None:
    """Return what a function does, without the functions that it calls; None if it is not in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else _instructions(code)


def _instructions(code: CodeType) -> list[Any]:
    constants = [_instructions(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _Entry(Record):
    choice: Choice


class ChoiceCache:
    """Measured choices on disk, one JSON file for each key. No fault of the disk reaches the training.

    See :func:`~torchboost.core.files.store_record` and :func:`~torchboost.core.files.load_record`.

    Args:
        folder: The folder of the entries. By default ``choices`` in the folder that the environment variable
            ``TORCHBOOST_CACHE`` names, otherwise in ``torchboost`` in ``XDG_CACHE_HOME``, otherwise in
            ``~/.cache/torchboost``. If ``TORCHBOOST_CACHE`` is empty or ``off``, nothing is loaded or stored.

    Attributes:
        folder: The folder of the entries; None if nothing is loaded or stored.

    Example:
        >>> cache = ChoiceCache("choices")
        >>> cache.load("0" * 64) is None
        True
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder: Path | None = record_folder("choices") if folder is None else Path(folder).absolute()

    def load(self, key: str) -> Choice | None:
        """Return the choice stored under what :func:`key_of` returned, with ``"cache"`` as its source; None without."""
        entry = load_record(self.folder, key, _Entry)
        return None if entry is None else entry.choice.model_copy(update={"source": "cache"})

    def store(self, key: str, choice: Choice) -> None:
        """Keep a measured choice."""
        store_record(self.folder, _Entry(key=key, choice=choice))
