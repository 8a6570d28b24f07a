from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchboost.bench.workloads.models import GPT, VGG, BasicBlock, Bottleneck, ResNet


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def on_meta(build: Callable[..., nn.Module], *args: Any, **settings: Any) -> nn.Module:
    with torch.device("meta"):
        return build(*args, **settings)


# Published parameter counts (torchvision's tables, OpenAI's checkpoint).
def test_resnet50_has_the_published_size() -> None:
    assert size(on_meta(ResNet, Bottleneck, [3, 4, 6, 3], classes=1000, stem="imagenet")) == 25_557_032


def test_resnet18_has_the_published_size() -> None:
    assert size(on_meta(ResNet, BasicBlock, [2, 2, 2, 2], classes=1000, stem="imagenet")) == 11_689_512


def test_gpt2_small_has_the_published_size() -> None:
    assert size(on_meta(GPT, 50257)) == 124_439_808


def test_vgg11_features_have_the_published_size() -> None:
    # torchvision's vgg11_bn has 9,225,984 weights in its features, 2,752 of them biases of convolutions.
    assert size(on_meta(VGG).get_submodule("features")) == 9_225_984 - 2_752


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (ResNet(Bottleneck, [1, 1], width=4, classes=7), (2, 3, 16, 16)),
        (ResNet(BasicBlock, [1, 1], width=4, classes=7, in_channels=1), (2, 1, 16, 16)),
        (ResNet(Bottleneck, [1, 1], width=4, classes=7, stem="imagenet"), (2, 3, 32, 32)),
        (VGG((1, 1), width=4, classes=7), (2, 3, 16, 16)),
    ],
)
def test_images_become_scores_and_every_weight_gets_a_gradient(model: nn.Module, shape: tuple[int, ...]) -> None:
    scores = model(torch.randn(shape))
    assert scores.shape == (2, 7)
    F.cross_entropy(scores, torch.tensor([1, 2])).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_gpt_sees_only_the_past_and_starts_near_the_uniform_loss() -> None:
    torch.manual_seed(0)
    model = GPT(50, context=16, layers=2, heads=2, width=32)
    tokens = torch.randint(50, (3, 16))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 50
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 16, 50)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])
    loss = F.cross_entropy(before.flatten(0, 1), tokens.roll(1, 1).flatten())
    assert loss.item() == pytest.approx(torch.tensor(50.0).log().item(), abs=0.2)


def test_gpt_refuses_a_width_its_heads_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"found 30.*heads, 4"):
        GPT(10, heads=4, width=30)
