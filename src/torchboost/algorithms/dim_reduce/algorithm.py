"""Dimension-reduced training: quasi-Newton steps along the principal components of the weights' own path."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.dim_reduce.basis import (
    DimReduceBasis,
    check_components,
    place_in,
    principal_components,
    read_checkpoints,
    read_matrix,
    rows_of,
    shapes_of,
    write_matrix,
)
from torchboost.algorithms.dim_reduce.optimizer import Subspace, check_settings, check_weights, evaluated
from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import is_integer
from torchboost.core.step import ClosureOptimizer
from torchboost.core.wrapping import only_ddp, parameters_of, unwrap, wrapper_of
from torchboost.distributed.agreement import Agreement, several
from torchboost.errors import IncompatibleError, RankDisagreementError
from torchboost.optim.wrapping_optimizer import DirectSteps, WrappingOptimizer

Phase = Literal["collect", "subspace"]
Snapshots = list[list[Tensor]]

_PASSED_BY = (
    "dim_reduce: the original optimizer was stepped directly, outside the subspace; step the one that attach set: "
    "target.optimizer.step(lambda: loss_fn(model(inputs), labels))."
)


@dataclass(frozen=True, kw_only=True)
class DimReduction(Algorithm):
    """Train along a few directions that earlier training has found. It is not combined with other algorithms.

    ``attach`` replaces the target's optimizer by a :class:`DimReduceRun`. The directions come from a file, from
    checkpoints of an earlier run, or, if neither is named, from snapshots of this run: it then trains with the
    optimizer it was given until there are enough, and continues in the subspace from the weights it has reached.

    Args:
        n_components: Number of directions.
        rho: Factor between the two trials of a line search.
        gamma: Momentum of the gradient outside the subspace.
        alpha: Step along that momentum.
        sigma: Share of the decrease predicted by the slope that a trial must reach.
        pca_mat_path: An ``.npy`` file with a direction per row, and the columns in the order of the parameters.
        weight_load_dir: A folder with at least ``n_components`` checkpoints, safetensors or ``.pt`` with tensors only.
            If both are given, an existing file is read and the folder is not. If there is no file yet, rank 0 writes it
            from the checkpoints, for the next run.
        snapshots: Number of snapshots of this run to take. None takes ``n_components``. They are kept in bfloat16, in
            host memory.
        snapshot_every: Updates between two of them.
        timeout: Seconds that ranks wait for each other when they make the basis.
    """

    name: ClassVar[str] = "dim_reduce"
    traits: ClassVar[Traits] = Traits(order=90, replaces_optimizer=True)

    n_components: int = 32
    rho: float = 0.55
    gamma: float = 0.9
    alpha: float = 0.001
    sigma: float = 0.4
    pca_mat_path: str | None = None
    weight_load_dir: str | None = None
    snapshots: int | None = None
    snapshot_every: int = 100
    timeout: int = 1800

    def __post_init__(self) -> None:
        for name in ("n_components", "snapshot_every", "timeout", "snapshots"):
            value, optional = getattr(self, name), name == "snapshots"
            if not (optional and value is None) and (not is_integer(value) or value < 1):
                raise ValueError(f"{name}={value}: an integer of 1 or more{', or None' * optional}.")
        check_settings(alpha=self.alpha, rho=self.rho, sigma=self.sigma, gamma=self.gamma)
        if self.timeout > 10**9:  # a wait is a timedelta, which holds no more than some millennia
            raise ValueError(f"timeout={self.timeout}: seconds, at most {10**9}.")
        if self.snapshots is not None and self.snapshots < self.n_components:
            raise ValueError(
                f"snapshots={self.snapshots}: at least as many as directions, n_components={self.n_components}, needed."
            )

    def check(self, target: Target) -> None:
        """Raise the errors that :meth:`attach` lists and that show before the basis is made."""
        if isinstance(target.optimizer, ClosureOptimizer):
            raise IncompatibleError("dim_reduce: the optimizer already does a line search; attach once.")
        if target.accumulator is not None:
            raise IncompatibleError(
                "dim_reduce: the target accumulates gradients, but a line search uses one batch; leave one out."
            )
        wrapper = wrapper_of(target.model)
        if wrapper not in (None, "DistributedDataParallel", "torch.compile", "nn.Module.compile"):
            raise IncompatibleError(
                f"dim_reduce: found {wrapper}, but the steps need whole parameters; use DistributedDataParallel."
            )
        _group(target.model)
        weights = _parameters(target.model, target.optimizer)
        check_components(self.n_components, sum(p.numel() for p in weights))

    def attach(self, target: Target) -> Attachment:
        """Replace the optimizer of the target by a :class:`DimReduceRun`.

        Raises:
            IncompatibleError: FSDP, accumulation, several precisions or devices, or parameters that are not trained.
            ValueError: The basis or a checkpoint does not fit the model, or there are too few checkpoints.
            FileNotFoundError: The file or folder is missing.
            RankDisagreementError: A rank did not arrive, has other settings, or could not make its part of the basis.
        """
        original = target.optimizer
        run = DimReduceRun(original, target.model, self)
        target.optimizer = run
        return _Reduced(run, undo=lambda: setattr(target, "optimizer", original))

    @property
    def collects(self) -> bool:
        """Whether the basis is made from snapshots of the run itself."""
        return self.pca_mat_path is None and self.weight_load_dir is None


class DimReduceRun(WrappingOptimizer, ClosureOptimizer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """An optimizer that trains with the original optimizer while snapshots are taken, and then in a subspace.

    It has the groups and the state of ``opt``, so that schedulers may drive either. The model is as the loop calls it.
    Under DDP the rows of the basis are shared out over its ranks.
    """

    def __init__(self, opt: Optimizer, model: nn.Module, settings: DimReduction) -> None:
        super().__init__(opt)
        self.settings = settings
        self.updates = 0
        self.subspace: Subspace | None = None  # before there is a basis
        self._model = model
        self._weights = _parameters(model, opt)
        self._snapshots: Snapshots = []
        if not settings.collects:
            self._enter()
        self.direct = DirectSteps(opt, self, _PASSED_BY)  # last, when nothing can fail

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update once and return the loss before it. ``closure`` returns the loss of the batch and does no more."""
        with evaluated(closure, self._weights) as (replay, loss):
            if self.subspace is not None:
                self.subspace.step(replay)
            else:
                with self.direct.allowed():
                    self.opt.step()
                self._collect()
            self.updates += 1
        return loss

    @property
    def phase(self) -> Phase:
        """``"collect"`` or ``"subspace"``."""
        return "collect" if self.subspace is None else "subspace"

    @property
    def collects_until(self) -> int:
        """The update at which the last snapshot is taken, 0 if there is a basis."""
        if self.subspace is not None:
            return 0
        every, needed = self.settings.snapshot_every, self.settings.snapshots or self.settings.n_components
        return (self.updates // every + needed - len(self._snapshots)) * every

    def remove(self) -> None:
        """Allow direct steps of the original optimizer again."""
        self.direct.remove()

    def _collect(self) -> None:
        if (self.updates + 1) % self.settings.snapshot_every:
            return
        self._snapshots.append([p.detach().to("cpu", torch.bfloat16, copy=True) for p in self._weights])
        if len(self._snapshots) >= (self.settings.snapshots or self.settings.n_components):
            self._enter()
            self._snapshots = []

    def _enter(self) -> None:
        self.subspace = self._along(_basis(self.settings, self._model, self._snapshots))

    def _along(self, basis: DimReduceBasis) -> Subspace:
        s, buffers = self.settings, self._model.buffers()
        return Subspace(self._weights, basis, alpha=s.alpha, rho=s.rho, gamma=s.gamma, sigma=s.sigma, buffers=buffers)

    def _own_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "phase": self.phase,
            "updates": self.updates,
            "snapshots": {"kept": [[t.clone() for t in snapshot] for snapshot in self._snapshots]},
        }
        if self.subspace is not None:
            state["subspace"] = self.subspace.state_dict()
            if self.settings.collects:
                basis = self.subspace.basis
                state["rows"], state["share"] = [basis.rows.clone()], [basis.rank, basis.ranks]
        return state

    def _loading(self, state: dict[str, Any]) -> Callable[[], None]:
        subspace, resume = None, lambda: None
        if state["phase"] == "full":
            raise ValueError(
                "the checkpoint was saved after the given optimizer had taken over again, which this version does not "
                "do; continue without dim_reduce."
            )
        if state["phase"] == "subspace":
            subspace = self._subspace_of(state)
            saved = state["subspace"]
            resume = subspace.loading(saved.get("subspace", saved))  # the version before wrote torch's layout around it
        updates, kept = int(state["updates"]), state["snapshots"]["kept"]
        snapshots = [[t.to("cpu", torch.bfloat16, copy=True) for t in snapshot] for snapshot in kept]
        if any([t.shape for t in snapshot] != [p.shape for p in self._weights] for snapshot in snapshots):
            raise ValueError(
                "the checkpoint holds snapshots of weights of other shapes; load it with the model that it is of."
            )

        def load() -> None:
            resume()
            self.subspace, self.updates, self._snapshots = subspace, updates, snapshots

        return load

    def _subspace_of(self, state: dict[str, Any]) -> Subspace:
        """Return the subspace to resume from a checkpoint."""
        if "rows" not in state and self.settings.collects:
            raise ValueError(
                "the checkpoint was saved in a subspace from a file, but this run collects its own; attach with the "
                "settings that it was saved with."
            )
        if "rows" not in state:
            return self.subspace or self._along(_basis(self.settings, self._model, []))
        group = _group(self._model)
        place = place_in(group)
        if tuple(state["share"]) != place:
            raise ValueError(
                "the checkpoint holds the rows of rank {} of {}, this is rank {} of {}; every rank must save and load "
                "its own state, as torchboost.distributed.checkpoint does.".format(*state["share"], *place)
            )
        rows = state["rows"][0].to(self._weights[0])
        return self._along(DimReduceBasis(rows, group, self.settings.n_components))


