"""The networks of the zoo: kinds that people train, in shapes whose step takes 15 to 150 ms on two cores.

Those of ``transformers`` are built from a configuration, with random weights; nothing is downloaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from inference import MOBILENET, mobilenet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from torchboost.workloads.models import BasicBlock, Bottleneck, ResNet

VOCABULARY = 2048
CLASSES = 10
BATCHES = 4
"""Different batches that the loop takes in turn."""


class Batch(NamedTuple):
    """The arguments of one call of the model; ``target`` is None if the model computes its loss itself."""

    args: tuple[Tensor, ...] = ()
    kwargs: dict[str, Tensor] = {}  # noqa: RUF012 (never changed)
    target: Tensor | None = None

    @property
    def size(self) -> int:
        return len(next(iter([*self.args, *self.kwargs.values()])))


Loss = Callable[[Any, Batch], Tensor]
"""Maps the outputs of the model and the batch to the loss."""
OptimizerFactory = Callable[..., Optimizer]


def adamw(parameters: Iterable[nn.Parameter], **settings: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, **settings)


def sgd(parameters: Iterable[nn.Parameter], **settings: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=5e-4, **settings)


def own_loss(outputs: Any, batch: Batch) -> Tensor:
    return outputs.loss


def cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    """Of scores whose last dimension is the classes."""
    assert batch.target is not None
    return F.cross_entropy(outputs.flatten(0, -2), batch.target.flatten())


def of_pixels(outputs: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of score maps (N, classes, H, W)."""
    assert batch.target is not None
    return F.cross_entropy(outputs, batch.target)


def of_clicks(outputs: Tensor, batch: Batch) -> Tensor:
    assert batch.target is not None
    return F.binary_cross_entropy_with_logits(outputs, batch.target)


class Training(NamedTuple):
    """What a training script has before its loop begins."""

    model: nn.Module
    optimizer: Optimizer
    batches: list[Batch]
    loss: Loss


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network, its optimizer and its data.

    Args:
        title: For people.
        build: Returns the model; the caller seeds.
        draw: Returns a batch; the caller seeds.
        optimizer: Called with the parameters, and with ``fused=True`` if the loop asks for it.
        loss: Of the outputs.
        needs: The package that the model comes from, if torch is not enough.
    """

    title: str
    build: Callable[[], nn.Module]
    draw: Callable[[], Batch]
    optimizer: OptimizerFactory = adamw
    loss: Loss = cross_entropy
    needs: str = ""

    def training(self, *, device: torch.device | str = "cpu", **settings: Any) -> Training:
        """Return model, optimizer, batches and loss, the same at each call. ``settings`` are those of the optimizer."""
        torch.manual_seed(0)
        with torch.device(device):
            model, batches = self.build().train(), [self.draw() for _ in range(BATCHES)]
        return Training(model, self.optimizer(model.parameters(), **settings), batches, self.loss)

    def missing(self) -> bool:
        """Whether the package that the model comes from is not installed."""
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None


def hugging_face(config: str, model: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a model of ``transformers`` with random weights."""

    def build() -> nn.Module:
        package = importlib.import_module("transformers")
        return getattr(package, model)(getattr(package, config)(**settings))

    return build


def of_transformers(title: str, names: tuple[str, str], draw: Callable[[], Batch], **settings: Any) -> Network:
    """Return a network of ``transformers``, which computes its loss itself."""
    build = hugging_face(*names, **settings)
    return Network(title=title, build=build, draw=draw, loss=own_loss, needs="transformers")


def tokens(count: int, length: int, *, vocabulary: int = VOCABULARY, **labels: tuple[int, ...]) -> Callable[[], Batch]:
    """Draw ``input_ids`` and, under each name of ``labels``, class numbers of that shape; ``()`` copies the tokens."""

    def draw() -> Batch:
        ids = torch.randint(vocabulary, (count, length))
        drawn = {
            name: torch.randint(2 if len(shape) == 1 else vocabulary, shape) if shape else ids
            for name, shape in labels.items()
        }
        return Batch(kwargs={"input_ids": ids, **drawn})

    return draw


def floats(name: str, shape: tuple[int, ...], labels: tuple[int, ...], classes: int) -> Callable[[], Batch]:
    """Draw a floating-point input called ``name`` and its ``labels``."""
    return lambda: Batch(kwargs={name: torch.randn(shape), "labels": torch.randint(classes, labels)})


def plain(inputs: Callable[[], tuple[Tensor, ...]], target: Callable[[], Tensor]) -> Callable[[], Batch]:
    return lambda: Batch(args=inputs(), target=target())


def images(count: int, side: int, channels: int = 3) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(count, channels, side, side),)


