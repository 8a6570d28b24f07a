"""A transformer encoder that has learned to guess hidden words of the docstrings, and few labelled texts for it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from torchboost.workloads.data import Documents
from torchboost.workloads.models import TextClassifier

__all__ = ["encoder", "pretrained"]

LAYERS, HEADS, WIDTH = 3, 4, 128
STEPS, BATCH, RATE = 300, 16, 2e-3
"""Of the pretraining, with AdamW and a warm-up over a fifth of the steps."""
HIDDEN = 0.15
"""Share of the words that have to be guessed."""


def encoder(data: Documents) -> TextClassifier:
    """Return a classifier of the documents with the weights of their trunk. What the trunk lacks is drawn."""
    sizes = {"context": data.train_ids.shape[1], "layers": LAYERS, "heads": HEADS, "width": WIDTH}
    model = TextClassifier(len(data.words) + 1, len(data.classes), **sizes)  # the last number hides a word
    model.load_state_dict(dict(data.trunk), strict=False)
    return model


def pretrained(data: Documents, *, steps: int = STEPS) -> Documents:
    """Return the documents with the trunk of a masked language model, trained on their training texts without labels.

    The same documents and threads give the same trunk. Takes about half a minute on two cores. The global random state
    is not changed.

    Args:
        data: The documents.
        steps: Updates, with 16 windows each.
    """
    width = data.train_ids.shape[1]
    stream = data.train_ids[data.train_ids != 0]  # one text after the other, without padding
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = encoder(data)
        optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
        schedule = OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.2, cycle_momentum=False)
        for _ in range(steps):
            ids = stream[torch.randint(len(stream) - width, (BATCH, 1)) + torch.arange(width)]
            hidden = torch.rand(ids.shape) < HIDDEN
            states = model.encode(ids.masked_fill(hidden, len(data.words)))[hidden]
            loss = F.cross_entropy(F.linear(states, model.words.weight), ids[hidden])
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    head = model.head.state_dict(prefix="head.")
    return replace(data, trunk={name: value for name, value in model.state_dict().items() if name not in head})