class _Reduced(Attachment):
    """The optimizer that was put in place of the given one."""

    def __init__(self, run: DimReduceRun, undo: Callable[[], None]) -> None:
        super().__init__(run, undo=undo)
        self._run = run

    @property
    def remark(self) -> str:
        """Until when the given optimizer trains."""
        return f"collecting until update {self.idle_until:,}" if self.idle_until else ""

    @property
    def idle_until(self) -> int:
        """The update at which the last snapshot is taken."""
        return self._run.collects_until


def _basis(settings: DimReduction, model: nn.Module, snapshots: Snapshots) -> DimReduceBasis:
    """Make the basis for a model, from snapshots or from the file or folder of the settings: each rank its rows."""
    group, k = _group(model), settings.n_components
    rank, ranks = place_in(group)
    like = next(p for p in unwrap(model).parameters() if p.requires_grad)

    def make() -> DimReduceBasis:
        path, folder = settings.pca_mat_path, settings.weight_load_dir
        shapes, share = shapes_of(model), rows_of(k, rank, ranks)
        if path is not None and (folder is None or Path(path).exists()):
            rows = read_matrix(path, k, shapes, share)
        else:
            weights = snapshots if folder is None else read_checkpoints(folder, shapes)
            if path is not None and rank == 0:  # for the next run
                every = principal_components(weights, k)
                write_matrix(path, every, shapes)
                rows = every[share.start : share.stop].clone()
            else:
                rows = principal_components(weights, k, share)
        return DimReduceBasis(rows.to(like), group, k)

    basis = make() if group is None else _on_ranks(make, settings, group)
    try:
        basis.check_orthonormal()
    except ValueError as error:
        if group is None or not settings.collects:
            raise
        raise IncompatibleError(
            f"dim_reduce: the snapshots of the ranks differ ({error}); wrap the model in DistributedDataParallel."
        ) from None
    return basis


