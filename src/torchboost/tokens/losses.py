"""Losses that read labelled positions only."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchboost.tokens.rows import BATCH, FLAT, TOKEN, MissingRows, Rows

__all__ = ["labelled_loss"]


def labelled_loss(
    function: Any,
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the logits of labelled positions, and their loss by a function of torch, whose arguments follow it."""
    if size_average is not None or reduce is not None:
        raise MissingRows("its arguments are of another kind")
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
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    options |= {"label_smoothing": label_smoothing} if label_smoothing else {}
    losses = function(picked, labels[labelled], **options)
    if reduction != "none":
        return losses
    return losses.new_zeros(labels.shape).index_copy(0, labelled, losses).view(target.shape)
