"""Folding leaves the function in eval mode as it is, or leaves the model as it is."""

from __future__ import annotations

import copy
import itertools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations

from tests.support.conv_nets import (
    ForeignNames,
    InvertedResidual,
    PreActNet,
    RefusesTracing,
    train_a_little,
    vgg,
)
from tests.support.portraits import changes, portrait
from tests.support.removal_nets import NormAct
from torchboost import fold_batch_norms
from torchboost.errors import IncompatibleError


def shaken(model: nn.Module) -> nn.Module:
    """Give every BatchNorm statistics and an affine map that matter; eval mode."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.3, 3)
            if module.weight is not None:
                nn.init.uniform_(module.weight, -2, 2)
                nn.init.uniform_(module.bias, -1, 1)
    return model.eval()


def norms(model: nn.Module) -> int:
    return sum(isinstance(m, _BatchNorm) for m in model.modules())


def test_folds_behind_every_kind_of_convolution():
    for bias in [True, False]:
        for kind, options in [
            (nn.Conv1d, {}),
            (nn.Conv2d, {"groups": 2}),
            (nn.Conv2d, {"groups": 4, "padding": 1, "padding_mode": "reflect"}),
            (nn.Conv3d, {"stride": 2, "dilation": 2}),
            (nn.ConvTranspose1d, {}),
            (nn.ConvTranspose2d, {"groups": 2, "stride": 2, "output_padding": 1}),
            (nn.ConvTranspose3d, {"groups": 4}),
        ]:
            sides = int(kind.__name__[-2])
            norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[sides - 1]
            model = shaken(nn.Sequential(kind(4, 8, 3, bias=bias, **options), norm(8), nn.ReLU()).double())
            x = torch.randn(2, 4, *[9] * sides, dtype=torch.float64)
            before = model(x)
            report = fold_batch_norms(model, sample=x)
            assert report.folded == ("1",)
            assert report.largest_difference < 1e-12
            torch.testing.assert_close(model(x), before)


def test_a_linear_layer_without_a_bias_gets_one_and_the_optimizer_follows():
    inner = [nn.BatchNorm1d(5), nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7, affine=False), nn.Tanh()]
    model = nn.Sequential(nn.Flatten(), *inner)
    optimizer = torch.optim.SGD(shaken(model).parameters(), lr=0.1)
    affine, x = list(model[1].parameters()), torch.randn(3, 5)
    before = model(x)
    report = fold_batch_norms(model, optimizer)
    assert report.folded == ("3",)
    assert "no convolution" in report.kept["1"]
    torch.testing.assert_close(model(x), before)
    kept = [*affine, model[2].weight, model[2].bias]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in kept]


def test_folds_networks_that_were_trained_a_little():
    for build, gone in [(vgg, 7), (ForeignNames, 4), (PreActNet, 3), (lambda: InvertedResidual(3, 3), 3)]:
        model = (
            nn.Sequential(build(), nn.AdaptiveAvgPool2d(1), nn.Flatten()) if build.__name__ == "<lambda>" else build()
        )
        train_a_little(model)
        x = torch.randn(4, 3, 16, 16)
        before, total = model.eval()(x), norms(model)
        report = fold_batch_norms(model, sample=x)
        assert len(report.folded) == gone == total - norms(model)
        assert report.largest_difference < 1e-4
        assert (model(x) - before).abs().max() / before.abs().max() < 1e-4
        assert fold_batch_norms(model).folded == ()


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(self.norm(self.conv(x))))


class _Leaks(_Twice):
    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


class _Activated(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


def _tied():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.ReLU())
    model[2].weight = model[0].weight
    return model


def test_says_why_a_layer_stays():
    for model, reason in [
        (_Twice(), "used 2 times"),
        (_Leaks(), "also used elsewhere"),
        (nn.Sequential(nn.Conv2d(3, 3, 1), _Activated(3)), "own forward"),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)), "no running statistics"),
        (nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 3, 1)), nn.BatchNorm2d(3)), "computes its weight"),
        (_tied(), "shares its weight"),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.BatchNorm2d(3)), "no convolution"),
        (RefusesTracing(), "could not be traced"),
    ]:
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                nn.init.uniform_(module.running_mean)
        before = copy.deepcopy(model.eval().state_dict())
        report = fold_batch_norms(model)
        assert report.folded == ()
        assert all(reason in text for text in report.kept.values())
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class _Conditional(_Net):
    def forward(self, x, shift=None):
        y = self.conv(x)
        return self.head(torch.relu(self.norm(y if shift is None else y + shift)).mean((2, 3)))


class _SmallImagesAreNotNormalised(_Net):
    def forward(self, x):
        y = self.conv(x)
        return self.head(torch.relu(self.norm(y) if x.shape[-1] > 16 else y).mean((2, 3)))


class _TwoInputs(_Net):
    def forward(self, x, y):
        return super().forward(x) + y


class _Around(nn.Module):
    """Blocks whose forward always does the same, in one that does not."""

    def __init__(self):
        super().__init__()
        self.body, self.tapped = nn.Sequential(_Conv(3), _Conv(4)), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x, features=False):
        x = self.body(x)
        found = []
        for layer in self.tapped:
            x = layer(x)
            found.append(x)
        return found if features else x


class _Conv(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inside, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


def _on_instance(module, forward):
    module.forward = types.MethodType(forward, module)


_ALTERATIONS = {
    "hook on the convolution": lambda m: m.conv.register_forward_hook(lambda *a: a[-1].clamp(-0.1, 0.3)),
    "hook on the norm": lambda m: m.norm.register_forward_hook(lambda *a: a[-1].clamp(-0.1, 0.3)),
    "pre-hook on the norm": lambda m: m.norm.register_forward_pre_hook(lambda m, a: (a[0].clamp(-0.1, 0.3),)),
    "forward of the norm": lambda m: _on_instance(m.norm, lambda self, x: nn.BatchNorm2d.forward(self, x).clamp(-1, 0)),
    "forward of the convolution": lambda m: _on_instance(m.conv, lambda self, x: nn.Conv2d.forward(self, x).relu()),
    "forward of the model": lambda m: _on_instance(m, lambda self, x, *y: self.head(self.conv(x).mean((2, 3)))),
}


def test_what_was_altered_on_the_instance_stays():
    for build, alteration in itertools.product([_Net, _TwoInputs], _ALTERATIONS.values()):
        model = shaken(build())
        alteration(model)
        inputs = (torch.randn(2, 3, 8, 8), torch.randn(2, 2))[: 1 + (build is _TwoInputs)]
        before = model(*inputs)
        assert fold_batch_norms(model).folded == ()
        assert fold_batch_norms(model, sample=inputs).folded == ()
        assert torch.equal(model(*inputs), before)


def test_a_hook_on_a_module_around_the_layer_counts_as_an_operation():
    model = shaken(nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1)), nn.BatchNorm2d(4)))
    assert fold_batch_norms(copy.deepcopy(model)).folded == ("1",)
    model[0].register_forward_hook(lambda module, args, output: output.relu())
    assert "no convolution" in fold_batch_norms(model).kept["1"]


def test_optional_arguments_must_be_settled_by_a_sample():
    model, x, shift = shaken(_Conditional()), torch.randn(2, 3, 8, 8), torch.randn(2, 4, 8, 8)
    assert "optional arguments" in fold_batch_norms(model).kept["norm"]
    assert "no convolution" in fold_batch_norms(model, sample=(x, shift)).kept["norm"]
    assert fold_batch_norms(model, sample={"x": x}).folded == ("norm",)


def test_a_decision_by_the_shape_is_refused_with_a_sample_too():
    model = shaken(_SmallImagesAreNotNormalised())
    assert "depends on values or shapes" in fold_batch_norms(model).kept["norm"]
    assert fold_batch_norms(model, sample=torch.randn(2, 3, 32, 32)).folded == ()


def test_every_path_is_followed():
    class Pads(_Net):
        """Decides by the shape, and does the same to the convolution's output on all paths."""

        def forward(self, x):
            if x.ndim != 4:
                raise ValueError("expected images")
            height, width = x.shape[-2:]
            x = F.pad(x, (0, 1 if width % 2 else 0, 0, max(height % 2, 0)))
            return super().forward(x)

    model, x = shaken(Pads()), torch.randn(2, 3, 9, 8)
    before = model(x)
    assert fold_batch_norms(model).folded == ("norm",)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def test_what_computes_with_shapes_outside_of_torch_stays():
    class Counts(_Net):
        def forward(self, x):
            return super().forward(F.pad(x, (0, int(x.shape[-1]) % 2)))

    report = fold_batch_norms(shaken(Counts()))
    assert report.folded == ()
    assert "cannot be traced" in report.kept["norm"]


