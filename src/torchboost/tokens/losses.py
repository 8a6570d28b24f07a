"""Losses that read labelled positions only."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from torchboost.tokens.rows import BATCH, FLAT, TOKEN, MissingRows, Rows

__all__ = ["cross_entropy", "nll_loss"]


def cross_entropy(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the logits of labelled positions, and their loss."""
    if size_average is not None or reduce is not None:
        raise MissingRows("its arguments are of another kind")
    options: dict[str, Any] = {"weight": weight, "label_smoothing": label_smoothing}
    return _loss(F.cross_entropy, logits, target, ignore_index, reduction, options)


def nll_loss(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute the loss of labelled positions from logarithms of probabilities."""
    if size_average is not None or reduce is not None:
        raise MissingRows("its arguments are of another kind")
    return _loss(F.nll_loss, logits, target, ignore_index, reduction, {"weight": weight})


def _loss(
    function: Any, logits: Any, target: Any, ignore_index: int, reduction: str, options: dict[str, Any]
) -> Tensor:
    if not isinstance(logits, Rows) or isinstance(target, Rows):
        raise MissingRows("its arguments are of another kind")
    if target.is_floating_point() or logits.dims not in ((FLAT, 0), (BATCH, 0, TOKEN)):
        raise MissingRows("its arguments are of another kind")
    if target.shape != (logits.shape[:1] if logits.ndim == 2 else (logits.shape[0], logits.shape[2])):
        raise MissingRows("its arguments are of another kind")
    labels = target.reshape(-1)
    labelled = (labels != ignore_index).nonzero().squeeze(1)
    if not labelled.numel():
        raise MissingRows("no position has a label")
    rows = logits.positions.row_of.view(-1)[labelled]
    if bool((rows < 0).any()):
        raise MissingRows("padded positions have labels")
    picked = logits.picked(rows)
    losses = function(picked, labels[labelled], ignore_index=ignore_index, reduction=reduction, **options)
    if reduction != "none":
        return losses
    return losses.new_zeros(labels.shape).index_copy(0, labelled, losses).view(target.shape)
