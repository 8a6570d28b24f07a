"""Every registered algorithm against every promise that all of them make."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchboost
from tests.support.ranks import run_ranks
from torchboost import REGISTRY, Target, TrainStep
from torchboost.core import Algorithm, AttachedAlgorithms, attach_all
from torchboost.core.step import ClosureOptimizer, Replay

# Dynamo itself looks at .grad of intermediate tensors and makes instances of torch.autograd.Function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # One process has nothing to combine; tests/contracts/test_adasum_on_ranks.py trains on nodes.
    pytest.mark.filterwarnings("ignore:adasum. one node"),
]

FAST_TO_BUILD: dict[str, dict[str, Any]] = {
    "adasum": {"devices_per_node": 1},
    "compile": {"backend": "eager"},
    "dim_reduce": {"n_components": 2, "snapshot_every": 1, "alpha": 0.05},
    "grad_freeze": {"groups": 3, "full_share": 0.3, "total_steps": 12},
    "token_drop": {"total_steps": 12},
}
NAMES = sorted(REGISTRY)

IRREVERSIBLE = {"less_bn"}
"""What changes the modules for good."""


class Block(nn.Module):
    """A residual block with two BatchNorms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + x)


class Net(nn.Sequential):
    """A root with a forward of its own: hooks of FSDP2 on torch's own Sequential leave no frame to compile."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for layer in self:
            input = layer(input)
        return input


class Patches(nn.Module):
    """Images of 8 x 8 pixels as 16 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x).flatten(2).transpose(1, 2)


