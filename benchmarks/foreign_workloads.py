"""Workloads of ``half_time`` that served no choice: networks of ``timm`` and ``transformers``, in small sizes."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from torchboost.workloads.data import Images, Text, cifar10
from torchboost.workloads.named import Workload
from torchboost.workloads.pieces import pieces

__all__ = ["FOREIGN"]


def vision_transformer(data: Images) -> nn.Module:
    """Return a ViT on patches of 4 x 4 pixels, with 65 tokens an image."""
    import timm

    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 3}
    return timm.models.VisionTransformer(num_classes=data.classes, **sizes)


class NeoX(nn.Module):
    """Maps numbers of word pieces to the scores of the next ones."""

    def __init__(self, data: Text) -> None:
        super().__init__()
        import transformers

        config = transformers.GPTNeoXConfig(
            vocab_size=len(data.characters),
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=data.context,
            use_cache=False,
        )
        self.neox: Any = transformers.GPTNeoXForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.neox(input_ids=tokens).logits


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


FOREIGN = (
    Workload(
        name="cifar10-timm-vit",
        title="CIFAR-10",
        model_name="ViT of timm, 4 layers, width 96",
        load=lambda path, limit: cifar10(path).held_out().limited(limit),
        build=vision_transformer,
        optimizer=functools.partial(AdamW, lr=1e-3, weight_decay=0.05),
        loss=F.cross_entropy,
        batch=64,
        epochs=2,
    ),
    Workload(
        name="pieces-neox",
        title="English text by word pieces",
        model_name="GPT-NeoX of transformers, 4 layers, width 128",
        load=lambda path, limit: pieces(path, context=128, vocabulary=1_024).held_out().limited(limit),
        build=NeoX,
        optimizer=functools.partial(AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        loss=loss,
        batch=16,
        epochs=3,
        metric="bits per character",
        drops=(0.02, 0.1),
    ),
)
