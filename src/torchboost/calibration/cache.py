"""A small cache on disk of measured choices, so that the second start of a training does not measure again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.optim import Optimizer

from torchboost.calibration.choice import Choice, Machine
from torchboost.calibration.fingerprint import Condition, describe
from torchboost.core.algorithm import Algorithm
from torchboost.core.arguments import check_module, check_optimizer
from torchboost.core.kept import default_folder, keep, read_kept

__all__ = ["ChoiceCache", "key_of"]

_LOG = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-f]{64}")


def key_of(
    model: nn.Module,
    optimizer: Optimizer,
    inputs: Any,
    *,
    candidates: Iterable[Algorithm],
    machine: Machine,
    conditions: Mapping[str, Condition] | None = None,
    others: Sequence[Optimizer] = (),
) -> str:
    """Return a key that two runs share if a choice of levers that was measured in one is right for the other.

    It is the SHA-256 checksum of a description in plain values:

    - the model: the type of each module, its ``extra_repr``, its plain attributes and those of its configuration, the
      instructions of its ``forward``, and for each parameter and buffer name, shape, precision, memory format, device
      and ``requires_grad``;
    - the optimizer: its class, the options of its groups, and which parameters are in which group;
    - the inputs: nested tuples, lists, mappings and dataclasses of tensors; tensors by shape, precision, memory format
      and device, other objects by their type;
    - the candidates with their settings, and the conditions;
    - the machine and the process: processor, threads, device, versions, the environment variables and the flags of
      torch that change kernels, and whether autocast is on.

    The values of weights and inputs and the learning rate do not count. Of other numbers that are not integers, such as
    a weight decay, it counts whether they are 0.

    Cost: some milliseconds for a ResNet-50. The model is not called and nothing is copied; the values of tensors are
    not read, so a GPU is not waited for.

    Args:
        model: Before any lever of the trial changes it.
        optimizer: The optimizer over its parameters.
        inputs: What the model is called with, such as ``(args, kwargs)``.
        candidates: The levers of the trial with their settings, in its order.
        machine: Where the trial takes place: ``Machine.of(device)``.
        conditions: What else the choice depends on, by name, such as the number of ranks, or the length of the run if
            it decides whether compilation is repaid.
        others: More optimizers over its parameters.

    Returns:
        64 hexadecimal digits.

    Raises:
        TypeError: Not a module, or not an optimizer.
        IncompatibleError: The optimizer does not call hooks and does not wrap another optimizer.
    """
    check_module(model)
    for one in (optimizer, *others):
        check_optimizer(one)
    description = describe(model, optimizer, inputs, candidates, machine, conditions or {}, others)
    return hashlib.sha256(json.dumps(description, separators=(",", ":")).encode()).hexdigest()


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    format: Literal[1] = 1
    key: str
    choice: Choice


class ChoiceCache:
    """Measured choices on disk, one JSON file for each key. No fault of the disk reaches the training.

    The folder is private (mode 0700), and so are its files (0600). Files that other users own or may write are not
    read. Files are written completely or not at all, so several processes may use one folder, and it may be deleted at
    any time. A damaged file, or one that is not an entry of this key, counts as absent and is replaced. The 256 newest
    entries are kept. If the folder cannot be written, nothing is stored; the log says so at level DEBUG.

    Args:
        folder: The folder of the entries. By default ``choices`` in the folder that the environment variable
            ``TORCHBOOST_CACHE`` names, otherwise in ``torchboost`` in ``XDG_CACHE_HOME``, otherwise in
            ``~/.cache/torchboost``. If ``TORCHBOOST_CACHE`` is empty or ``off``, nothing is loaded or stored.

    Attributes:
        folder: The folder of the entries; None if nothing is loaded or stored.

    Example:
        >>> cache = ChoiceCache("choices")
        >>> cache.load("0" * 64) is None
        True
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder: Path | None = default_folder("choices") if folder is None else Path(folder).absolute()

    def load(self, key: str) -> Choice | None:
        """Return the choice that was stored, with ``"cache"`` as its source; None if there is none.

        Args:
            key: What :func:`key_of` returned.

        Raises:
            ValueError: Not such a key.
        """
        file = self._file(key)
        if file is None:
            return None
        try:
            entry = _Entry.model_validate_json(read_kept(file))
            if entry.key != key:
                raise ValueError(f"it is the entry of {entry.key}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _LOG.debug("The cached choice %s is not used: %s", file, error)
            return None
        return entry.choice.model_copy(update={"source": "cache"})

    def store(self, key: str, choice: Choice) -> None:
        """Keep a choice, instead of an earlier one of the same key. If this is not possible, do nothing.

        Args:
            key: What :func:`key_of` returned.
            choice: A measured one.

        Raises:
            ValueError: Not such a key, or the choice is a prior, which was not measured.
        """
        if choice.source == "prior":
            raise ValueError("choice: found a prior, which was not measured; store only what a trial decided.")
        file = self._file(key)
        if file is None:
            return
        try:
            keep(file, _Entry(key=key, choice=choice).model_dump_json().encode() + b"\n")
        except OSError as error:
            _LOG.debug("The choice is not kept in %s: %s", file, error)

    def _file(self, key: str) -> Path | None:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(f"key: found {key!r}; give what key_of returned, 64 hexadecimal digits.")
        return None if self.folder is None else self.folder / f"{key}.json"
