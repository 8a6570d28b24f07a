"""Dimension-reduced training: quasi-Newton steps along the principal components of the weights' own path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_number
from torchboost.core.closure import ClosureOptimizer, Replay
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.errors import IncompatibleError
from torchboost.optim import native_basis
from torchboost.optim.basis_sources import MatrixFile, shared_basis
from torchboost.optim.front import FrontOptimizer
from torchboost.optim.principal_components import PrincipalComponents
from torchboost.optim.snapshots import CheckpointFiles, Layout, SnapshotBuffer, Snapshots
from torchboost.optim.subspace import LineSearch, SubspaceOptimizer, check_weights
from torchboost.optim.subspace_basis import SubspaceBasis, blocks_within

__all__ = ["Phase", "SubspaceDescent", "SubspaceRun"]

Phase = Literal["collect", "subspace", "full"]


@dataclass(frozen=True, kw_only=True)
class SubspaceDescent(Algorithm):
    """Train along a few directions that earlier training has shown to matter; stands alone.

    ``attach`` puts a :class:`SubspaceRun` in the place of the target's optimizer. The directions come from a file, from
    checkpoints of an earlier run, or, where neither is named, from snapshots of this run: it then trains with the
    optimizer it was given until there are enough, and goes on in the subspace from where it started.

    Args:
        n_components: Number of directions.
        rho: Factor between two trials of a line search.
        gamma: Momentum of the gradient outside the subspace.
        alpha: Step along that momentum.
        sigma: Share of the decrease promised by the slope that a trial must reach.
        trials: Forward passes per line search at most.
        line_search: See :class:`~torchboost.optim.SubspaceOptimizer`.
        pca_mat_path: An ``.npy`` file with a direction per row, as ``torchboost pca`` writes it.
        weight_load_dir: A folder with at least ``n_components`` checkpoints, safetensors or ``.pt`` with tensors only.
        snapshots: How many snapshots of this run to take; ``n_components`` where None.
        snapshot_every: Updates between two of them.
        snapshot_dtype: How they are kept in host memory.
        restart: Whether the subspace begins at the weights from before the snapshots, as published, or at the last.
        patience: Hand back to the full optimizer when the mean loss of so many updates in the subspace is not lower,
            by ``tolerance`` of it, than that of as many before; None never does.
        tolerance: See ``patience``.
        memory_mebibytes: Budget of the basis on each rank; above it every direction covers one block of weights only.
        timeout: Seconds that ranks wait for the one that makes the basis.
        native: See :class:`~torchboost.optim.SubspaceOptimizer`.
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
    restart: bool = True
    patience: int | None = 100
    tolerance: float = 0.01
    memory_mebibytes: int | None = None
    timeout: int = 1800
    native: bool = False

    def __post_init__(self) -> None:
        for name in ("n_components", "snapshot_every", "trials", "timeout"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: an integer of 1 or more.")
        for name in ("snapshots", "patience", "memory_mebibytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: an integer of 1 or more, or None.")
        for name in ("alpha", "tolerance"):
            check_number(name, getattr(self, name))
        for name in ("rho", "sigma", "gamma"):
            check_number(name, getattr(self, name), above=name != "gamma")
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)}: a number below 1.")
        if self.pca_mat_path is not None and self.weight_load_dir is not None:
            raise ValueError("pca_mat_path and weight_load_dir are both set: the basis comes from one of them.")
        if self.snapshots is not None and self.snapshots < self.n_components:
            raise ValueError(
                f"snapshots={self.snapshots}: at least as many as directions are needed, n_components is "
                f"{self.n_components}."
            )

    def check(self, target: Target) -> None:
        """Refuse what :meth:`attach` lists, as far as it shows before the basis is made."""
        if isinstance(target.optimizer, ClosureOptimizer):
            raise IncompatibleError("dim_reduce: the optimizer searches along the loss already; attach once.")
        if target.accumulator is not None:
            raise IncompatibleError(
                "dim_reduce: the target accumulates gradients, and a line search looks at one batch; leave it out."
            )
        wrapper = wrapper_of(target.model)
        if wrapper not in (None, "DistributedDataParallel", "torch.compile", "nn.Module.compile"):
            raise IncompatibleError(
                f"dim_reduce: the model is wrapped by {wrapper}, and the steps need whole parameters on every rank; "
                "use DistributedDataParallel."
            )
        layout = _layout(target.model)
        blocks_within(layout.length, self.n_components, budget=self._budget(), ranks=_ranks(target.model))
        weights = _parameters(target.model, target.optimizer)
        if self.native:
            native_basis.check(weights[0].device, weights[0].dtype)

    def attach(self, target: Target) -> Attachment:
        """Put a :class:`SubspaceRun` in front of the optimizer of the target.

        Raises:
            IncompatibleError: FSDP, accumulation, several precisions or devices, parameters that the optimizer does
                not train; ``native`` other than in float32 on a CPU with a C compiler.
            ValueError: The basis does not fit the model; too few checkpoints, or of another model; NaN in one.
            FileNotFoundError: The file or folder is missing.
            TimeoutError: A rank did not come.
        """
        self.check(target)
        given = target.optimizer
        run = SubspaceRun(given, target.model, self)
        target.optimizer = run
        return Attachment(run, undo=lambda: setattr(target, "optimizer", given))

    def basis(self, model: nn.Module, snapshots: Snapshots | None = None) -> SubspaceBasis:
        """Make the basis for a model: from ``snapshots``, or from the file or folder of the settings."""
        layout, group = _layout(model), _group(model)
        blocks = blocks_within(layout.length, self.n_components, budget=self._budget(), ranks=_ranks(model))
        if snapshots is not None:
            make = partial(PrincipalComponents, snapshots, blocks)
        elif self.pca_mat_path is not None:
            if len(blocks) > 1:
                raise IncompatibleError(
                    f"dim_reduce: the {self.n_components} directions of {self.pca_mat_path} cover all weights, which "
                    f"memory_mebibytes={self.memory_mebibytes} does not hold; raise it, or give weight_load_dir."
                )
            make = partial(MatrixFile, self.pca_mat_path, self.n_components, layout)
        else:
            make = partial(_from_folder, self.weight_load_dir or "", layout, blocks)
        return shared_basis(make, blocks, group, timeout=self.timeout, alike=repr(self))

    @property
    def collects(self) -> bool:
        """Whether the basis is made from snapshots of the run itself."""
        return self.pca_mat_path is None and self.weight_load_dir is None

    def _budget(self) -> int | None:
        return None if self.memory_mebibytes is None else self.memory_mebibytes << 20


