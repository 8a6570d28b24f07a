"""Containers of outputs keep their class, their attributes and their identity where nothing changes."""

from __future__ import annotations

import dataclasses
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.forward import with_tensors

HALF = torch.ones(2, dtype=torch.bfloat16)
Pair = namedtuple("Pair", ["first", "second"])


class Named(dict):
    def __init__(self, name: str, **entries: Any) -> None:
        super().__init__(**entries)
        self.name = name


class Two(tuple):
    def __new__(cls, a: Any, b: Any) -> Two:
        return super().__new__(cls, (a, b))


@dataclasses.dataclass
class Scaled:
    logits: Tensor
    scale: dataclasses.InitVar[float]
    built: int = dataclasses.field(init=False, default=0)

    def __post_init__(self, scale: float) -> None:
        self.logits = self.logits * scale
        self.built += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    logits: Tensor
    rest: tuple[Any, ...] = ()


def widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


def with_attribute() -> OrderedDict[str, Tensor]:
    made = OrderedDict(a=HALF)
    vars(made)["extra"] = 3
    return made


CASES: dict[str, tuple[Any, Any]] = {
    "list": ([HALF, 1], lambda v: v[0]),
    "tuple": ((1, HALF), lambda v: v[1]),
    "nested": ([{"a": (HALF,)}], lambda v: v[0]["a"][0]),
    "named tuple": (Pair(HALF, 1), lambda v: v.first),
    "tuple with its own constructor": (Two(HALF, 2), lambda v: v[0]),
    "max": (torch.max(HALF[None], 1), lambda v: v.values),
    "packed": (nn.utils.rnn.pack_sequence([HALF, HALF]), lambda v: v.data),
    "defaultdict": (defaultdict(list, a=HALF), lambda v: v["a"]),
    "dict with its own constructor": (Named("n", a=HALF), lambda v: v["a"]),
    "OrderedDict": (with_attribute(), lambda v: v["a"]),
    "UserDict": (UserDict(a=HALF), lambda v: v["a"]),
    "ChainMap": (ChainMap({}, {"a": HALF}), lambda v: v["a"]),
    "deque": (deque([HALF], maxlen=3), lambda v: v[0]),
    "dataclass with a constructor of its own": (Scaled(HALF, 2.0), lambda v: v.logits / 2),
    "frozen dataclass": (Frozen(HALF, (1, HALF)), lambda v: v.rest[1]),
}


def test_containers_keep_their_class() -> None:
    for value, read in CASES.values():
        before = read(value)
        made = with_tensors(value, widen)
        assert type(made) is type(value)
        assert made is not value
        assert torch.equal(read(made), before.float())
        assert read(made).dtype is torch.float32
        assert read(value).dtype is before.dtype is torch.bfloat16


def test_attributes_and_defaults_stay_and_constructors_do_not_run() -> None:
    assert with_tensors(CASES["dict with its own constructor"][0], widen).name == "n"
    assert with_tensors(with_attribute(), widen).extra == 3
    assert with_tensors(CASES["defaultdict"][0], widen)["new"] == []
    assert with_tensors(CASES["deque"][0], widen).maxlen == 3
    assert with_tensors(CASES["dataclass with a constructor of its own"][0], widen).built == 1


def test_what_has_nothing_to_change_or_is_not_understood_is_the_same_object() -> None:
    class Stubborn(dict):
        def __copy__(self) -> Any:
            raise TypeError("not this one")

    unchanged = [[torch.ones(2), {"a": 1}], Frozen(torch.ones(2)), Counter(a=1), HALF.shape, None, "text", Scaled]
    strange = [SimpleNamespace(a=HALF), MappingProxyType({"a": HALF}), {HALF}, Stubborn(a=HALF)]
    for value in (*unchanged, *strange):
        assert with_tensors(value, widen) is value


def test_what_is_not_understood_is_told() -> None:
    told: list[Any] = []
    hidden = SimpleNamespace(a=HALF)
    with_tensors([{"a": (hidden,)}, HALF], widen, told.append)
    assert [entry for entry in told if not isinstance(entry, int)] == [hidden]


def test_what_a_dataclass_made_of_its_fields_is_changed_too() -> None:
    @dataclasses.dataclass
    class Derived:
        a: Tensor

        def __post_init__(self) -> None:
            self.twice = self.a * 2

    assert with_tensors(Derived(HALF), widen).twice.dtype is torch.float32
