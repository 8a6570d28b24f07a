"""Workloads of ``half_time`` that served no choice: networks of ``timm`` and ``transformers``, in small sizes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW

from torchboost.workloads.data import Images, Text
from torchboost.workloads.named import find_workload
from torchboost.workloads.pieces import pieces


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


FOREIGN = (
    replace(
        find_workload("cifar10-vgg"),
        name="cifar10-timm-vit",
        model_name="ViT of timm, 4 layers, width 96",
        build=vision_transformer,
        optimizer=functools.partial(AdamW, lr=1e-3, weight_decay=0.05),
        epochs=2,
    ),
    replace(
        find_workload("pieces-gpt"),
        name="pieces-neox",
        model_name="GPT-NeoX of transformers, 4 layers, width 128",
        load=lambda path, limit: pieces(path, context=128, vocabulary=1_024).held_out().limited(limit),
        build=NeoX,
        optimizer=functools.partial(AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        batch=16,
    ),
)