def test_parts_whose_forward_is_fixed_are_folded_in_one_that_is_not():
    model, x = shaken(_Around()), torch.randn(2, 3, 8, 8)
    plain, features = model(x), model(x, features=True)
    report = fold_batch_norms(model)
    assert report.folded == ("body.0.norm", "body.1.norm")
    assert list(report.kept) == ["tapped.1"]
    torch.testing.assert_close(model(x), plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x, features=True), features, rtol=1e-4, atol=1e-5)


def test_behind_a_linear_layer_there_must_be_two_dimensions():
    model, rows = shaken(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))), torch.randn(2, 6)
    assert "number of dimensions" in fold_batch_norms(model).kept["1"]
    assert fold_batch_norms(model, sample=torch.randn(2, 6, 6)).folded == ()
    assert fold_batch_norms(model, sample=rows).folded == ("1",)

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Conv2d(3, 4, 3), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x):
            return self.head(torch.relu(self.body(x)).mean((2, 3)))

    assert fold_batch_norms(shaken(Pooled())).folded == ("head.1",)


def test_a_convolution_that_computes_otherwise_inside_stays():
    class Standardised(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)

    model = shaken(nn.Sequential(Standardised(3, 4, 3), nn.BatchNorm2d(4)))
    assert "computes its weight" in fold_batch_norms(model).kept["1"]