def numbers(below: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(below, shape)


class LSTMLanguageModel(nn.Module):
    """Embedding, stacked LSTM, scores of the next token."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


class GRUClassifier(nn.Module):
    """A recurrent network that reads in both directions and classifies the whole sequence."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(features, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0].mean(1))


class TemporalBlock(nn.Module):
    """Two dilated causal convolutions over time, added to their input."""

    def __init__(self, inside: int, outside: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.first = nn.Conv1d(inside, outside, 3, dilation=dilation)
        self.second = nn.Conv1d(outside, outside, 3, dilation=dilation)
        self.skip = nn.Identity() if inside == outside else nn.Conv1d(inside, outside, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(F.relu(self.first(F.pad(x, (self.pad, 0)))))
        y = self.dropout(F.relu(self.second(F.pad(y, (self.pad, 0)))))
        return F.relu(y + self.skip(x))


class TemporalConvolutions(nn.Module):
    """A temporal convolutional network that classifies at each time step."""

    def __init__(self, features: int, width: int, layers: int) -> None:
        super().__init__()
        sizes = [features] + layers * [width]
        blocks = [TemporalBlock(a, b, 2**k) for k, (a, b) in enumerate(itertools.pairwise(sizes))]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).transpose(1, 2))


def two_convolutions(inside: int, outside: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inside, outside):
        layers += [nn.Conv2d(channels, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Convolutions down to a quarter of the resolution and up again, with the finer maps concatenated."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sizes = [width * 2**k for k in range(levels)]
        self.down = nn.ModuleList(two_convolutions(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, stride=2) for size in sizes[-2::-1])
        self.merge = nn.ModuleList(two_convolutions(2 * size, size) for size in sizes[-2::-1])
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            maps.append(x)
        for up, merge, finer in zip(self.up, self.merge, maps[-2::-1], strict=True):
            x = merge(torch.cat([up(x), finer], dim=1))
        return self.head(x)


class Recommender(nn.Module):
    """One embedding for each field of a click, and a perceptron over them and the dense features."""

    def __init__(self, fields: int, rows: int, width: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(fields))
        self.layers = perceptron(fields * width + dense, 256, 128, 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        rows = [table(ids[:, field]) for field, table in enumerate(self.tables)]
        return self.layers(torch.cat([*rows, dense], dim=1)).squeeze(1)


class MessagePassing(nn.Module):
    """A graph network: each edge computes a message from its two ends, each node sums what arrives."""

    def __init__(self, features: int, width: int, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.messages = nn.ModuleList(perceptron(2 * width, width, width) for _ in range(layers))
        self.updates = nn.ModuleList(perceptron(2 * width, width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x, (source, sink) = self.enter(x), edges
        for message, update, norm in zip(self.messages, self.updates, self.norms, strict=True):
            sent = message(torch.cat([x[source], x[sink]], dim=1))
            arrived = torch.zeros_like(x).index_add(0, sink, sent.to(x.dtype))
            x = norm(x + update(torch.cat([x, arrived], dim=1)))
        return self.head(x)


def perceptron(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


_TEXT = {"vocab_size": VOCABULARY}
_WHISPER = {
    "d_model": 192,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 768,
    "decoder_ffn_dim": 768,
    "num_mel_bins": 80,
    "max_source_positions": 100,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_SPEECH = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 768,
    "conv_dim": (64, 64, 128, 128, 192),
    "conv_stride": (5, 2, 2, 2, 2),
    "conv_kernel": (10, 3, 3, 3, 2),
    "num_feat_extract_layers": 5,
    "num_conv_pos_embeddings": 32,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 64,
    "apply_spec_augment": False,
    "num_labels": CLASSES,
}

ZOO: dict[str, Network] = {
    "gpt2": of_transformers(
        "GPT-2, 6 layers of width 256",
        ("GPT2Config", "GPT2LMHeadModel"),
        tokens(4, 64, labels=()),
        n_layer=6,
        n_embd=256,
        n_head=8,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        **_TEXT,
    ),
    "llama": of_transformers(
        "Llama, 6 layers of width 256",
        ("LlamaConfig", "LlamaForCausalLM"),
        tokens(4, 64, labels=()),
        num_hidden_layers=6,
        hidden_size=256,
        intermediate_size=688,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        use_cache=False,
        **_TEXT,
    ),
    "bert": of_transformers(
        "BERT, 6 layers of width 256",
        ("BertConfig", "BertForSequenceClassification"),
        tokens(6, 48, labels=(6,)),
        num_hidden_layers=6,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=4,
        max_position_embeddings=64,
        **_TEXT,
    ),
    "vit": of_transformers(
        "ViT, 6 layers of width 192",
        ("ViTConfig", "ViTForImageClassification"),
        floats("pixel_values", (6, 3, 48, 48), (6,), CLASSES),
        num_hidden_layers=6,
        hidden_size=192,
        intermediate_size=768,
        num_attention_heads=3,
        image_size=48,
        patch_size=6,
        num_labels=CLASSES,
    ),
    "convnext": of_transformers(
        "ConvNeXt, depths 2, 2, 4, 2, widths 32 to 256",
        ("ConvNextConfig", "ConvNextForImageClassification"),
        floats("pixel_values", (8, 3, 96, 96), (8,), CLASSES),
        depths=[2, 2, 4, 2],
        hidden_sizes=[32, 64, 128, 256],
        num_labels=CLASSES,
    ),
    "t5": of_transformers(
        "T5, 3 + 3 layers of width 192",
        ("T5Config", "T5ForConditionalGeneration"),
        tokens(4, 64, labels=(4, 32)),
        d_model=192,
        d_kv=32,
        d_ff=512,
        num_layers=3,
        num_heads=6,
        decoder_start_token_id=0,
        use_cache=False,
        **_TEXT,
    ),
    "whisper": of_transformers(
        "Whisper, 3 + 3 layers of width 192",
        ("WhisperConfig", "WhisperForConditionalGeneration"),
        floats("input_features", (3, 80, 200), (3, 24), VOCABULARY),
        use_cache=False,
        **_TEXT,
        **_WHISPER,
    ),
    "wav2vec": of_transformers(
        "wav2vec 2.0, 5 convolutions, 4 layers of width 192",
        ("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification"),
        floats("input_values", (4, 8000), (4,), CLASSES),
        **_SPEECH,
    ),
    "lstm": Network(
        title="LSTM language model, 2 layers of width 256",
        build=lambda: LSTMLanguageModel(256, 2),
        draw=plain(lambda: (torch.randint(VOCABULARY, (16, 24)),), numbers(VOCABULARY, 16, 24)),
    ),
    "gru": Network(
        title="GRU classifier in both directions, 2 layers of width 128",
        build=lambda: GRUClassifier(40, 128),
        draw=plain(lambda: (torch.randn(16, 50, 40),), numbers(CLASSES, 16)),
    ),
    "tcn": Network(
        title="Temporal convolutions, 6 blocks of width 96",
        build=lambda: TemporalConvolutions(32, 96, 6),
        draw=plain(lambda: (torch.randn(8, 32, 256),), numbers(CLASSES, 8, 256)),
    ),
    "mlp": Network(
        title="MLP, 784-1024-1024-512-10",
        build=lambda: perceptron(784, 1024, 1024, 512, CLASSES),
        draw=plain(lambda: (torch.randn(192, 784),), numbers(CLASSES, 192)),
    ),
    "unet": Network(
        title="U-Net, 3 levels from width 16",
        build=lambda: UNet(16, 3),
        draw=plain(images(4, 64), numbers(CLASSES, 4, 64, 64)),
        loss=of_pixels,
    ),
    "resnet": Network(
        title="basic ResNet [2, 2, 2] from width 16",
        build=lambda: ResNet(BasicBlock, [2, 2, 2], width=16),
        draw=plain(images(32, 32), numbers(CLASSES, 32)),
        optimizer=sgd,
    ),
    "bottleneck": Network(
        title="bottleneck ResNet [3, 4, 6, 3] from width 16",
        build=lambda: ResNet(Bottleneck, [3, 4, 6, 3], width=16),
        draw=plain(images(16, 32), numbers(CLASSES, 16)),
        optimizer=sgd,
    ),
    "mobilenet": Network(
        title="MobileNetV2 at 64 pixels",
        build=lambda: mobilenet(MOBILENET),
        draw=plain(images(8, 64), numbers(1000, 8)),
        optimizer=sgd,
    ),
    "recommender": Network(
        title="12 embeddings of 20,000 rows and an MLP",
        build=lambda: Recommender(12, 20_000, 16, dense=13),
        draw=plain(
            lambda: (torch.randint(20_000, (256, 12)), torch.randn(256, 13)), lambda: torch.randint(2, (256,)).float()
        ),
        loss=of_clicks,
    ),
    "gnn": Network(
        title="graph network, 3 layers of width 96, 1,500 nodes, 6,000 edges",
        build=lambda: MessagePassing(32, 96, 3),
        draw=plain(lambda: (torch.randn(1500, 32), torch.randint(1500, (2, 6000))), numbers(CLASSES, 1500)),
    ),
}

TINY: dict[str, Network] = {
    "tiny": Network(
        title="two convolutions",
        build=lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(16, CLASSES),
        ),
        draw=plain(images(2, 8), numbers(CLASSES, 2)),
        optimizer=sgd,
    ),
}
"""Checks the scripts in seconds; its times mean nothing."""
