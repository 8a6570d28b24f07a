"""A choice survives JSON and the disk, under a key of what the speed of a step depends on."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from torchboost.algorithms import Autocast, Compile
from torchboost.calibration.choice import Choice, Machine, Verdict, key_of, load_choice, store_choice
from torchboost.measure.evidence import Interval
from torchboost.measure.stopwatch import environment

MACHINE = Machine(processor="a", threads=2, device="cpu", torch="2.13", torchboost="1")
RATIO = Interval(low=1.1, mid=1.2, high=1.3)
VERDICTS = (
    Verdict(lever="autocast", kept=True, reason="1.2 times as fast", ratio=RATIO, pairs=8),
    Verdict(lever="compile", kept=False, reason="the run is too short"),
)
CHOICE = Choice(verdicts=VERDICTS, source="trial", seconds=1.5, step_seconds=0.01, ratio=RATIO, machine=MACHINE)


def test_it_survives_json_and_refuses_unknown_keys():
    assert Choice.model_validate_json(CHOICE.model_dump_json()) == CHOICE
    assert CHOICE.kept == {"autocast"}
    with pytest.raises(ValidationError):
        Choice.model_validate({**CHOICE.model_dump(), "more": 1})


def test_a_checkpoint_holds_a_choice_the_levers_or_neither():
    assert Choice.saved({}) is None
    assert Choice.saved({"choice": CHOICE.model_dump_json()}) == CHOICE.model_copy(update={"source": "checkpoint"})
    form = "compile(mode='reduce-overhead')"
    for verdict, levers in (
        (VERDICTS[1], {"autocast": True, "compile": False}),
        (Verdict(lever="compile", kept=True, form=form, reason=""), {"autocast": True, "compile": form}),
    ):
        choice = CHOICE.model_copy(update={"verdicts": (VERDICTS[0], verdict)})
        assert choice.levers == levers
        again = Choice.saved({"levers": levers})
        assert again is not None
        assert (again.levers, again.source) == (levers, "checkpoint")
    for state in ({"choice": "{"}, {"choice": 7}, {"levers": 7}, {"levers": {"autocast": "maybe"}}):
        with pytest.raises(ValueError, match=f"{next(iter(state))}: the checkpoint holds .* says nothing about levers"):
            Choice.saved(state)


def test_a_machine_is_described_by_what_this_process_uses(monkeypatch):
    here = Machine.of("cpu")
    assert here == Machine.of(torch.device("cpu"))
    assert (here.device, here.threads, here.torch) == ("cpu", torch.get_num_threads(), torch.__version__)
    assert (here.processor, here.torchboost) == (environment().processor, environment().torchboost)
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "get_device_name", lambda device: f"GPU {device.index}")
        assert Machine.of(f"{kind}:1").device == "GPU 1"
    assert MACHINE.differences(MACHINE) == ""
    other = MACHINE.model_copy(update={"device": "GPU", "torch": "2.14"})
    assert MACHINE.differences(other) == "device: found cpu, here GPU; torch: found 2.13, here 2.14"


def test_a_choice_comes_back_from_the_disk_with_the_cache_as_its_source(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHBOOST_CACHE", str(tmp_path))
    infinite = {"ratio": Interval(low=float("-inf"), mid=1.0, high=float("inf")), "step_seconds": 1e-300}
    for other in ({}, infinite, {"verdicts": (), "peak_bytes": 1 << 60}):
        choice = CHOICE.model_copy(update=other)
        store_choice(plain(), choice)
        assert load_choice(plain()) == choice.model_copy(update={"source": "cache"})
    monkeypatch.setenv("TORCHBOOST_CACHE", "off")
    assert load_choice(plain()) is None


class Net(nn.Module):
    """A network with everything that a key looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)
        self.scale, self.temperature, self.run_name = 2, 0.7, "/runs/2026-11-22"

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
    return key_of(model, [optimizer or adamw(model)], inputs, **settings)


def plain() -> str:
    return key(Net())


def changed(change: Callable[[Net], object]) -> str:
    """Return the key of a network after a change to it, with an optimizer that was built before."""
    model = Net()
    optimizer = adamw(model)
    result = change(model)
    return key(result if isinstance(result, nn.Module) and result is not model else model, optimizer)


def test_values_names_of_runs_and_addresses_do_not_count():
    changes: list[Callable[[Net], object]] = [
        lambda net: [tensor.data.fill_(3) for tensor in (*net.parameters(), *net.buffers())],
        lambda net: setattr(net, "temperature", 0.9),
        lambda net: setattr(net, "run_name", "/runs/another-day"),
        lambda net: setattr(net.norm, "momentum", 0.2),
        lambda net: setattr(net, "_private", 3),
    ]
    assert {changed(change) for change in changes} | {key(copy.deepcopy(Net()))} == {plain()}
    nets = [Net(), Net()]
    for net in nets:
        net.origin = id(net)
        net.objects = [net, object()]
    assert len({key(net) for net in nets}) == 1


