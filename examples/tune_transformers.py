"""Find out what may be turned on for two models of the package transformers.

Run: torchboost tune examples/tune_transformers.py:gpt2 --drop 2 --budget 10m --out gpt2.json
     torchboost tune examples/tune_transformers.py:vit --drop 1 --budget 10m --epochs 8 --out vit.json
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

CONTEXT, BATCH = 64, 16


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=steps + 1)


def gpt2(seed: int) -> Any:
    """The language of Python's documentation, character by character; the metric is minus the loss on unseen text."""
    text = "".join(topics[name] for name in sorted(topics))[:120_000].encode("ascii", "replace")
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = rows[: len(rows) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    training, test = rows[:-160], rows[-160:]
    config = GPT2Config(vocab_size=128, n_positions=CONTEXT, n_embd=96, n_layer=3, n_head=3)
    model = GPT2LMHeadModel(config)

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    def evaluate(model: Any) -> float:
        return -float(loss(model(test), test))

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader([(row, row) for row in training], BATCH, shuffle=True, drop_last=True)
    return model, optimizer, loss, loader, evaluate, one_cycle


def vit(seed: int) -> Any:
    """Handwritten digits in patches of 2 x 2; the metric is the accuracy on half of them."""
    pixels, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    inputs = inputs.repeat_interleave(2, 2).repeat_interleave(2, 3)
    held = torch.arange(len(targets)) % 2 == 1
    size: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    config = ViTConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, **size)
    model = ViTForImageClassification(config)

    def evaluate(model: Any) -> float:
        return float((model(inputs[held]).logits.argmax(1) == targets[held]).float().mean())

    data = torch.utils.data.TensorDataset(inputs[~held], targets[~held])
    loader = torch.utils.data.DataLoader(data, 32, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return (
        model,
        optimizer,
        lambda outputs, labels: F.cross_entropy(outputs.logits, labels),
        loader,
        evaluate,
        one_cycle,
    )
