"""How much each group of parameters still changes, and what follows for freezing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Plasticity"]


class Plasticity:
    """Decides after each window of updates how many leading groups are frozen.

    The plasticity of a group is the distance its weights moved in the window, ``|w - w0|``, as a share of the
    farthest they moved in any window so far; a learning rate that falls for all lowers it for all. A leading group is
    frozen when its plasticity is below ``threshold`` times the mean of the groups that still train, at most one group
    per window, never the last one. All are trained again when the mean loss of a window exceeds the lowest one so far
    by the share ``tolerance``; the next decision then waits for two windows.

    After Y. Wang et al., "Egeria: Efficient DNN Training with Knowledge-Guided Layer Freezing", EuroSys 2023
    (arXiv 2201.06227), with weights in the place of activations and no reference model.

    Args:
        groups: The parameters of each group, in order of execution.
        threshold: 1 freezes what has slowed down more than the average.
        tolerance: Rise of the loss that re-opens everything; 0.1 is a tenth.

    Cost: a copy of the weights of the groups that may be frozen, one pass over them per window.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], *, threshold: float, tolerance: float) -> None:
        self._groups = [list(group) for group in groups]
        self._threshold = threshold
        self._tolerance = tolerance
        self._before: list[list[Tensor]] = []
        self._loss: Tensor | None = None
        self._losses = 0
        self._best = float("inf")
        self._wait = 0
        self._farthest = [0.0] * len(self._groups)
        self.measured: list[float] = []
        self._begin()

    def _begin(self) -> None:
        self._before = [[p.detach().clone() for p in group] for group in self._groups]
        self._loss, self._losses = None, 0

    def observe(self, loss: Tensor) -> None:
        """Take note of the loss of an update, a tensor of shape ``()``; nothing waits for the device."""
        value = loss.detach().float()
        self._loss = value.clone() if self._loss is None else self._loss + value
        self._losses += 1

    def decide(self, frozen: int, *, may_freeze: bool = True, total: Callable[[Tensor], Tensor] | None = None) -> int:
        """End the window, begin the next one, and return how many groups are frozen in it, of ``frozen`` so far.

        Args:
            frozen: Leading groups that are frozen now.
            may_freeze: Whether one more may be.
            total: Sums a float64 tensor on the CPU over the ranks that train together, so that all decide alike.
        """
        moved, mean_loss = self._measure(total)
        self._farthest = [max(pair) for pair in zip(self._farthest, moved, strict=True)]
        self.measured = [now / most if most else 0.0 for now, most in zip(moved, self._farthest, strict=True)]
        self._begin()
        if mean_loss is not None and mean_loss > self._best * (1 + self._tolerance):
            self._wait = 2
            return 0
        self._best = min(self._best, mean_loss) if mean_loss is not None else self._best
        if self._wait:
            self._wait -= 1
            return frozen
        training = self.measured[frozen:]
        if may_freeze and len(training) > 1 and training[0] < self._threshold * sum(training) / len(training):
            return frozen + 1
        return frozen

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured so far in this window and before, the weights at its start included."""
        return {
            "before": [[w.clone() for w in group] for group in self._before],
            "loss": None if self._loss is None else self._loss.clone(),
            "losses": self._losses,
            "best": self._best,
            "wait": self._wait,
            "farthest": list(self._farthest),
            "measured": list(self.measured),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: The checkpoint is of other groups; nothing was changed.
        """
        if [[w.shape for w in g] for g in state["before"]] != [[p.shape for p in g] for g in self._groups]:
            raise ValueError("the checkpoint measured other groups of parameters; use the same model and groups.")
        self._before = [
            [w.to(p.device, p.dtype, copy=True) for w, p in zip(saved, group, strict=True)]
            for saved, group in zip(state["before"], self._groups, strict=True)
        ]
        self._loss = None if state["loss"] is None else state["loss"].clone()
        self._losses, self._best, self._wait = state["losses"], state["best"], state["wait"]
        self._farthest, self.measured = list(state["farthest"]), list(state["measured"])

    @torch.no_grad()
    def _measure(self, total: Callable[[Tensor], Tensor] | None) -> tuple[list[float], float | None]:
        """The distance that each group moved and the mean loss, the same on all ranks."""
        sums = []
        for group, before in zip(self._groups, self._before, strict=True):
            pairs = [(_local(p), _local(w)) for p, w in zip(group, before, strict=True)]
            sums.append(torch.stack([(p - w).abs().float().square().sum() for p, w in pairs]).sum())
        device = sums[0].device
        loss = torch.zeros((), device=device) if self._loss is None else self._loss.to(device)
        # Replicas all hold the same sums, shards hold parts of them; either way the shares come out right.
        figures = torch.stack([*sums, loss, torch.tensor(float(self._losses), device=device)]).double().cpu()
        *squares, loss_sum, count = (figures if total is None else total(figures)).tolist()
        return [square**0.5 for square in squares], loss_sum / count if count else None


def _local(tensor: Tensor) -> Tensor:
    """The shard of this rank, or the whole of a tensor that is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]