def test_what_the_class_of_a_norm_runs_behind_it_stays():
    model, x = (
        shaken(nn.Sequential(nn.Conv2d(3, 4, 1), NormAct(4, nn.ReLU()), nn.Conv2d(4, 4, 1))),
        torch.randn(2, 3, 4, 4),
    )
    before = model(x)
    assert fold_batch_norms(model).folded == ("1",)
    assert any(isinstance(module, nn.ReLU) for module in model[1].modules())
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def test_a_norm_that_a_plain_list_calls_stays_and_the_others_go():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.convs = _Conv(3), nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))
            self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
            self.order = list(zip(self.convs, self.norms, strict=True))

        def forward(self, x):
            x = self.stem(x)
            for conv, norm in self.order:
                x = norm(conv(x))
            return x

    model, x = shaken(Lists()), torch.randn(2, 3, 8, 8)
    before = model(x)
    report = fold_batch_norms(model)
    assert report.folded == ("stem.norm",)
    assert report.kept == dict.fromkeys(("norms.0", "norms.1"), "'order' of the model also holds it")
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


class Breaks(nn.Module):
    """Raises once its convolution has a bias, or then takes another path."""

    def __init__(self, error: type[BaseException] | None):
        super().__init__()
        self.conv, self.norm, self.error = nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3), error

    def forward(self, x):
        if self.conv.bias is None:
            return self.norm(self.conv(x))
        if self.error is not None:
            raise self.error("half-way")
        return x


def test_an_error_an_interrupt_or_a_wrong_trace_leave_everything_as_it_was():
    for error, message in [(RuntimeError, "half-way"), (KeyboardInterrupt, "half-way"), (None, "restored")]:
        model = shaken(Breaks(error))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before, parameters = portrait(model), list(model.parameters())
        with pytest.raises(error or IncompatibleError, match=message):
            fold_batch_norms(model, optimizer)
        assert not changes(before, portrait(model))
        assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, parameters))


def test_an_optimizer_that_cannot_follow_leaves_the_model_as_it_was():
    model = shaken(nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3)))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer.param_groups[0]["param_names"].pop()
    before = portrait(model)
    with pytest.raises(ValueError, match="names"):
        fold_batch_norms(model, optimizer)
    assert not changes(before, portrait(model))


def test_half_precision():
    model = shaken(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())).bfloat16()
    report = fold_batch_norms(model)
    assert report.folded == ("1",)
    assert model[0].bias.dtype == torch.bfloat16
    assert report.largest_difference < 0.05


def test_a_diverged_network_is_said_to_be_one():
    model = vgg()
    train_a_little(model)
    next(model.parameters()).data.fill_(float("nan"))
    norms = sum(isinstance(module, _BatchNorm) for module in model.modules())
    with pytest.raises(ValueError, match="NaN or infinities"):
        fold_batch_norms(model.eval())
    assert sum(isinstance(module, _BatchNorm) for module in model.modules()) == norms


def test_what_is_wrapped_or_trains_stays_and_nothing_to_fold_is_no_warning():
    model = shaken(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    with pytest.raises(IncompatibleError, match="DataParallel"):
        fold_batch_norms(nn.DataParallel(model))
    model[1].train()
    assert "training mode" in fold_batch_norms(model).kept["1"]
    assert "0 of 0" in str(fold_batch_norms(nn.Linear(2, 2)))
