"""Every algorithm of the registry on the device, alone: the losses of the CPU, and gone without a trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.device.on_device._rules import DEVICES
from tests.device.on_device._training import CLOSE, HALF, batch, default_device, losses, network, step
from tests.support.pretend_device.waits import Waits
from torchboost import REGISTRY, Target
from torchboost.algorithms import (
    Autocast,
    ChannelsLast,
    Compile,
    DimReduction,
    FusedOptimizer,
    GradAccumulation,
    GradFreeze,
    GradientCentralization,
    LessBn,
    LossScaleGroup,
    MatmulPrecision,
)
from torchboost.algorithms.grad_freeze.freezer import Freezing
from torchboost.core import Algorithm, attach_all

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "less_bn": LessBn,
    "gradient_centralization": GradientCentralization,
    "channels_last": ChannelsLast,
    "autocast": Autocast,
    "matmul_precision": MatmulPrecision,
    "grad_freeze": lambda: GradFreeze(groups=3, pattern="continuous", full_share=0.3, total_steps=6),
    "fused_optimizer": FusedOptimizer,
    "compile": lambda: Compile(backend="eager"),
    "grad_accumulation": lambda: GradAccumulation(steps=2),
    "loss_scale_group": lambda: LossScaleGroup(groups=2),
    "dim_reduce": lambda: DimReduction(n_components=2, snapshot_every=1),
}
ELSEWHERE = {"adasum", "threads", "unpad", "sparse_head", "token_drop"}
"""AdaSum exchanges tensors between ranks, for which the pretend device has no backend. Threads are those of the CPU.
What is left out of padded batches reads masks, and so waits. These networks have no tokens to drop."""
FREEZING: dict[str, dict[str, Any]] = {
    "continuous": {"full_share": 0.3},
    "interval": {"full_share": 0.3},
    "progressive": {"full_share": 0.3},
    "fixed": {"frozen": 1},
}
STEPS = 6
ALONE = pytest.mark.parametrize("name", ALGORITHMS)
pytestmark = pytest.mark.filterwarnings("ignore::torchboost.NoEffectWarning")


def target_of(device: str) -> Target:
    model = network("bottleneck", device)
    return Target(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def trained(algorithm: Algorithm, device: str) -> tuple[list[float], Target, Any]:
    target = target_of(device)
    attached = attach_all(target, [algorithm])
    return run(target, device), target, attached


def run(target: Target, device: str) -> list[float]:
    model, optimizer = target.model, target.optimizer
    if type(optimizer).__name__ != "DimReduceRun":
        return losses(model, optimizer, device, steps=STEPS, scaler=target.scaler)
    seen = []
    for number in range(STEPS):
        inputs, labels = batch(model, number, device)

        def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(model(inputs), labels)

        seen.append(float(optimizer.step(closure)))
    return seen


def test_every_algorithm_is_here():
    assert set(ALGORITHMS) | ELSEWHERE == set(REGISTRY)


@ALONE
@pytest.mark.parametrize("default", [None, "cuda"])
def test_an_algorithm_trains_as_on_the_cpu_and_a_steady_step_does_not_wait(name, default):
    wanted = trained(ALGORITHMS[name](), "cpu")[0]
    with default_device(default):
        found, target, _ = trained(ALGORITHMS[name](), "cuda")
    close = HALF if name == "autocast" else CLOSE
    assert found == pytest.approx(wanted, rel=close["rtol"], abs=close["atol"])
    if default is None and name not in ("dim_reduce", "loss_scale_group"):
        with Waits() as waits:
            step(target.model, target.optimizer, "cuda", STEPS, scaler=target.scaler)
        assert waits.seen == {}


@pytest.mark.parametrize("pattern", FREEZING)
@pytest.mark.parametrize("cached", [0, 1], ids=["computed", "cached"])
@pytest.mark.parametrize("default", [None, "cuda"])
def test_freezing_trains_as_on_the_cpu(pattern, cached, default):
    settings = GradFreeze(
        groups=3, pattern=pattern, total_steps=STEPS, norms="eval", cache_mebibytes=cached, **FREEZING[pattern]
    )
    seen = []
    for device in DEVICES:
        with default_device(default if device == "cuda" else None):
            target = target_of(device)
            freezing = attach_all(target, [settings])["grad_freeze"]
            assert isinstance(freezing, Freezing)
            seen.append([])
            for number in (0, 1, 0, 1, 0, 1):
                ids = range(8 * number, 8 * number + 8)
                with nullcontext() if freezing.fast is None else freezing.fast.samples(ids):
                    seen[-1].append(float(step(target.model, target.optimizer, device, number)))
    assert seen[1] == pytest.approx(seen[0], rel=CLOSE["rtol"], abs=CLOSE["atol"])
