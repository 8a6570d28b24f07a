"""Checkpoints of a job on several ranks that resume on any number of ranks and survive a crash during a write.

``torch.distributed.checkpoint`` (DCP) shards and reshards. This module adds the work that DCP expects of its caller: a
folder gets its name only when it is complete, the optimizer is never stepped to find out what it holds, and the state
of each rank (a training step, a scheduler, a sampler) is restored on that rank.
"""

from __future__ import annotations

import copy
import operator
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchboost.core.hardware import accelerators, generator_states, set_generator_states
from torchboost.distributed.agreement import first_holder, from_first_rank, ranks_of_shards
from torchboost.distributed.topology import Topology

__all__ = ["latest", "load", "save"]

OPTIMIZER = "torchboost.optimizer"
"""Part with the entries that hooks added to the optimizer's state dict."""

COPY = "torchboost.copy"
"""Part with the lowest rank that holds the same optimizer state, which is saved under its number."""

BUFFERS = "torchboost.buffers"
"""Part with the lowest rank that holds the same buffers of the model."""

GENERATORS = "torchboost.generators"
"""Part with the states of the rank's random number generators."""

OURS = {OPTIMIZER, COPY, BUFFERS, GENERATORS}

METADATA = ".metadata"
"""The file that DCP writes last."""

UNFINISHED = ".unfinished-"
"""How the temporary names of checkpoints begin."""


