"""Plain PyTorch models, written as a user would write them, without torchboost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    expansion: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels, H, W) to (N, width, H / stride, W / stride)."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """A 1 x 1, a 3 x 3 and a widening 1 x 1 convolution, and a shortcut. The 3 x 3 convolution has the stride."""

    expansion: ClassVar[int] = 4

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels, H, W) to (N, 4 * width, H / stride, W / stride)."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A residual network for images.

    ``ResNet(Bottleneck, [3, 4, 6, 3], classes=1000, stem="imagenet")`` is ResNet-50.

    Args:
        block: Kind of residual block.
        layers: Blocks per stage. Every stage after the first halves the resolution and doubles the width.
        width: Channels of the first stage, before the block's expansion.
        classes: Number of outputs.
        in_channels: Channels of the images.
        stem: ``"cifar"``, one 3 x 3 convolution, or ``"imagenet"``, 7 x 7 with stride 2 and pooling.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        layers: Sequence[int],
        *,
        width: int = 64,
        classes: int = 10,
        in_channels: int = 3,
        stem: Literal["cifar", "imagenet"] = "cifar",
    ) -> None:
        super().__init__()
        self.stem = _stem(stem, in_channels, width)
        stages, channels = [], width
        for index, count in enumerate(layers):
            planes, blocks = width * 2**index, []
            for position in range(count):
                stride = 2 if index > 0 and position == 0 else 1
                blocks.append(block(channels, planes, stride))
                channels = planes * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to scores (N, classes)."""
        return self.fc(self.pool(self.stages(self.stem(x))).flatten(1))


class VGG(nn.Module):
    """A stack of 3 x 3 convolutions with BatchNorm, with pooling between the stages.

    Args:
        layers: Convolutions per stage.
        width: Channels of the first stage. They double from stage to stage, up to eightfold.
        classes: Number of outputs.
        in_channels: Of the images.
    """

    def __init__(
        self, layers: Sequence[int] = (1, 1, 2, 2, 2), *, width: int = 64, classes: int = 10, in_channels: int = 3
    ) -> None:
        super().__init__()
        features: list[nn.Module] = []
        channels = in_channels
        for index, count in enumerate(layers):
            planes = width * min(2**index, 8)
            for _ in range(count):
                features += [
                    nn.Conv2d(channels, planes, 3, padding=1, bias=False),
                    nn.BatchNorm2d(planes),
                    nn.ReLU(inplace=True),
                ]
                channels = planes
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to scores (N, classes)."""
        return self.fc(self.pool(self.features(x)).flatten(1))


class GPT(nn.Module):
    """A decoder-only transformer: pre-norm, learned positions, output layer tied to the input embedding.

    ``GPT(50257)`` is GPT-2 small. Weights are initialised as in GPT-2, normal with standard deviation 0.02, because
    PyTorch's default for embeddings (standard deviation 1) gives useless initial losses in a tied layer.

    Args:
        vocabulary: Number of tokens.
        context: Largest number of tokens in a sequence.
        layers: Transformer blocks.
        heads: Attention heads per block.
        width: Size of a token's vector, a multiple of ``heads``.
    """

    def __init__(
        self, vocabulary: int, *, context: int = 1024, layers: int = 12, heads: int = 12, width: int = 768
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width: found {width}; it must be a multiple of the number of heads, {heads}.")
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (N, T) to scores of the next token (N, T, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))


class TextClassifier(nn.Module):
    """A transformer encoder over words, the mean over the words of a text, and a linear layer. The number 0 is padding.

    Args:
        vocabulary: Number of words, padding included.
        classes: Number of outputs.
        context: Largest number of words in a text.
        layers: Encoder layers, each with its norms first.
        heads: Attention heads per layer.
        width: Size of a word's vector, a multiple of ``heads``.
    """

    def __init__(
        self, vocabulary: int, classes: int, *, context: int = 128, layers: int = 2, heads: int = 4, width: int = 128
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Map numbers of words (N, T) to scores (N, classes)."""
        padding = ids == 0
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.encoder(self.words(ids) + self.positions(places), src_key_padding_mask=padding)
        words = (~padding).unsqueeze(2)
        return self.head((hidden * words).sum(1) / words.sum(1))


class TransformerBlock(nn.Module):
    """Causal attention, then a two-layer perceptron, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to the same shape."""
        x = x + self._attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def _attention(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.qkv(x).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(count, length, width))


def _shortcut(channels: int, out_channels: int, stride: int) -> nn.Module | None:
    if stride == 1 and channels == out_channels:
        return None
    return nn.Sequential(nn.Conv2d(channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))


def _stem(kind: str, in_channels: int, width: int) -> nn.Module:
    size, stride = (7, 2) if kind == "imagenet" else (3, 1)
    convolution = nn.Conv2d(in_channels, width, size, stride, padding=size // 2, bias=False)
    layers: list[nn.Module] = [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.MaxPool2d(3, 2, padding=1)) if kind == "imagenet" else nn.Sequential(*layers)
