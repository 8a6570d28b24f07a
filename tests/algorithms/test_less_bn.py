"""BatchNorm goes where it is not needed, in networks of every kind; what it did lives on where it was trained."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import torchboost
from tests.support.conv_nets import (
    Basic,
    ForeignNames,
    InvertedResidual,
    PreActNet,
    RefusesTracing,
    names_of_norms,
    outputs,
    resnet,
    train_a_little,
    vgg,
)
from tests.support.models import BottleneckNet
from tests.support.portraits import changes, portrait
from tests.support.removal_nets import NormAct, preact_net, repvgg_net
from torchboost import Target, less_bn
from torchboost.algorithms import LessBn
from torchboost.core import attach_all
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.graph.norms import NormalizedLinear
from torchboost.graph.removed_norm import RemovedNorm
from torchboost.workloads.models import BasicBlock, Bottleneck, ResNet


class Renamed(nn.Module):
    """Any network under attribute names that say the opposite."""

    def __init__(self, inner: nn.Sequential):
        super().__init__()
        for index, module in enumerate(inner):
            setattr(self, f"bn{index}_fc_shortcut", module)

    def forward(self, x):
        for module in self.children():
            x = module(x)
        return x


def test_basic_blocks():
    model = resnet(2, 2)
    report = less_bn(model)
    assert report.removed == ("3.bn1", "4.bn1", "5.downsample.1", "5.bn1", "6.bn1")
    assert names_of_norms(model) == ["1", "3.bn2", "4.bn2", "5.bn2", "6.bn2"]
    assert report.kept["1"] == "the first of the network"
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 4)


def test_bottleneck_blocks_with_and_without_the_shortcut():
    model = ResNet(Bottleneck, [1, 2], width=4)
    assert len(less_bn(model, dry_run=True).removed) == 8
    report = less_bn(model, keep_shortcut=True)
    assert len(report.removed) == 6
    assert report.kept["stages.0.0.downsample.1"] == "in a shortcut (keep_shortcut)"


def test_inverted_residuals_with_and_without_skip():
    blocks = [InvertedResidual(4, 4), InvertedResidual(4, 6, 2), InvertedResidual(6, 8, 2), InvertedResidual(8, 8)]
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.SiLU(), *blocks)
    less_bn(model)
    assert names_of_norms(model) == ["1", "3.project.1", "4.project.1", "5.project.1", "6.project.1"]


def test_plain_stacks():
    for every, left in [(1, 7), (2, 4), (3, 3), (4, 3), (100, 2)]:
        model = vgg()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if every == 1 else "error", NoEffectWarning)
            report = less_bn(model, keep_every=every)
        assert len(names_of_norms(model)) == left
        assert {"1", "21"} <= set(names_of_norms(model))
        assert len(report.removed) == 7 - left


def test_the_narrowest_norm_of_a_bottleneck_can_stay_instead_of_the_last():
    torch.manual_seed(0)
    model = BottleneckNet()
    norms = names_of_norms(model)
    report = less_bn(model, keep="narrowest")
    assert [name for name in norms if name not in report.removed][1:] == [n for n in norms if n.endswith("bn2")]
    ends = [m.conv3 for m in model.modules() if hasattr(m, "conv3")]
    for end in ends:  # half of the mean square gets through the ReLU in front; the branch starts at 1 / blocks
        assert float(end.weight.detach().square().sum((1, 2, 3)).mean() / 2) == pytest.approx(1 / len(ends), rel=1e-3)
    assert not LessBn(keep="narrowest").needs_transform(model)


def test_a_wrapped_model_counts_as_done_where_something_was_removed():
    fresh, done = vgg(), vgg()
    less_bn(done)
    for model in (fresh, done):
        model.compile(backend="eager")
    assert LessBn().needs_transform(fresh)
    assert not LessBn().needs_transform(done)
    assert not LessBn().needs_transform(torch.compile(nn.Linear(2, 2), backend="eager"))


def test_fewer_norms_than_blocks():
    model = resnet(3, 3)
    report = less_bn(model, blocks_per_norm=2)
    assert names_of_norms(model) == ["1", "4.bn2", "6.bn2", "8.bn2"]
    assert len(report.rescaled) == len(report.removed) == 10


def test_every_nth_block_counts_from_the_last_that_kept():
    net = nn.Sequential(*[Basic(3, 3) for _ in range(4)], Basic(3, 4), *[Basic(4, 4) for _ in range(4)])
    report = less_bn(net, keep="last", blocks_per_norm=3)
    last = [name in report.kept for name in report.found if name.endswith("bn2")]
    assert last == [False, False, True, False, True, False, False, True, True]


def test_names_play_no_part():
    for build in [lambda: resnet(2, 2), vgg]:
        model = build()
        plain, renamed = less_bn(model, dry_run=True), less_bn(Renamed(build()), dry_run=True)
        told = [name.replace("bn", "", 1).replace("_fc_shortcut", "") for name in renamed.removed]
        assert told == list(plain.removed)
        assert less_bn(ForeignNames(), keep="last", dry_run=True).removed == ("main", "linear")


def test_kinds_of_batch_norm():
    for norm in [nn.BatchNorm2d, nn.SyncBatchNorm]:
        assert len(less_bn(vgg(norm=norm), dry_run=True).removed) == 3


def test_one_and_three_dimensions():
    for sides, conv, norm in ((1, nn.Conv1d, nn.BatchNorm1d), (3, nn.Conv3d, nn.BatchNorm3d)):
        layers = [m for _ in range(3) for m in (conv(2, 2, 1), norm(2), nn.ReLU())]
        report = less_bn(nn.Sequential(*layers))
        assert (report.removed, sides) == (("4",), sides)
    mlp = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())])
    assert less_bn(mlp).removed == ("4",)


def test_what_cannot_go_says_why():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.first = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
            self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))
            self.norm, self.last, self.idle = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x):
            x = self.first(self.stem(x)).relu()
            y = self.norm(self.a(x)).relu()
            return x + self.last(self.c(self.norm(self.b(y)).relu()))

    model = Shared()
    with pytest.warns(NoEffectWarning):
        report = less_bn(model)
    assert report.kept["norm"] == "it is used 2 times"
    assert report.kept["idle"] == "the traced pass does not reach it"

    class Own(nn.BatchNorm2d):
        def forward(self, input):
            return super().forward(input).relu()

    with pytest.warns(NoEffectWarning):
        assert "own forward" in less_bn(vgg((2,), norm=Own), keep_every=9).kept["4"]


def test_a_norm_that_went_leaves_the_skip_path_alone():
    for style in ["module", "method", "keyword", "positional"]:
        torch.manual_seed(0)
        model = preact_net(style)
        assert "1.bn1" in less_bn(model).removed
        plain = preact_net("plain")
        less_bn(plain)
        plain.load_state_dict(model.state_dict())
        assert not any(m.copies for m in plain.modules() if isinstance(m, RemovedNorm))
        assert sum(m.copies for m in model.modules() if isinstance(m, RemovedNorm)) == 3
        trained = []
        for network in (model, plain):
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            for step in range(3):
                torch.manual_seed(step)
                F.cross_entropy(network(torch.randn(4, 3, 8, 8)), torch.arange(4)).backward()
                optimizer.step()
                optimizer.zero_grad()
            trained.append(list(network.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_additions_in_place_behind_a_norm_that_went():
    model = repvgg_net()
    assert {"3.same", "4.same"} <= set(less_bn(model).removed)
    x = torch.randn(2, 3, 8, 8)
    model(x).sum().backward()  # autograd noticed that its saved tensors were written to
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_norm_held_beside_the_module_tree_stays():
    class Paths(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = vgg()
            self.path = list(self.layers)[:6]

        def forward(self, x):
            for layer in (*self.path, *list(self.layers)[6:]):
                x = layer(x)
            return x

    report = less_bn(Paths(), keep_every=9)
    assert report.kept["layers.4"] == "'path' of the model also holds it"
    assert report.removed


def test_a_norm_that_someone_extended_stays():
    model = vgg()
    seen = []
    model[4].register_forward_hook(lambda module, args, output: seen.append(output))
    assert "hooks" in less_bn(model, keep_every=9).kept["4"]
    model(torch.randn(2, 3, 16, 16))
    assert len(seen) == 1


def test_a_forward_that_reads_the_width_of_a_norm():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = vgg(), None

        def forward(self, x):
            h = self.first[:6](x)
            return self.first[6:](h.view(len(x), self.first[4].num_features, *h.shape[2:]))

    model = Reads()
    assert "first.4" in less_bn(model, keep_every=9).removed
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 4)


def test_norms_that_bring_an_activation_along():
    for trained in [False, True]:
        torch.manual_seed(0)
        layers = [m for wide in (3, 4, 4, 4, 4) for m in (nn.Conv2d(wide, 4, 3, padding=1), NormAct(4, nn.SiLU()))]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
        x = torch.randn(8, 3, 8, 8)
        if trained:
            train_a_little(model, size=8)
        before = outputs(model, x)
        report = less_bn(model)
        assert report.removed == ("3", "7")
        assert isinstance(model[3].act, nn.SiLU)
        if trained:
            assert report.largest_difference <= 1e-5
            assert torch.allclose(outputs(model, x), before, atol=1e-5)
        else:  # the activation behind is seen: half of the mean square gets through to the next layer
            assert float(model[4].weight.detach().square().sum((1, 2, 3)).mean()) > 0
            assert report.rescaled == ("2", "6")
            assert float(model[6].weight.detach().square().sum((1, 2, 3)).mean() / 2) == pytest.approx(1, rel=0.05)


def test_a_module_under_two_names_goes_from_both():
    model = vgg()
    outer = nn.ModuleDict({"net": model, "again": nn.ModuleList([model[4]])})
    outer.forward = lambda x: model(x)
    assert len(less_bn(outer).removed) == 3
    stack = nn.Sequential(*[m for _ in range(3) for m in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())])
    stack[3].bonus = stack[4]
    less_bn(stack)
    assert isinstance(stack[4], RemovedNorm)
    assert stack[3].bonus is stack[4]


def test_what_cannot_be_traced_is_unchanged_without_a_sample():
    model = RefusesTracing()
    with pytest.warns(NoEffectWarning, match="no BatchNorm that can go"):
        report = less_bn(model)
    assert (report.traced, report.removed) == ("structure", ())
    assert set(report.kept.values()) == {"the data flow could not be traced; pass an input as sample="}
    report = less_bn(model, sample=(torch.randn(2, 3, 8, 8), torch.tensor(1.0)))
    assert report.traced == "run"
    assert names_of_norms(model) == ["bn1", "layers.0.bn2", "layers.1.bn2", "layers.2.bn2"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: vgg((4, 4, 4), 32),
        lambda: ResNet(BasicBlock, [3, 3, 3], width=32),
        lambda: ResNet(Bottleneck, [3, 3], width=16),
    ],
    ids=["plain", "basic", "bottleneck"],
)
def test_activations_keep_their_size(build):
    model = build()
    report = less_bn(model, blocks_per_norm=3, keep_every=12)
    assert not report.folded
    assert report.largest_difference is None
    found = []
    for name in report.rescaled:
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda m, i, out: found.append(float(out.detach().square().mean())))
    model(torch.randn(16, 3, 32, 32))
    assert len(found) == len(report.removed)
    smallest = 1 / 9 if isinstance(model, ResNet) else 1
    assert smallest / 4 < min(found)
    assert max(found) < 4


def test_the_draw_of_the_weights_stays_and_only_their_size_changes():
    model = resnet(2, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = less_bn(model)
    assert set(report.rescaled) == {"3.conv1", "4.conv1", "5.conv1", "5.downsample.0", "6.conv1"}
    for name, parameter in model.named_parameters():
        ratio = parameter.detach() / before[name]
        changed = name.removesuffix(".weight") in report.rescaled
        if changed:
            torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio))
            assert ratio.flatten()[0] != 1
        else:
            assert torch.equal(parameter, before[name])


def test_weights_can_be_kept():
    model = resnet(2, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert less_bn(model, init="keep").rescaled == ()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_only_the_last_linear_layer_of_the_pass_is_normalised():
    class Early(nn.Module):
        """Registers its head first."""

        def __init__(self):
            super().__init__()
            self.head, self.body, self.inner = nn.Linear(4, 3), vgg()[:-3], nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x):
            return self.head(self.inner(self.body(x)))

    model = Early()
    weight, bias = model.head.weight, model.head.bias
    report = less_bn(model, normalize_head=True, head_multiplier=8.0)
    assert report.head == "head"
    assert isinstance(model.head, NormalizedLinear)
    assert (model.head.weight is weight, model.head.bias is bias, model.head.multiplier.item()) == (True, True, 8.0)
    assert sum(isinstance(m, NormalizedLinear) for m in model.modules()) == 1
    assert type(model.inner[0]) is nn.Linear
    assert not LessBn(normalize_head=True).needs_transform(model)


def test_a_head_without_batch_norm_and_a_network_without_head():
    assert less_bn(nn.Sequential(nn.Linear(3, 3)), normalize_head=True).head == "0"
    with pytest.warns(NoEffectWarning, match="no linear layer"):
        less_bn(nn.Sequential(nn.Conv2d(3, 3, 1)), normalize_head=True)
    with pytest.warns(NoEffectWarning):
        less_bn(nn.Linear(3, 3), normalize_head=True)


def test_a_dry_run_tells_the_same_and_changes_nothing():
    for trained in [False, True]:
        model = resnet(2, 2)
        if trained:
            train_a_little(model)
        before, modules = copy.deepcopy(model.state_dict()), list(model.modules())
        dry = less_bn(model, normalize_head=True, dry_run=True)
        assert list(model.modules()) == modules
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert dry == less_bn(model, normalize_head=True)
        assert f"{len(dry.removed)} of {len(dry.found)}" in str(dry)


def test_twice_is_once():
    for build, settings in [
        (lambda: resnet(3, 3), {}),
        (lambda: resnet(3, 3), {"blocks_per_norm": 2}),
        (lambda: vgg((3, 3, 2)), {"keep_every": 3}),
        (PreActNet, {"keep_shortcut": True}),
    ]:
        model, algorithm = build(), LessBn(**settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert algorithm.needs_transform(model)
        assert algorithm.idle(model, optimizer) is None
        algorithm.transform(model, optimizer)
        assert not algorithm.needs_transform(model)
        assert "BatchNorm" in algorithm.idle(model, optimizer)
        train_a_little(model)
        assert not algorithm.needs_transform(model)
        attach_all(Target(model, optimizer), [algorithm])
        wrapped = torch.compile(model, backend="eager")
        attach_all(Target(wrapped, optimizer), [algorithm])


def test_nothing_to_do_warns():
    for model in (nn.Sequential(nn.Linear(2, 2)), nn.BatchNorm1d(3), vgg((1,))):
        with pytest.warns(NoEffectWarning, match="nothing was changed"):
            report = less_bn(model)
        assert report.removed == ()
    assert "no BatchNorm" in LessBn().idle(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters()))


def test_wrapped_models_are_refused_with_the_way_out():
    compiled_in_place = resnet(2)
    compiled_in_place.compile(backend="eager")
    for model in (torch.compile(resnet(2), backend="eager"), nn.DataParallel(resnet(2)), compiled_in_place):
        before = names_of_norms(model)
        with pytest.raises(IncompatibleError, match="on the bare model before wrapping"):
            less_bn(model)
        assert names_of_norms(model) == before


class Denoiser(nn.Module):
    """A plain stack inside one skip, as in DnCNN."""

    def __init__(self, norms: int) -> None:
        super().__init__()
        layers = [(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(norms)]
        ends = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
        self.noise = nn.Sequential(ends[0], nn.ReLU(), *(layer for three in layers for layer in three), ends[1])

    def forward(self, x):
        return x + self.noise(x)


def test_a_stack_inside_a_skip_stays_as_a_stack_does():
    for norms, keep_every, left in [(3, 1, 1), (4, 1, 4), (15, 1, 15), (15, 2, 1)]:
        model = Denoiser(norms)
        with pytest.warns(NoEffectWarning) if left == norms else nullcontext():
            report = less_bn(model, keep_every=keep_every)
        assert len(report.kept) == left
        assert len(report.found) == norms
        assert left == 1 or "a branch of more than 3" in next(iter(report.kept.values()))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"keep_every.*0"):
        less_bn(vgg(), keep_every=0)
    with pytest.raises(ValueError, match=r"blocks_per_norm.*-1"):
        LessBn(blocks_per_norm=-1)
    with pytest.raises(ValueError, match=r"head_multiplier.*inf"):
        LessBn(head_multiplier=float("inf"))
    with pytest.raises(ValueError, match=r"init.*'zero'"):
        less_bn(vgg(), init="zero")
    with pytest.raises(TypeError, match="found str"):
        less_bn("vgg")


def test_an_error_half_way_leaves_model_and_optimizer_as_they_were():
    for trained in [False, True]:
        model = resnet(1, 1)
        if trained:
            train_a_little(model)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        optimizer.param_groups[0]["param_names"].append("nothing")
        before, parameters = portrait(model), list(optimizer.param_groups[0]["params"])
        with pytest.raises(ValueError, match="names"):
            less_bn(model, optimizer, normalize_head=True)
        # Where warnings are errors, that of new parameters is one too.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(NoEffectWarning, match="will not train"):
                less_bn(model, normalize_head=True)
        assert not changes(before, portrait(model))
        assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, parameters))


def test_the_reduced_network_can_be_copied_saved_and_compiled(tmp_path):
    for trained in [False, True]:
        model, again = resnet(2, 2), resnet(2, 2)
        if trained:
            train_a_little(model)
            train_a_little(again)
        less_bn(model, normalize_head=True)
        less_bn(again, normalize_head=True)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        again.load_state_dict(torch.load(tmp_path / "model.pt"))
        x = torch.randn(2, 3, 16, 16)
        expected = outputs(model.eval(), x)
        assert torch.equal(outputs(again, x), expected)
        for build in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
            assert torch.equal(build(model)(x).detach(), expected)
        torch.testing.assert_close(outputs(torch.compile(again, backend="eager"), x), expected)


def averaged(model: nn.Module, updates: int = 0) -> AveragedModel:
    average = AveragedModel(model)
    for _ in range(updates):
        average.update_parameters(model)
    return average


def test_an_average_of_the_weights_from_before_is_said():
    for updates in [0, 2]:
        model = ResNet(BasicBlock, [1, 1], width=4)
        average = averaged(model, updates)
        count = len(list(model.parameters()))
        with pytest.warns(
            UserWarning, match=f"AveragedModel over a ResNet with the {count} parameters.*after this change"
        ):
            less_bn(model)
        after = averaged(model, updates)
        after.update_parameters(model)
        for own, other in zip(model.parameters(), after.parameters(), strict=True):
            torch.testing.assert_close(own, other)
        assert len(list(average.parameters())) == count


def test_an_average_is_said_by_boost_too():
    model = ResNet(BasicBlock, [1, 1], width=4)
    average = averaged(model)
    with pytest.warns(UserWarning, match="AveragedModel"):
        torchboost.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2", total_steps=5000)
    assert average.module is not model


def test_other_averages_and_copies_are_not_meant():
    """Warnings are errors, so this fails if one is given."""
    for updates in [0, 2]:
        model, same_class, other = (ResNet(BasicBlock, [1, 1], width=4) for _ in range(3))
        twin = copy.deepcopy(model)
        averages = [
            averaged(same_class),
            averaged(ResNet(BasicBlock, [1], width=4), updates),
            averaged(nn.Linear(2, 2)),
        ]
        averages.append(AveragedModel.__new__(AveragedModel))
        less_bn(model)
        less_bn(twin, dry_run=True)
        remaining = averaged(other)
        assert less_bn(other, dry_run=True).removed
        assert (len(averages), remaining.module.training) == (4, True)
