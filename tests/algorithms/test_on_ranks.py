"""Two ranks under DDP and FSDP2 train like one process, with the algorithms that change steps or forwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.models import TinyGPT, cnn, mlp
from tests.support.ranks import run_ranks
from tests.support.wrapped import Kind, all_weights, train_share, wrap
from torchboost import Target
from torchboost.algorithms import Autocast, ChannelsLast, Compile, FusedOptimizer, GradientCentralization
from torchboost.core import attach_all
from torchboost.errors import IncompatibleError, NoEffectWarning

pytestmark = [pytest.mark.dist, pytest.mark.long]

ALGORITHMS = {
    "autocast": (mlp, Autocast(), 1e-3),
    "channels_last": (cnn, ChannelsLast(), 1e-5),
    "compile": (TinyGPT, Compile(backend="aot_eager"), 1e-5),
    "fused SGD": (mlp, FusedOptimizer(), 1e-5),
    "fused AdamW": (mlp, FusedOptimizer(), 1e-5),
    "gradient_centralization": (mlp, GradientCentralization(), 1e-5),
}
"""The network, the algorithm, and how far one process may be away."""


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "fused AdamW":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def trained(name: str, kind: Kind) -> list[float]:
    make, algorithm, _ = ALGORITHMS[name]
    torch.manual_seed(0)
    model = make()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    model.train(not any(isinstance(module, nn.BatchNorm2d) for module in model.modules()))
    if kind == "ddp" and algorithm.needs_transform(model):
        algorithm.transform(model)
    wrapped = wrap(model, kind, gradient_as_bucket_view=True)
    target = Target(wrapped, optimizer_of(name, wrapped))
    if kind == "single" and name not in ("autocast", "gradient_centralization"):
        train_share(target, model)  # these compute what the plain loop does
        return all_weights(wrapped)
    if name == "fused SGD" and kind == "fsdp" and algorithm.idle(wrapped, target.optimizer):
        with pytest.warns(NoEffectWarning, match=r"SGD cannot be fused for torch.float32 DTensor"):
            attached = attach_all(target, [algorithm])
    else:
        attached = attach_all(target, [algorithm])
        assert not name.startswith("fused") or target.optimizer.param_groups[0]["fused"] is True
    assert {outputs.dtype for outputs in train_share(target, model)} == {torch.float32}
    if isinstance(algorithm, Compile):
        assert attached["compile"].graphs >= 1
    attached.remove()
    assert "forward" not in vars(wrapped)
    assert all(module._compiled_call_impl is None for module in wrapped.modules())
    return all_weights(wrapped)


def on_ranks() -> dict[str, list[list[float]]]:
    torch.set_num_threads(1)
    sequential = fully_shard(mlp())
    with pytest.raises(IncompatibleError, match="sharded root is torch's own Sequential"):
        attach_all(Target(sequential, optimizer_of("compile", sequential)), [Compile(backend="eager")])
    return {name: [trained(name, "ddp"), trained(name, "fsdp")] for name in ALGORITHMS}


def test_ranks_under_ddp_and_fsdp_train_like_one_process() -> None:
    first, second = run_ranks(on_ranks, 2)
    assert first == second
    for name, found in first.items():
        for weights in found:
            torch.testing.assert_close(weights, trained(name, "single"), rtol=0, atol=ALGORITHMS[name][2])
