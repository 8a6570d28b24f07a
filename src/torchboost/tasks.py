"""Other choices of algorithms than those of the levels, for a task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from torch import nn

from torchboost.config import BoostConfig, ConfigSource, naming_file
from torchboost.core.arguments import check_module
from torchboost.errors import ConfigError, nearest
from torchboost.graph.blocks import blocks_of

Task = Literal["fine_tune"]

MEBIBYTES = 1024
"""Memory for the outputs of a frozen trunk."""


def fine_tuning(model: nn.Module, *, frozen: int | None = None, dtype: str | None = None) -> dict[str, Any]:
    """Return the section ``extra`` of ``boost(..., task="fine_tune")``: the first blocks are frozen and cached.

    The frozen blocks compute each sample once, as :class:`torchboost.algorithms.GradFreeze` says. Samples are known by
    their content, so the loop does not name them. LessBN and gradient centralization, which were measured from scratch,
    are off. So is compilation, because a compiled model cannot be cached.

    Use it to let a tuning choose the number: ``tune(make, candidates={f"{k} frozen": fine_tuning(model, frozen=k) for k
    in (3, 5, 7)})``.

    Args:
        model: The bare model.
        frozen: Number of blocks to freeze, from the input on, at least 1. The default is half of them. See
            :func:`torchboost.graph.blocks.blocks_of`.
        dtype: ``"bfloat16"`` keeps the outputs of the frozen blocks in half the memory. None keeps them exactly.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: The model has not more blocks than ``frozen``.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
        >>> fine_tuning(model, frozen=4)["grad_freeze"]["frozen"]
        4
    """
    check_module(model)
    blocks = len(blocks_of(model))
    chosen = blocks // 2 if frozen is None else frozen
    if frozen is not None and not 1 <= frozen < blocks:
        raise ValueError(f"frozen: found {frozen}; this model has {blocks} blocks, so allowed are 1 to {blocks - 1}.")
    freezing = {"pattern": "fixed", "groups": max(1, blocks), "frozen": chosen, "norms": "eval"}
    caching = {"cache_mebibytes": MEBIBYTES, "cache_by": "content", "cache_dtype": dtype}
    off = dict.fromkeys(("less_bn", "gradient_centralization", "compile"), False)
    return {**off, "grad_freeze": {**freezing, **caching}}


@contextmanager
def with_task(config: ConfigSource | None, task: Task, model: nn.Module) -> Iterator[BoostConfig]:
    """Yield a configuration with the choices of a task. Entries that it already has under ``extra`` count.

    Errors about the configuration inside the context name its file.
    """
    if task not in get_args(Task):
        allowed = ", ".join(map(repr, get_args(Task)))
        raise ConfigError("task", found=repr(task), allowed=allowed, hint=nearest(str(task), get_args(Task)))
    loaded, extra = BoostConfig.load(config), fine_tuning(model)
    for name, setting in loaded.extra.items():
        ours = extra.get(name)
        extra[name] = {**ours, **setting} if isinstance(ours, dict) and isinstance(setting, dict) else setting
    with naming_file(config):
        yield loaded.model_copy(update={"extra": extra})