class SubspaceRun(FrontOptimizer, ClosureOptimizer):
    """An optimizer that trains in a subspace, with another one before and after.

    Args:
        opt: Trains while snapshots are taken, and after the hand-back; its groups and state are those of this object,
            so that schedulers may drive either.
        model: What the loop calls; under DDP the rows of the basis are shared out over its ranks.
        settings: See :class:`SubspaceDescent`.

    Attributes:
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
        self._stepping = False
        self._weights = _parameters(model, opt)
        self._snapshots = SnapshotBuffer(_layout(model), getattr(torch, settings.snapshot_dtype))
        self._start: list[Tensor] = []
        self._losses = _Windows()
        if not settings.collects:
            self._enter(settings.basis(model))
        elif settings.restart:
            self._start = [weight.detach().clone() for weight in self._weights]
        self._guard = opt.register_step_pre_hook(self._refuse_others)  # last, where nothing can fail any more

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update once and return the loss before it.

        Args:
            closure: See :meth:`torchboost.optim.SubspaceOptimizer.step`.

        Raises:
            TypeError: No closure.
        """
        if closure is None:
            raise TypeError(
                "dim_reduce: step() found no closure, and its line search looks at the loss again. In a loop of your "
                "own call optimizer.step(lambda: loss_fn(model(inputs), labels)) in place of backward() and step(); "
                "TrainStep and BoostTrainOneStepCell do it by themselves."
            )
        replay = closure if isinstance(closure, Replay) else Replay(closure, self._weights[0].device)
        ours = replay.loss is None
        if ours:
            replay.backward(self._weights)
        if self.subspace is not None:
            self.subspace.step(replay)
            self._judge(self.subspace.loss)
        else:
            self._stepping = True
            try:
                self.opt.step()
            finally:
                self._stepping = False
            self._collect()
        self.updates += 1
        if ours:
            self.zero_grad()
        return replay.loss

    def remove(self) -> None:
        """Let the optimizer behind be stepped again by others."""
        self._guard.remove()

    def _refuse_others(self, *_: Any) -> None:
        if not self._stepping:
            raise IncompatibleError(
                "dim_reduce: the optimizer behind it was stepped directly, past the subspace; step what attach put in "
                "its place: target.optimizer.step(lambda: loss_fn(model(inputs), labels))."
            )

    def _collect(self) -> None:
        if self.phase != "collect" or (self.updates + 1) % self.settings.snapshot_every:
            return
        self._snapshots.add(self._weights)
        if len(self._snapshots) < (self.settings.snapshots or self.settings.n_components):
            return
        basis = self.settings.basis(self._model, self._snapshots)
        self._snapshots.clear()
        with torch.no_grad():
            for weight, start in zip(self._weights, self._start, strict=bool(self._start)):
                weight.copy_(start)
        self._start = []
        self._enter(basis)

    def _enter(self, basis: SubspaceBasis) -> None:
        s = self.settings
        self.phase = "subspace"
        self.subspace = SubspaceOptimizer(
            self._weights,
            basis,
            lr=s.alpha,
            rho=s.rho,
            gamma=s.gamma,
            sigma=s.sigma,
            trials=s.trials,
            line_search=s.line_search,
            buffers=self._model.buffers(),
            native=s.native,
        )

    def _judge(self, loss: float) -> None:
        """Hand back where a window of updates was not better than the one before."""
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
                state["rows"] = [rows.clone() for rows in self.subspace.basis.rows]
        return state

    def _load_own_state(self, state: dict[str, Any]) -> None:
        if state["phase"] == "subspace":
            if "rows" in state:
                blocks = blocks_within(
                    _layout(self._model).length,
                    self.settings.n_components,
                    budget=self.settings._budget(),
                    ranks=_ranks(self._model),
                )
                self._enter(SubspaceBasis(blocks, state["rows"], _group(self._model)))
            if self.subspace is None:
                raise ValueError(
                    "the checkpoint was written in a subspace from a file, this run collects its own; attach with the "
                    "settings it was written with."
                )
            self.subspace.load_state_dict(state["subspace"])
        else:
            self.subspace = None
        self.phase, self.updates = state["phase"], int(state["updates"])
        self._losses.load_state_dict(state["losses"])
        self._start = [start.to(weight) for start, weight in zip(state["start"], self._weights, strict=False)]
        self._snapshots.load_state_dict(state["snapshots"])


