"""The description changes with everything that a choice depends on, and with nothing else."""

from __future__ import annotations

import copy
import os
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
from torchboost.calibration.choice import Machine
from torchboost.calibration.fingerprint import Description, describe

MACHINE = Machine(processor="a", threads=2, device="cpu", torch="2.13", torchboost="1")
Pair = tuple[nn.Module, torch.optim.Optimizer]


@dataclass
class Config:
    """A configuration as transformers and nanoGPT have them."""

    heads: int = 2
    attention: str = "sdpa"
    dropout: float = 0.1
    path: str = "/runs/2026-11-22"


class Net(nn.Module):
    """A network with everything that a description looks at."""

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


def described(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **other: Any) -> Description:
    given: dict[str, Any] = {
        "inputs": ((torch.zeros(2, 3, 8, 8),), {"mask": None}),
        "candidates": [Autocast(), Compile()],
        "machine": MACHINE,
        "conditions": {},
    }
    return describe(model, optimizer or adamw(model), **(given | other))


def plain() -> Description:
    torch.manual_seed(0)
    return described(Net())


def changed(change: Callable[[Net], object]) -> Description:
    """Describe a network after a change to it, with an optimizer that was built before."""
    model = Net()
    optimizer = adamw(model)
    result = change(model)
    return described(result if isinstance(result, nn.Module) and result is not model else model, optimizer)


def with_values(model: Net) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(3)


@pytest.mark.parametrize(
    "change",
    [
        with_values,
        lambda net: setattr(net, "temperature", 0.9),
        lambda net: setattr(net, "run_name", "/runs/another-day"),
        lambda net: setattr(net.config, "path", "somewhere/else"),
        lambda net: setattr(net.config, "dropout", 0.2),
        lambda net: setattr(net, "_private", 3),
        copy.deepcopy,
    ],
)
def test_what_does_not_change_the_work_of_a_step_does_not_count(change):
    model = Net()
    result = change(model)
    assert described(result if isinstance(result, nn.Module) else model) == plain()


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "scale", 3),
        lambda net: setattr(net, "temperature", 0.0),
        lambda net: setattr(net, "flag", True),
        lambda net: setattr(net.config, "heads", 4),
        lambda net: setattr(net.config, "attention", "eager"),
        lambda net: setattr(net.config, "dropout", 0.0),
        lambda net: setattr(net, "other", net.head),
        lambda net: setattr(net, "norm", nn.SyncBatchNorm(4)),
        lambda net: setattr(net, "conv", nn.Conv2d(3, 4, 3, padding=1)),
        lambda net: setattr(net, "conv", nn.Conv2d(3, 4, 3, dilation=2)),
        lambda net: setattr(net.norm, "momentum", 0.2),
        lambda net: setattr(net, "head", nn.Linear(4, 3)),
        lambda net: setattr(net, "head", nn.Linear(4, 2, bias=False)),
        lambda net: setattr(net, "head", nn.utils.parametrizations.weight_norm(net.head)),
        lambda net: net.add_module("none", None),
        lambda net: net.register_parameter("more", nn.Parameter(torch.zeros(1))),
        lambda net: net.register_buffer("more", torch.zeros(1)),
        lambda net: net.head.requires_grad_(False),
        lambda net: net.head.to(torch.bfloat16),
        lambda net: net.head.to("meta"),
        lambda net: net.to(memory_format=torch.channels_last),
        lambda net: net.eval(),
        lambda net: net.norm.eval(),
        lambda net: net.compile(backend="eager"),
        lambda net: setattr(net, "forward", edited.__get__(net)),
        lambda net: torch.compile(net, backend="eager"),
        lambda net: nn.Sequential(net),
        lambda net: Sibling(),
    ],
)
def test_the_structure_of_the_model_counts(change):
    assert changed(change) != plain()


def test_addresses_and_hashes_do_not_count():
    nets = [Net(), Net()]
    for net in nets:
        net.origin, net.config.original = id(net), hash(object()) << 20
    assert described(nets[0]) == described(nets[1])


def test_the_instructions_of_forward_count(monkeypatch):
    before = plain()
    monkeypatch.setattr(Net, "forward", edited)
    assert plain() != before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.relu, torch.sigmoid),
        (nn.functional.relu, nn.functional.gelu),
        (lambda x: x, lambda x: x @ x.t()),
        (nn.BatchNorm2d, nn.LayerNorm),
        (torch.float32, torch.bfloat16),
        ({"layers": 1}, {"layers": 50}),
    ],
    ids=["built-in", "function", "lambda", "class", "precision", "dictionary"],
)
def test_what_a_module_keeps_as_an_attribute_counts(one, other):
    first, again, second = (
        changed(lambda net, value=value: setattr(net, "kept", value)) for value in (one, one, other)
    )
    assert first == again
    assert first != second
    assert plain() not in (first, second)


