"""Adam for embeddings with sparse gradients, of which a step uses few rows, and the missed steps of the other rows.

In a missed step momentum still moves the weight, both moments shrink, and weight decay applies. The moments after any
number of steps are products, so the moves are a sum in which each step has its own factors. Epsilon is added to the
root of the second moment, so the sum has no closed form. Its terms shrink, and terms that can no longer change the
weight are not computed. With coupled (L2) weight decay the moments depend on the weight, and steps are made in turn.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from torchboost.core.algorithm import Attachment
from torchboost.core.arguments import check_flag
from torchboost.core.torch_private import sparse_rows, sparse_values, version
from torchboost.errors import IncompatibleError
from torchboost.optim.rules.adam import Adam, adam_directions
from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.loading import damaged, is_entry
from torchboost.optim.rules.masters import LOW_PRECISION
from torchboost.optim.rules.options import Common, rule_arguments
from torchboost.optim.tensors import is_rows, merge_sparse
from torchboost.tokens.state import let_last

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

BLOCK = 1 << 18
"""Weights that are caught up at a time. Limits the memory for a whole table."""

FORM = ("nesterov", "amsgrad", "decoupled_weight_decay", "bias_correction", "eps_uncorrected")
"""Options that choose the formula."""

CHUNK = 32
"""Steps whose terms are summed together."""

LEAST = 1e-30
"""Smallest share of a second moment's root that counts as more than none."""

SMALLEST = 1e-300
"""Smaller factors count as this one, so that their logarithms are finite. A power of it is 0."""


