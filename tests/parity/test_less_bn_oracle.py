"""LessBN removes what the reference's graph pass removes, and training goes on to the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.conv_nets import names_of_norms
from torchboost.algorithms.less_bn import less_bn
from torchboost.graph.norms import NormalizedLinear

TORCH_NAMES = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}


class Block(nn.Module):
    """A residual block as in the oracle's notes: 1x1-3x3-1x1 or 3x3-3x3, with or without projection."""

    def __init__(self, kind: str, inside: int, outside: int, widths: list[int], projects: bool):
        super().__init__()
        kernels = (1, 3, 1) if kind == "bottleneck" else (3, 3)
        self.depth, self.projects = len(kernels), projects
        for i, (kernel, width) in enumerate(zip(kernels, widths, strict=True), start=1):
            setattr(
                self, f"conv{i}", nn.Conv2d(inside if i == 1 else widths[i - 2], width, kernel, padding=kernel // 2)
            )
            setattr(self, f"bn{i}", nn.BatchNorm2d(width))
            getattr(self, f"conv{i}").register_parameter("bias", None)
        if projects:
            self.down_conv, self.down_bn = nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside)

    def forward(self, x):
        out = x
        for i in range(1, self.depth + 1):
            out = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(out))
            out = out.relu() if i < self.depth else out
        return (out + (self.down_bn(self.down_conv(x)) if self.projects else x)).relu()


class Net(nn.Module):
    def __init__(self, net: dict, arrays: dict, bias: bool):
        super().__init__()
        self.pool = net["pool"]
        self.conv0 = nn.Conv2d(net["ci"], net["c0"], 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(net["c0"])
        inside = net["c0"]
        for i, (outside, projects) in enumerate(zip(net["widths"], net["downs"], strict=True)):
            depth = 3 if net["kind"] == "bottleneck" else 2
            widths = [arrays[f"init/b{i}.conv{k}.weight"].shape[0] for k in range(1, depth + 1)]
            setattr(self, f"b{i}", Block(net["kind"], inside, outside, widths, projects))
            inside = outside
        self.fc = nn.Linear(inside, net["classes"], bias=bias)

    def forward(self, x):
        x = self.bn0(self.conv0(x)).relu()
        x = F.max_pool2d(x, 2) if self.pool else x
        return self.fc(self.b2(self.b1(self.b0(x))).mean((2, 3)))


def renamed(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return f"{stem}.{TORCH_NAMES.get(last, last)}"


def load(model: nn.Module, arrays: dict) -> None:
    state = {renamed(k.removeprefix("init/")): torch.from_numpy(v) for k, v in arrays.items() if k.startswith("init/")}
    result = model.load_state_dict(state, strict=False)
    assert set(result.unexpected_keys) <= {"fc.multiplier"}
    assert all(key.endswith("num_batches_tracked") for key in result.missing_keys)


def build(oracle, case):
    meta, arrays = oracle[case]
    model = Net(meta["hyper"]["net"], arrays, bias="init/fc.bias" in arrays)
    load(model, arrays)
    return meta, arrays, model


CASES = ["lessbn_bottleneck", "lessbn_basic", "lessbn_bottleneck_fn"]


@pytest.mark.parametrize("case", CASES)
def test_removes_the_same_layers(oracle, case):
    meta, _, model = build(oracle, case)
    assert sorted(names_of_norms(model)) == meta["expected"]["all_bn"]
    report = less_bn(model, keep="last", normalize_head=meta["hyper"]["fn_flag"])
    assert sorted(report.removed) == meta["expected"]["removed_bn"]
    assert report.head == ("fc" if meta["hyper"]["fn_flag"] else None)


@pytest.mark.parametrize("case", CASES)
def test_trains_to_the_same_numbers(oracle, case):
    meta, arrays, model = build(oracle, case)
    hyper = meta["hyper"]
    optimizer = torch.optim.SGD(model.parameters(), lr=hyper["learning_rate"], momentum=hyper["momentum"])
    less_bn(model, optimizer, keep="last", normalize_head=hyper["fn_flag"], init="keep")
    assert torch.equal(model.b0.conv1.weight, torch.from_numpy(arrays["init/b0.conv1.weight"]))
    decayed = [p for m in model.modules() for p in m.parameters(recurse=False) if not isinstance(m, nn.BatchNorm2d)]
    plain = [p for m in model.modules() for p in m.parameters(recurse=False) if isinstance(m, nn.BatchNorm2d)]
    assert set(decayed + plain) == set(optimizer.param_groups[0]["params"])
    optimizer.param_groups[0].update(params=decayed, weight_decay=hyper["weight_decay"])
    optimizer.add_param_group({"params": plain, "weight_decay": 0.0})
    model.train()
    for step in range(meta["steps"]):
        loss = F.cross_entropy(model(torch.from_numpy(arrays["x"][step])), torch.from_numpy(arrays["y"][step]).long())
        torch.testing.assert_close(loss.detach(), torch.tensor(arrays["loss"][step]), **meta["tolerance"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    got = model.state_dict()
    wanted = {renamed(k.removeprefix("param/")): v for k, v in arrays.items() if k.startswith("param/")}
    removed = {f"{name}." for name in meta["expected"]["removed_bn"]}
    compared = {name for name in wanted if not name.startswith(tuple(removed))}
    assert compared == {n for n in got if not n.endswith("num_batches_tracked") and not n.startswith(tuple(removed))}
    for name in compared:
        want = torch.from_numpy(wanted[name])
        torch.testing.assert_close(got[name], want, **meta["tolerance"], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", ["common_head_last_fn_nobias", "common_head_last_fn_bias"])
def test_the_head_that_is_put_in_is_the_reference_head(oracle, case):
    meta, arrays = oracle[case]
    features, classes = meta["hyper"]["in_channels"], meta["hyper"]["out_channels"]
    model = nn.Sequential(nn.Linear(features, classes, bias="bias" in arrays))
    for name, parameter in model[0].named_parameters():
        parameter.data.copy_(torch.from_numpy(arrays[name]))
    less_bn(model, normalize_head=True, head_multiplier=float(arrays["multiplier"][0]))
    assert isinstance(model[0], NormalizedLinear)
    x = torch.from_numpy(arrays["x"]).requires_grad_()
    out = model(x)
    out.backward(torch.from_numpy(arrays["dout"]))
    got = {"out": out.detach(), "grad_x": x.grad} | {f"grad_{n}": p.grad for n, p in model[0].named_parameters()}
    assert set(got) == {name for name in arrays if name.startswith(("grad_", "out"))}
    for name, value in got.items():
        torch.testing.assert_close(value, torch.from_numpy(arrays[name]), **meta["tolerance"])
