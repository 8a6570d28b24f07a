"""float16 and bfloat16 from end to end on a GPU, and group scales beside the fast path of freezing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models import BottleneckNet, TinyGPT, batch_for
from torchboost import DynamicLossScale
from torchboost.algorithms import GroupGradScaler, LossScaleGroup
from torchboost.algorithms.autocast import autocast_forward
from torchboost.algorithms.grad_freeze.algorithm import GradFreeze
from torchboost.core.algorithm import Target, attach_all
from torchboost.core.step import TrainStep
from torchboost.optim.pipeline import GradientPipeline
from torchboost.optim.transforms import Centralize, ClipNorm


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [BottleneckNet, TinyGPT])
@pytest.mark.parametrize("how", ["dynamic", "group", "GradScaler"])
@pytest.mark.parametrize("fused", [False, True])
def test_half_precision_trains_on_a_gpu(make, dtype, how, fused):
    torch.manual_seed(0)
    model = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    GradientPipeline(Centralize(), ClipNorm(1.0)).attach(optimizer)
    scaler = {
        "dynamic": lambda: DynamicLossScale(2.0**14),
        "group": lambda: GroupGradScaler(model, 2, init_scale=2.0**14),
        "GradScaler": lambda: torch.amp.GradScaler("cuda", init_scale=2.0**14),
    }[how]()
    autocast_forward(model, dtype)
    poison = {"value": 1.0}
    step = TrainStep(Target(model, optimizer, scaler), lambda x, y: F.cross_entropy(model(x), y) * poison["value"])
    x, y = (t.cuda() for t in batch_for(model, torch.Generator().manual_seed(0), 8))
    losses = [float(step(x, y).loss) for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]
    before = [p.detach().clone() for p in model.parameters()]
    poison["value"] = math.inf
    assert step(x, y).overflow
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def _fine_tune(scaled: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: nn.Module = BottleneckNet()
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    freeze = GradFreeze(groups=3, pattern="fixed", frozen=1, norms="eval", cache_mebibytes=1, total_steps=6)
    attached = attach_all(target, [freeze, *([LossScaleGroup(groups=3, init_scale=2.0**12)] if scaled else [])])
    step = TrainStep(target, lambda x, y: F.cross_entropy(model(x), y), attached=attached)
    for number in range(6):
        assert not step(*batch_for(model, torch.Generator().manual_seed(number), 8)).overflow
    attached.remove()
    return model.state_dict()


def test_group_scales_beside_the_fast_path_of_a_frozen_prefix():
    plain, scaled = _fine_tune(False), _fine_tune(True)
    for name, value in plain.items():
        torch.testing.assert_close(scaled[name], value, rtol=1e-5, atol=1e-6, msg=name)