def save(
    folder: str | os.PathLike[str],
    number: int,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    keep: int = 2,
    **parts: Stateful,
) -> Path:
    """Write the checkpoint ``folder/number``. All ranks must call this, with a folder that all of them can access.

    The files are written and synced under a temporary name and then renamed, so ``folder`` holds complete checkpoints
    only, even if the job is killed. The layout of model and optimizer is as in ``get_model_state_dict`` and
    ``get_optimizer_state_dict``. Of copies of a state the first rank's is written. Buffers are written of the first
    rank of each DDP or FSDP2 group, from which DDP takes them too. Ranks with a bare model are groups of one. The
    states of torch's generators are written for every rank.

    Args:
        folder: Folder of this job's checkpoints.
        number: Number of the checkpoint, such as the updates done. 0 or more.
        model: As the loop calls it: bare, in DDP, or sharded by FSDP2.
        optimizer: The optimizer that is stepped (``target.optimizer`` if a plan may have replaced it).
        keep: How many of the newest checkpoints to keep. 1 or more.
        **parts: Other objects with ``state_dict`` and ``load_state_dict`` by a name of your choice: a ``TrainStep``, a
            scaler, attached algorithms. The state of each rank is saved.

    Returns:
        The path of the checkpoint.

    Raises:
        TypeError: ``number`` or ``keep`` is not an integer.
        ValueError: One of them is too small, the optimizer belongs to another model, or a part has a reserved name.
        FileExistsError: A checkpoint of this number or of a larger one exists, or another file has its name. Raised on
            all ranks. Nothing was written.
        OSError: The folder cannot be written. Raised on all ranks.
        RuntimeError: A part cannot be written (pickled). Raised on all ranks. Complete checkpoints are not changed.
    """
    if operator.index(number) < 0 or operator.index(keep) < 1:
        raise ValueError(f"found number={number} and keep={keep}; give a number of 0 or more, and keep 1 or more.")
    if taken := OURS & set(parts):
        raise ValueError(f"the part name {sorted(taken)[0]!r} is reserved; give another name.")
    folder = Path(folder)
    path = folder / f"{number:08d}"
    unfinished = _temporary(path)
    _by_first(lambda: _check_place(path))
    names = _names(model, _params(optimizer))
    state = dict(optimizer.state_dict())
    states = {names[position]: entry for position, entry in state.pop("state").items()}
    groups = [{**g, "params": [names[position] for position in g["params"]]} for g in state.pop("param_groups")]
    whole = {"state": states, "param_groups": groups}
    weights = get_model_state_dict(model)
    buffers = _buffers(weights, model)
    holder, source = _holder(whole, _shards(_params(optimizer))), _holder(buffers, [_source(model)])
    saved_parts = {name: part.state_dict() for name, part in parts.items()}
    generators = generator_states(accelerators(model.parameters()))
    saved_parts |= {OPTIMIZER: state, COPY: holder, BUFFERS: source, GENERATORS: generators}
    content = {
        "model": weights,
        _key("optimizer", holder): whole,
        # DCP takes a tuple as it is. It takes dicts apart and asks for them piece by piece.
        "parts": {str(Topology.current().rank): (saved_parts,)},
    }
    if source:
        content[_key("buffers", source)] = buffers
    _by_first(lambda: _clear(folder))
    # By default DCP spreads copies over the ranks, and the BatchNorm statistics of a replica are its own.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with _quiet():
        try:
            state_dict_saver.save(content, checkpoint_id=unfinished, planner=planner)
        except CheckpointException as error:  # not an Exception
            raise RuntimeError(f"{path} was not written: {_in_short(error)}.") from error
    _by_first(lambda: _finish(unfinished, path, keep))
    return path


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, **parts: Stateful) -> None:
    """Resume from a checkpoint, on the same or another number of ranks. All ranks must call this.

    Parts are loaded first, so a part that refuses the checkpoint does so before weights are changed. On the same number
    of ranks the random number generators are restored, and buffers come from the rank's group. On another number of
    ranks the generators are not changed, and buffers come from rank 0.

    Args:
        path: As returned by :func:`save` or :func:`latest`. DCP reads it with ``pickle``: load only files you trust.
        model: Built, transformed and wrapped as for the first update. DDP and FSDP2 can be exchanged.
        optimizer: Over the same parameters in the same groups. It need not have been stepped.
        **parts: Under the names that :func:`save` was given.

    Raises:
        FileNotFoundError: There is no checkpoint, or one of its files is missing.
        ValueError: The model, the groups or the parts differ, a file is damaged, or, on another number of ranks, the
            parts or optimizer states differ between the ranks (as gradients in mid-window do). Nothing was loaded,
            unless the damage is in the weights, which are read last. A part may raise other errors.
    """
    path = Path(path)
    metadata = _metadata(path)
    names = _names(model, _params(optimizer))
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    weights = _weights_of(metadata, bare)
    writers = sorted(int(place[1]) for place in (metadata.planner_data or {}).values() if place[0] == "parts")
    # On another number of ranks all read the parts of all, to compare them.
    ranks = [Topology.current().rank] if len(writers) == Topology.current().world_size else writers
    wrote: dict[str, Any] = {"parts": dict.fromkeys(map(str, ranks))}
    _read(path, wrote)
    saved_parts = _common({rank: wrote["parts"][str(rank)][0] for rank in ranks})
    present = set(saved_parts) - OURS
    if present != set(parts):
        raise ValueError(
            f"the checkpoint holds the parts {sorted(present)}, but load got {sorted(parts)}; give the same parts."
        )
    state = _optimizer_state(path, metadata, _key("optimizer", saved_parts[COPY]), names, optimizer)
    for name, part in parts.items():
        part.load_state_dict(saved_parts[name])
    # Not set_optimizer_state_dict: it steps an optimizer without state, hooks and all, and drops frozen moments.
    optimizer.load_state_dict(saved_parts[OPTIMIZER] | state)
    content = {"model": weights}
    key = _key("buffers", saved_parts[BUFFERS])
    if saved_parts[BUFFERS]:
        content[key] = copy.deepcopy(_buffers(weights, model))
    _read(path, content)
    set_model_state_dict(bare, {**weights, **content.get(key, {})})
    if len(writers) == Topology.current().world_size:
        _set_generator_states(saved_parts[GENERATORS], model)


def load_optimizer(path: str | os.PathLike[str], key: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Load an optimizer from a checkpoint that a trainer wrote with DCP under ``key``. All ranks must call this.

    Unlike ``set_optimizer_state_dict`` it keeps the moments of frozen parameters, and steps nothing. ``model`` and the
    errors are as for :func:`load`.
    """
    names = _names(model, _params(optimizer))
    optimizer.load_state_dict(_optimizer_state(Path(path), _metadata(Path(path)), key, names, optimizer))


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a folder of :func:`save`, or None. All ranks must call this."""
    return _by_first(lambda: next(reversed(_complete(Path(folder))), None))


def _by_first(act: Callable[[], Any]) -> Any:
    """Call ``act`` on rank 0. All ranks wait for it and return its result or raise its error."""
    result = failure = None
    if Topology.current().rank == 0:
        try:
            result = act()
        except Exception as error:
            failure = error
    result, failure = from_first_rank((result, failure))
    if failure is not None:
        raise failure
    return result


def _in_short(error: CheckpointException) -> str:
    """Return the error of each rank that failed, in one line."""
    causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in sorted(causes.items()))


