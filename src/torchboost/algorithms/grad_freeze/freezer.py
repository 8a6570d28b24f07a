"""Freeze a changing set of parameters, and the modules that belong to them, in a running loop."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchboost.algorithms.grad_freeze.cache import FastPrefix
from torchboost.algorithms.grad_freeze.checks import GradientChecks, Replicas, check_freezable
from torchboost.core.algorithm import Attachment, Removable
from torchboost.core.forward import plain_hook
from torchboost.core.step import learns_nothing
from torchboost.core.torch_private import AnyBatchNorm, not_traced, recompile_limit, version
from torchboost.core.wrapping import is_compiled, parameters_of
from torchboost.distributed.agreement import several
from torchboost.errors import warn_no_effect
from torchboost.graph.blocks import Block

Norms = Literal["update", "eval"]
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prefix:
    """The part of a model that is frozen at one index of a schedule."""

    parameters: tuple[nn.Parameter, ...] = ()
    norms: tuple[AnyBatchNorm, ...] = ()  # run in eval mode
    cut: tuple[nn.Module, ...] = ()  # have detached outputs, because a parameter they use still trains elsewhere

    def without(self, spared: Collection[int]) -> Prefix:
        """Exclude parameters by ``id``, and the modules that hold some of them."""

        def keeps(module: nn.Module) -> bool:
            return not any(id(p) in spared for p in module.parameters(recurse=False))

        return Prefix(
            parameters=tuple(p for p in self.parameters if id(p) not in spared),
            norms=tuple(filter(keeps, self.norms)),
            cut=tuple(filter(keeps, self.cut)),
        )


def prefixes_of(blocks: Sequence[Block], starts: Sequence[int], norms: Norms = "update") -> tuple[Prefix, ...]:
    """Return for each group the prefix before it, that is all blocks frozen while it is the first to train."""
    kinds = AnyBatchNorm if norms == "eval" else ()
    return tuple(
        Prefix(
            parameters=tuple(p for block in blocks[:start] for p in block.parameters),
            norms=tuple(m for block in blocks[:start] for m in block.modules if isinstance(m, kinds)),
            cut=tuple(m for block in blocks[:start] for m in block.cut),
        )
        for start in starts
    )


def compiled_prefixes() -> int:
    """Return the most prefixes of a compiled model: 3 at torch's limit of 8 graphs, past which it runs eagerly.

    Each set of flags costs one graph for training and one for evaluation, since guards check ``requires_grad`` under
    ``no_grad`` too. A last batch of another size adds one of each.
    """
    return max(2, (recompile_limit() - 2) // 2)


class Freezing(Attachment):
    """A frozen prefix that changes with the updates of an optimizer.

    Frozen parameters have ``requires_grad=False`` and no gradient: the backward pass stops at their border, no
    activations before it are stored, and the optimizer skips them, so weights and moments do not change, whatever the
    decay or momentum. There is one optimizer with one set of moments. Parameter groups are never changed. The flags
    change in a post-hook of ``optimizer.step``, that is once per update: they are kept inside an accumulation window,
    and if a ``GradScaler`` skips an update. On several ranks the reducer of DDP is rebuilt before the next pass, so
    that nothing of the frozen part is sent, and the ranks compare their state
    (:class:`~torchboost.algorithms.grad_freeze.checks.Replicas`).

    Only parameters of the optimizer are frozen, and only while the user trains them: parameters that the user freezes
    remain frozen, and parameters that the user thaws remain thawed. The index in use is the schedule's, or the largest
    index below it at which something trains. Freezing of these parameters by an earlier attachment is undone first.

    Args:
        model: As the loop calls it, wrapped or not (DDP may follow later). None if only parameters are known.
        optimizer: The optimizer whose updates are counted. Held weakly.
        prefixes: The frozen part at index 0, 1, ...
        schedule: Index for each update, counted from 0.
        compiled: Schedule to use instead if the model is compiled before the first update that freezes.
        fast: Runs the frozen part. It detects which parameters are frozen, and is removed with this.
        total_steps: Number of updates after which everything is thawed. Later updates warn once. None never ends.
        judged_at: Number of updates of this process after which ``fast`` ends if it has found next to nothing.
        alike: Further numbers that must be equal on all ranks, such as the seed of the schedule.
        agree_within: Seconds to wait for a rank before a pass. Then an error is raised. 0 disables the comparison.

    Attributes:
        step: Number of updates so far.
        index: The index in use.
        fast: As given. ``with freezing.fast.samples(ids):`` names the samples of a batch for its cache.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizer,
        prefixes: Sequence[Prefix],
        schedule: Callable[[int], int],
        *,
        compiled: Callable[[int], int] | None = None,
        fast: FastPrefix | None = None,
        total_steps: int | None = None,
        judged_at: int | None = None,
        alike: Mapping[str, int] | None = None,
        agree_within: float = 600.0,
    ) -> None:
        check_freezable(model, optimizer)
        parameters = parameters_of(optimizer)
        _release(parameters)
        self.step = self.index = self._seen = 0
        self.fast = fast
        self._model, self._prefixes, self._total = model, tuple(prefixes), total_steps
        self._schedule, self._few, self._judged_at = schedule, compiled, judged_at
        self._for_compiled = None if compiled else False  # None until the first update that freezes
        self._counted = model is None or is_compiled(model)  # the caller knew of the compiler
        self._settled = set[AnyBatchNorm]()  # put into eval mode here, and only those
        self._alike = dict(alike or {})
        self._freezable = len({id(p) for prefix in prefixes for p in prefix.parameters if p.requires_grad})
        self._flips = 0
        self._warned = False
        self._spared = frozenset[int]()
        self._in_force = self._prefixes[0]
        self._frozen: dict[int, Tensor] = {}  # by id: hashing a tensor costs ten times as much as hashing a number
        self._thawed_by_user = set[int]()
        self._record: tuple[Callable[[], Freezing | None], set[int]] = (weakref.ref(self), set())
        for parameter in parameters:
            _RECORDS[parameter] = self._record
        cut = dict.fromkeys(module for prefix in prefixes for module in prefix.cut)
        tied = {id(p) for module in cut for p in module.parameters(recurse=False)}
        self._reach = _Reach(optimizer, [prefix.parameters for prefix in prefixes], tied, self._may_train)
        # The fast path takes modules with hooks as they are, and refuses checkpointing.
        watched = None if fast is not None or (self.graphs, schedule(0)) == (1, 0) else model
        self._checks: GradientChecks | None = GradientChecks(watched, parameters)
        self._replicas: Replicas | None = None
        handles: list[Removable] = [optimizer.register_step_post_hook(not_traced(self._updated)), self._checks]
        handles += [plain_hook(module, module.register_forward_hook(self._detach)) for module in cut]
        handles += [fast] if fast is not None else []
        if model is not None:
            if any(prefix.norms for prefix in prefixes):
                handles.append(plain_hook(model, model.register_forward_pre_hook(not_traced(self._settle_norms))))
            self._replicas = Replicas(model, lambda: self._flips, self._figures, within=agree_within)
            handles.append(self._replicas)
        super().__init__(*handles, undo=self._thaw)
        self._follow()
        self._watch()

    def freeze(self, index: int) -> None:
        """Use another index until the next update. Raise ``ValueError`` if it does not exist."""
        if not 0 <= index < len(self._prefixes):
            raise ValueError(f"index: found {index}; pass 0 to {len(self._prefixes) - 1}.")
        self._apply(index)

    @property
    def frozen(self) -> tuple[nn.Parameter, ...]:
        """The parameters that this attachment freezes now."""
        return tuple(p for p in self._in_force.parameters if id(p) in self._frozen)

    @property
    def graphs(self) -> int:
        """Number of different prefixes of the schedule, and of training graphs of a compiled model."""
        return getattr(self._few if self._for_compiled else self._schedule, "prefixes", len(self._prefixes))

    def figures(self) -> dict[str, float]:
        """Return the share of the optimizer's weights that are frozen now, and of samples that the cache has found."""
        sizes = sum(parameter.numel() for parameter in self._reach.parameters)
        found = {} if self.fast is None else {"cached": self.fast.report().hit_rate}
        return {"frozen": sum(parameter.numel() for parameter in self.frozen) / max(1, sizes), **found}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, the unusable indices, and, as a check, the frozen parameters."""
        index = self._reach.usable(self._scheduled(self.step, self._for_compiled)[0], self._reach.closed)
        frozen = len(self._prefixes[index].parameters)
        return {"step": self.step, "frozen": frozen, "compiled": self._for_compiled, **self._reach.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint. Flags follow as in training: what the user froze in this process remains frozen.

        ``ValueError``: these settings freeze another part of the network at that step. Nothing was changed.
        """
        self.loading(state)()

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a checkpoint as :meth:`load_state_dict` does, and return the function that resumes from it."""
        step = int(state["step"])
        index, compiled = self._scheduled(step, state.get("compiled") if self._few else False)
        closed = {*state["closed"], *state.get("doubtful", ())}  # earlier versions had both
        index = self._reach.usable(index, closed)
        frozen = len(self._prefixes[index].parameters)
        if frozen != state["frozen"]:
            raise ValueError(
                f"the checkpoint froze {state['frozen']} parameters at update {step}, but these settings freeze "
                f"{frozen}; attach with the settings, seed and model that the checkpoint was saved with."
            )

        resume = self._reach.loading(state, closed)

        def load() -> None:
            self.step, self._for_compiled = step, compiled
            resume()
            self._apply(index)

        return load

    def _scheduled(self, step: int, compiled: bool | None) -> tuple[int, bool | None]:
        """Return the index of an update, and whether the schedule for a compiled model is used from then on."""
        if compiled is None and self._model is not None and is_compiled(self._model):
            compiled = True
        index = self._schedule_of(compiled)(step) if self._total is None or step < self._total else 0
        return index, bool(compiled) if index else compiled

    def _schedule_of(self, compiled: bool | None) -> Callable[[int], int]:
        return self._few if compiled and self._few is not None else self._schedule

    @property
    def course(self) -> str:
        """The update from which on it freezes, if it does so for good."""
        compiled = self._scheduled(self.step, self._for_compiled)[1]
        begins = getattr(self._schedule_of(compiled), "begins", None)
        return "" if begins is None else f"freezing begins after update {begins:,}"

    def _follow(self) -> None:
        """Apply the index of the next update."""
        index, self._for_compiled = self._scheduled(self.step, self._for_compiled)
        self._apply(index)

    def _updated(self, optimizer: Optimizer, *_: Any) -> None:
        if learns_nothing(optimizer):
            return
        self._watch()
        self._reach.observe(self.index)
        accumulated = None if self._checks is None else self._checks.observe(self.index > 0)
        if accumulated is not None:
            self._checks = None
        if accumulated is False:
            self._reach.closed.update(range(1, len(self._prefixes)))
            warn_no_effect(
                "freezing: found gradients that no backward pass accumulated, such as those of "
                "torch.autograd.grad(loss, parameters), which fails for frozen parameters; nothing is frozen. Call "
                "loss.backward() instead, or leave freezing out."
            )
        self.step += 1
        self._seen += 1
        if self.fast is not None and self._seen == self._judged_at:
            self.fast.judge()
        self._follow()
        if self._total is not None and self.step == self._total + 1:
            warn_no_effect(
                f"freezing: update {self.step} comes after the end of the run, total_steps={self._total}; everything "
                "trains from then on. Set total_steps to the number of updates of the whole run."
            )

    def _figures(self) -> dict[str, int]:
        """The numbers that must be equal on all ranks before a pass."""
        frozen = {"frozen groups": self.index, "parameters not reached yet": len(self._spared)}
        return {"updates": self.step, **frozen, "parameters": self._freezable, **self._alike}

    def _watch(self) -> None:
        """Look for other ranks. They may have been set up after this was attached."""
        if self._replicas is not None:
            self._replicas.watch()
        elif not self._warned and several() and torch.distributed.get_world_size() > 1:
            self._warned = True
            warnings.warn(
                "freezing: found several ranks and only parameters, no model, so DistributedDataParallel cannot learn "
                "which of them train; build it with find_unused_parameters=True first, or use freeze_blocks or "
                "GradientFreeze, which take the model.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _thaw(self) -> None:
        self._apply(0)
        if self._replicas is not None:
            self._replicas.release()

    def _apply(self, index: int) -> None:
        """Apply the largest usable index up to ``index``."""
        index = self._reach.usable(index, self._reach.closed)
        spared = self._reach.spared(index)
        if index == self.index and spared == self._spared:
            return
        self._check_graphs()
        after = self._prefixes[index].without(spared)
        self.index, self._spared, self._in_force = index, spared, after
        known = set(map(id, self._reach.parameters))  # others belong to other optimizers, or to none
        self._freeze({id(p): p for p in after.parameters if id(p) in known})
        self._flips += 1
        if self._model is not None:
            for norm in self._settled.difference(after.norms):
                norm.training = self._model.training
                self._settled.discard(norm)
            self._settle_norms()

    def _freeze(self, after: Mapping[int, Tensor]) -> None:
        """Freeze exactly those parameters that train now, and thaw all others that were frozen here.

        A parameter that other code has frozen is never thawed. If other code thaws a parameter that is held, it is no
        longer held. A second ``requires_grad_(False)`` on it cannot be detected.
        """
        for key, parameter in list(self._frozen.items()):
            if parameter.requires_grad:
                self._thawed_by_user.add(key)
            elif key not in after:
                parameter.requires_grad_(True)
            else:
                continue
            del self._frozen[key]
        for key, parameter in after.items():
            if parameter.requires_grad and key not in self._thawed_by_user:
                parameter.requires_grad_(False)
                parameter.grad = None
                self._frozen[key] = parameter
                _RECORDS[parameter] = self._record
        self._record[1].clear()
        self._record[1].update(self._frozen)

    def _may_train(self, parameter: Tensor) -> bool:
        """Whether a parameter would train if nothing were frozen here."""
        return parameter.requires_grad or id(parameter) in self._frozen

    def _check_graphs(self) -> None:
        """Warn once if the model was compiled later and the schedule needs more graphs than torch allows."""
        if self._counted or self._model is None or not is_compiled(self._model):
            return
        self._counted = True
        if self.graphs > compiled_prefixes():
            warnings.warn(
                f"freezing: the model was compiled after freezing was attached, and this schedule needs {self.graphs} "
                "graphs for training and as many for evaluation; past torch._dynamo.config.recompile_limit, torch "
                f"runs eagerly permanently. Compile first, or set prefixes={compiled_prefixes()}.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _detach(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Let no gradient through a module that uses a parameter of a later block, while its own block is frozen."""
        return output.detach() if module in self._in_force.cut and isinstance(output, Tensor) else output

    def _settle_norms(self, *_: Any) -> None:
        """Put frozen norms back into eval mode, since ``model.train()`` in the loop sets every module to training."""
        for norm in self._in_force.norms:
            if norm.training:
                norm.training = False
                self._settled.add(norm)


