"""Dimension-reduced training: quasi-Newton steps along the principal components of the weights' own path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.dim_reduce.basis import Block, SubspaceBasis, blocks_within
from torchboost.algorithms.dim_reduce.basis_sources import MatrixFile, shared_basis, write_matrix
from torchboost.algorithms.dim_reduce.loss_windows import LossWindows
from torchboost.algorithms.dim_reduce.optimizer import LineSearch, SubspaceOptimizer, check_weights
from torchboost.algorithms.dim_reduce.principal_components import PrincipalComponents
from torchboost.algorithms.dim_reduce.snapshots import CheckpointFiles, Layout, SnapshotBuffer, Snapshots
from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_number
from torchboost.core.averaging import only_ddp
from torchboost.core.closure import ClosureOptimizer, Replay
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.errors import IncompatibleError
from torchboost.optim.direct_steps import DirectSteps
from torchboost.optim.wrapping_optimizer import WrappingOptimizer

__all__ = ["Phase", "SubspaceDescent", "SubspaceRun"]

Phase = Literal["collect", "subspace", "full"]

_PASSED_BY = (
    "dim_reduce: the original optimizer was stepped directly, outside the subspace; step the one that attach set: "
    "target.optimizer.step(lambda: loss_fn(model(inputs), labels))."
)
_LONGEST = 10**9
"""Seconds; a wait is a timedelta, which holds no more than some millennia."""


@dataclass(frozen=True, kw_only=True)
class SubspaceDescent(Algorithm):
    """Train along a few directions that earlier training has found; not combined with other algorithms.

    ``attach`` replaces the target's optimizer by a :class:`SubspaceRun`. The directions come from a file, from
    checkpoints of an earlier run, or, if neither is named, from snapshots of this run: it then trains with the
    optimizer it was given until there are enough, and continues in the subspace from the weights it has reached.

    Args:
        n_components: Number of directions.
        rho: Factor between two trials of a line search.
        gamma: Momentum of the gradient outside the subspace.
        alpha: Step along that momentum.
        sigma: Share of the decrease promised by the slope that a trial must reach.
        trials: Forward passes per line search at most.
        line_search: See :class:`~torchboost.algorithms.SubspaceOptimizer`.
        pca_mat_path: An ``.npy`` file with a direction per row, as ``torchboost pca`` writes it.
        weight_load_dir: A folder with at least ``n_components`` checkpoints, safetensors or ``.pt`` with tensors only.
            If both are given, an existing file is read and the folder is not; if there is no file yet, it is written
            from the checkpoints, for the next run.
        snapshots: Number of snapshots of this run to take; None takes ``n_components``.
        snapshot_every: Updates between two of them.
        snapshot_dtype: How they are kept in host memory.
        restart: Whether the subspace begins at the weights from before the snapshots, as published, which gives up
            what was trained meanwhile; by default it begins at the last.
        patience: Hand back to the full optimizer when the mean loss of so many updates in the subspace is not lower,
            by ``tolerance`` of it, than that of as many before; None never does.
        tolerance: See ``patience``.
        memory_mebibytes: Budget of the basis on each rank; above it every direction covers one block of weights only.
        timeout: Seconds that ranks wait for the one that makes the basis.
    """

    name: ClassVar[str] = "dim_reduce"
    traits: ClassVar[Traits] = Traits(order=90, replaces_optimizer=True, alone=True)

    n_components: int = 32
    rho: float = 0.55
    gamma: float = 0.9
    alpha: float = 0.001
    sigma: float = 0.4
    trials: int = 2
    line_search: LineSearch = "backtracking"
    pca_mat_path: str | None = None
    weight_load_dir: str | None = None
    snapshots: int | None = None
    snapshot_every: int = 100
    snapshot_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    restart: bool = False
    patience: int | None = 100
    tolerance: float = 0.01
    memory_mebibytes: int | None = None
    timeout: int = 1800

    def __post_init__(self) -> None:
        for name in ("n_components", "snapshot_every", "trials", "timeout"):
            if not _is_count(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: an integer of 1 or more.")
        for name in ("snapshots", "patience", "memory_mebibytes"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise ValueError(f"{name}={value}: an integer of 1 or more, or None.")
        for name, allowed in (("line_search", get_args(LineSearch)), ("snapshot_dtype", ("bfloat16", "float32"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: one of {', '.join(map(repr, allowed))}.")
        for name in ("alpha", "tolerance"):
            check_number(name, getattr(self, name))
        for name in ("rho", "sigma", "gamma"):
            check_number(name, getattr(self, name), above=name != "gamma")
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)}: a number below 1.")
        if self.timeout > _LONGEST:
            raise ValueError(f"timeout={self.timeout}: seconds, at most {_LONGEST}.")
        if self.snapshots is not None and self.snapshots < self.n_components:
            raise ValueError(
                f"snapshots={self.snapshots}: at least as many as directions are needed, n_components is "
                f"{self.n_components}."
            )

    def check(self, target: Target) -> None:
        """Raise the errors that :meth:`attach` lists and that show before the basis is made."""
        if isinstance(target.optimizer, ClosureOptimizer):
            raise IncompatibleError("dim_reduce: the optimizer already does a line search; attach once.")
        if target.accumulator is not None:
            raise IncompatibleError(
                "dim_reduce: the target accumulates gradients, but a line search uses one batch; leave accumulation or "
                "dim_reduce out."
            )
        wrapper = wrapper_of(target.model)
        if wrapper not in (None, "DistributedDataParallel", "torch.compile", "nn.Module.compile"):
            raise IncompatibleError(
                f"dim_reduce: the model is wrapped by {wrapper}, but the steps need whole parameters on every rank; "
                "use DistributedDataParallel."
            )
        _parameters(target.model, target.optimizer)
        self._blocks(target.model)

    def attach(self, target: Target) -> Attachment:
        """Replace the optimizer of the target by a :class:`SubspaceRun`.

        Raises:
            IncompatibleError: FSDP, accumulation, several precisions or devices, parameters that the optimizer does
                not train.
            ValueError: The basis does not fit the model; too few checkpoints, or of another model; NaN in one.
            FileNotFoundError: The file or folder is missing.
            TimeoutError: A rank did not arrive.
        """
        given = target.optimizer
        run = SubspaceRun(given, target.model, self)
        target.optimizer = run
        return Attachment(run, undo=lambda: setattr(target, "optimizer", given))

    def basis(self, model: nn.Module, snapshots: Snapshots | None = None) -> SubspaceBasis:
        """Make the basis for a model: from ``snapshots``, or from the file or folder of the settings."""
        layout, group, blocks = _layout(model), _group(model), self._blocks(model)
        if snapshots is not None:
            make = partial(PrincipalComponents, snapshots, blocks)
        elif self.pca_mat_path is not None:
            if len(blocks) > 1:
                raise IncompatibleError(
                    f"dim_reduce: the {self.n_components} directions of {self.pca_mat_path} cover all weights, which "
                    f"do not fit into memory_mebibytes={self.memory_mebibytes}; raise it, or give weight_load_dir "
                    "alone."
                )
            make = partial(_from_file, self.pca_mat_path, self.weight_load_dir, self.n_components, layout)
        else:
            make = partial(_from_folder, self.weight_load_dir or "", layout, blocks)
        return shared_basis(make, blocks, group, timeout=self.timeout, alike=repr(self))

    @property
    def collects(self) -> bool:
        """Whether the basis is made from snapshots of the run itself."""
        return self.pca_mat_path is None and self.weight_load_dir is None

    def _blocks(self, model: nn.Module) -> tuple[Block, ...]:
        weights = [p for p in unwrap(model).parameters() if p.requires_grad]
        return blocks_within(
            sum(p.numel() for p in weights),
            self.n_components,
            budget=None if self.memory_mebibytes is None else self.memory_mebibytes << 20,
            ranks=_ranks(model),
            itemsize=max((p.element_size() for p in weights), default=4),
        )


class SubspaceRun(WrappingOptimizer, ClosureOptimizer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """An optimizer that trains in a subspace, and with the original optimizer before and after.

    Args:
        opt: Trains while snapshots are taken, and after the hand-back; its groups and state are those of this object,
            so that schedulers may drive either.
        model: What the loop calls; under DDP the rows of the basis are shared out over its ranks.
        settings: See :class:`SubspaceDescent`.

    Attributes:
        direct: Refuses direct steps of ``opt``.
        phase: ``"collect"``, ``"subspace"`` or ``"full"``.
        subspace: The optimizer of the subspace; None before there is a basis and after the hand-back.
        updates: Updates so far.
    """

    def __init__(self, opt: Optimizer, model: nn.Module, settings: SubspaceDescent) -> None:
        super().__init__(opt)
        self.settings = settings
        self.updates = 0
        self.phase: Phase = "collect"
        self.subspace: SubspaceOptimizer | None = None
        self._model = model
        self._weights = _parameters(model, opt)
        self._snapshots = SnapshotBuffer(_layout(model), getattr(torch, settings.snapshot_dtype))
        self._start: list[Tensor] = []
        self._losses = LossWindows()
        if not settings.collects:
            self._enter(settings.basis(model))
        self.direct = DirectSteps(opt, self, _PASSED_BY)  # last, when nothing can fail

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update once and return the loss before it.

        Args:
            closure: See :meth:`torchboost.algorithms.SubspaceOptimizer.step`.

        Raises:
            TypeError: No closure.
        """
        if closure is None:
            raise TypeError(
                "dim_reduce: step() found no closure, but its line search evaluates the loss again. In your own loop, "
                "call optimizer.step(lambda: loss_fn(model(inputs), labels)) in place of backward() and step(); "
                "TrainStep and BoostTrainOneStepCell do so themselves."
            )
        replay = closure if isinstance(closure, Replay) else Replay(closure, self._weights[0].device)
        ours = replay.loss is None
        if ours:
            replay.backward(self._weights)
        if self.subspace is not None:
            self.subspace.step(replay)
            self._judge(self.subspace.loss)
        else:
            if self.phase == "collect" and self.settings.restart and not self.updates:
                # Not before: DDP, or a checkpoint, may set the weights after this was attached.
                self._start = [weight.detach().clone() for weight in self._weights]
            with self.direct.allowed():
                self.opt.step()
            self._collect()
        self.updates += 1
        if ours:
            self.zero_grad()
        return replay.loss

    def remove(self) -> None:
        """Allow direct steps of the original optimizer again."""
        self.direct.remove()

    def _collect(self) -> None:
        if self.phase != "collect" or (self.updates + 1) % self.settings.snapshot_every:
            return
        self._snapshots.add(self._weights)
        if len(self._snapshots) < (self.settings.snapshots or self.settings.n_components):
            return
        self._enter(self.settings.basis(self._model, self._snapshots))
        self._snapshots.clear()
        with torch.no_grad():
            for weight, start in zip(self._weights, self._start, strict=bool(self._start)):
                weight.copy_(start)
        self._start = []

    def _enter(self, basis: SubspaceBasis) -> None:
        self.subspace = self._optimizer_of(basis)
        self.phase = "subspace"

    def _optimizer_of(self, basis: SubspaceBasis) -> SubspaceOptimizer:
        s = self.settings
        return SubspaceOptimizer(
            self._weights,
            basis,
            lr=s.alpha,
            rho=s.rho,
            gamma=s.gamma,
            sigma=s.sigma,
            trials=s.trials,
            line_search=s.line_search,
            buffers=self._model.buffers(),
        )

    def _judge(self, loss: float) -> None:
        """Hand back if a window of updates was not better than the one before."""
        if self.settings.patience is None or not self._losses.add(loss, self.settings.patience):
            return
        if self._losses.gain() < self.settings.tolerance:
            self.phase, self.subspace = "full", None

    def _own_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "phase": self.phase,
            "updates": self.updates,
            "losses": self._losses.state_dict(),
            "start": [start.clone() for start in self._start],
            "snapshots": self._snapshots.state_dict(),
        }
        if self.subspace is not None:
            state["subspace"] = self.subspace.state_dict()
            if self.settings.collects:
                basis = self.subspace.basis
                state["rows"] = [rows.clone() for rows in basis.rows]
                state["share"] = [basis.rank, basis.ranks]
        return state

    def _load_own_state(self, state: dict[str, Any]) -> None:
        subspace = None
        if state["phase"] == "subspace":
            subspace = self._subspace_of(state)
            subspace.load_state_dict(state["subspace"])
        self.subspace = subspace
        self.phase, self.updates = state["phase"], int(state["updates"])
        self._losses.load_state_dict(state["losses"])
        self._start = [start.to(weight) for start, weight in zip(state["start"], self._weights, strict=False)]
        self._snapshots.load_state_dict(state["snapshots"])

    def _subspace_of(self, state: dict[str, Any]) -> SubspaceOptimizer:
        """Return the optimizer to resume from a checkpoint."""
        if "rows" not in state and self.settings.collects:
            raise ValueError(
                "the checkpoint was saved in a subspace from a file, but this run collects its own; attach with the "
                "settings that it was saved with."
            )
        if "rows" not in state:
            return self.subspace or self._optimizer_of(self.settings.basis(self._model))
        group = _group(self._model)
        here = [0, 1] if group is None else [dist.get_rank(group), dist.get_world_size(group)]
        if state["share"] != here:
            raise ValueError(
                "the checkpoint holds the rows of rank {} of {}, this is rank {} of {}; every rank must save and load "
                "its own state, as torchboost.distributed.checkpoint does.".format(*state["share"], *here)
            )
        return self._optimizer_of(SubspaceBasis(self.settings._blocks(self._model), state["rows"], group))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _from_folder(folder: str, layout: Layout, blocks: Any) -> PrincipalComponents:
    return PrincipalComponents(CheckpointFiles(folder, layout), blocks)


