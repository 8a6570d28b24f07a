"""The workloads on which optimizers are compared: text by characters and word pieces, images, speakers, fine-tuning."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from images import endless, of_classes
from options import Options
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.workloads.data import Images, cifar10, content_of, text
from torchboost.workloads.models import GPT, BasicBlock, Bottleneck, ResNet
from torchboost.workloads.named import one_cycle

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network, its data in three parts, and the steps of a run."""

    name: str
    title: str
    build: Callable[[], nn.Module]
    stream: Callable[[int], Iterator[Pair]]
    splits: dict[str, list[Pair]]
    steps: int
    batch: int
    metric: str = "accuracy"
    weight_decay: float = 0.1
    rest_rate: float = 0.0
    warmup: float = 0.2
    autocast: bool = False

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = self.build()
        return model.to(memory_format=torch.channels_last) if self.autocast else model

    def batches(self, seed: int) -> Iterator[Pair]:
        return self.stream(seed)

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, -2), targets.flatten())

    def badness(self, run: dict[str, Any]) -> float:
        return run["loss"] if self.metric == "loss" else -run["accuracy"]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        model.eval()
        loss = right = count = 0.0
        for inputs, targets in self.splits[split]:
            scores, wanted = model(inputs).flatten(0, -2).float(), targets.flatten()
            loss += float(F.cross_entropy(scores, wanted, reduction="sum"))
            right += float((scores.argmax(1) == wanted).sum())
            count += len(wanted)
        return {"loss": loss / count, "accuracy": right / count}

    @torch.no_grad()
    def reestimate(self, model: nn.Module, seed: int, batches: int = 20) -> None:
        """Estimate the statistics of BatchNorm for the weights as they are."""
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        if norms:
            stream = self.stream(seed + 1000)
            torch.optim.swa_utils.update_bn([next(stream)[0] for _ in range(batches)], model)


def windows(tokens: Tensor, context: int, batch: int, seed: int) -> Iterator[Pair]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - context - 1, (batch,), generator=draw)
        some = tokens[starts[:, None] + torch.arange(context + 1)]
        yield some[:, :-1].contiguous(), some[:, 1:].contiguous()


def in_order(tokens: Tensor, context: int, batch: int, most: int) -> list[Pair]:
    starts = torch.arange(0, len(tokens) - context - 1, context)[:most]
    views = [tokens[some[:, None] + torch.arange(context + 1)] for some in starts.split(batch)]
    return [(view[:, :-1].contiguous(), view[:, 1:].contiguous()) for view in views]


def gpt_characters(options: Options) -> Workload:
    data = text(options.text, context=128)
    border = len(data.train_tokens) * 19 // 20
    training, validation = data.train_tokens[:border], data.train_tokens[border:]
    return Workload(
        name="gpt-characters",
        title="GPT on English text by characters, 4 layers, width 128",
        build=lambda: GPT(len(data.characters), context=128, layers=4, heads=4, width=128),
        stream=lambda seed: windows(training, 128, 16, seed),
        splits={"validation": in_order(validation, 128, 64, 320), "test": in_order(data.test_tokens, 128, 64, 320)},
        steps=8 if options.smoke else 600,
        batch=16,
        metric="loss",
    )