class _Windows:
    """The mean loss of this window of updates, and of the one before."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0
        self._means: list[float] = []

    def add(self, loss: float, size: int) -> bool:
        """Take a loss; return whether a window is full that can be compared."""
        self._sum, self._count = self._sum + loss, self._count + 1
        if self._count < size:
            return False
        self._means = [*self._means[-1:], self._sum / self._count]
        self._sum, self._count = 0.0, 0
        return len(self._means) == 2

    def gain(self) -> float:
        """Return by which share of the mean before the last mean is lower."""
        before, now = self._means
        return (before - now) / abs(before) if before else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._sum, "count": self._count, "means": list(self._means)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum, self._count, self._means = state["sum"], state["count"], list(state["means"])


def _from_folder(folder: str, layout: Layout, blocks: Any) -> PrincipalComponents:
    return PrincipalComponents(CheckpointFiles(folder, layout), blocks)


def _layout(model: nn.Module) -> Layout:
    return Layout.of(unwrap(model))


def _group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that train the model together; a bare one is taken to be wrapped later, over all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    wrapped = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    group = dist.group.WORLD if wrapped is None else wrapped.process_group
    return group if dist.get_world_size(group) > 1 else None


def _ranks(model: nn.Module) -> int:
    group = _group(model)
    return 1 if group is None else dist.get_world_size(group)


def _parameters(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return the weights in the order of the layout, if the optimizer has them all and they are of one kind."""
    weights: list[Tensor] = [p for p in unwrap(model).parameters() if p.requires_grad]
    held = {p for group in optimizer.param_groups for p in group["params"]}
    stray = sum(p not in held for p in weights)
    if stray:
        raise IncompatibleError(
            f"dim_reduce: {stray} of {len(weights)} parameters of the model that require grad are not in the "
            "optimizer; freeze them with requires_grad_(False), or give them to the optimizer."
        )
    check_weights(weights)
    return weights
