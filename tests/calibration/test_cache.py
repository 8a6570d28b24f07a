"""Choices are kept under a key that changes with everything that they depend on, and with nothing else."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from torchboost.algorithms import Autocast, Compile
from torchboost.calibration.cache import ChoiceCache, key_of
from torchboost.calibration.choice import Choice, Machine, Verdict
from torchboost.measure.evidence import Interval

MACHINE = Machine(processor="a", threads=2, device="cpu", torch="2.13", torchboost="1")


@dataclass
class Config:
    """A configuration as transformers and nanoGPT have them."""

    heads: int = 2
    attention: str = "sdpa"
    dropout: float = 0.1
    path: str = "/runs/2026-11-22"


class Net(nn.Module):
    """A network with everything that a key looks at."""

    def __init__(self, scale: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)
        self.scale = scale
        self.temperature = 0.7
        self.run_name = "/runs/2026-11-22"
        self.config = Config()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3))) * self.scale


class Sibling(Net):
    """Another class with the same structure."""


def edited(self: Net, x: Tensor) -> Tensor:
    return self.head(self.norm(self.conv(x)).relu().mean((2, 3))) * self.scale


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **({"lr": 0.1} | options))


def key(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **other: Any) -> str:
    settings: dict[str, Any] = {"candidates": [Autocast(), Compile()], "machine": MACHINE, **other}
    inputs = settings.pop("inputs", ((torch.zeros(2, 3, 8, 8),), {"mask": None}))
    return key_of(model, optimizer or adamw(model), inputs, **settings)


def plain() -> str:
    return key(Net())


def changed(change: Callable[[Net], object]) -> str:
    """Return the key of a network after a change to it, with an optimizer that was built before."""
    model = Net()
    optimizer = adamw(model)
    result = change(model)
    return key(result if isinstance(result, nn.Module) and result is not model else model, optimizer)


def with_values(model: Net) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(3)


def test_what_does_not_change_the_work_of_a_step_does_not_count():
    changes: list[Callable[[Net], object]] = [
        with_values,
        lambda net: setattr(net, "temperature", 0.9),
        lambda net: setattr(net, "run_name", "/runs/another-day"),
        lambda net: setattr(net.config, "path", "somewhere/else"),
        lambda net: setattr(net.config, "dropout", 0.2),
        lambda net: setattr(net.norm, "momentum", 0.2),
        lambda net: setattr(net, "_private", 3),
    ]
    assert {changed(change) for change in changes} | {key(copy.deepcopy(Net()))} == {plain()}
    nets = [Net(), Net()]
    for net in nets:  # an address says only that there is one
        net.origin, net.config.original = id(net), hash(object()) << 20
    assert len({key(net) for net in nets} | {plain()}) == 2


def test_the_structure_of_the_model_counts():
    changes: dict[str, Callable[[Net], object]] = {
        "integer": lambda net: setattr(net, "scale", 3),
        "zero": lambda net: setattr(net, "temperature", 0.0),
        "flag": lambda net: setattr(net, "flag", True),
        "configuration": lambda net: setattr(net.config, "heads", 4),
        "name": lambda net: setattr(net.config, "attention", "eager"),
        "no dropout": lambda net: setattr(net.config, "dropout", 0.0),
        "shared": lambda net: setattr(net, "other", net.head),
        "norm": lambda net: setattr(net, "norm", nn.SyncBatchNorm(4)),
        "padding": lambda net: setattr(net, "conv", nn.Conv2d(3, 4, 3, padding=1)),
        "dilation": lambda net: setattr(net, "conv", nn.Conv2d(3, 4, 3, dilation=2)),
        "width": lambda net: setattr(net, "head", nn.Linear(4, 3)),
        "bias": lambda net: setattr(net, "head", nn.Linear(4, 2, bias=False)),
        "weight norm": lambda net: setattr(net, "head", nn.utils.parametrizations.weight_norm(net.head)),
        "no child": lambda net: net.add_module("none", None),
        "parameter": lambda net: net.register_parameter("more", nn.Parameter(torch.zeros(1))),
        "buffer": lambda net: net.register_buffer("more", torch.zeros(1)),
        "frozen": lambda net: net.head.requires_grad_(False),
        "bfloat16": lambda net: net.head.to(torch.bfloat16),
        "meta": lambda net: net.head.to("meta"),
        "channels last": lambda net: net.to(memory_format=torch.channels_last),
        "eval": lambda net: net.eval(),
        "eval of one": lambda net: net.norm.eval(),
        "compile": lambda net: net.compile(backend="eager"),
        "forward": lambda net: setattr(net, "forward", edited.__get__(net)),
        "torch.compile": lambda net: torch.compile(net, backend="eager"),
        "inside": lambda net: nn.Sequential(net),
        "class": lambda net: Sibling(),
        "built-in": lambda net: setattr(net, "kept", torch.relu),
        "another": lambda net: setattr(net, "kept", torch.sigmoid),
        "function": lambda net: setattr(net, "kept", nn.functional.relu),
        "lambda": lambda net: setattr(net, "kept", lambda x: x),
        "product": lambda net: setattr(net, "kept", lambda x: x @ x.t()),
        "type": lambda net: setattr(net, "kept", nn.BatchNorm2d),
        "other type": lambda net: setattr(net, "kept", nn.LayerNorm),
        "precision": lambda net: setattr(net, "kept", torch.bfloat16),
        "other precision": lambda net: setattr(net, "kept", torch.float32),
        "dictionary": lambda net: setattr(net, "kept", {"layers": 1}),
        "larger": lambda net: setattr(net, "kept", {"layers": 50}),
    }
    found: dict[str, str] = {plain(): "none"}
    for name, change in changes.items():
        value = changed(change)
        assert value == changed(change), name
        assert found.setdefault(value, name) == name
    relu, gelu = (nn.TransformerEncoderLayer(4, 2, 8, activation=name) for name in ("relu", "gelu"))
    assert key(relu) != key(gelu)


def test_the_instructions_of_forward_count(monkeypatch):
    before = plain()
    monkeypatch.setattr(Net, "forward", edited)
    assert plain() != before


def test_shared_modules_and_parameters_are_not_separate_ones():
    def stack(sharing: str) -> nn.Sequential:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        if sharing == "weight":
            second.weight = first.weight
        return nn.Sequential(first, first if sharing == "module" else second)

    stacks = [nn.Sequential(nn.Linear(4, 4)), *map(stack, ("none", "weight", "module"))]
    assert len({*map(key, stacks)}) == 4


def test_what_counts_of_the_optimizer():
    model = Net()
    parameters = list(model.parameters())
    for options in ({"lr": 0.2}, {"lr": 1}, {"betas": (0.8, 0.9)}, {"eps": 1e-6}, {"weight_decay": 3.0}):
        assert key(model, adamw(model, **options)) == plain(), options
    different: list[dict[str, Any]] = [
        *({"weight_decay": 0}, {"betas": (0.0, 0.9)}, {"amsgrad": True}, {"maximize": True}, {"foreach": True}),
        *({"fused": True}, {"lr": torch.tensor(0.1)}),
    ]
    others = [
        *(adamw(model, **options) for options in different),
        torch.optim.Adam(parameters, lr=0.1, weight_decay=0.01),
        torch.optim.SGD(parameters, lr=0.1),
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        adamw(model.head),
        torch.optim.AdamW(parameters[::-1], lr=0.1),
        torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}], lr=0.1),
        torch.optim.AdamW([{"params": parameters, "centralize": True}], lr=0.1),
        torch.optim.LBFGS(parameters, max_iter=3),
        torch.optim.LBFGS(parameters, max_iter=4),
    ]
    assert len({plain(), *(key(model, other) for other in others)}) == len(others) + 1


def test_schedules_steps_and_options_without_a_name_do_not_count():
    model = Net()
    optimizers = [adamw(model) for _ in range(4)]
    LambdaLR(optimizers[0], lambda step: 0.0)
    OneCycleLR(optimizers[1], 1.0, 10)
    optimizers[2].param_groups[0][5] = 1
    model(torch.zeros(2, 3, 8, 8)).sum().backward()
    optimizers[3].step()
    assert {key(model, optimizer) for optimizer in optimizers} == {plain()}


Point = namedtuple("Point", "x y")


@dataclass
class Batch:
    """A batch as an object."""

    x: Tensor
    y: Any = None


IMAGE = torch.zeros(2, 3, 4, 4)
DIFFERENT: list[Any] = [
    *((), (IMAGE,), [IMAGE], IMAGE, (IMAGE.double(),), (torch.zeros(3, 3, 4, 4),)),
    (IMAGE.to(memory_format=torch.channels_last),),
    (IMAGE.to("meta"),),
    (torch.zeros(2, 3, 4, 4, requires_grad=True),),
    *((IMAGE, IMAGE), (IMAGE, torch.zeros(2, 3, 4, 4)), (IMAGE, None), (IMAGE, True), (IMAGE, False), (IMAGE, 1)),
    *((IMAGE, "a"), (IMAGE, SimpleNamespace()), {"x": IMAGE}, {"y": IMAGE}, {0: IMAGE}, {"0": IMAGE}),
    *(OrderedDict(x=IMAGE), UserDict(x=IMAGE), {"x": {"x": IMAGE}}, Point(IMAGE, IMAGE)),
    *(Batch(IMAGE), Batch(IMAGE, IMAGE), torch.eye(3).to_sparse()),
    torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
]


def test_the_form_of_the_inputs_counts_and_their_values_do_not():
    model = Net()
    assert len({key(model, inputs=inputs) for inputs in DIFFERENT}) == len(DIFFERENT)
    for one, other in (
        (torch.zeros(2), torch.ones(2)),
        ({"x": IMAGE, "y": None}, {"y": None, "x": IMAGE}),
        ({"x": 1, 1: "a", None: 2.0}, {None: 3.0, 1: "b", "x": 2}),
        ((3, "a"), (4, "b")),
        (Batch(IMAGE, 3), Batch(IMAGE + 1, 4)),
    ):
        assert key(model, inputs=one) == key(model, inputs=other)


class Passing(UserDict[str, Tensor]):
    """A mapping that makes its entries in passing, so that one may have the address of another before it."""

    def __getitem__(self, key: str) -> Tensor:
        return torch.zeros(len(key))


def test_entries_that_are_made_in_passing_are_not_taken_for_one_another():
    one, other = (Passing(dict.fromkeys(keys, IMAGE)) for keys in (("a", "b"), ("a", "bb")))
    assert key(Net(), inputs=one) == key(Net(), inputs=one) != key(Net(), inputs=other)


def test_candidates_machine_and_conditions_count():
    model = Net()
    others: list[dict[str, Any]] = [
        {},
        *({"candidates": each} for each in ([], [Autocast()], [Compile(), Autocast()])),
        {"candidates": [Autocast(dtype="float16"), Compile()]},
        {"candidates": [Autocast(), Compile(dynamic=True)]},
        *({"machine": MACHINE.model_copy(update={n: "x"})} for n in ("processor", "device", "torch", "torchboost")),
        {"machine": MACHINE.model_copy(update={"threads": 3})},
        *({"conditions": each} for each in ({"steps": 2}, {"steps": 4}, {"total": 2}, {"share": 0.5}, {"share": 0.25})),
    ]
    assert len({key(model, **other) for other in others}) == len(others)
    assert key(model, conditions={"a": 1, "b": 2}) == key(model, conditions={"b": 2, "a": 1})


def test_what_changes_kernels_in_the_process_counts(monkeypatch):
    before, found = plain(), []
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        for value in ("31", "32"):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                found.append(plain())
    monkeypatch.setenv("ANOTHER", str(os.getpid()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the switch warns of Intel GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            found.append(plain())
    for precision in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=precision):
            found.append(plain())
    torch.use_deterministic_algorithms(True)
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    try:
        found.append(plain())
        torch.use_deterministic_algorithms(False)
        found.append(plain())
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.mkldnn.conv.fp32_precision = "none"
    assert plain() == before
    assert len({before, *found}) == len(found) + 1


def test_a_key_is_the_same_in_every_process():
    code = "from tests.calibration.test_cache import plain; print(plain())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == plain()


class Untouchable(nn.Module):
    """A network that must not be called or copied."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        pytest.fail("called")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        pytest.fail("copied")


