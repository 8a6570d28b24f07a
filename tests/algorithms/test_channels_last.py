"""Channels-last: only strides change, whatever belongs to a kernel follows, removal gives the old strides back."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchboost
from tests.support.models import BottleneckNet, batch_for, cnn, mlp
from tests.support.trajectories import train
from torchboost import Target, boost, optim
from torchboost.algorithms import ChannelsLast, to_channels_last
from torchboost.core import Attachment, attach_all
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.optim.wrapping_optimizer import WrappingOptimizer

LAST = torch.channels_last


def sgd(model: nn.Module, **options: bool) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in model.state_dict().values()]


def batch(model: nn.Module, seed: int = 0) -> tuple[Tensor, Tensor]:
    return batch_for(model, torch.Generator().manual_seed(seed))


@torch.no_grad()
def largest_gap(a: nn.Module, b: nn.Module) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_the_model_computes_channels_last_and_the_same_values() -> None:
    model = BottleneckNet()
    plain = copy.deepcopy(model)
    seen = []
    model.stem.register_forward_hook(lambda module, args, output: seen.append(output.is_contiguous(memory_format=LAST)))
    effect = to_channels_last(model)
    inputs, _ = batch(model)
    torch.testing.assert_close(model(inputs), plain(inputs), rtol=1e-5, atol=1e-6)
    assert seen == [True]
    assert all(m.weight.is_contiguous(memory_format=LAST) for m in model.modules() if isinstance(m, nn.Conv2d))
    effect.remove()
    model(inputs)
    assert seen == [True, False]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_images_of_one_channel_are_computed_channels_last_too() -> None:
    """Their bytes are the same in both formats, so the first convolution would choose by the strides: contiguous."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1))
    inputs = torch.randn(2, 1, 6, 6, requires_grad=True)
    expected = model(inputs)
    assert expected.is_contiguous()
    to_channels_last(model)
    found = model(inputs)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert not found.is_contiguous()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), inputs)[0] for one in (found, expected)))


def test_momentum_that_exists_follows_its_kernel() -> None:
    for fused in [False, True]:
        model = cnn()
        plain = copy.deepcopy(model)
        one, other = Target(model, sgd(model, fused=fused)), Target(plain, sgd(plain))
        train(one, 2, 3)
        train(other, 2, 3)
        attached = attach_all(one, [ChannelsLast()])
        kernels = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
        assert all(one.optimizer.state[k]["momentum_buffer"].stride() == k.stride() for k in kernels)
        train(one, 3, 4)
        train(other, 3, 4)
        assert largest_gap(model, plain) < 1e-5
        attached.remove()
        assert strides(model) == strides(plain)
        assert all(one.optimizer.state[k]["momentum_buffer"].stride() == k.stride() for k in kernels)
        train(one, 2, 5)
        train(other, 2, 5)
        assert largest_gap(model, plain) < 1e-5


def test_a_gradient_that_exists_follows_its_kernel() -> None:
    model = cnn()
    inputs, labels = batch(model)
    F.cross_entropy(model(inputs), labels).backward()
    before = model[0].weight.grad.clone()
    ChannelsLast().transform(model)
    assert model[0].weight.grad.stride() == model[0].weight.stride()
    assert torch.equal(model[0].weight.grad, before)


def test_the_function_gives_back_the_strides_that_were_there() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3))
    model[0].to(memory_format=LAST)
    model[1].weight.data = model[1].weight.data.transpose(2, 3)
    before = strides(model)
    effect = to_channels_last(model)
    assert model[1].weight.is_contiguous(memory_format=LAST)
    effect.remove()
    assert strides(model) == before


def test_a_model_that_was_channels_last_stays_so() -> None:
    model = cnn().to(memory_format=LAST)
    before = strides(model)
    attach_all(Target(model, sgd(model)), [ChannelsLast()]).remove()
    assert strides(model) == before
    plain = cnn()
    ChannelsLast().transform(plain)
    attach_all(Target(plain, sgd(plain)), [ChannelsLast()]).remove()
    assert strides(plain) == before
    saved, optimizer = Target(contiguous := cnn(), sgd(contiguous)), sgd(model)
    train(saved, 1, 3)
    to_channels_last(model, optimizer)
    optimizer.load_state_dict(saved.optimizer.state_dict())
    assert optimizer.state[model[0].weight]["momentum_buffer"].stride() == model[0].weight.stride()


def test_a_failure_while_attaching_gives_the_strides_back() -> None:
    class Failing(ChannelsLast):
        def attach(self, target: Target) -> Attachment:
            raise IncompatibleError("refuses")

    model = cnn()
    before = strides(model)
    with pytest.raises(IncompatibleError, match="refuses"):
        attach_all(Target(model, sgd(model)), [Failing()])
    assert strides(model) == before


