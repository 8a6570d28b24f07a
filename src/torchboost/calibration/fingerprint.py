"""Describe in plain values what the speed of a training step depends on. Nothing is computed, copied or called."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchboost.calibration.choice import Machine
from torchboost.core.algorithm import Algorithm
from torchboost.core.kernels import kernel_switches
from torchboost.core.torch_private import buffer_slots, child_slots, compiled_call, parameter_slots
from torchboost.core.wrapping import hookable

__all__ = ["Condition", "Description", "describe"]

Description: TypeAlias = "bool | int | str | Sequence[Description] | None"
"""What JSON can hold, without objects, whose order would matter, and numbers that are not integers."""

Condition: TypeAlias = bool | int | float | str | None
"""What else a choice depends on."""

_MOST_ENTRIES = 64
"""Longest list in an attribute that is described entry by entry."""

_DEEPEST = 16
"""Deepest nesting of containers that is described."""

_ADDRESSES = 1 << 40
"""Integers from here on are addresses and hashes, which differ in each process."""

_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType)

_FIRST = itemgetter(0)

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def describe(
    model: nn.Module,
    optimizer: Optimizer,
    inputs: Any,
    candidates: Iterable[Algorithm],
    machine: Machine,
    conditions: Mapping[str, Condition],
    others: Sequence[Optimizer] = (),
) -> Description:
    """Describe a training step. Two descriptions are equal if the same choice of levers is right for both.

    Weights do not count, and learning rates do not. Of other numbers that are not integers it counts whether they are
    0, because only this changes the work of a step. Paths and other texts do not count, unless they are in
    ``extra_repr``. See :func:`torchboost.calibration.cache.key_of` for the arguments.
    """
    walk = _Walk()
    return [
        ["model", walk.modules(model)],
        *(["optimizer", walk.optimizer(optimizer)] for optimizer in (optimizer, *others)),
        ["inputs", walk.inputs(inputs, ())],
        ["candidates", [_settings(candidate) for candidate in candidates]],
        ["machine", [[name, _exact(value)] for name, value in sorted(machine.model_dump().items())]],
        ["process", _process(walk.kinds_of_devices())],
        ["conditions", [[name, _exact(value)] for name, value in sorted(conditions.items())]],
    ]


class _Walk:
    """Describes objects in turn. A tensor that comes again is named by its number, so that sharing counts."""

    def __init__(self) -> None:
        # The objects are kept, because a mapping may make its entries in passing, and a number may be given again.
        self._tensors: dict[int, tuple[int, Tensor]] = {}
        self._records: dict[int, tuple[int, Any]] = {}
        self._codes: dict[CodeType, int] = {}
        self._record_types: dict[type, bool] = {}
        self._devices: dict[torch.device, int] = {}

    def kinds_of_devices(self) -> list[str]:
        """The types of the devices so far, sorted."""
        return sorted({device.type for device in self._devices})

    def modules(self, root: nn.Module) -> Description:
        """One entry for each module, breadth first. Children are named by the number of their entry."""
        found, numbers = [root], {id(root): 0}
        entries: list[Description] = []
        for module in found:  # grows on the way
            children: list[Description] = []
            for name, child in child_slots(module).items():
                if child is not None and id(child) not in numbers:
                    numbers[id(child)] = len(found)
                    found.append(child)
                children.append([name, None if child is None else numbers[id(child)]])
            entries.append([*self._module(module), children])
        return entries

    def _module(self, module: nn.Module) -> list[Description]:
        try:
            said = _ADDRESS.sub("", module.extra_repr())
        except Exception as error:  # a user's method, and not what is measured
            said = type(error).__name__
        return [
            _kind(module),
            said,
            self._code(vars(module).get("forward", type(module).forward)),
            compiled_call(module) is not None,
            self._attributes(module),
            [[name, self._tensor(tensor)] for name, tensor in parameter_slots(module).items()],
            [[name, self._tensor(tensor)] for name, tensor in buffer_slots(module).items()],
        ]

    def _attributes(self, module: nn.Module) -> Description:
        """The public attributes that change the work: plain values, functions, classes, precisions, configurations.

        ``extra_repr`` often leaves them out.
        """
        entries = []
        for name, value in vars(module).items():
            if name[0] != "_" and _is_plain(value):
                entries.append([name, _plain(value)])
            elif name[0] != "_" and isinstance(value, _NAMED):
                entries.append([name, [_name_of(value), None if isinstance(value, type) else self._code(value)]])
            elif isinstance(value, torch.dtype):
                entries.append([name, str(value)])
            elif name[0] != "_" and type(value) is dict:
                entries.append([name, _plain_entries(value)])
            elif self._is_record(type(value)):
                entries.append([name, self._record(value)])
        return sorted(entries, key=_FIRST)

    def _code(self, function: Any) -> Description:
        """What a function does, without the functions that it calls. None for a function that is not in Python."""
        code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
        if code is None:
            return None
        if code in self._codes:
            return self._codes[code]
        self._codes[code] = len(self._codes)
        return _instructions(code)

    def _is_record(self, kind: type) -> bool:
        """Whether objects of a class are configurations: dataclasses, and those that can be turned into a dict."""
        if kind not in self._record_types:
            self._record_types[kind] = dataclasses.is_dataclass(kind) or hasattr(kind, "to_dict")
        return self._record_types[kind]

    def _record(self, value: Any) -> Description:
        if id(value) in self._records:
            return self._records[id(value)][0]
        self._records[id(value)] = len(self._records), value
        held = getattr(value, "__dict__", {})
        return [_kind(value), [[name, _plain(v)] for name, v in sorted(held.items()) if _is_plain(v)]]

    def optimizer(self, optimizer: Optimizer) -> Description:
        """Classes, options and which parameters are in which group."""
        inner = hookable(optimizer)
        switches = {k: v for k, v in vars(inner).items() if isinstance(v, bool) and not k.startswith("_")}
        return [
            _kind(optimizer),
            _kind(inner),
            [[name, value] for name, value in sorted(switches.items())],
            [
                [
                    isinstance(group.get("lr"), Tensor),
                    _options(group, inner.defaults),
                    [self._tensor(parameter) for parameter in group["params"]],
                ]
                for group in optimizer.param_groups
            ],
        ]

    def inputs(self, value: Any, around: tuple[int, ...]) -> Description:
        """Tensors by shape, precision, layout and device; containers by their entries; others by their type."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if value is None or isinstance(value, bool):
            return value
        if id(value) in around:
            return "a cycle"
        if len(around) == _DEEPEST:
            return "deep"
        around = (*around, id(value))
        if isinstance(value, Mapping):
            entries = [[_kind(key), _name_of_key(key), self.inputs(entry, around)] for key, entry in value.items()]
            return [_kind(value), sorted(entries, key=itemgetter(0, 1))]
        if isinstance(value, (list, tuple)):
            return [_kind(value), [self.inputs(entry, around) for entry in value]]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return [_kind(value), [[name, self.inputs(getattr(value, name, None), around)] for name in names]]
        return _kind(value)

    def _tensor(self, tensor: Tensor | None) -> Description:
        if tensor is None:
            return None
        if id(tensor) in self._tensors:
            return self._tensors[id(tensor)][0]
        self._tensors[id(tensor)] = len(self._tensors), tensor
        if is_lazy(tensor) or tensor.is_nested:
            return [_kind(tensor)]
        plain = tensor.layout is torch.strided
        return [
            _kind(tensor),
            [size if type(size) is int else _kind(size) for size in tensor.shape],
            str(tensor.dtype),
            [*tensor.stride()] if plain else str(tensor.layout),
            [tensor.device.type, self._devices.setdefault(tensor.device, len(self._devices))],
            tensor.requires_grad,
        ]


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _name_of_key(key: Any) -> str:
    return str(key) if isinstance(key, (bool, int, str)) else ""


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        if depth == _DEEPEST or len(value) > _MOST_ENTRIES:
            return False
        return all(_is_plain(entry, depth + 1) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Description:
    """Describe an attribute: integers and names exactly, other numbers by whether they are 0, no other texts."""
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):
        return str(value) if str.isidentifier(value) else "text"
    if isinstance(value, float):
        return _zero_or_not(value)
    if isinstance(value, int) and abs(value) >= _ADDRESSES:
        return "address"
    return value