def _check_place(path: Path) -> None:
    """Refuse a number that is not the largest in the folder, because only the largest are kept."""
    newest = next(reversed(_complete(path.parent)), None)
    if newest is not None and int(newest.name) >= int(path.name):
        older = f", and checkpoint {int(path.name)} would be older, so it would be removed first" * (newest != path)
        raise FileExistsError(f"{newest} already exists{older}; give a larger number, or save into another folder.")
    if os.path.lexists(path):
        raise FileExistsError(f"{path} already exists and is not a checkpoint; move it, or give another number.")


# The folder: a checkpoint has its name only if it is complete


def _complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, and links to them, by number. The folder need not exist."""
    numbered = [path for path in folder.glob("[0-9]*") if re.fullmatch("[0-9]{8}|[1-9][0-9]{8,}", path.name)]
    return sorted((path for path in numbered if (path / METADATA).is_file()), key=lambda path: int(path.name))


def _temporary(path: Path) -> Path:
    return path.with_name(UNFINISHED + path.name)


def _clear(folder: Path) -> None:
    """Create the folder, and remove files that an interrupted job left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{UNFINISHED}*"):
        _remove(left)


def _finish(unfinished: Path, path: Path, keep: int) -> None:
    """Rename a complete checkpoint to its final name, then remove all but the ``keep`` largest numbers."""
    _sync(unfinished)
    unfinished.rename(path)
    _sync(path.parent)
    for old in _complete(path.parent)[:-keep]:
        if not old.is_symlink():  # its target was not written here
            _remove(old.rename(_temporary(old)))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync(folder: Path) -> None:
    """Sync a folder after a rename. DCP has synced the files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# DCP's names for the parts of model and optimizer


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _names(model: nn.Module, params: list[Tensor]) -> list[str]:
    """Return DCP's names of the parameters, in their order, independent of wrappers."""
    probe = torch.optim.SGD(params)
    probe.state[params[0]] = {}  # torch steps an optimizer without state to create one
    try:
        return get_optimizer_state_dict(model, probe)["param_groups"][0]["params"]  # pyright: ignore
    except KeyError as error:
        raise ValueError(
            "the optimizer holds parameters that are not in the model; give the model they belong to."
        ) from error


def _weights_of(metadata: Metadata, model: nn.Module) -> dict[str, Any]:
    """Return the tensors that are read into a model, or refuse a checkpoint of another model.

    They are the state dict, or, without entries for removed BatchNorms, what the version before wrote: parameters and
    buffers as they are.
    """
    prefix, entries = "model.", metadata.state_dict_metadata
    written = {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}
    weights = get_model_state_dict(model)
    names = _names(model, list(model.parameters()))
    plain = dict(zip(names, (p.detach() for p in model.parameters()), strict=True))
    buffers = {name for name, _ in model.named_buffers()}
    plain |= {name: value for name, value in weights.items() if name in buffers or name in names}
    if plain.keys() != weights.keys() and plain.keys() == written.keys():
        weights = plain
    saved = {name: tuple(entry.size) for name, entry in written.items() if isinstance(entry, TensorStorageMetadata)}
    here = {name: tuple(value.shape) for name, value in weights.items() if isinstance(value, Tensor)}
    if saved != here:
        other = sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
        raise ValueError(
            f"the checkpoint is of another model: {len(other)} entries differ, the first is '{other[0]}', of shape "
            f"{saved.get(other[0], 'none')} in the checkpoint and {here.get(other[0], 'none')} here. Build the same "
            "model, and transform it (plan.transform) before loading."
        )
    return weights


def _buffers(weights: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the entries of a model's state dict besides parameters."""
    named = set(_names(model, list(model.parameters())))
    return {name: value for name, value in weights.items() if name not in named and not isinstance(value, DTensor)}


def _source(model: nn.Module) -> int:
    """Return the rank whose buffers this rank uses, in DDP at every pass: the first that averages gradients with it."""
    ddp = next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)
    return min(_shards(model.parameters()) if ddp is None else dist.get_process_group_ranks(ddp.process_group))


def _shards(params: Iterable[Tensor]) -> list[int]:
    """Return the ranks over which parameters are sharded. Without sharding, only this rank."""
    return ranks_of_shards(params) or [Topology.current().rank]


def _holder(state: dict[str, Any], shards: Sequence[int]) -> int:
    """Return the lowest rank that holds the same state as these ranks together."""
    return first_holder(state, shards) if dist.is_initialized() else 0


def _key(what: str, holder: int) -> str:
    """Return the key of a state. For rank 0 it is the one that DCP's functions look for."""
    return f"{what}-{holder}" if holder else what