def test_the_activation_of_a_layer_of_torch_counts():
    relu, gelu = (nn.TransformerEncoderLayer(4, 2, 8, activation=name) for name in ("relu", "gelu"))
    assert described(relu) != described(gelu)


def test_shared_modules_and_parameters_are_not_separate_ones():
    def stack(sharing: str) -> nn.Sequential:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        if sharing == "weight":
            second.weight = first.weight
        return nn.Sequential(first, first if sharing == "module" else second)

    found = [str(described(stack(sharing))) for sharing in ("none", "weight", "module")]
    assert len(set(found)) == 3
    assert str(described(nn.Sequential(nn.Linear(4, 4)))) not in found


@pytest.mark.parametrize(
    "options", [{"lr": 0.2}, {"lr": 1}, {"betas": (0.8, 0.9)}, {"eps": 1e-6}, {"weight_decay": 3.0}]
)
def test_rates_do_not_count(options):
    model = Net()
    assert described(model, adamw(model, **options)) == plain()


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0},
        {"betas": (0.0, 0.9)},
        {"amsgrad": True},
        {"maximize": True},
        {"foreach": True},
        {"fused": True},
        {"lr": torch.tensor(0.1)},
    ],
)
def test_options_of_the_optimizer_count(options):
    model = Net()
    assert described(model, adamw(model, **options)) != plain()


