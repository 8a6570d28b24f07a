"""Losses that read labelled positions only."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.tokens.layout import Layout
from torchboost.tokens.operations import PaddedRows
from torchboost.tokens.rows import BATCH, TOKEN, MissingRows

MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])
LABELS = torch.tensor([[2, -100, 1, -100], [0, 2, -100, -100]])


def logits() -> tuple[Tensor, Any]:
    torch.manual_seed(0)
    whole = torch.randn(2, 4, 3, dtype=torch.float64)
    return whole, PaddedRows(whole.flatten(0, 1)[MASK.flatten()], Layout(MASK), (BATCH, TOKEN, 0))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("logs", [False, True])
def test_labelled_positions_give_the_loss(reduction: str, weighted: bool, dims: int, logs: bool):
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) if weighted else None

    def loss(x: Any) -> Tensor:
        labels = LABELS if dims == 3 else LABELS.flatten()
        x = x.transpose(1, 2) if dims == 3 else x.view(-1, 3)
        if logs:
            return F.nll_loss(x.log_softmax(1), labels, weight, reduction=reduction)
        return F.cross_entropy(x, labels, weight, reduction=reduction, label_smoothing=0.1)

    whole, rows = logits()
    torch.testing.assert_close(loss(rows), loss(whole))


@pytest.mark.parametrize("kind", ["labels in the padding", "no labels", "shape", "soft"])
def test_other_targets_ask_for_the_padding(kind: str):
    _, rows = logits()
    targets = {
        "labels in the padding": LABELS.clone().fill_(1).flatten(),
        "no labels": torch.full((8,), -100),
        "shape": LABELS,
        "soft": torch.rand(8, 3, dtype=torch.float64),
    }
    with pytest.raises(MissingRows):
        F.cross_entropy(rows.view(-1, 3), targets[kind])