# Flags outlive their owner. Only this table tells a parameter that freezing has frozen from one that the user froze. An
# entry, which is dropped with its parameter, says who owns it, and which parameters the owner has frozen, by ``id``.
_RECORDS: Any = WeakIdKeyDictionary()


def _release(parameters: Iterable[Tensor]) -> None:
    """Take over parameters from an earlier owner: remove it and thaw its frozen parameters.

    If an optimizer is deleted, its freezing goes with it, and its parameters would remain frozen. They are thawed here.
    """
    for parameter in parameters:
        owner, frozen = _RECORDS.pop(parameter, (lambda: None, ()))
        if (living := owner()) is not None:
            living.remove()
        elif id(parameter) in frozen:
            parameter.requires_grad_(True)


class _Reach:
    """Records for each index of a schedule whether something trains there, from the gradients so far.

    An index is usable if the optimizer has a parameter after its prefix that the user trains, and if every informative
    update gave one of those a gradient. A module that the forward pass does not use, one that no loss depends on, and a
    head that only some batches use therefore never become the last part that trains. A weight that also has a use that
    is cut off does not count, since its gradient may have come from there.

    Later updates may reach parameters that none has reached yet, such as a head that is used in turns. These are
    trainable at every index (:meth:`spared`). This costs nothing while they have no gradients.

    A gradient of zeros from ``zero_grad(set_to_none=False)`` does not count. Checking this synchronises the device once
    per update. On several ranks it is not checked.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        frozen: Sequence[Sequence[Tensor]],
        tied: set[int],
        may_train: Callable[[Tensor], bool],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._frozen = [frozenset(map(id, parameters)) for parameters in frozen]  # at each index
        self._tied, self._may_train = tied, may_train  # by id: those that do not count; and whether the user trains one
        self._parameters: list[Tensor] = []
        self._versions: dict[int, int] = {}
        self._unreached = frozenset[int]()  # could have been reached
        self._pending: list[Tensor] = []  # not reached yet, whether or not they could have been
        self.closed = set[int]()
        """Indices that are not usable."""

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the optimizer, in its order, or the last known ones if it is gone."""
        optimizer, known = self._optimizer(), len(self._parameters)
        if optimizer is not None and known != sum(len(group["params"]) for group in optimizer.param_groups):
            self._parameters = parameters_of(optimizer)
            self._pending += self._parameters[known:]  # groups that are added come last
        return self._parameters

    def usable(self, index: int, closed: Collection[int]) -> int:
        """Return the largest index up to ``index`` that is not closed and trains something. 0 always is usable."""
        last_first = self.parameters[::-1]
        while index:
            frozen = self._frozen[index]
            if index not in closed and any(id(p) not in frozen and self._may_train(p) for p in last_first):
                break
            index -= 1
        return index

    def spared(self, index: int) -> frozenset[int]:
        """Return the ``id`` of the parameters trainable at ``index`` that could have had a gradient but never did."""
        return self._frozen[index] & self._unreached

    def observe(self, index: int) -> None:
        """Record the gradients of an update made at ``index``.

        Cost: microseconds. The parameters are read from the last one back, until all open indices have a gradient.
        """
        parameters = self.parameters
        if not any(p.grad is not None and p.requires_grad for p in parameters):
            return
        self._pending = [p for p in self._pending if p.grad is None]
        self._unreached = frozenset(id(p) for p in self._pending if p.requires_grad)
        # At other indices some parameters that train there are frozen now.
        waiting = {at for at, frozen in enumerate(self._frozen) if at and self._frozen[index] <= frozen} - self.closed
        for parameter in reversed(parameters):
            behind = {at for at in waiting if id(parameter) not in self._frozen[at]}
            if behind and self._has_gradient(parameter):
                waiting -= behind
            if not waiting:
                break
        self.closed |= waiting

    def _has_gradient(self, parameter: Tensor) -> bool:
        key, grad = id(parameter), parameter.grad
        if grad is None or not parameter.requires_grad or key in self._tied:
            return False
        # A gradient tensor that is kept is written in place at each update. A new one starts again.
        before, now = self._versions.get(key, _NEVER), version(grad)
        self._versions[key] = now
        readable = now > before and grad.layout is torch.strided and not several()
        return not readable or bool(grad.any())

    def state_dict(self) -> dict[str, Any]:
        """Return which indices are not usable, and which parameters of the optimizer were not reached."""
        places = dict(enumerate(map(id, self.parameters)))
        pending = set(map(id, self._pending))
        return {
            "closed": sorted(self.closed),
            "pending": [place for place, key in places.items() if key in pending],
            "unreached": [place for place, key in places.items() if key in self._unreached],
        }

    def loading(self, state: Mapping[str, Any], closed: set[int]) -> Callable[[], None]:
        """Return a function that resumes from :meth:`state_dict`, with these indices closed."""
        parameters = self.parameters
        pending = [parameters[place] for place in state.get("pending", ())]
        unreached = frozenset(id(parameters[place]) for place in state.get("unreached", ()))

        def load() -> None:
            self.closed, self._pending, self._unreached = closed, pending, unreached

        return load
