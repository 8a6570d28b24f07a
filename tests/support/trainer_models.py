"""Small models of ``transformers`` with random weights, and data for them: what the tests of the trainers train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["FORMS", "KINDS", "SPEED", "Kind", "Rows", "differences", "has_plain_layout", "trained_alike"]

SPEED = {"extra": {"channels_last": True, "fused_optimizer": True}}
FREEZING = {"extra": {"less_bn": {}, "grad_freeze": {"pattern": "progressive"}}}


class Rows(Dataset):
    """Rows of a dict of tensors."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def batch(self, rows: int) -> dict[str, Tensor]:
        """Return the first rows."""
        return {name: column[:rows] for name, column in self.columns.items()}


class Kind(NamedTuple):
    """A model, its data, and the settings of the boost that give it something to do."""

    build: Callable[[], nn.Module]
    data: Callable[[], Rows]
    config: dict | None

    def seeded(self) -> nn.Module:
        """Return a model whose weights are the same each time."""
        torch.manual_seed(11)
        return self.build()


def _bert() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
    )


def _gpt() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def _resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 32, 32], depths=[2, 2, 1, 1], layer_type="basic", num_labels=3
        )
    )


def _numbers(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(3))


def _classes() -> Rows:
    return Rows({"input_ids": _numbers(64, 48, 12), "labels": _numbers(3, 48)})


def _text() -> Rows:
    tokens = _numbers(64, 48, 12)
    return Rows({"input_ids": tokens, "labels": tokens})


def _images() -> Rows:
    pixels = torch.randn(48, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    return Rows({"pixel_values": pixels, "labels": _numbers(3, 48)})


KINDS = {
    "bert": Kind(_bert, _classes, None),
    "gpt": Kind(_gpt, _text, None),
    "resnet": Kind(_resnet, _images, FREEZING),
}


FORMS = [("resnet", "bf16"), ("bert", "accumulated"), ("gpt", "plain")]
"""Each kind with a form of the loop; only the network with norms has something to remove and to freeze."""


def differences(first: nn.Module, second: nn.Module) -> dict[str, float]:
    """Return by name how far the tensors of two models are apart, without those that are equal bit for bit."""
    pairs = zip(first.state_dict().items(), second.state_dict().values(), strict=True)
    return {name: float((one - other).abs().max()) for (name, one), other in pairs if not torch.equal(one, other)}


def trained_alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether the state dicts of two models are equal, names and bits."""
    one, other = first.state_dict(), second.state_dict()
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def has_plain_layout(optimizer_state: dict[str, Any]) -> bool:
    """Whether the state dict of an optimizer is one that torch's fused kernels read rightly in a plain model."""
    moments = [value for entry in optimizer_state["state"].values() for value in entry.values()]
    kernels = [value for value in moments if isinstance(value, Tensor) and value.ndim == 4]
    unfused = all(not group["fused"] for group in optimizer_state["param_groups"])
    return bool(kernels) and unfused and all(value.is_contiguous() for value in kernels)
