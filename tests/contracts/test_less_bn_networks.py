"""LessBN on trained networks, on networks written by others, on optimizers in use and on several ranks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from tests.support.conv_nets import (
    PreActNet,
    RefusesTracing,
    names_of_norms,
    outputs,
    resnet,
    train_a_little,
    vgg,
)
from tests.support.ranks import run_ranks
from tests.support.zoo import ZOO
from torchboost.algorithms.less_bn import LessBn, less_bn
from torchboost.core.algorithm import Target, attach_all
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.optim import ScheduleFreeAdamW, muon_from
from torchboost.workloads.models import Bottleneck, ResNet


def test_a_trained_network_computes_the_same():
    cases = (
        (lambda: resnet(2, 2), {"keep_shortcut": True}),
        (vgg, {"keep_every": 5}),
        (lambda: ResNet(Bottleneck, [2, 2], width=4), {"blocks_per_norm": 3}),
        (lambda: ResNet(Bottleneck, [2, 2], width=4), {"keep": "last"}),
    )
    for build, settings in cases:
        model = build()
        train_a_little(model)
        x = torch.randn(8, 3, 16, 16)
        before = outputs(model, x)
        report = less_bn(model, **settings)
        assert report.removed
        assert report.folded
        assert report.rescaled == ()
        assert report.largest_difference <= 1e-4
        assert (outputs(model, x) - before).abs().max() / before.abs().max() <= 1e-4
        assert "eval mode" in str(report)


@pytest.mark.parametrize("name", [name for name, network in ZOO.items() if not network.stateful])
def test_the_first_step_is_finite_and_the_weights_go_home(name):
    network = ZOO[name]
    model = network.model()
    if not names_of_norms(model):
        return
    plain, batch = copy.deepcopy(model), network.batch(torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        less_bn(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = network.loss(model(*batch.args, **batch.kwargs), batch.target)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    state, again = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    for other in (plain, again):
        other.load_state_dict(state)
    losses = [network.loss(m.eval()(*batch.args, **batch.kwargs), batch.target).item() for m in (model, plain, again)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_eval_mode_stays_eval_mode():
    model = vgg()
    train_a_little(model)
    less_bn(model.eval())
    assert not any(m.training for m in model.modules())


def test_a_trained_norm_with_nothing_in_front_stays():
    model = PreActNet()
    train_a_little(model)
    with pytest.warns(NoEffectWarning):
        report = less_bn(model)
    assert "no convolution" in report.kept["blocks.2.bn1"]


def test_trained_but_not_traceable_stays():
    model = RefusesTracing()
    nn.init.ones_(model.bn1.running_mean)
    with pytest.warns(NoEffectWarning):
        report = less_bn(model)
    assert "sample=" in report.kept["layers.0.bn1"]


def test_the_optimizer_follows():
    model = resnet(2, 2)
    optimizer = train_a_little(model)
    group, weight = optimizer.param_groups[0], model[3].conv1.weight
    less_bn(model, optimizer, normalize_head=True)
    assert optimizer.param_groups[0] is group
    assert set(group["params"]) == set(model.parameters())
    assert len(group["params"]) == len(set(group["params"]))
    assert set(optimizer.state) <= set(model.parameters())
    assert weight in optimizer.state
    at = next(i for i, p in enumerate(group["params"]) if p is weight)
    assert group["params"][at + 1] is model[3].conv1.bias
    F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4)).backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_new_parameters_join_the_group_of_their_weight():
    model = vgg()
    train_a_little(model)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    less_bn(model, optimizer)
    assert [len(g["params"]) for g in optimizer.param_groups] == [9 + 3, 16 - 6]
    assert model[3].bias in set(optimizer.param_groups[0]["params"])


def test_a_rule_that_cannot_follow_is_refused_before_anything_changes():
    model = vgg()
    train_a_little(model)
    given = torch.optim.SGD(model.parameters(), lr=0.05)
    cases = ((muon_from(given, model, lr=0.02), "vector"), (ScheduleFreeAdamW(model.parameters(), lr=0.01), "state"))
    for optimizer, reason in cases:
        model(torch.randn(2, 3, 16, 16)).sum().backward()
        optimizer.step()
        groups, state = [list(g["params"]) for g in optimizer.param_groups], copy.deepcopy(model.state_dict())
        with pytest.raises(IncompatibleError, match=reason):
            less_bn(model, optimizer)
        assert groups == [g["params"] for g in optimizer.param_groups]
        torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert less_bn(model, ScheduleFreeAdamW(model.parameters(), lr=0.01)).removed


class Branching(nn.Module):
    """Only a run shows its flow; a symbolic trace fails."""

    def __init__(self):
        super().__init__()
        self.body = resnet(2, 2)

    def forward(self, x):
        return self.body(x) if x.abs().sum() > 0 else self.body(-x)


def _trains_on_ranks(wrapper: str) -> tuple[int, list[torch.Tensor]]:
    """Transform the bare model, wrap it, attach, train; needs_transform must see that nothing is left."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, algorithm = Branching(), LessBn()
    algorithm.transform(model)
    bare = model
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
        assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attach_all(Target(model, optimizer), [algorithm])
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(4, 3, 16, 16, generator=generator)
        F.cross_entropy(model(x), torch.randint(4, (4,), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.full_tensor() if wrapper == "fsdp" else p for p in model.parameters()]
    dist.barrier()
    return len(names_of_norms(bare)), [w.detach().clone() for w in weights]


def _trains_in_both_wrappers() -> list[tuple[int, list[torch.Tensor]]]:
    return [_trains_on_ranks(wrapper) for wrapper in ("ddp", "fsdp")]


@pytest.mark.dist
def test_two_ranks_agree_and_the_wrapped_model_is_left_alone():
    for (norms, first), (_, second) in zip(*run_ranks(_trains_in_both_wrappers, 2), strict=True):
        assert norms == 5
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def foreign(kind: str, **settings) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_labels=4, **settings)
    return getattr(transformers, f"{kind}ForImageClassification")(config)


RESNET50 = {"embedding_size": 8, "hidden_sizes": [32, 64, 128, 256]}
REGNET = {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128], "groups_width": 8, "layer_type": "y"}


@pytest.mark.parametrize(
    ("kind", "settings", "norms", "removed", "with_shortcut"),
    [
        ("ResNet", RESNET50, 53, 36, 32),  # 16 blocks of 3, 4 projections, stem: 16 * 2 + 4 go
        ("RegNet", REGNET, 71, 48, 44),  # 22 blocks of 3 with squeeze-and-excitation, 4 projections, stem: 44 + 4 go
    ],
    ids=["resnet50", "regnety"],
)
def test_networks_nobody_here_wrote(kind, settings, norms, removed, with_shortcut):
    model = foreign(kind, **settings)
    scratch = less_bn(model, keep_shortcut=True, dry_run=True)
    assert (len(scratch.found), len(scratch.removed)) == (norms, with_shortcut)
    optimizer = train_a_little(model, size=64, steps=6)
    assert less_bn(copy.deepcopy(model).double()).largest_difference <= 1e-9
    x = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        before = model.eval()(x).logits
        report = less_bn(model, optimizer)
        difference = (model(x).logits - before).abs().max() / before.abs().max()
    assert len(report.removed) == removed
    assert report.traced == "run"
    assert report.largest_difference <= 1e-4
    assert difference <= 1e-4
    assert sum(isinstance(m, _BatchNorm) for m in model.modules()) == norms - removed
    assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())
