"""Adam for embeddings with sparse gradients, of which a step uses few rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from torchboost.core.algorithm import Attachment
from torchboost.core.torch_private import sparse_rows, sparse_values
from torchboost.errors import IncompatibleError
from torchboost.optim.rules.adam import Adam
from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.masters import LOW_PRECISION
from torchboost.optim.rules.missed_steps import FORM, form_of, new_past, record, replay
from torchboost.optim.rules.options import Common, rule_arguments

__all__ = ["LazyAdam"]

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

BLOCK = 1 << 18
"""Weights that are caught up at a time; limits the memory for a whole table."""


class LazyAdam(Adam):
    """Adam that updates only the rows of a sparse gradient.

    Dense gradients are handled by :class:`Adam`, with all of its options. In a sparse gradient, as from
    ``nn.Embedding(sparse=True)``, duplicate rows are merged first. There are two modes for the update.

    - Classic (``exact=False``; MindSpore's and TensorFlow's lazy Adam): only the rows of the gradient change, in value
      and moments; weight decay, once per step, also applies to them only. The bias correction counts all steps. The
      rule differs from Adam: the momentum of a row has no effect until its next gradient. With
      ``eps_uncorrected=True`` it is ``torch.optim.SparseAdam``, whose checkpoints load.
    - Exact (``exact=True``): equal to Adam with dense gradients, up to rounding. Right before a row is read, its missed
      steps are replayed with the options of those steps. :meth:`attach` does so before every forward pass,
      :meth:`catch_up` does it by hand. Call ``catch_up()`` before anything else reads the table (evaluation, saving, a
      tied layer).

    Cost of a sparse step: proportional to the rows of the gradient; nothing is as large as the table. Exact mode adds 4
    bytes per row, and until the next ``catch_up()`` 150 bytes per step in which a numeric option changed (such as a
    scheduled learning rate). Catching up takes one pass over a row per missed step until it rests, after about 200
    steps with the default betas; with coupled (L2) ``weight_decay`` rows never rest, so all missed steps are replayed.

    Checkpoints of :class:`Adam`, and of ``torch.optim``'s Adam and SparseAdam load; their rows count as up to date.
    ``SparseAdam`` is classic mode with ``eps_uncorrected=True``.

    State: that of :class:`Adam`. In exact mode also ``last_step``, the last step of each row, and ``past``, the options
    since then; both exist only while rows may lag. After ``catch_up()`` the state is Adam's and loads into it.

    Sources: ``mindspore.nn.LazyAdam``; TensorFlow Addons, ``LazyAdam``; D. Kingma, J. Ba, arXiv 1412.6980.

    Args:
        params: See :class:`Adam`.
        lr: See :class:`Adam`.
        betas: See :class:`Adam`.
        eps: See :class:`Adam`.
        weight_decay: See :class:`Adam`.
        exact: Replay missed steps, so that the result is that of dense Adam. A group may set its own value.
        amsgrad: See :class:`Adam`.
        nesterov: See :class:`Adam`.
        decoupled_weight_decay: See :class:`Adam`.
        bias_correction: See :class:`Adam`.
        eps_uncorrected: See :class:`Adam`.
        foreach: See :class:`Adam`.
        fused: See :class:`Adam`; ``GradScaler`` still unscales before the step.
        capturable: See :class:`Adam`; sparse gradients are then refused.
        **common: See :class:`~torchboost.optim.UpdateRule`.

    Raises:
        TypeError, ValueError: An option is invalid, or two exclude each other.

    Example:
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = LazyAdam(table.parameters(), lr=1e-2, exact=True)
        >>> with optimizer.attach(table):
        ...     for ids in (torch.tensor([1, 2]), torch.tensor([2, 7])):
        ...         table(ids).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    packs_moments = rounds = False

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Any = 0.0,
        *,
        exact: bool = False,
        amsgrad: bool = False,
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        bias_correction: bool = True,
        eps_uncorrected: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        **common: Unpack[Common],
    ) -> None:
        UpdateRule.__init__(self, **rule_arguments(locals(), moments_8bit=False))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # If the fused kernel skipped a step because of an overflow, this class would not know.
        return False

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse what :class:`Adam` refuses, and an ``exact`` that is not a bool or not supported."""
        super().check_group(group)
        if not isinstance(group["exact"], bool):
            raise TypeError(f"exact: found {group['exact']!r}; give True or False.")
        if group["exact"] and group["capturable"]:
            raise ValueError("exact and capturable exclude each other: which rows lag changes at every step.")

    def check_grad(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Accept dense gradients and sparse rows.

        Raises:
            IncompatibleError: Another layout, entries instead of rows, or rows that this group does not support.
        """
        if grad.layout is torch.strided:
            super().check_grad(param, grad, group)
            return
        found = f"found a gradient of layout {grad.layout} for a parameter of shape {tuple(param.shape)}"
        if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
            raise IncompatibleError(
                f"LazyAdam needs dense gradients or sparse rows (torch.sparse_coo with sparse_dim 1), {found}. "
                "Use transforms=(Coalesce(dense=True),)."
            )
        if group["capturable"]:
            raise IncompatibleError(
                f"capturable=True does not support sparse gradients, {found}; "
                "put the table into a group with capturable=False."
            )
        narrow = param.dtype in LOW_PRECISION and not group["master_weights"]
        if group["exact"] and (narrow or param.is_complex()):
            raise IncompatibleError(
                f"exact=True needs moments in float32 or float64, {found} and dtype {param.dtype}. "
                "Use master_weights=True for float16 and bfloat16, or exact=False."
            )

    @torch.no_grad()
    def catch_up(self, param: Tensor | None = None, rows: Tensor | Sequence[int] | None = None) -> None:
        """Replay missed steps, for rows that are about to be read or for all rows before evaluation or saving.

        Does nothing in classic mode or if no row lags. Safe at any time: it does not change what training computes.
        Cost: see the class. Memory: about 100 MB at most, for any size of the table.

        Args:
            param: A parameter of this optimizer; None for all.
            rows: Row numbers of ``param``, in any shape and order; None for all, after which the state is Adam's.

        Raises:
            TypeError: ``rows`` are not whole numbers, or are given without ``param``.
            ValueError: This optimizer does not hold the parameter.
            IndexError: ``param`` does not have such a row.

        Example:
            >>> table = torch.nn.Embedding(10, 4, sparse=True)
            >>> optimizer = LazyAdam(table.parameters(), exact=True)
            >>> optimizer.catch_up(table.weight, [3, 5])
            >>> optimizer.catch_up()
        """
        if param is None:
            if rows is not None:
                raise TypeError("rows: also give the parameter that they belong to.")
            for group in self.param_groups:
                for each in group["params"]:
                    self._catch_up(each)
            return
        self._check_held(param)
        self._catch_up(param, None if rows is None else _row_numbers(param, rows))

    def attach(self, module: nn.Embedding | nn.EmbeddingBag) -> Attachment:
        """Replay the missed steps of rows right before ``module`` reads them, in every forward pass, also in eval mode.

        Cost: one lookup of ``last_step`` for the rows, and their missed steps. Needed in exact mode only; in classic
        mode the hook has nothing to do. Copies of the module are not affected.

        Args:
            module: An embedding with ``sparse=True``.

        Returns:
            The attachment. Its ``remove()`` removes the hook and catches the whole table up.

        Raises:
            TypeError: Not an embedding.
            ValueError: This optimizer does not hold the weight.
            IncompatibleError: The embedding has dense gradients.
        """
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise TypeError(f"module must be an Embedding or an EmbeddingBag, found {type(module).__name__}.")
        if not module.sparse:
            raise IncompatibleError(
                "the embedding has sparse=False, so its gradients are dense and no row falls behind; use sparse=True."
            )
        weight = module.weight
        self._check_held(weight)

        @torch.no_grad()
        def before_forward(read: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = args[0] if args else kwargs["input"]
            if read is module:
                self._catch_up(weight, ids)

        handle = module.register_forward_pre_hook(before_forward, with_kwargs=True)
        return Attachment(handle, undo=lambda: self.catch_up(weight))

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update in place; a sparse gradient is handled as a small dense one of its rows."""
        compact = Batch([], [], [])
        named: list[tuple[int, Tensor]] = []
        known = [param for param in group["params"] if param in self.state]
        owners = {id(self.state[param].get("master", param)): param for param in known}
        for i, (worked, grad, state) in enumerate(zip(batch.params, batch.grads, batch.states, strict=True)):
            owner = owners[id(worked)]
            if owner is not worked:
                self._stamps.note(owner)  # catching up must not replace this master
            lazy = group["exact"] and grad.is_sparse
            if "past" in state and not (lazy and state["past"]["form"] == form_of(group)):
                self._catch_up(owner)
            if grad.is_sparse:
                grad = grad.coalesce()
                rows = sparse_rows(grad)
                if lazy:
                    self._catch_up(owner, rows)
                named.append((i, rows))
                moments = {key: state[key].index_select(0, rows) for key in MOMENTS if key in state}
                compact.params.append(worked.index_select(0, rows))
                compact.grads.append(sparse_values(grad))
                compact.states.append({"step": state["step"], **moments})
            else:
                compact.params.append(worked)
                compact.grads.append(grad)
                compact.states.append(state)
        super().update(group, compact)
        for i, rows in named:
            worked, owner = batch.params[i], owners[id(batch.params[i])]
            worked.index_copy_(0, rows, compact.params[i])
            if owner is not worked:
                owner.index_copy_(0, rows, compact.params[i].to(owner.dtype))
            state = batch.states[i]
            for key, value in compact.states[i].items():
                if key != "step":
                    state[key].index_copy_(0, rows, value)
            if group["exact"]:
                _made_step(group, state, rows)

    def _catch_up(self, param: Tensor, rows: Tensor | None = None) -> None:
        state: dict[str, Any] = self.state.get(param, {})
        if "past" not in state:
            return
        if "master" in state:
            state["master"] = self._stamps.current(param, state["master"])
        step, last = int(state["step"]), state["last_step"]
        if rows is None:
            late = (last < step).nonzero().flatten()
        else:
            rows = rows.flatten().to(last.device, torch.int64)
            late = rows[last[rows] < step].unique()
        late = late[last[late].argsort()]
        moments = MOMENTS if state["past"]["form"][FORM.index("amsgrad")] else MOMENTS[:2]
        tables = {"weight": state.get("master", param)} | {key: state[key] for key in moments}
        # Narrow rows count as 32 wide: their missed steps take memory too, up to 32 at a time.
        width = max(32, param.numel() // max(1, len(last)))
        for part in late.split(max(1, BLOCK // width)):
            values = {key: table.index_select(0, part) for key, table in tables.items()}
            replay(values, last[part], step, state["past"])
            for key, table in tables.items():
                table.index_copy_(0, part, values[key])
            if "master" in state:
                param.index_copy_(0, part, values["weight"].to(param.dtype))
            last.index_fill_(0, part, step)
        if "master" in state:
            self._stamps.note(param)
        if rows is None:
            del state["last_step"], state["past"]

    def prepare(self, work: Sequence[Batch]) -> Callable[[], None] | None:
        """Merge duplicate rows, then do what :class:`Adam` does."""
        for batch in work:
            batch.grads[:] = [grad.coalesce() if grad.is_sparse else grad for grad in batch.grads]
        return super().prepare(work)

    def _check_held(self, param: Tensor) -> None:
        if not any(param is other for group in self.param_groups for other in group["params"]):
            found = f"of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
            raise ValueError(f"this optimizer does not hold the parameter {found}; give one of its parameters.")


def _made_step(group: Mapping[str, Any], state: dict[str, Any], rows: Tensor) -> None:
    """Record that only these rows made the step that the state counts."""
    step = int(state["step"])
    if "past" not in state:
        table = state["exp_avg"]
        state["last_step"] = torch.full((len(table),), step - 1, dtype=torch.int32, device=table.device)
        state["past"] = new_past(group)
    record(state["past"], step, group)
    state["last_step"].index_fill_(0, rows, step)


def _row_numbers(param: Tensor, rows: Tensor | Sequence[int]) -> Tensor:
    numbers = torch.as_tensor(rows, device=param.device)
    if not numbers.numel():
        return numbers.long()
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype is torch.bool:
        raise TypeError(f"rows: found {numbers.dtype}; give whole numbers.")
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high >= len(param):
        raise IndexError(f"rows: found {low} to {high}; the parameter has rows 0 to {len(param) - 1}.")
    return numbers.long()