class Pooled(nn.Module):
    """The mean over tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


OF_TOKENS = {"token_drop"}
"""What acts on transformers alone."""


def build(seed: int = 0, name: str = "") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    if name in OF_TOKENS:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        model = Net(Patches(), encoder, Pooled(), nn.Linear(8, 4))
    else:
        stem = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        model = Net(*stem, Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def batches(n: int, seed: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 3, 8, 8, generator=g), torch.randint(0, 4, (8,), generator=g)) for _ in range(n)]


def algorithm(name: str) -> Algorithm:
    return REGISTRY[name].algorithm(**FAST_TO_BUILD.get(name, {}))


def start(name: str, seed: int = 0) -> tuple[Target, AttachedAlgorithms]:
    target = Target(*build(seed, name))
    return target, attach_all(target, [algorithm(name)])


def train(target: Target, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, y in data:
        if isinstance(target.optimizer, ClosureOptimizer):
            target.optimizer.step(lambda x=x, y=y: F.cross_entropy(target.model(x), y))
            continue
        F.cross_entropy(target.model(x), y).backward()
        target.optimizer.step()
        target.optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def hooks(module: Any) -> list[int]:
    return [len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks") and value is not None]


def test_settings_are_values():
    for name in NAMES:
        value = algorithm(name)
        assert value == algorithm(name)
        assert hash(value) == hash(algorithm(name))
        assert eval(repr(value), {type(value).__name__: type(value)}) == value
        settings = json.loads(json.dumps(dataclasses.asdict(value)))
        assert type(value)(**settings) == value
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.name = "other"


@pytest.mark.parametrize("name", NAMES)
def test_a_target_is_checked_once(name, monkeypatch):
    kind, checks = type(algorithm(name)), []
    check = kind.check
    monkeypatch.setattr(kind, "check", lambda self, target: checks.append(name) or check(self, target))
    _, attached = start(name)
    attached.remove()
    assert checks == [name]


@pytest.mark.parametrize("name", NAMES)
def test_own_loop_equals_train_step(name):
    target, _ = start(name)
    train(target, batches(5))
    other, attached = start(name)
    step = TrainStep(other, lambda x, y: F.cross_entropy(other.model(x), y), attached=attached)
    for x, y in batches(5):
        step(x, y)
    assert identical(weights(target.model), weights(other.model))


def test_resume_in_mid_run_is_bit_identical():
    for name in NAMES:
        data = batches(6)
        target, attached = start(name)
        train(target, data[:3])
        saved = copy.deepcopy((target.model.state_dict(), target.optimizer.state_dict(), attached.state_dict()))
        train(target, data[3:])

        again, reattached = start(name, seed=9)
        again.model.load_state_dict(saved[0])
        again.optimizer.load_state_dict(saved[1])
        reattached.load_state_dict(saved[2])
        train(again, data[3:])
        assert identical(weights(target.model), weights(again.model))


def test_remove_leaves_no_trace():
    for name in NAMES:
        model, optimizer = build(name=name)
        modules_before = [hooks(m) for m in model.modules()]
        strides_before = [p.stride() for p in model.parameters()]
        groups_before = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        optimizer_before = hooks(optimizer)
        target = Target(model, optimizer)
        attached = attach_all(target, [algorithm(name)])
        train(target, batches(2))
        attached.remove()
        assert hooks(optimizer) == optimizer_before
        assert all(m._compiled_call_impl is None for m in model.modules())
        assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups_before
        if name not in IRREVERSIBLE:
            assert [hooks(m) for m in model.modules()] == modules_before
            assert [p.stride() for p in model.parameters()] == strides_before
            plain, plain_optimizer = build(name=name)
            plain.load_state_dict(model.state_dict())
            plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(Target(model, optimizer), batches(2, seed=8))
            train(Target(plain, plain_optimizer), batches(2, seed=8))
            assert identical(weights(model), weights(plain))


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_stays_the_users_under_scheduler_and_scaler(name):
    model, optimizer = build(name=name)
    target = Target(model, optimizer)
    attach_all(target, [algorithm(name)])
    assert (target.optimizer is optimizer) != REGISTRY[name].algorithm.traits.replaces_optimizer
    optimizer = target.optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    reference, _ = start(name)
    reference_scheduler = torch.optim.lr_scheduler.LambdaLR(reference.optimizer, lambda step: 0.5**step)
    for x, y in batches(4):
        pass_ = Replay(lambda x=x, y=y: F.cross_entropy(model(x), y), x.device)
        scaler.scale(pass_.first()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer, *([pass_] if isinstance(optimizer, ClosureOptimizer) else []))
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        train(reference, [(x, y)])
        reference_scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 16)
    for key, value in weights(reference.model).items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_compiled_model_trains_alike():
    for name in [n for n in NAMES if n != "compile"]:
        eager, _ = start(name)
        compiled, _ = start(name)
        train(eager, batches(3))
        compiled.model.compile(backend="eager")
        train(compiled, batches(3))
        for key, value in weights(eager.model).items():
            torch.testing.assert_close(compiled.model.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def _distributed(name: str, how: str) -> dict[str, torch.Tensor]:
    model, _ = build(name=name)
    chosen = algorithm(name)
    # FSDP2 shards contiguous parameters only, so a change of memory format comes after it, surgery before.
    if chosen.needs_transform(model) and (how == "ddp" or name in IRREVERSIBLE):
        chosen.transform(model)
    if how == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        for block in model:
            if any(True for _ in block.parameters()):
                fully_shard(block)
        wrapped = fully_shard(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    target = Target(wrapped, optimizer)
    attached = attach_all(target, [chosen])
    rank = dist.get_rank()
    train(target, [(x[rank * 4 : rank * 4 + 4], y[rank * 4 : rank * 4 + 4]) for x, y in batches(3)])
    attached.remove()
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for n, p in parameters.items()}


def _all_distributed() -> dict[tuple[str, str], dict[str, torch.Tensor] | str]:
    trained: dict[tuple[str, str], dict[str, torch.Tensor] | str] = {}
    for name, how in itertools.product(NAMES, ("ddp", "fsdp2")):
        try:
            trained[name, how] = _distributed(name, how)
        except torchboost.IncompatibleError as error:
            trained[name, how] = str(error)
    return trained


@pytest.mark.dist
def test_two_ranks_agree():
    first, second = run_ranks(_all_distributed, 2)
    for name in first:
        start_weights = dict(build(name=name[0])[0].named_parameters())
        if isinstance(first[name], str):
            assert first[name] == second[name]
            assert re.search(r"; |\. [A-Z]", first[name]), "an error says what to do"
            continue
        assert identical(first[name], second[name])
        assert all(torch.isfinite(v).all() for v in first[name].values())
        assert any(not torch.equal(v, start_weights[k]) for k, v in first[name].items() if k in start_weights)
