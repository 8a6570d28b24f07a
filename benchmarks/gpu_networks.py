"""The networks that are trained on a GPU, with random weights and data: their usual sizes, and tiny ones.

ResNet-50 and MobileNetV2 are plain torch, the others come from ``transformers``; nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from inference import MOBILENET, VOCABULARY, mobilenet, resnet50
from zoo_networks import Batch, Network, floats, images, numbers, of_transformers, plain, sgd, tokens

from torchboost.workloads.models import Bottleneck, ResNet


def language(title: str, names: tuple[str, str], count: int, length: int, vocabulary: int, **settings: Any) -> Network:
    draw = tokens(count, length, vocabulary=vocabulary, labels=())
    return of_transformers(f"{title}, batch {count} x {length} tokens", names, draw, vocab_size=vocabulary, **settings)


def pictures(title: str, names: tuple[str, str], count: int, side: int, classes: int, **settings: Any) -> Network:
    draw = floats("pixel_values", (count, 3, side, side), (count,), classes)
    return of_transformers(f"{title}, batch {count}", names, draw, num_labels=classes, **settings)


def convolutions(title: str, build: Callable[[], torch.nn.Module], count: int, side: int, classes: int) -> Network:
    draw = plain(images(count, side), numbers(classes, count))
    return Network(title=f"{title}, batch {count}", build=build, draw=draw, optimizer=sgd)


GPT2, LLAMA = ("GPT2Config", "GPT2LMHeadModel"), ("LlamaConfig", "LlamaForCausalLM")
BERT, VIT = ("BertConfig", "BertForMaskedLM"), ("ViTConfig", "ViTForImageClassification")
CLASSIFIER = ("BertConfig", "BertForSequenceClassification")
CONVNEXT = ("ConvNextConfig", "ConvNextForImageClassification")


def padded(net: Network, classes: int = 0) -> Network:
    """Return a network whose batches are padded: lengths are log-normal, about a third of the width.

    Args:
        net: A language model, or with ``classes`` a classifier of texts.
        classes: Of the labels. If 0, the second half of each text is the labels, as after a prompt.
    """

    def draw() -> Batch:
        ids = net.draw().kwargs["input_ids"]
        count, width = ids.shape
        lengths = (torch.randn(count) * 0.5 + math.log(0.28 * width)).exp().long().clamp(8, width)
        places = torch.arange(width)
        mask = places < lengths[:, None]
        answer = mask & (places >= lengths[:, None] // 2)
        labels = torch.randint(classes, (count,)) if classes else ids.masked_fill(~answer, -100)
        return Batch(kwargs={"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels})

    return replace(net, title=f"{net.title}, padded", draw=draw)


def to_the_longest(net: Network) -> Network:
    """Return a network whose batches end where their longest text ends."""

    def draw() -> Batch:
        given = net.draw().kwargs
        width = int(given["attention_mask"].sum(1).max())
        return Batch(kwargs={name: rows[:, :width] if rows.ndim == 2 else rows for name, rows in given.items()})

    return replace(net, draw=draw)


def gpt2(count: int) -> Network:
    return language("GPT-2 small", GPT2, count, 1024, VOCABULARY, use_cache=False)


_LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "use_cache": False,
}
NETWORKS: Mapping[str, Network] = {
    "resnet50": convolutions("ResNet-50 at 224 pixels", resnet50, 256, 224, 1000),
    "resnet50-short": convolutions("ResNet-50 at 224 pixels", resnet50, 64, 224, 1000),
    "gpt2": gpt2(16),
    "gpt2-short": gpt2(4),
    "bert": language("BERT base", BERT, 64, 256, 30_522),
    "vit": pictures("ViT base at 224 pixels", VIT, 128, 224, 1000),
    "llama": language("Llama, 16 layers of width 1024", LLAMA, 8, 1024, 32_000, **_LLAMA),
    "bert-classifier": padded(language("BERT base", CLASSIFIER, 64, 512, 30_522), classes=2),
    "llama-instructions": padded(language("Llama, 16 layers of width 1024", LLAMA, 16, 1024, 32_000, **_LLAMA)),
    "convnext": pictures("ConvNeXt tiny at 224 pixels", CONVNEXT, 128, 224, 1000),
    "mobilenet": convolutions("MobileNetV2 at 224 pixels", lambda: mobilenet(MOBILENET), 256, 224, 1000),
    "gpt-1b": language(
        "GPT of 1.3 billion parameters", GPT2, 4, 1024, VOCABULARY, n_layer=24, n_embd=2048, n_head=16, use_cache=False
    ),
}
_ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
_TINY_GPT = language(
    *("tiny GPT-2", GPT2, 2, 16, 64),
    **{"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0},
    use_cache=False,
)
_TINY_RESNET = convolutions("tiny ResNet", lambda: ResNet(Bottleneck, [1, 1], width=8), 4, 12, 10)
TINY: Mapping[str, Network] = {
    "resnet50": _TINY_RESNET,
    "resnet50-short": _TINY_RESNET,
    "gpt2": _TINY_GPT,
    "gpt2-short": _TINY_GPT,
    "gpt-1b": _TINY_GPT,
    "bert": language("tiny BERT", BERT, 2, 16, 64, max_position_embeddings=16, **_ONE_LAYER),
    "bert-classifier": padded(
        language("tiny BERT", CLASSIFIER, 4, 64, 64, max_position_embeddings=64, **_ONE_LAYER), classes=2
    ),
    "llama-instructions": padded(language("tiny Llama", LLAMA, 4, 64, 64, use_cache=False, **_ONE_LAYER)),
    "vit": pictures("tiny ViT", VIT, 2, 16, 10, image_size=16, patch_size=4, **_ONE_LAYER),
    "llama": language("tiny Llama", LLAMA, 2, 16, 64, use_cache=False, **_ONE_LAYER),
    "convnext": pictures("tiny ConvNeXt", CONVNEXT, 2, 32, 10, depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 8, 8]),
    "mobilenet": convolutions("tiny MobileNetV2", lambda: mobilenet(MOBILENET[:2]), 2, 32, 1000),
}
"""Checks the scripts in seconds; its times mean nothing."""


def network(name: str, *, tiny: bool) -> Network:
    return (TINY if tiny else NETWORKS)[name]