def _plain_entries(value: Mapping[Any, Any]) -> Description:
    """Describe the entries of a dictionary that have a name and a plain value, unless there are many."""
    if len(value) > _MOST_ENTRIES:
        return len(value)
    return sorted([key, _plain(entry)] for key, entry in value.items() if isinstance(key, str) and _is_plain(entry))


def _name_of(value: Any) -> str:
    """Return the full name of a function or a class."""
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', value.__name__)}"


def _zero_or_not(value: float) -> str:
    return "0" if value == 0 else "not 0"


def _options(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> Description:
    """The options of a group. A schedule adds numbers of its own to it, so only the optimizer's own ones count."""
    entries: list[Description] = []
    for name, value in sorted(item for item in group.items() if isinstance(item[0], str)):
        if name in ("params", "param_names", "lr"):
            continue
        if value is None or isinstance(value, (bool, str)):
            entries.append([name, value])
        elif name in defaults:
            entries.append([name, _option(value)])
    return entries


def _option(value: Any) -> Description:
    if isinstance(value, (list, tuple)):
        return [_option(entry) for entry in value]
    if isinstance(value, int) and value:
        return value
    if isinstance(value, (int, float)):
        return _zero_or_not(value)
    return _kind(value)


def _settings(candidate: Algorithm) -> Description:
    held = [field.name for field in dataclasses.fields(candidate)]  # pyright: ignore[reportArgumentType]
    return [candidate.name, _kind(candidate), [[name, _exact(getattr(candidate, name))] for name in held]]


def _exact(value: Any) -> Description:
    if isinstance(value, (list, tuple)):
        return [_exact(entry) for entry in value]
    if isinstance(value, float):
        return value.hex()
    return value if value is None or isinstance(value, (bool, int, str)) else _kind(value)


def _instructions(code: CodeType) -> Description:
    return [code.co_code.hex(), [*code.co_names], [_constant(value) for value in code.co_consts]]


def _constant(value: Any) -> Description:
    if isinstance(value, CodeType):
        return _instructions(value)
    if isinstance(value, tuple):
        return [_constant(entry) for entry in value]
    if isinstance(value, frozenset):
        return sorted(repr(entry) for entry in value)
    return repr(value)


def _process(devices: list[str]) -> Description:
    """The switches of this process that change kernels, and autocast."""
    autocast = [
        [device, torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))]
        for device in devices
        if torch.amp.is_autocast_available(device)
    ]
    return [*kernel_switches(), autocast]