def gpt_pieces(options: Options) -> Workload:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    content = content_of(options.text)
    ends = [len(content) * share // 100 for share in (86, 90)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2048, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([content[: ends[0]]], trainer)
    parts = (content[: ends[0]], content[ends[0] : ends[1]], content[ends[1] :])
    training, validation, test = (torch.tensor(tokenizer.encode(part).ids) for part in parts)
    return Workload(
        name="gpt-pieces",
        title="GPT on English text by word pieces, 4 layers, width 192, bfloat16 autocast",
        build=lambda: GPT(2048, context=128, layers=4, heads=4, width=192),
        stream=lambda seed: windows(training, 128, 8, seed),
        splits={"validation": in_order(validation, 128, 32, 160), "test": in_order(test, 128, 32, 320)},
        steps=8 if options.smoke else 300,
        batch=8,
        metric="loss",
        autocast=True,
    )


def images(options: Options, classes: range = range(10)) -> tuple[Images, dict[str, list[Pair]]]:
    data = cifar10(options.data)
    if len(classes) < 10:
        data = of_classes(data, classes.start, len(classes))
    border = len(data.train_inputs) * 9 // 10
    held = replace(data, test_inputs=data.train_inputs[border:], test_labels=data.train_labels[border:])
    splits = {"validation": list(held.test(250))[:8], "test": list(data.test(250))[:16]}
    return replace(data, train_inputs=data.train_inputs[:border], train_labels=data.train_labels[:border]), splits


def image_workload(options: Options, name: str, title: str, build: Callable[[], nn.Module], steps: int) -> Workload:
    data, splits = images(options)
    return Workload(
        name=name,
        title=f"{title} on CIFAR-10",
        build=build,
        stream=lambda seed: endless(data, 64, seed),
        splits=splits,
        steps=8 if options.smoke else steps,
        batch=64,
        weight_decay=0.05,
    )


def basic() -> nn.Module:
    return ResNet(BasicBlock, (2, 2, 2, 2), width=16)


def bottleneck() -> nn.Module:
    return ResNet(Bottleneck, (2, 2, 2, 2), width=16)


class ViT(nn.Module):
    """Patches of 4 x 4, learned positions, pre-norm blocks, the mean of all patches."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, width))
        layer = functools.partial(nn.TransformerEncoderLayer, width, heads, 4 * width, 0.0, "gelu", batch_first=True)
        self.blocks = nn.Sequential(*(layer(norm_first=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class Encoder(nn.Module):
    """A BERT-like classifier: embeddings, post-norm encoder layers, the first position through tanh and a head."""

    def __init__(self, vocabulary: int, classes: int, width: int = 128, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        layer = functools.partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, classes)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=tokens == 0)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


def speakers(options: Options) -> Workload:
    """Who speaks? Windows of a play's lines, by the most frequent speakers; every fifth speech is for tests."""
    content = Path(options.text).read_text(encoding="utf-8") if options.text else ""
    speeches = [part.partition(":\n") for part in content.split("\n\n")]
    names = [name for name, _ in Counter(name for name, _, _ in speeches).most_common(12)]
    words = Counter(word for _, _, said in speeches for word in re.findall(r"[a-z']+", said.lower()))
    number = {word: index + 2 for index, (word, _) in enumerate(words.most_common(4000))}
    parts: dict[str, list[tuple[list[int], int]]] = {"training": [], "validation": [], "test": []}
    for position, (name, _, said) in enumerate(speech for speech in speeches if speech[0] in names):
        part = {0: "test", 1: "validation"}.get(position % 10, "training")
        tokens = [number.get(word, 1) for word in re.findall(r"[a-z']+", said.lower())]
        parts[part] += [([1, *tokens[at : at + 63]], names.index(name)) for at in range(0, len(tokens), 63)]
    tensors = {part: _padded(listed) for part, listed in parts.items()}

    def stream(seed: int) -> Iterator[Pair]:
        draw = torch.Generator().manual_seed(seed)
        inputs, labels = tensors["training"]
        while True:
            some = torch.randint(len(labels), (32,), generator=draw)
            yield inputs[some], labels[some]

    return Workload(
        name="speakers",
        title="BERT-like classifier of a play's speakers, 4 layers, width 128",
        build=lambda: Encoder(len(number) + 2, len(names)),
        stream=stream,
        splits={
            part: list(zip(*(one.split(64) for one in tensors[part]), strict=True)) for part in ("validation", "test")
        },
        steps=8 if options.smoke else 300,
        batch=32,
        metric="loss",
    )


def _padded(listed: list[tuple[list[int], int]]) -> Pair:
    rows = torch.zeros(len(listed), 64, dtype=torch.long)
    for row, (tokens, _) in zip(rows, listed, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return rows, torch.tensor([label for _, label in listed])


def trained_model(work: Workload, rate: float = 0.1) -> dict[str, torch.Tensor]:
    """Return the weights of a network that SGD has trained, for fine-tuning."""
    model, stream = work.model(0), work.batches(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for step in range(work.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * one_cycle(step, work.steps)
        inputs, targets = next(stream)
        optimizer.zero_grad()
        work.loss(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


def fine_tuning(options: Options) -> Workload:
    """A network that has learned classes 0 to 4 learns classes 5 to 9."""
    first, splits_before = images(options, range(5))
    before = replace(
        image_workload(options, "before", "", basic, 400),
        stream=lambda seed: endless(first, 64, seed),
        splits=splits_before,
    )
    weights = trained_model(before)
    data, splits = images(options, range(5, 10))

    def build() -> nn.Module:
        model = basic()
        model.load_state_dict(weights)
        nn.init.normal_(model.fc.weight, std=0.01)  # pyright: ignore[reportAttributeAccessIssue]
        return model

    return replace(
        before,
        name="fine-tuning",
        title="Fine-tuning a basic ResNet from five classes of CIFAR-10 to the other five, bfloat16 autocast",
        build=build,
        stream=lambda seed: endless(data, 64, seed),
        splits=splits,
        steps=8 if options.smoke else 150,
        autocast=True,
    )


WORKLOADS: dict[str, Callable[[Options], Workload]] = {
    "gpt-characters": gpt_characters,
    "resnet-basic": lambda o: image_workload(o, "resnet-basic", "ResNet of basic blocks, width 16", basic, 400),
    "vit": lambda o: replace(
        image_workload(o, "vit", "ViT, 4 layers, width 128, bfloat16 autocast,", ViT, 250),
        autocast=True,
    ),
    "resnet-bottleneck": lambda o: replace(
        image_workload(o, "resnet-bottleneck", "ResNet of bottlenecks, width 16, bfloat16 autocast,", bottleneck, 250),
        autocast=True,
    ),
    "speakers": speakers,
    "fine-tuning": fine_tuning,
    "gpt-pieces": gpt_pieces,
}
