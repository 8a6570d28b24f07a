"""Find out what may be turned on for a model of the package transformers: a factory for the command line.

torchboost doctor examples/tune_transformers.py:gpt2
torchboost tune examples/tune_transformers.py:gpt2 --drop 2 --budget 10m --out gpt2.json
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from transformers import GPT2Config, GPT2LMHeadModel

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
