"""Memory that the loop holds: inputs into which the model writes, gradients that are views of a flat buffer."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import batch_for, cnn
from tests.support.ranks import run_ranks
from tests.support.wrapped import all_weights, wrap
from torchboost.algorithms.channels_last import ChannelsLast, to_channels_last
from torchboost.core.algorithm import Attachment, Target, attach_all

LAST = torch.channels_last


def sgd(model: nn.Module, **options: bool) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


def batch(model: nn.Module, seed: int = 0) -> tuple[Tensor, Tensor]:
    return batch_for(model, torch.Generator().manual_seed(seed))


class WritesInput(nn.Module):
    """Normalises its input in place before it computes, by a factor that it may learn."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=learned)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x.sub_(x.detach().mean((0, 2, 3), keepdim=True)).mul_(self.scale)
        return self.conv(x) + other.square()


@pytest.mark.parametrize("learned", [False, True])
def test_what_the_model_writes_into_its_input_reaches_the_loop(learned: bool) -> None:
    def run(converted: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = WritesInput(learned)
        if converted:
            attach_all(Target(model, sgd(model)), [ChannelsLast()])
        x = torch.randn(2, 3, 5, 5)
        y = model(x=x, other=x)
        F.mse_loss(y, x).backward()
        return [x.detach(), y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    for ours, plain in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(ours, plain)


def flatten_gradients(model: nn.Module) -> Tensor:
    """Make the gradients views of one buffer, as loops do that clip or reduce them in one piece."""
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    pieces = flat.split([p.numel() for p in model.parameters()])
    for p, piece in zip(model.parameters(), pieces, strict=True):
        p.grad = piece.view(p.shape)
    return flat


def test_a_kernel_whose_gradient_is_a_view_of_a_buffer_of_its_size_stays() -> None:
    layer = nn.Conv2d(3, 4, 3, bias=False)
    flat = flatten_gradients(layer)
    with to_channels_last(layer):
        layer(torch.randn(2, 3, 5, 5)).sum().backward()
        flat.zero_()
        assert not bool(layer.weight.grad.any())


def test_a_gradient_in_a_flat_buffer_stays_there_while_kernels_go_back() -> None:
    model = cnn()
    effect = to_channels_last(model)
    flat = flatten_gradients(model)
    effect.remove()
    flat.fill_(1)
    assert all(bool((p.grad == 1).all()) for p in model.parameters())


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_in_a_flat_buffer_stay_there(early: bool, fused: bool) -> None:
    """A loop that clears the buffer clears the gradients, and what it writes into the buffer is what the step takes."""

    def run(converted: bool) -> nn.Module:
        torch.manual_seed(0)
        model = cnn()
        optimizer = sgd(model, fused=fused)
        flat = flatten_gradients(model) if early else None
        attached = attach_all(Target(model, optimizer), [ChannelsLast()]) if converted else Attachment()
        flat = flatten_gradients(model) if flat is None else flat
        views = [p.grad for p in model.parameters()]
        for seed in range(3):
            inputs, labels = batch(model, seed)
            flat.zero_()
            F.cross_entropy(model(inputs), labels).backward()
            flat.mul_(0.5)
            optimizer.step()
        attached.remove()
        assert all(p.grad is view for p, view in zip(model.parameters(), views, strict=True))
        assert all(p.grad.untyped_storage().data_ptr() == flat.data_ptr() for p in model.parameters())
        return model

    for ours, plain in zip(run(True).parameters(), run(False).parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def _train_with_views_of_buckets(when: str) -> tuple[list[float], bool]:
    warnings.filterwarnings("ignore", message="grad and param do not obey|Grad strides do not match")
    torch.manual_seed(0)
    model = cnn().eval()
    if when == "before":
        ChannelsLast().transform(model)
    wrapped = wrap(model, "ddp", gradient_as_bucket_view=True)
    if when == "after":  # the buckets are laid out for contiguous kernels
        model.to(memory_format=LAST)
    target = Target(wrapped, sgd(wrapped, fused=True))
    attach_all(target, [] if when == "never" else [ChannelsLast()])
    inside = []
    for seed in range(3):
        inputs, labels = batch(model, 2 * seed + dist.get_rank())
        F.cross_entropy(wrapped(inputs), labels).backward()
        held = [p.grad for p in model.parameters()]
        target.optimizer.step()
        inside += [p.grad is grad for p, grad in zip(model.parameters(), held, strict=True)]
        target.optimizer.zero_grad(set_to_none=False)
    return all_weights(wrapped), all(inside)


def _train_with_views_of_buckets_each() -> list[tuple[list[float], bool]]:
    return [_train_with_views_of_buckets(when) for when in ("never", "before", "after")]


@pytest.mark.dist
def test_gradients_that_are_views_of_the_buckets_of_ddp_stay_there() -> None:
    a, b = run_ranks(_train_with_views_of_buckets_each, 2)
    assert a == b
    assert all(inside for _, inside in a)
    for weights, _ in a[1:]:
        torch.testing.assert_close(weights, a[0][0], rtol=0, atol=1e-5)