def test_nothing_is_called_copied_or_read():
    model = Untouchable().to("meta")  # has no values to read
    assert key(model, inputs=(torch.zeros(2, device="meta"),))
    lazy = nn.Sequential(nn.LazyLinear(3))
    optimizer = torch.optim.SGD(lazy.parameters(), lr=0.1)
    assert key(lazy, optimizer) == key(lazy, optimizer)


class OddText(str):
    """A text with a method of its own."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        raise RuntimeError


class Refuses(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("closed")


def ring() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(5000):
        made = [made]
    return made


def test_odd_attributes_and_inputs_are_no_obstacle():
    for value in (OddText("name"), ring(), deep(), namedtuple("Pair", "x")(ring()), Refuses(), [0] * 1000):
        model = Net()
        model.odd = value
        inputs = ((value,), {"again": value})
        assert key(model, inputs=inputs) == key(model, inputs=inputs)


def test_a_choice_comes_back_with_the_cache_as_its_source(tmp_path, monkeypatch):
    verdict = Verdict(lever="autocast", kept=True, reason="faster", ratio=Interval(low=1.1, mid=1.2, high=1.3), pairs=8)
    infinite = {"ratio": Interval(low=float("-inf"), mid=1.0, high=float("inf")), "step_seconds": 1e-300}
    monkeypatch.setenv("TORCHBOOST_CACHE", str(tmp_path))
    for other in ({}, infinite, {"verdicts": (), "peak_bytes": 1 << 60}):
        choice = Choice(**({"verdicts": (verdict,), "source": "trial", "machine": MACHINE} | other))
        ChoiceCache().store(plain(), choice)
        assert ChoiceCache(tmp_path / "choices").load(plain()) == choice.model_copy(update={"source": "cache"})
    monkeypatch.setenv("TORCHBOOST_CACHE", "off")
    assert ChoiceCache().folder is None
    assert ChoiceCache().load(plain()) is None