class Flattening(nn.Module):
    """Takes images of one size, 9 x 9, by a view that only contiguous activations allow."""

    def __init__(self, side: int = 9) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.side = side
        self.head = nn.Linear(4 * (side - 2) ** 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).view(len(x), -1))


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, centred / centred.view(len(centred), -1).std(1).view(-1, 1, 1, 1), self.bias)


class BackwardView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.view(-1).view(gradient.shape)


class ViewsGradients(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(BackwardView.apply(self[0](x)))


class WritesThroughReshape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x.detach().reshape(-1).clamp_(min=1.0)  # a view of contiguous activations, a copy of others
        return x


def test_what_does_not_work_in_this_format_is_left_out_at_the_first_call() -> None:
    for build, said in [
        (Flattening, "view size is not compatible"),
        (lambda: nn.Sequential(Standardised(3, 4, 3)), "view size is not compatible"),
        (lambda: ViewsGradients(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)), "view size is not compatible"),
        (WritesThroughReshape, "an output differs by"),
    ]:
        model = build()
        plain = copy.deepcopy(model)
        before, inputs, called = strides(model), torch.randn(2, 3, 9, 9), []
        config = {"extra": {"channels_last": True, "autocast": False, "fused_optimizer": False}}
        boosted = torchboost.boost(model, sgd(model), calibrate=False, config=config)
        for each in (model, plain):
            next(each.children()).register_forward_hook(lambda module, *_, called=called: called.append(module))
        with pytest.warns(NoEffectWarning, match=f"channels_last: left out: .*{said}"):
            loss = model(inputs).square().mean()
        assert strides(model) == before
        assert said in boosted.explain()
        loss.backward()
        plain(inputs).square().mean().backward()
        assert called.count(next(model.children())) == called.count(next(plain.children()))
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_model_without_numbers_is_not_tried() -> None:
    with torch.device("meta"):
        model = cnn()
    assert ChannelsLast().idle(model, sgd(model)) is None
    to_channels_last(model)
    assert model[0].weight.is_contiguous(memory_format=LAST)


def test_kernels_in_a_flat_buffer_or_in_shared_memory_stay() -> None:
    model = cnn()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = 0
    for p in model.parameters():
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    shared = cnn().share_memory()
    for each in (model, shared):
        before = strides(each)
        assert not ChannelsLast().needs_transform(each)
        with attach_all(Target(each, sgd(each)), [ChannelsLast()]):
            assert strides(each) == before
    flat.zero_()
    assert not bool(model[0].weight.any())
    assert all(p.is_shared() for p in shared.parameters())


def test_lbfgs_flattens_gradients_by_view() -> None:
    model = cnn()
    assert "LBFGS" in (ChannelsLast().idle(model, torch.optim.LBFGS(model.parameters())) or "")


class Inherits(torch.optim.SGD):
    """No step of its own."""


class Views(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_((p.grad.view(len(p), -1) / p.grad.norm()).view_as(p), alpha=-0.1)


class ViewsInItsRule(optim.SGD):
    def update(self, group, batch) -> None:
        for p, grad in zip(batch.params, batch.grads, strict=True):
            p.sub_(grad.view(len(p), -1).sign().view_as(p), alpha=group["lr"])


class Behind(WrappingOptimizer):
    """Steps what is behind it."""


COPES = {
    "torch": (lambda params: torch.optim.Adafactor(params), True),
    "inherited": (lambda params: Inherits(params, lr=0.1), True),
    "ours": (lambda params: optim.Lamb(params), True),
    "behind another": (lambda params: Behind(torch.optim.SGD(params, lr=0.1)), True),
    "own step": (lambda params: Views(params, lr=0.1), False),
    "own rule": (lambda params: ViewsInItsRule(params, lr=0.1), False),
    "own step behind another": (lambda params: Behind(Views(params, lr=0.1)), False),
}


def test_an_optimizer_with_a_step_of_its_own_keeps_contiguous_gradients() -> None:
    for name in COPES:
        make, copes = COPES[name]
        model = cnn()
        boosted = boost(model, make(model.parameters()), calibrate=False, config={"extra": {"channels_last": True}})
        assert ("channels_last" in boosted.attached) is copes
        assert ("has its own step" in boosted.explain()) is not copes
        inputs, labels = batch(model)
        F.cross_entropy(model(inputs), labels).backward()
        assert all(p.grad.is_contiguous() for p in model.parameters()) is not copes
        boosted.optimizer.step()


def test_volumes_use_the_three_dimensional_format_and_other_inputs_pass() -> None:
    class Volumes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(2, 4, 3)

        def forward(self, x: Tensor, *, mask: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.conv(x), mask, image

    model = Volumes()
    with to_channels_last(model):
        mask, image = torch.ones(1, 2, 4, 4, 4, dtype=torch.bool), torch.ones(1, 2, 4, 4)
        y, same_mask, same_image = model(torch.randn(3, 2, 4, 4, 4), mask=mask, image=image)
        assert y.is_contiguous(memory_format=torch.channels_last_3d)
        assert same_mask is mask
        assert same_image is image


def pointwise_and_depthwise() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1))


