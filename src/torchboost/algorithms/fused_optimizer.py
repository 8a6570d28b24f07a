"""The fused form of the user's own optimizer: one kernel updates all parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, AlreadyOn, Attachment, Target, Traits, attach_each
from torchboost.core.arguments import check_optimizer
from torchboost.core.torch_private import parameter_slots
from torchboost.core.wrapping import hookable
from torchboost.errors import IncompatibleError, warn_no_effect
from torchboost.optim.fusing import Fusion, fused_class, obstacle


def fuse_optimizer(optimizer: Optimizer) -> Attachment:
    """Let SGD, Adam, AdamW or Adagrad, torch's or ours, update all parameters in one kernel.

    Sets the ``fused`` flag of the param groups and of the defaults, as if the optimizer had been built with
    ``fused=True``. It remains the same object. Results agree with the ordinary form up to float32 rounding.

    The faults of torch's fused kernels are avoided, which ``docs/algorithms/fused_optimizer.md`` lists: a kernel is
    tried in each precision first, gradients and state get the memory layout of their parameter, momentum that is
    missing starts at zero, and ``GradScaler`` unscales the gradients, at the price of one more pass over them. They are
    looked at before each step, and after the closure if ``step`` is given one. The state of a contiguous parameter is
    looked at when it was loaded and when layouts have changed: tensors that you write into it must be contiguous.

    ``optimizer.state_dict()`` returns the flags from before, and a loaded checkpoint keeps the optimizer fused. A group
    goes back to its own form, with a warning, if its gradients are sparse, or one of its parameters has got gaps in its
    memory, into which the kernel would write, or another precision whose kernel is wrong.

    Args:
        optimizer: Groups that cannot be fused do not change: torch then picks foreach on GPUs by itself. That holds
            for groups which are added later, too. Groups that are fused already (built so, or loaded from a checkpoint
            of a fused run) get the same care.

    Returns:
        Its ``remove()`` restores the flags.

    Raises:
        TypeError: Not an optimizer.
        IncompatibleError: A group was built with ``differentiable=True``, which excludes fusing, or the optimizer calls
            no hooks and wraps no other one.

    Warns:
        NoEffectWarning: Some group cannot be fused, now or later. The message says why.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
        >>> with fuse_optimizer(optimizer):
        ...     optimizer.param_groups[0]["fused"]
        True
    """
    check_optimizer(optimizer)
    return _fuse(optimizer, frozenset())


def _fuse(optimizer: Optimizer, sparse: frozenset[Tensor]) -> Attachment:
    optimizer = hookable(optimizer)
    _refuse_differentiable(optimizer)
    obstacles = _obstacles(optimizer, sparse)
    unexpected = obstacles
    if not all(obstacles):  # a rule without a fused form may stand next to one that has it
        unexpected = [
            o if fused_class(optimizer, g) else None for o, g in zip(obstacles, optimizer.param_groups, strict=True)
        ]
    if any(unexpected):
        found = "; ".join(f"group {i}: {text}" for i, text in enumerate(unexpected) if text)
        warn_no_effect(f"fused_optimizer: not fused: {found}", above=2)
    if all(obstacles):
        return Attachment()
    return Fusion(optimizer, [text is None for text in obstacles])


@dataclass(frozen=True, kw_only=True)
class FusedOptimizer(Algorithm):
    """Applies :func:`fuse_optimizer`. It has no settings."""

    name: ClassVar[str] = "fused_optimizer"
    traits: ClassVar[Traits] = Traits(order=35, each_optimizer=True)

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain why no param group can be fused, or that all that can be are fused already."""
        obstacles = _obstacles(optimizer, _sparse(model))
        if all(obstacles):
            return "; ".join(dict.fromkeys(text for text in obstacles if text))
        open_groups = [g for g, found in zip(optimizer.param_groups, obstacles, strict=True) if not found]
        return AlreadyOn("already fused") if all(group.get("fused") for group in open_groups) else None

    def check(self, target: Target) -> None:
        """Refuse an optimizer that was built with ``differentiable=True``."""
        for optimizer in target.optimizers:
            _refuse_differentiable(optimizer)

    def attach(self, target: Target) -> Attachment:
        """Fuse the optimizer of the target. Of several, the ones that can be fused."""
        found = target.optimizers
        fusible = [one for one in found if self.idle(target.model, one) is None] if target.others else found
        sparse = _sparse(target.model)
        return attach_each(fusible, lambda optimizer: _fuse(optimizer, sparse))


def _obstacles(optimizer: Optimizer, sparse: frozenset[Tensor]) -> list[str | None]:
    """Return for each group why it cannot be fused, or None."""
    said = "sparse gradients, which the fused kernels do not support"
    return [
        said if not sparse.isdisjoint(group["params"]) else obstacle(optimizer, group)
        for group in optimizer.param_groups
    ]


def _sparse(model: nn.Module) -> frozenset[Tensor]:
    """Return the parameters whose gradients will be sparse."""
    tables = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    weights = (parameter_slots(table).get("weight") for table in tables if table.sparse)
    return frozenset(weight for weight in weights if weight is not None)


def _refuse_differentiable(optimizer: Optimizer) -> None:
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise IncompatibleError(
            f"fused_optimizer: {type(optimizer).__name__} was built with differentiable=True, which torch cannot fuse; "
            "build it with differentiable=False or leave fused_optimizer out."
        )