class LazyAdam(Adam):
    """Adam that updates only the rows of a sparse gradient.

    Dense gradients are handled by :class:`Adam`, with all of its options. In a sparse gradient, as from
    ``nn.Embedding(sparse=True)``, duplicate rows are merged first. There are two modes for the update.

    - Classic (``exact=False``, MindSpore's and TensorFlow's lazy Adam): only the rows of the gradient change, in value
      and moments. Weight decay, once per step, also applies to them only. The bias correction counts all steps. The
      rule differs from Adam: the momentum of a row has no effect until its next gradient. With
      ``eps_uncorrected=True`` it is ``torch.optim.SparseAdam``, whose checkpoints load.
    - Exact (``exact=True``): equal to Adam with dense gradients, up to rounding. Right before a row is read, its missed
      steps are replayed with the options at the time. :meth:`attach` does so before every forward pass,
      :meth:`catch_up` does it by hand. Call ``catch_up()`` before anything else reads the table (evaluation, saving, a
      tied layer).

    Cost of a sparse step: proportional to the rows of the gradient. Exact mode adds 4 bytes per row, and until the next
    ``catch_up()`` 150 bytes per step in which a numeric option changed (such as a scheduled learning rate). Catching up
    takes one pass over a row per missed step until it rests, after about 200 steps with the default betas. With coupled
    (L2) ``weight_decay`` rows never rest, so all missed steps are replayed.

    Checkpoints of :class:`Adam`, and of ``torch.optim``'s Adam and SparseAdam load. Their rows count as up to date.

    State: as in :class:`Adam`. In exact mode also ``last_step``, the last step of each row, and ``past``, the options
    since then. Both exist only while rows may lag. After ``catch_up()`` the state is Adam's and loads into it.

    Sources: ``mindspore.nn.LazyAdam``, ``LazyAdam`` of TensorFlow Addons, and D. Kingma, J. Ba, arXiv 1412.6980.

    Other arguments, and errors, are those of :class:`Adam`.

    Args:
        exact: Replay missed steps, so that the result equals dense Adam's. A group may set its own value.
        fused: As in :class:`Adam`. ``GradScaler`` still unscales before the step.
        capturable: As in :class:`Adam`. Sparse gradients are then refused.

    Example:
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = LazyAdam(table.parameters(), lr=1e-2, exact=True)
        >>> with optimizer.attach(table):
        ...     for ids in (torch.tensor([1, 2]), torch.tensor([2, 7])):
        ...         table(ids).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    kernel_unscales = False  # if the fused kernel skipped a step because of an overflow, this class would not know

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
        UpdateRule.__init__(self, **rule_arguments(locals()))

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse the groups that :class:`Adam` refuses, and an ``exact`` that is not a bool or not supported."""
        super().check_group(group)
        check_flag("exact", group["exact"])
        if group["exact"] and group["capturable"]:
            raise ValueError("exact and capturable exclude each other: which rows lag changes at every step.")

    def check_grad(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Accept dense gradients, and sparse rows that this group supports."""
        if grad.layout is torch.strided:
            super().check_grad(param, grad, group)
            return
        found = f"found a gradient of layout {grad.layout} for a parameter of shape {tuple(param.shape)}"
        if not is_rows(grad):
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

    def _check_state(self, param: Tensor, state: Mapping[str, Any]) -> None:
        """Refuse a state with a part of what missed steps need."""
        last, past = state.get("last_step"), state.get("past")
        if "last_step" not in state and "past" not in state:
            return
        if not isinstance(last, Tensor) or last.shape != param.shape[:1]:
            raise damaged(param, "last_step", last)
        if not isinstance(past, Mapping) or not _is_past(past):
            raise damaged(param, "past", past)
        for key in moments_of(past):
            if not is_entry(param, state.get(key)):
                raise damaged(param, key, state.get(key))

    @torch.no_grad()
    def catch_up(self) -> None:
        """Replay the missed steps of all rows, before evaluation or saving. The state is then Adam's.

        Does nothing in classic mode or if no row lags. Safe at any time: it does not change the results of training.
        Cost: see the class. Memory: about 100 MB at most, for any size of the table.
        """
        for group in self.param_groups:
            for param in group["params"]:
                self._catch_up(param)

    def attach(self, module: nn.Embedding | nn.EmbeddingBag) -> Attachment:
        """Replay the missed steps of rows right before ``module`` reads them, in every forward pass, also in eval mode.

        Cost: one lookup of ``last_step`` for the rows, and their missed steps. Needed in exact mode only. In classic
        mode the hook does nothing. Copies of the module are not affected.

        Returns:
            The attachment. Its ``remove()`` removes the hook and catches the whole table up.

        Raises:
            TypeError: Not an embedding.
            ValueError: This optimizer does not hold the weight.
            IncompatibleError: The embedding does not have ``sparse=True``.
        """
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise TypeError(f"module must be an Embedding or an EmbeddingBag, found {type(module).__name__}.")
        if not module.sparse:
            raise IncompatibleError(
                "the embedding has sparse=False, so its gradients are dense and no row falls behind; use sparse=True."
            )
        weight = module.weight
        if not any(weight is param for group in self.param_groups for param in group["params"]):
            raise ValueError(
                f"this optimizer does not hold the parameter of shape {tuple(weight.shape)}; give its module."
            )

        @torch.no_grad()
        def before_forward(read: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = args[0] if args else kwargs["input"]
            if read is module:
                self._catch_up(weight, ids)

        handle = module.register_forward_pre_hook(before_forward, with_kwargs=True)
        return Attachment(handle, undo=torch.no_grad()(lambda: self._catch_up(weight)))

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update in place. A sparse gradient is handled as a small dense one of its rows."""
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
            batch.params[i].index_copy_(0, rows, compact.params[i])
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
        step, last, before = int(state["step"]), state["last_step"], version(param)
        if rows is None:
            late = (last < step).nonzero().flatten()
        else:
            rows = rows.flatten().to(last.device, torch.int64)
            late = rows[last[rows] < step].unique()
        late = late[last[late].argsort()]
        tables = {"weight": state.get("master", param)} | {key: state[key] for key in moments_of(state["past"])}
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
        let_last(param, before)
        if "master" in state:
            self._stamps.note(param)
        if rows is None:
            del state["last_step"], state["past"]

    def prepare(self, work: Sequence[Batch]) -> Callable[[], None] | None:
        """Merge duplicate rows, then prepare as :class:`Adam` does."""
        for batch in work:
            merge_sparse(batch.grads)
        return super().prepare(work)


def _made_step(group: Mapping[str, Any], state: dict[str, Any], rows: Tensor) -> None:
    """Record that only these rows made the step that the state counts, and its options if they have changed."""
    step = int(state["step"])
    if "past" not in state:
        table = state["exp_avg"]
        state["last_step"] = torch.full((len(table),), step - 1, dtype=torch.int32, device=table.device)
        state["past"] = {"form": form_of(group), "options": []}  # plain numbers, for a checkpoint
    options = state["past"]["options"]
    values = (float(group["lr"]), float(group["weight_decay"]), *map(float, group["betas"]), float(group["eps"]))
    if not options or options[-1][1:] != values:
        options.append((step, *values))
    state["last_step"].index_fill_(0, rows, step)


def _is_past(past: Any) -> bool:
    """Whether a loaded value has what :func:`replay` reads."""
    if not isinstance(past, Mapping) or not {"form", "options"} <= past.keys():
        return False
    lists = [past["form"], past["options"]]
    if not all(isinstance(one, (tuple, list)) for one in lists) or len(lists[0]) != len(FORM) or not lists[1]:
        return False
    return all(
        isinstance(one, (tuple, list)) and len(one) == 6 and all(isinstance(value, (int, float)) for value in one)
        for one in lists[1]
    )


def moments_of(past: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entries that missed steps change."""
    return MOMENTS if past["form"][FORM.index("amsgrad")] else MOMENTS[:2]


def form_of(group: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return the values of ``FORM``."""
    return tuple(bool(group[name]) for name in FORM)


def replay(rows: Mapping[str, Tensor], last: Tensor, step: int, past: Mapping[str, Any]) -> None:
    """Bring rows up to a step, in place, as dense Adam with a gradient of zero would.

    Cost: one pass over a row per missed step until no further one can change it, about 200 steps with ``betas=(0.9,
    0.999)``. All missed steps count with coupled (L2) weight decay, and with ``beta1 >= sqrt(beta2)``.

    Args:
        rows: The weight and the moments by name, contiguous, in float32 or float64. The first axis counts rows.
        last: The last step of every row, below ``step``.
        step: The step that all rows must reach.
        past: ``"form"``, the values of ``FORM``, and ``"options"``: for each step with a change, from the earliest of
            ``last`` on, the step and the options from there on: rate, decay, both betas, epsilon.
    """
    if not len(last):
        return
    begun = last.cpu().double()  # a device is waited for once here, and once for the number of steps that count
    flat = {key: value.view(len(last), -1) for key, value in rows.items()}
    form: dict[str, bool] = dict(zip(FORM, past["form"], strict=True))
    start = max(bisect_right(past["options"], (int(begun.min()) + 1, math.inf)) - 1, 0)
    options = past["options"][start:]
    if not form["decoupled_weight_decay"] and any(decay for _, _, decay, *_ in options):
        _make_steps(options, form, flat, begun, step)
    else:
        _sum_steps(_History.of(options, form, step, rows["weight"]), flat, begun)


@dataclass(frozen=True, slots=True)
class _History:
    """The options of a range of steps, for lookup by step."""

    first: Tensor
    """The first step of each set of options."""
    values: Tensor
    """The sets, one per line: learning rate, weight decay, betas, epsilon."""
    logs: Tensor
    """Logarithms of the shares of both moments and, with decoupled decay, of a weight after a step, per set."""
    before: Tensor
    """Sums of ``logs`` over all steps before each set."""
    end: int
    form: Mapping[str, bool]
    most: tuple[float, float, float, float]
    """Largest learning rate, first beta, and size of a move in units of the one before, and smallest epsilon."""

    @classmethod
    def of(cls, options: Sequence[Any], form: Mapping[str, bool], end: int, like: Tensor) -> _History:
        table = torch.tensor(options, dtype=torch.float64, device="cpu")
        first, values = table[:, 0].contiguous(), table[:, 1:].contiguous()
        lr, decay, beta1, beta2, eps = values.unbind(1)
        most = (float(lr.max()), float(beta1.max()), float((beta1 / beta2.sqrt()).max()), float(eps.min()))
        left = 1 - lr * decay if form["decoupled_weight_decay"] else torch.ones_like(lr)
        # Dense Adam multiplies by factors that are rounded to the precision of the rows.
        beta1, beta2, left = (factor.to(like.dtype).double() for factor in (1 - beta1, beta2, left))
        logs = torch.stack([1 - beta1, beta2, left], 1).clamp_(min=SMALLEST).log_()
        sums = (first.diff(append=first.new_full((1,), end + 1))[:, None] * logs).cumsum(0)
        before = torch.cat([sums.new_zeros(1, 3), sums[:-1]])
        near = like.device
        return cls(first.to(near), values.to(near), logs.to(near), before.to(near), end, form, most)

    def until(self, steps: Tensor) -> Tensor:
        """Return the sums of ``logs`` over all steps up to and including these."""
        index = self.index(steps)
        return self.before[index] + (steps - self.first[index] + 1)[..., None] * self.logs[index]

    def left(self, begin: Tensor) -> Tensor:
        """Return the shares of both moments and of a weight that remain after the steps since ``begin``."""
        return (self.until(torch.full_like(begin, self.end)) - self.until(begin)).exp_()

    def terms(self, begin: Tensor, low: int, high: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return ``a``, ``e`` of moves ``a m / (sqrt(v) + e)`` with the decay after them, of shape ``(rows, count)``.

        The first move of a row belongs to the step ``begin + first``. ``begin`` is from ``low`` to ``high``.
        """
        number = torch.arange(first, first + count, dtype=torch.float64, device=begin.device)
        steps = (number + begin[:, None]).clamp_(max=self.end)
        low, high = low + first, min(high + first + count, self.end)
        if high - low < steps.numel():
            table = self._factors(torch.arange(low, high + 1, dtype=steps.dtype, device=steps.device))
            size, scale, eps, mean, square = (column[(steps - low).long()] for column in table)
        else:
            size, scale, eps, mean, square = self._factors(steps)
        before = self.until(begin)
        # Shares of both moments remain after a step. Below the least share the root is nothing next to epsilon.
        size = size * (mean - before[:, :1]).exp_()
        if not self.form["amsgrad"]:
            scale = scale * (square - before[:, 1:2]).div_(2).exp_()
        scale = scale.clamp(min=LEAST)
        return size / scale, eps / scale

    def _factors(self, steps: Tensor) -> tuple[Tensor, ...]:
        lr, _, beta1, beta2, eps = self.values[self.index(steps)].unbind(-1)
        first, second = torch.ones_like(steps), torch.ones_like(steps)
        if self.form["bias_correction"]:
            first, second = 1 - beta1**steps, (1 - beta2**steps).sqrt()
        mean, square, fade = self.until(steps).unbind(-1)
        size = -lr / first * (self.until(torch.full_like(lr.flatten()[:1], self.end))[:, 2] - fade).exp_()
        if self.form["nesterov"]:
            size *= beta1
        if self.form["eps_uncorrected"]:
            return size * second, torch.ones_like(size), eps, mean, square
        return size, 1 / second, eps, mean, square

    def reach(self, weight: Tensor, mean: Tensor, root: Tensor, begin: Tensor) -> Tensor:
        """Return the number of steps after which all further ones move a row by less than rounding."""
        missing = self.end - begin
        lr, beta1, shrink, eps = self.most
        if not shrink < 1:
            return missing
        # A first step moves at most lr / (1 - beta1**n) * |m| / max(sqrt(v), eps). The sum of all further ones counts.
        first = 1 - beta1 ** (begin + 1) if self.form["bias_correction"] else torch.ones_like(begin)
        farthest = lr / (1 - shrink) / first
        info = torch.finfo(weight.dtype)
        travel = farthest.to(weight.dtype)[:, None] * mean.abs() / root.clamp(min=eps)
        limit = weight.abs() * self.left(begin)[:, 2:].to(weight.dtype) * (info.eps / 8) + info.tiny
        needed = (limit / travel.clamp_(min=info.tiny)).amin(1).double().log_() / math.log(max(shrink, SMALLEST))
        return torch.minimum(needed.ceil_().nan_to_num_(math.inf, math.inf).clamp_(min=0), missing)

    def index(self, steps: Tensor) -> Tensor:
        """Return the set of options of each step."""
        return (torch.searchsorted(self.first, steps, right=True) - 1).clamp_(min=0)


def _sum_steps(history: _History, rows: Mapping[str, Tensor], begun: Tensor) -> None:
    weight, mean, square = (rows[key] for key in ("weight", "exp_avg", "exp_avg_sq"))
    begin, largest = begun.to(weight.device), rows.get("max_exp_avg_sq")
    if largest is not None:  # of the second moments from here on, the next one is the largest
        torch.maximum(largest, square * history.values[history.index(begin + 1), 3:4].to(square.dtype), out=largest)
    root = (square if largest is None else largest).sqrt()
    reach = history.reach(weight, mean, root, begin)
    # The rows that still have steps to make are always the first ones.
    counts, order = reach.cpu().sort(descending=True)
    begun, order = begun[order], order.to(weight.device)
    reach, ordered, root = reach[order], begin[order], root[order]
    total = torch.zeros_like(root)
    space = root.new_empty(len(root), CHUNK, root.shape[1])  # for the terms of a chunk, again and again
    for start in range(0, int(counts[0]), CHUNK):
        count, active = min(CHUNK, int(counts[0]) - start), int(torch.count_nonzero(counts > start))
        low, high = int(begun[:active].min()), int(begun[:active].max())
        size, eps = history.terms(ordered[:active], low, high, start + 1, count)
        number = torch.arange(start + 1, start + count + 1, device=size.device)
        size = size.masked_fill_(number > reach[:active, None], 0.0).to(root.dtype)
        terms = torch.add(root[:active, None], eps.to(root.dtype)[..., None], out=space[:active, :count])
        total[:active] += torch.bmm(size[:, None], terms.reciprocal_())[:, 0]
    left1, left2, left = history.left(begin).to(weight.dtype)[..., None].unbind(1)
    moves = torch.empty_like(total).index_copy_(0, order, total).mul_(mean)
    weight.mul_(left).add_(moves)
    mean.mul_(left1)
    square.mul_(left2)


def _make_steps(
    options: Sequence[Any], form: Mapping[str, bool], rows: Mapping[str, Tensor], begun: Tensor, end: int
) -> None:
    """Make the steps one by one, as the moments depend on the weights."""
    begun, order = begun.sort()
    order = order.to(rows["weight"].device)
    live = {key: value[order] for key, value in rows.items()}
    for step in range(int(begun[0]) + 1, end + 1):
        active = int(torch.searchsorted(begun, float(step)))
        _, lr, decay, *betas, eps = options[max(bisect_right(options, (step, math.inf)) - 1, 0)]
        state = {key: value[:active] for key, value in live.items()}
        weight = state.pop("weight")
        state["step"] = torch.tensor(step - 1.0, dtype=torch.float32, device="cpu")
        moves = adam_directions({**form, "betas": betas, "eps": eps}, Batch([weight], [weight * decay], [state]))
        weight.sub_(moves[0], alpha=lr)
    for key, value in live.items():
        rows[key].index_copy_(0, order, value)
