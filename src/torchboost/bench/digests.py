"""Digests of a factory's training, by which a report that is continued sees that something else has changed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.bench.factory import Parts, one_epoch, streams_restored


def fingerprint_of(parts: Parts) -> str:
    """Return a text that tells trainings apart by the optimizer's settings, the modules, the start weights and buffers.

    It sees no change of the loss, the data or ``evaluate``.
    """
    digest = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", repr(parts.model)).encode())
    for group in parts.optimizer.param_groups:
        digest.update(repr(sorted((key, str(value)) for key, value in group.items() if key != "params")).encode())
    digest.update(type(parts.optimizer).__name__.encode())
    for tensor in (*parts.model.parameters(), *parts.model.buffers()):
        digest.update(_size_of(tensor.detach()).encode())
    return digest.hexdigest()[:16]


def data_of(parts: Parts) -> str:
    """Return a text that tells data apart by the first batch of seed 0: its shapes, types and sums."""
    digest = hashlib.sha256()
    with streams_restored():
        batch = next(one_epoch(parts.batches, seed=0, epoch=0, device=torch.device("cpu")))
    for value in _leaves(batch):
        told = f"{value.dtype} {tuple(value.shape)} {_size_of(value)}" if isinstance(value, Tensor) else repr(value)
        digest.update(re.sub(r"0x[0-9a-f]+", "", told).encode())
    return digest.hexdigest()[:16]


def changes_by_call(parts: Parts, fingerprint: str, data: str) -> str:
    """Return a note if another call of the factory for the same seed had other digests. Empty if not."""
    differ = {
        "start weights or optimizers": fingerprint_of(parts) != fingerprint,
        "data": data_of(parts) != data,
    }
    if not any(differ.values()):
        return ""
    return (
        f"make returned other {' and other '.join(name for name, found in differ.items() if found)} when it was called "
        "again for the same seed, so runs with one seed are no pairs; let it draw from torch's generator or the seed, "
        "and change no data that it keeps"
    )


def modes_of(model: nn.Module) -> str:
    """Return a note about layers that :meth:`torch.nn.Module.train` takes out of evaluation mode. Empty if none is."""
    kinds = sorted({type(module).__name__ for module in model.modules() if not module.training})
    if not model.training or not kinds:
        return ""
    return (
        f"make returned a model in training mode with layers in evaluation mode ({', '.join(kinds)}), and here "
        "model.train() is called, which changes them; to keep them, let the model's own train() do so"
    )


def check_unchanged(path: Path, saved: Any, now: Any, again: Callable[[], Parts]) -> None:
    """Raise ``ValueError`` if two reports are of other start weights, optimizers or data.

    ``again`` calls the factory with the seed 0 once more: what differs in every call is not compared. In reports of
    earlier versions ``fingerprint`` and ``data`` are empty.
    """
    for name, what, digest in (("fingerprint", "model or optimizer", fingerprint_of), ("data", "data", data_of)):
        before, after = getattr(saved, name), getattr(now, name)
        if before and before != after and digest(again()) == after:
            raise ValueError(
                f"{path} was made with other {what} ({name} {before}, and now {after}); runs of both cannot be mixed. "
                "Restore what the factory reads and imports, save to another file, or do not resume."
            )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (Mapping, tuple, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each)
    else:
        yield value


def _size_of(tensor: Tensor) -> str:
    real = tensor.abs() if tensor.is_complex() else tensor
    return f"{float(real.double().abs().sum()):.12e}"