def test_kernels_get_the_strides_that_torch_gives_them() -> None:
    """If the window or the number of channels is 1, both formats are the same bytes, but compiled code differs."""
    model, by_hand = pointwise_and_depthwise(), pointwise_and_depthwise().to(memory_format=LAST)
    before = strides(model)
    optimizer = sgd(model)
    F.cross_entropy(model(torch.randn(2, 4, 5, 5)).mean((2, 3)), torch.tensor([0, 1])).backward()
    optimizer.step()
    assert strides(model) != strides(by_hand)
    assert ChannelsLast().needs_transform(model)
    effect = to_channels_last(model, optimizer)
    assert strides(model) == strides(by_hand)
    assert not ChannelsLast().needs_transform(model)
    assert all(optimizer.state[p]["momentum_buffer"].stride() == p.stride() for p in model.parameters())
    effect.remove()
    assert strides(model) == before


def test_a_wrapped_model_keeps_strides_that_mean_the_same_bytes() -> None:
    model = pointwise_and_depthwise()
    model.compile(backend="eager")
    before = strides(model)
    assert not ChannelsLast().needs_transform(model)
    with to_channels_last(model):
        assert strides(model) == before


def test_a_computed_kernel_is_left_to_its_parametrisation() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))
    with to_channels_last(model):
        assert model(torch.randn(1, 3, 5, 5)).is_contiguous(memory_format=LAST)


def test_a_model_without_convolutions_is_refused_politely() -> None:
    model = mlp()
    assert "convolution" in (ChannelsLast().idle(model, sgd(model)) or "")
    assert ChannelsLast().idle(cnn(), sgd(cnn())) is None
    with pytest.warns(NoEffectWarning, match="Sequential has no 2-d or 3-d convolution"):
        effect = to_channels_last(model)
    effect.remove()


def test_a_wrapped_model_with_other_kernels_is_refused_before_anything_changes() -> None:
    model = cnn()
    before = strides(model)
    model.compile(backend="eager")
    with pytest.raises(IncompatibleError, match=r"nn\.Module\.compile; call it on the bare model"):
        to_channels_last(model)
    assert strides(model) == before


def test_it_compiles_without_graph_breaks() -> None:
    for backend, in_place in itertools.product(["eager", "aot_eager"], [True, False]):
        torch.compiler.reset()
        model = BottleneckNet()
        inputs, _ = batch(model)
        expected = model(inputs)
        with to_channels_last(model):
            call = model
            if in_place:
                model.compile(backend=backend, fullgraph=True)
            else:
                call = torch.compile(model, backend=backend, fullgraph=True)
            torch.testing.assert_close(call(inputs), expected, rtol=1e-5, atol=1e-6)


def test_a_copied_model_keeps_its_kernels_and_an_attachment_copied_with_it_is_its_own() -> None:
    attaches = [to_channels_last, lambda m, o: attach_all(Target(m, o), [ChannelsLast()])]
    for again, attach in itertools.product([copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], attaches):
        model = cnn()
        before, inputs = strides(model), batch(model)[0]
        effect = attach(model, sgd(model))
        changed = strides(model)
        copied, other = again((model, effect))
        torch.testing.assert_close(copied(inputs), model(inputs))
        assert strides(copied) == changed
        assert vars(copied).keys() == vars(cnn()).keys()
        other.remove()
        assert strides(copied) == before
        assert strides(model) == changed != before
        effect.remove()
        assert strides(model) == before


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torch_script_compiles_it() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)
    with attach_all(Target(model, sgd(model)), [ChannelsLast()]):
        assert torch.equal(torch.jit.script(model)(x), model(x))


def test_gradients_per_sample_by_vmap_are_those_of_the_loop():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    images = torch.randn(5, 3, 8, 8)
    model[2].weight.requires_grad_().data = torch.randn(200)[:144].view(4, 4, 3, 3)  # in a flat buffer, so it stays
    attach_all(Target(model, sgd(model)), [ChannelsLast()])
    parameters = dict(model.named_parameters())

    def loss(weights, image):
        return torch.func.functional_call(model, weights, (image[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, images)
    for image, number in zip(images, range(len(images)), strict=True):
        alone = torch.func.grad(loss)(parameters, image)
        for name, gradient in alone.items():
            torch.testing.assert_close(per_sample[name][number], gradient)


class Reshaping(Flattening):
    """Runs in either format. Its size is not guessed, so the first batch decides."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).flatten(1)).square().mean()


def test_other_tensors_in_place_of_the_parameters() -> None:
    torch.manual_seed(0)
    model, images = Reshaping(), torch.randn(2, 3, 9, 9)
    values = {name: value.detach().clone() for name, value in model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, images)

    expected, gradients = loss(values), torch.func.grad(loss)(values)
    with to_channels_last(model):
        torch.testing.assert_close(loss(values), expected)
        torch.testing.assert_close(torch.func.grad(loss)(values), gradients)
        torch.testing.assert_close(model(images), expected)