def test_the_optimizer_and_its_groups_count():
    model = Net()
    parameters = list(model.parameters())
    others = [
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
    found = [str(described(model, optimizer)) for optimizer in others]
    assert len({*found, str(plain())}) == len(others) + 1


def test_a_schedule_does_not_count():
    model = Net()
    optimizer = adamw(model)
    LambdaLR(optimizer, lambda step: 0.0)
    assert described(model, optimizer) == plain()
    model = Net()
    optimizer = adamw(model)
    OneCycleLR(optimizer, 1.0, 10)
    assert described(model, optimizer) == plain()


def test_steps_that_were_taken_do_not_count():
    model = Net()
    optimizer = adamw(model)
    model(torch.zeros(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    assert described(model, optimizer) == plain()


Point = namedtuple("Point", "x y")


@dataclass
class Batch:
    """A batch as an object."""

    x: Tensor
    y: Any = None


IMAGE = torch.zeros(2, 3, 4, 4)
DIFFERENT: list[Any] = [
    (),
    (IMAGE,),
    [IMAGE],
    IMAGE,
    (IMAGE.double(),),
    (torch.zeros(3, 3, 4, 4),),
    (IMAGE.to(memory_format=torch.channels_last),),
    (IMAGE.to("meta"),),
    (torch.zeros(2, 3, 4, 4, requires_grad=True),),
    (IMAGE, IMAGE),
    (IMAGE, torch.zeros(2, 3, 4, 4)),
    (IMAGE, None),
    (IMAGE, True),
    (IMAGE, False),
    (IMAGE, 1),
    (IMAGE, "a"),
    (IMAGE, SimpleNamespace()),
    {"x": IMAGE},
    {"y": IMAGE},
    {0: IMAGE},
    {"0": IMAGE},
    OrderedDict(x=IMAGE),
    UserDict(x=IMAGE),
    {"x": {"x": IMAGE}},
    Point(IMAGE, IMAGE),
    Batch(IMAGE),
    Batch(IMAGE, IMAGE),
    torch.eye(3).to_sparse(),
    torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
]


def test_the_form_of_the_inputs_counts():
    model = Net()
    assert len({str(described(model, inputs=inputs)) for inputs in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.ones(2)),
        ({"x": IMAGE, "y": None}, {"y": None, "x": IMAGE}),
        ({"x": 1, 1: "a", None: 2.0}, {None: 3.0, 1: "b", "x": 2}),
        ((3, "a"), (4, "b")),
        (Batch(IMAGE, 3), Batch(IMAGE + 1, 4)),
    ],
)
def test_the_values_of_the_inputs_do_not_count(one, other):
    model = Net()
    assert described(model, inputs=one) == described(model, inputs=other)


def test_inputs_that_contain_themselves():
    loop: list[Any] = [IMAGE]
    loop.append(loop)
    assert described(Net(), inputs=loop) == described(Net(), inputs=loop)


class Passing(UserDict[str, Tensor]):
    """A mapping that makes its entries in passing, so that one may have the address of another before it."""

    def __getitem__(self, key: str) -> Tensor:
        return torch.zeros(2)


def test_entries_that_are_made_in_passing_are_not_taken_for_one_another():
    keys = [str(number) for number in range(50)]
    lasting = UserDict({key: torch.zeros(2) for key in keys})
    passing = Passing(dict.fromkeys(keys, torch.zeros(1)))
    entries = [str(described(Net(), inputs=inputs)) for inputs in (lasting, passing)]
    assert entries[0].replace("collections.UserDict", "") == entries[1].replace(f"{__name__}.Passing", "")


def test_candidates_machine_and_conditions_count():
    model = Net()
    others: list[dict[str, Any]] = [
        {},
        {"candidates": []},
        {"candidates": [Autocast()]},
        {"candidates": [Compile(), Autocast()]},
        {"candidates": [Autocast(dtype="float16"), Compile()]},
        {"candidates": [Autocast(), Compile(dynamic=True)]},
        *({"machine": MACHINE.model_copy(update={name: "other"})} for name in ("processor", "device", "torch")),
        {"machine": MACHINE.model_copy(update={"torchboost": "2"})},
        {"machine": MACHINE.model_copy(update={"threads": 3})},
        {"conditions": {"world_size": 2}},
        {"conditions": {"world_size": 4}},
        {"conditions": {"total_steps": 2}},
        {"conditions": {"share": 0.5}},
        {"conditions": {"share": 0.25}},
    ]
    assert len({str(described(model, **other)) for other in others}) == len(others)
    assert described(model, conditions={"a": 1, "b": 2}) == described(model, conditions={"b": 2, "a": 1})


@pytest.mark.parametrize(
    "name",
    ["ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "ONEDNN_DEFAULT_FPMATH_MODE"],
)
def test_environment_variables_count(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    found = [str(plain())]
    for value in ("1", "2"):
        monkeypatch.setenv(name, value)
        found.append(str(plain()))
    assert len(set(found)) == 3
    monkeypatch.setenv("ANOTHER", str(os.getpid()))
    assert str(plain()) == found[-1]


def test_flags_of_torch_count():
    before = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the switch warns of Intel GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            assert plain() != before
    with torch.autocast("cpu"):
        half = plain()
        assert half != before
    with torch.autocast("cpu", dtype=torch.float16):
        assert plain() not in (before, half)
    torch.use_deterministic_algorithms(True)
    try:
        assert plain() != before
    finally:
        torch.use_deterministic_algorithms(False)
    precision = torch.backends.mkldnn.conv
    assert precision.fp32_precision == "none"
    precision.fp32_precision = "bf16"
    try:
        assert plain() != before
    finally:
        precision.fp32_precision = "none"
    assert plain() == before


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_precision_of_matrix_products_counts(monkeypatch, precision):
    before = plain()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert plain() != before


def test_precisions_that_torch_cannot_name_together_are_described(monkeypatch):
    def mixed() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    before = plain()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    assert plain() != before


class Raises(nn.Linear):
    """A layer whose own description fails."""

    def extra_repr(self) -> str:
        raise RuntimeError("not now")


class Addressed(nn.Linear):
    """A layer whose own description names an address."""

    def extra_repr(self) -> str:
        return repr(object())


@pytest.mark.parametrize("layer", [Raises, Addressed])
def test_descriptions_of_users_may_fail_and_may_name_addresses(layer):
    keep = [layer(2, 2), layer(2, 2)]
    assert described(keep[0]) == described(keep[1])


def test_parameters_without_a_shape_yet():
    model = nn.Sequential(nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert described(model, optimizer) == described(model, optimizer)


class Untouchable(nn.Module):
    """A network that must not be called or copied."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        pytest.fail("called")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        pytest.fail("copied")


class Counting(torch.overrides.TorchFunctionMode):
    """Lists the functions of torch that run, except those that read the form of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in {"__get__", "stride", "get_device", "dim", "size"}:
            self.called.append(name)
        return func(*args, **(kwargs or {}))


def test_nothing_is_called_copied_or_read():
    model = Untouchable()
    optimizer = adamw(model)
    inputs = (torch.zeros(2, 3, 8, 8),)
    with Counting() as counting:
        describe(model, optimizer, inputs, [Autocast()], MACHINE, {})
    assert [name for name in counting.called if not name.startswith(("is_autocast", "get_autocast"))] == []
    on_meta = Untouchable().to("meta")  # has no values to read
    describe(on_meta, adamw(on_meta), (torch.zeros(2, device="meta"),), [], MACHINE, {})


class OddText(str):
    """A text with a method of its own."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        raise RuntimeError


def ring() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(5000):
        made = [made]
    return made


@pytest.mark.parametrize("value", [OddText("name"), ring(), deep(), namedtuple("Pair", "x")(ring())])
def test_odd_attributes_and_inputs_are_described(value):
    model = Net()
    model.odd = value
    assert described(model, inputs=((value,), {"again": value})) == described(
        model, inputs=((value,), {"again": value})
    )


def test_options_without_a_name_do_not_count():
    model = Net()
    optimizer = adamw(model)
    before = described(model, optimizer)
    optimizer.param_groups[0][5] = 1
    assert described(model, optimizer) == before
