"""Adam with MindSpore's variants, on torch's kernels if torch has one for the variant, else on lists of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from typing_extensions import Unpack

from torchboost.core.torch_private import foreach, foreach_lerp
from torchboost.errors import IncompatibleError
from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.masters import IN_CACHE, pieces
from torchboost.optim.rules.options import Common, check_capturable, check_fused, rule_arguments

LATE = 1e30
"""Update number at which both bias corrections are exactly 1."""


class AdamOptions(Common, total=False):
    """Keyword arguments that :class:`AdamW` and :class:`AdamWeightDecay` have in common with :class:`Adam`."""

    amsgrad: bool
    nesterov: bool
    eps_uncorrected: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool


class Adam(UpdateRule):
    """Adam: ``w -= lr * m^ / (sqrt(v^) + eps)`` with moments corrected for their start at zero.

    With the defaults it equals ``torch.optim.Adam`` bit for bit in each of its forms (loop, ``foreach``, ``fused``),
    and with ``decoupled_weight_decay=True`` ``torch.optim.AdamW``. Checkpoints load both ways. State: ``step``,
    ``exp_avg``, ``exp_avg_sq``, 8 bytes per float32 weight, with ``amsgrad`` also ``max_exp_avg_sq``, 12 bytes.

    Source: D. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", arXiv 1412.6980. S. Reddi et al., "On the
    Convergence of Adam and Beyond" (``amsgrad``). I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization".

    Other arguments, and errors, are those of :class:`~torchboost.optim.UpdateRule`.

    Args:
        betas: Decay rates of the moments, each at least 0 and below 1.
        eps: Added to the root of the second moment, at least 0.
        weight_decay: Added to the gradient or, with ``decoupled_weight_decay``, subtracted from the weights.
        amsgrad: Use the largest second moment so far.
        nesterov: Use ``beta1 m + (1 - beta1) g`` instead of ``m`` (MindSpore's ``use_nesterov``).
        decoupled_weight_decay: ``w -= lr * weight_decay * w``, as in AdamW.
        bias_correction: Correct the moments for their start at zero.
        eps_uncorrected: Add ``eps`` to the root of the second moment before it is corrected, as MindSpore does.
        foreach: Update lists of tensors. None chooses as torch does.
        fused: Use torch's fused kernel.
        capturable: Safe in a CUDA graph.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Adam(model.parameters(), lr=1e-3, fused=True)
    """

    kernel_unscales = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Any = 0.0,
        *,
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
        super().__init__(**rule_arguments(locals()))

    def adopted(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved group, with bias correction unless it says otherwise, because torch always corrects."""
        return {"bias_correction": True, **super().adopted(group)}

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse forms for which torch has no kernel."""
        variants = [name for name in ("nesterov", "eps_uncorrected") if group.get(name)]
        if variants and (group.get("fused") or group.get("capturable")):
            raise ValueError(f"{variants[0]}: torch has no kernel for it; leave out fused and capturable.")

    def check_grad(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Refuse gradients that torch's kernels would refuse, and complex parameters of variants without a kernel."""
        super().check_grad(param, grad, group)
        if param.is_complex() and (group["nesterov"] or group["eps_uncorrected"]):
            raise IncompatibleError(
                f"nesterov and eps_uncorrected need real parameters, found {param.dtype} of shape {tuple(param.shape)}."
            )
        check_fused(param, group, torch.optim.Adam)
        check_capturable(param, group)

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the entries of the state."""
        return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update in place."""
        if group["nesterov"] or group["eps_uncorrected"]:
            for part in pieces(batch, IN_CACHE):
                _move(group, part)
            return
        if group["fused"]:
            batch.align(self.state_keys(group)[1:])
        steps = batch.state("step")
        if not group["bias_correction"]:
            # The kernels correct by 1 - beta**step, which is 1 if step is large. The real steps are counted here.
            found_inf = getattr(self, "found_inf", None)
            foreach.add_(steps, 1)
            if found_inf is not None:
                foreach.sub_(steps, [found_inf.to(step.device) for step in steps])
            late = {device: torch.full((), LATE, device=device) for device in {step.device for step in steps}}
            steps = [late[step.device] for step in steps]
        torch_adam(
            batch.params,
            batch.grads,
            batch.state("exp_avg"),
            batch.state("exp_avg_sq"),
            batch.state("max_exp_avg_sq") if group["amsgrad"] else [],
            steps,
            foreach=group["foreach"],
            # As the compiler sets it for torch's own Adam: before 2.12 it cannot trace the other way.
            capturable=group["capturable"] or torch.compiler.is_compiling(),
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            has_complex=any(param.is_complex() for param in batch.params),
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class AdamW(Adam):
    """Adam with decoupled weight decay, equal to ``torch.optim.AdamW`` bit for bit in each of its forms.

    The defaults are torch's. Checkpoints load both ways. Arguments and errors are those of :class:`Adam`.

    Source: I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = AdamW(model.parameters(), lr=1e-3)
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Any = 1e-2,
        **options: Unpack[AdamOptions],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=True, **options)

    def adopted(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved group with decoupled decay, also if it is of Adam, as torch's AdamW does."""
        return {**super().adopted(group), "decoupled_weight_decay": True}


class AdamWeightDecay(Adam):
    """Adam with decoupled weight decay and no bias correction: ``w -= lr * (m / (sqrt(v) + eps) + weight_decay * w)``.

    MindSpore's ``AdamWeightDecay``. With bias correction it is :class:`AdamW`. If a checkpoint of
    ``torch.optim.AdamW`` is loaded, bias correction is on. Arguments and errors are those of :class:`Adam`.

    Source: J. Devlin et al., "BERT", arXiv 1810.04805, which leaves out the correction.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: Any = 0.0,
        *,
        bias_correction: bool = False,
        **options: Unpack[AdamOptions],
    ) -> None:
        kind: dict[str, Any] = {"decoupled_weight_decay": True, "bias_correction": bias_correction}
        super().__init__(params, lr, betas, eps, weight_decay, **kind, **options)


def adam_directions(group: Mapping[str, Any], batch: Batch) -> list[Tensor]:
    """Update the moments and return ``m^ / (sqrt(v^) + eps)``, or the variant that the group asks for.

    The gradients must contain ``maximize`` and a coupled decay already.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    grads, mean, square, steps = batch.grads, batch.state("exp_avg"), batch.state("exp_avg_sq"), batch.state("step")
    foreach.add_(steps, 1)
    foreach.lerp_(mean, grads, 1 - beta1)
    foreach.mul_(square, beta2)
    foreach.addcmul_(square, grads, grads, 1 - beta2)
    if group.get("amsgrad"):
        largest = batch.state("max_exp_avg_sq")
        foreach.maximum_(largest, square)
        square = largest
    first, second = _corrections(group, steps)
    root = foreach.sqrt(square)
    if not group.get("eps_uncorrected"):
        foreach.div_(root, second)
    foreach.add_(root, float(group["eps"]))
    if group.get("nesterov"):
        directions = foreach_lerp(mean, grads, 1 - beta1)
        foreach.div_(directions, root)
    else:
        directions = list(foreach.div(mean, root))
    sizes = [s / f if group.get("eps_uncorrected") else 1 / f for f, s in zip(first, second, strict=True)]
    foreach.mul_(directions, sizes)
    return directions


def rooted_directions(group: Mapping[str, Any], batch: Batch) -> list[Tensor]:
    """Return ``m^ / sqrt(v^ + eps)`` from moments that are up to date."""
    first, second = _corrections(group, batch.state("step"))
    root = foreach.div(batch.state("exp_avg_sq"), [s * s for s in second])
    foreach.add_(root, float(group["eps"]))
    foreach.sqrt_(root)
    directions = list(foreach.div(batch.state("exp_avg"), root))
    foreach.div_(directions, first)
    return directions


def _move(group: Mapping[str, Any], batch: Batch) -> None:
    """Update the parameters of a batch on lists of tensors, for the variants without a kernel."""
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if group["maximize"]:
        batch.grads[:] = foreach.neg(batch.grads)
    if decay and group["decoupled_weight_decay"]:
        foreach.mul_(batch.params, 1 - lr * decay)
    elif decay:
        batch.grads[:] = foreach.add(batch.grads, batch.params, alpha=decay)
    foreach.add_(batch.params, adam_directions(group, batch), alpha=-lr)


def _corrections(group: Mapping[str, Any], steps: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """Return ``1 - beta1^t`` and ``sqrt(1 - beta2^t)`` per parameter, 1 without bias correction."""
    if not group.get("bias_correction", True):
        return [1.0] * len(steps), [1.0] * len(steps)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    counts = [float(step) for step in steps]
    return [1 - beta1**count for count in counts], [(1 - beta2**count) ** 0.5 for count in counts]