def _on_ranks(make: Callable[[], DimReduceBasis], settings: DimReduction, group: dist.ProcessGroup) -> DimReduceBasis:
    """Return the result of ``make``, if the settings are equal on all ranks and no rank failed."""
    agreement = Agreement(
        dist.get_process_group_ranks(group), subject="dim_reduce, making the basis", timeout=settings.timeout
    )
    try:
        agreement.check({"settings": zlib.crc32(repr(settings).encode())}, hint="Give all ranks the same settings.")
        basis, failure = None, None
        try:
            basis = make()
        except Exception as error:
            failure = error
        failures = agreement.largest([failure is not None], step="basis")[0]
    finally:
        agreement.close()
    if failure is not None:
        raise failure
    if failures or basis is None:
        raise RankDisagreementError("dim_reduce: another rank could not make the basis; look at its error.")
    return basis


def _group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that train the model together. A bare one is taken to be wrapped later, over all ranks."""
    if not several():
        return None
    wrapped = only_ddp(model)
    group = dist.group.WORLD if wrapped is None else wrapped.process_group
    return group if dist.get_world_size(group) > 1 else None


def _parameters(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return the weights in the order of the layout, if the optimizer has them all and they are of one kind."""
    weights: list[Tensor] = [p for p in unwrap(model).parameters() if p.requires_grad]
    trained = set(parameters_of(optimizer))
    others = sum(p.requires_grad for p in trained.difference(weights))
    if others:
        raise IncompatibleError(
            f"dim_reduce: the optimizer trains {others} parameters that are not in the model, which a step in the "
            "subspace would not change; put them into the model, or into another optimizer."
        )
    stray = sum(p not in trained for p in weights)
    if stray:
        raise IncompatibleError(
            f"dim_reduce: {stray} of {len(weights)} parameters of the model that require grad are not in the "
            "optimizer; freeze them with requires_grad_(False), or give them to the optimizer."
        )
    check_weights(weights)
    return weights