def _from_file(path: str, folder: str | None, components: int, layout: Layout) -> MatrixFile:
    if folder is not None and not Path(path).exists():
        checkpoints = CheckpointFiles(folder, layout)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_matrix(path, checkpoints, components)
    return MatrixFile(path, components, layout)


def _layout(model: nn.Module) -> Layout:
    return Layout.of(unwrap(model))


def _group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that train the model together; a bare one is taken to be wrapped later, over all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    wrapped = only_ddp(model)
    group = dist.group.WORLD if wrapped is None else wrapped.process_group
    return group if dist.get_world_size(group) > 1 else None


def _ranks(model: nn.Module) -> int:
    group = _group(model)
    return 1 if group is None else dist.get_world_size(group)


def _parameters(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return the weights in the order of the layout, if the optimizer has them all and they are of one kind."""
    weights: list[Tensor] = [p for p in unwrap(model).parameters() if p.requires_grad]
    held = {p for group in optimizer.param_groups for p in group["params"]}
    others = sum(p.requires_grad for p in held.difference(weights))
    if others:
        raise IncompatibleError(
            f"dim_reduce: the optimizer trains {others} parameters that are not in the model, which a step in the "
            "subspace would not change; put them into the model, or into another optimizer."
        )
    stray = sum(p not in held for p in weights)
    if stray:
        raise IncompatibleError(
            f"dim_reduce: {stray} of {len(weights)} parameters of the model that require grad are not in the "
            "optimizer; freeze them with requires_grad_(False), or give them to the optimizer."
        )
    check_weights(weights)
    return weights