def _optimizer_state(
    path: Path, metadata: Metadata, key: str, names: list[str], optimizer: Optimizer
) -> dict[str, Any]:
    """Return the state that a checkpoint has under ``key``, sharded and ordered as this optimizer is."""
    params = dict(zip(names, _params(optimizer), strict=True))
    state: dict[str, Any] = {"state": {}, "param_groups": []}
    for name, entry in metadata.state_dict_metadata.items():
        place: tuple[Any, ...] = (metadata.planner_data or {})[name]
        if place[0] != key:
            continue
        room = None
        if isinstance(entry, TensorStorageMetadata):
            param = params.get(place[2]) if place[1] == "state" else None
            dtype = entry.properties.dtype
            if isinstance(param, DTensor) and param.shape == entry.size:
                room = torch.empty_like(param, dtype=dtype)
            else:
                room = torch.empty(entry.size, dtype=dtype, device="cpu")
        _put(state, place[1:], room)
    content = {key: state}
    _read(path, content)
    _match_groups(content[key], names, optimizer)
    return content[key]


def _put(tree: Any, place: tuple[Any, ...], value: Any) -> None:
    """Write into nested dicts and lists, which grow as needed. An integer in ``place`` indexes a list."""
    for part, following in zip(place, (*place[1:], None), strict=True):
        empty = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(tree, list):
            tree.extend([None] * (part + 1 - len(tree)))
            if tree[part] is None:
                tree[part] = empty
        else:
            tree.setdefault(part, empty)
        tree = tree[part]


def _match_groups(state: dict[str, Any], names: list[str], optimizer: Optimizer) -> None:
    """Put the parameters of each saved group into the order of the optimizer's."""
    remaining = iter(names)
    here = [[next(remaining) for _ in group["params"]] for group in optimizer.param_groups]
    saved = [group["params"] for group in state["param_groups"]]
    if [set(group) for group in here] != [set(group) for group in saved]:
        raise ValueError(
            f"the param groups differ: the checkpoint's hold {[len(g) for g in saved]} parameters, this optimizer's "
            f"{[len(g) for g in here]}; build the groups from the same parameters as before."
        )
    for group, order in zip(state["param_groups"], here, strict=True):
        group["params"] = order


def _common(by_rank: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the parts of one rank. If there are several ranks, their parts must be equal."""
    first, *others = by_rank
    holders = sorted({parts[COPY] for parts in by_rank.values()})
    if len(holders) > 1:
        raise ValueError(
            f"the optimizer's state differs between ranks {', '.join(map(str, holders))} of the checkpoint, as with "
            f"AdaSum, so it cannot be loaded on {Topology.current().world_size} ranks. Resume on {len(by_rank)} ranks."
        )
    for other in others:
        for name, state in by_rank[first].items():
            if name not in (BUFFERS, GENERATORS) and not _same(state, by_rank[other][name]):
                raise ValueError(
                    f"'{name}' differs between ranks {first} and {other} of the checkpoint, which {len(by_rank)} ranks "
                    f"wrote, so it cannot be loaded on {Topology.current().world_size} ranks. Resume on {len(by_rank)} "
                    "ranks, or save when it is the same on all ranks, such as between two accumulation windows."
                )
    return by_rank[first]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor) or isinstance(b, DTensor):
        return False  # one rank's shard
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b


def _metadata(path: Path) -> Metadata:
    if not (path / METADATA).is_file():
        raise FileNotFoundError(f"{path} is not a checkpoint: it has no '.metadata'; latest(folder) finds the newest.")
    try:
        metadata = FileSystemReader(path).read_metadata()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
    except Exception as error:  # pickle has no common class for errors of a damaged file
        raise ValueError(f"{path / METADATA} is damaged ({error}); load another checkpoint.") from error
    return metadata


def _read(path: Path, content: dict[str, Any]) -> None:
    with _quiet():
        try:
            state_dict_loader.load(content, checkpoint_id=path)
        except CheckpointException as error:  # not an Exception
            missing = any(isinstance(cause, FileNotFoundError) for cause, _ in error.failures.values())
            kind = FileNotFoundError if missing else ValueError
            raise kind(f"{path} cannot be read ({_in_short(error)}); load another checkpoint.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress DCP's warning about a single process."""
    with warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _set_generator_states(states: Sequence[Tensor], model: nn.Module) -> None:
    """Restore the states of generators. Those of other kinds of devices, which have other sizes, are skipped."""
    devices = accelerators(model.parameters())
    _, *others = generator_states(devices)
    saved = [old if old.shape == new.shape else new for old, new in zip(states[1:], others, strict=False)]
    set_generator_states([states[0], *saved], devices[: len(saved)])