def test_the_structure_of_the_model_counts(monkeypatch):
    changes: dict[str, Callable[[Net], object]] = {
        "integer": lambda net: setattr(net, "scale", 3),
        "zero": lambda net: setattr(net, "temperature", 0.0),
        "flag": lambda net: setattr(net, "flag", True),
        "shared": lambda net: setattr(net, "other", net.head),
        "norm": lambda net: setattr(net, "norm", nn.SyncBatchNorm(4)),
        "padding": lambda net: setattr(net, "conv", nn.Conv2d(3, 4, 3, padding=1)),
        "mode": lambda net: setattr(net, "conv", nn.Conv2d(3, 4, 3, padding_mode="reflect")),
        "dilation": lambda net: setattr(net, "conv", nn.Conv2d(3, 4, 3, dilation=2)),
        "width": lambda net: setattr(net, "head", nn.Linear(4, 3)),
        "bias": lambda net: setattr(net, "head", nn.Linear(4, 2, bias=False)),
        "weight norm": lambda net: setattr(net, "head", nn.utils.parametrizations.weight_norm(net.head)),
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
        "inside": lambda net: nn.Sequential(net),
        "class": lambda net: Sibling(),
        "precision": lambda net: setattr(net, "kept", torch.bfloat16),
    }
    names: dict[str, str] = {plain(): "none"}
    for name, change in changes.items():
        assert names.setdefault(changed(change), name) == name
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    stacks = [[first], [first, nn.Linear(4, 4)], [first, second], [first, first]]
    assert len({key(nn.Sequential(*stack)) for stack in stacks}) == 4
    monkeypatch.setattr(Net, "forward", edited)
    assert plain() not in names or names[plain()] == "forward"


def test_what_counts_of_the_optimizer():
    model = Net()
    parameters = list(model.parameters())
    for options in ({"lr": 0.2}, {"lr": 1}, {"betas": (0.8, 0.9)}, {"eps": 1e-6}, {"weight_decay": 3.0}):
        assert key(model, adamw(model, **options)) == plain(), options
    scheduled, cycled, stepped = (adamw(model) for _ in range(3))
    LambdaLR(scheduled, lambda step: 0.0)
    OneCycleLR(cycled, 1.0, 10)
    model(torch.zeros(2, 3, 8, 8)).sum().backward()
    stepped.step()
    assert {key(model, optimizer) for optimizer in (scheduled, cycled, stepped)} == {plain()}
    different = [{"weight_decay": 0}, {"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"fused": True}]
    others = [
        *(adamw(model, **options) for options in (*different, {"lr": torch.tensor(0.1)})),
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


def test_the_form_of_the_inputs_candidates_machine_and_conditions_count():
    model, image = Net(), torch.zeros(2, 3, 4, 4)
    last = image.to(memory_format=torch.channels_last)
    inputs: list[Any] = [(), (image,), (image.double(),), (image[:1],), (last,), (image.to("meta"),), (image, image)]
    inputs += [(image, image + 1), (torch.zeros(2, 3, 4, 4, requires_grad=True),), (torch.eye(3).to_sparse(),)]
    inputs += [(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),)]
    assert len({key(model, inputs=each) for each in inputs}) == len(inputs)
    assert key(model, inputs=((image, 3, "a"), {})) == key(model, inputs=((image + 1, 4, "b"), {}))
    others: list[dict[str, Any]] = [
        {},
        *({"candidates": each} for each in ([], [Autocast()], [Compile(), Autocast()])),
        {"candidates": [Autocast(dtype="float16"), Compile()]},
        *({"machine": MACHINE.model_copy(update={n: "x"})} for n in ("processor", "device", "torch", "torchboost")),
        {"machine": MACHINE.model_copy(update={"threads": 3})},
        *({"conditions": each} for each in ({"steps": 2}, {"steps": 4}, {"total": 2}, {"share": 0.5})),
    ]
    assert len({key(model, **other) for other in others}) == len(others)


def test_what_changes_kernels_in_the_process_counts(monkeypatch):
    before, keys = plain(), []
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        for value in ("31", "32"):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                keys.append(plain())
    monkeypatch.setenv("ANOTHER", str(os.getpid()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the switch warns of Intel GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            keys.append(plain())
    for precision in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=precision):
            keys.append(plain())
    torch.use_deterministic_algorithms(True)
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    try:
        keys.append(plain())
        torch.use_deterministic_algorithms(False)
        keys.append(plain())
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.mkldnn.conv.fp32_precision = "none"
    assert plain() == before
    assert len({before, *keys}) == len(keys) + 1


def test_a_key_is_the_same_in_every_process():
    code = "from tests.calibration.test_choice import plain; print(plain())"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == plain()


class Untouchable(nn.Linear):
    """A network that must not be called or copied."""

    def forward(self, input: Tensor) -> Tensor:
        pytest.fail("called")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        pytest.fail("copied")


class OddText(str):
    """A text with a method of its own."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        raise RuntimeError


def test_nothing_is_called_copied_or_read_and_odd_attributes_are_no_obstacle():
    model = Untouchable(3, 3, device="meta")  # has no values to read
    ring: list[Any] = []
    ring.append(ring)
    model.odd, model.ring, model.text = (ring, 1), ring, OddText("name")
    assert key(model, inputs=(torch.zeros(2, device="meta"),))
    lazy = nn.Sequential(nn.LazyLinear(3))
    assert key(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
