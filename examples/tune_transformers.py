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
    rates = [group["lr"] for group in optimizer.param_groups]  # that of Muon is another than that of the rest
    return OneCycleLR(optimizer, max_lr=rates, total_steps=steps + 1, cycle_momentum=False)


def clip(model: torch.nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def gpt2(seed: int) -> Any:
    """Python's documentation, character by character, with clipped gradients; the metric is minus the loss."""
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
    return model, optimizer, loss, loader, evaluate, one_cycle, None, clip


# It prints at the end of `doctor`, on one busy core of a CPU:
#
#     part of a step (20 steps, cpu)  median, ms  share
#     ------------------------------  ----------  -----
#     data loading                    0.20        0 %
#     forward                         105.28      52 %
#     backward                        82.24       41 %
#     optimizer                       11.86       6 %
#     A level acts on forward, backward and optimizer, which take 100 % of a step.
#
#     waste of a step                ms         share
#     -----------------------------  ---------  -----
#     waiting for data               0.22       0 %
#     padding                        not known
#     unlabelled head                not known
#     masks that mask nothing        0.00       0 %
#     activation checkpointing       0.00       0 %
#     forward pass of frozen layers  0.00       0 %
#     host synchronisations          0.00       0 %
#     waiting for data: timed with the steps above.
#     padding: no mask seen among the arguments of the model or of its parts; whether forward makes one is not known.
#     unlabelled head: up to 10 % of the computation, not decided in 5 pairs of steps.
#     masks that mask nothing: no argument that may be left out is a tensor of ones or of zeros alone.
#     activation checkpointing: no checkpoint was met.
#     forward pass of frozen layers: all parameters are trained.
#     host synchronisations: not counted on the CPU, where .item() waits for nothing.
