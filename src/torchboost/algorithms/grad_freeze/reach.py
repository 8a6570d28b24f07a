"""Which frozen prefixes leave something to train, and which parameters no update has reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.core.torch_private import version

__all__ = ["Reach"]

_NEVER = 1 << 62


class Reach:
    """Records for each index of a schedule whether something trains there, from the gradients so far.

    An index is usable if the optimizer has a parameter after its prefix that the user trains, and if every informative
    update gave one of those a gradient. A module that the forward pass does not use, one that no loss depends on, and a
    head that only some batches use therefore never become the last part that trains.

    Later updates may reach parameters that none has reached yet, such as a head that is used in turns. These stay
    trainable at every index (:meth:`spared`). This costs nothing while they have no gradients.

    A gradient of zeros left by ``zero_grad(set_to_none=False)`` does not count. Checking this synchronises the device
    once per update; on several ranks it is not checked.

    Args:
        optimizer: The optimizer whose parameters count. Held weakly.
        frozen: The parameters of the prefix of each index.
        cut: The modules whose outputs are detached at each index, see :class:`torchboost.graph.blocks.Block`.
        may_train: Whether the user trains a parameter.
        values: Whether the values of gradients may be read.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        frozen: Sequence[Sequence[Tensor]],
        cut: Sequence[Sequence[nn.Module]],
        may_train: Callable[[Tensor], bool],
        *,
        values: Callable[[], bool],
    ) -> None:
        self._optimizer = ref(optimizer)
        self._frozen = [frozenset(map(id, parameters)) for parameters in frozen]
        self._cut = [frozenset(modules) for modules in cut]
        self._tied: list[dict[int, frozenset[nn.Module]]] = [_users(modules) for modules in cut]
        self._may_train = may_train
        self._values = values
        self._behind: list[list[Tensor]] = []
        self._size = 0
        self._versions: dict[int, int] = {}
        self._closed: set[int] = set()
        self._doubtful: set[int] = set()
        self._unreached = frozenset[int]()  # could have been reached
        self._pending: list[Tensor] = []  # not reached yet, whether or not they could have been
        self._trained()

    def usable(self, index: int, state: Mapping[str, Any] | None = None) -> int:
        """Return the largest usable index up to ``index``; 0 always is.

        Args:
            index: The wanted index.
            state: The state of a checkpoint, used instead of what was recorded here.
        """
        behind, seen = self._trained(), self.state_dict() if state is None else state
        while index and (index in seen["closed"] or index in seen["doubtful"] or not self._trains(behind[index])):
            index -= 1
        return index

    def spared(self, index: int) -> frozenset[int]:
        """Return the ``id`` of what stays trainable at ``index``: it could have had a gradient but never did."""
        return self._frozen[index] & self._unreached

    def _trains(self, parameters: list[Tensor]) -> bool:
        return any(map(self._may_train, parameters))

    @property
    def known(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        return self._trained()[0]

    def observe(self, index: int) -> bool:
        """Record the gradients of an update made at ``index``; return whether there were any.

        Cost: microseconds; each index reads the parameters from the last one back to one with a gradient.
        """
        behind, seen = self._trained(), dict[int, bool]()
        if not any(p.grad is not None and p.requires_grad for p in behind[0]):
            return False
        self._note_unreached()
        for other in range(1, len(behind)):
            if other in self._closed or not self._frozen[index] <= self._frozen[other]:
                continue  # parts of what trains there are frozen now
            found = self._found(behind[other], self._tied[other], self._cut[index], seen)
            if found:
                self._doubtful.discard(other)
            elif found is None:
                self._doubtful.add(other)
            else:
                self._closed.add(other)
        return True

    def _note_unreached(self) -> None:
        self._pending = [p for p in self._pending if p.grad is None]
        self._unreached = frozenset(id(p) for p in self._pending if p.requires_grad)

    def close(self) -> None:
        """Freeze nothing from now on."""
        self._closed.update(range(1, len(self._frozen)))

    def state_dict(self) -> dict[str, Any]:
        """Return which indices are not usable, and which parameters of the optimizer were not reached."""
        forward = self._trained()[0][::-1]
        pending = set(map(id, self._pending))
        return {
            "closed": sorted(self._closed),
            "doubtful": sorted(self._doubtful),
            "pending": [place for place, p in enumerate(forward) if id(p) in pending],
            "unreached": [place for place, p in enumerate(forward) if id(p) in self._unreached],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`."""
        self._closed, self._doubtful = set(state["closed"]), set(state["doubtful"])
        forward = self._trained()[0][::-1]
        pending, unreached = set(state.get("pending", ())), set(state.get("unreached", ()))
        self._pending = [p for place, p in enumerate(forward) if place in pending]
        self._unreached = frozenset(id(p) for place, p in enumerate(forward) if place in unreached)

    def _trained(self) -> list[list[Tensor]]:
        """Return for each index the parameters of the optimizer after its prefix, last one first.

        If the optimizer is gone, return its last known ones.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return self._behind
        groups = [group["params"] for group in optimizer.param_groups]
        size = sum(map(len, groups))
        if size != self._size:
            known = [p for group in reversed(groups) for p in reversed(group)]
            self._behind = [[p for p in known if id(p) not in frozen] for frozen in self._frozen]
            self._pending += known[: max(0, size - self._size)]  # groups that are added come last
            self._size = size
        return self._behind

    def _found(
        self,
        parameters: list[Tensor],
        tied: dict[int, frozenset[nn.Module]],
        cut_now: frozenset[nn.Module],
        seen: dict[int, bool],
    ) -> bool | None:
        """Whether one of them got a gradient; None if it may have come through a use that will be cut."""
        unsure = False
        for parameter in parameters:
            key = id(parameter)
            if key not in seen:
                seen[key] = parameter.requires_grad and self._reached(parameter)
            if seen[key]:
                if tied.get(key, cut_now) <= cut_now:
                    return True
                unsure = True
        return None if unsure else False

    def _reached(self, parameter: Tensor) -> bool:
        grad = parameter.grad
        if grad is None:
            return False
        # A gradient tensor that is kept is written in place at each update; a new one starts again.
        before = self._versions.get(id(parameter), _NEVER)
        self._versions[id(parameter)] = now = version(grad)
        if now <= before or grad.layout is not torch.strided or not self._values():
            return True
        return bool(grad.any())


def _users(modules: Sequence[nn.Module]) -> dict[int, frozenset[nn.Module]]:
    users: dict[int, frozenset[nn.Module]] = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), frozenset()) | {module}
    return users
