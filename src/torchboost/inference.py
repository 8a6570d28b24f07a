"""A fast copy of a network for inference: BatchNorm folded, channels-last, made of torch's own modules."""

from __future__ import annotations

import functools
import statistics
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.algorithms.channels_last import ChannelsLast
from torchboost.calibration.watch import Call, Gate
from torchboost.core.torch_private import is_tracing
from torchboost.core.wrapping import unwrap
from torchboost.errors import IncompatibleError, warn_no_effect
from torchboost.graph.copies import ReachesOriginal, copies_of, twin
from torchboost.graph.folding import fold_batch_norms, largest_difference
from torchboost.graph.removed_norm import RemovedNorm, show_bias
from torchboost.graph.surgery import replace_module
from torchboost.graph.trace import Arguments, call, evaluate
from torchboost.measure.stopwatch import Clock, Warmup, compare

_TOLERANCE = 1e-4


def fast_copy(network: nn.Module, *, sample: Any = None) -> nn.Module:
    """Return a copy for inference whose outputs equal those of ``network.eval()`` within 1e-4 of the largest output.

    Every BatchNorm that certainly follows a convolution or linear layer is folded into it
    (:func:`~torchboost.graph.folding.fold_batch_norms`), and kernels are stored channels-last. The copy consists of the
    network's own classes and torch's, without hooks or wrapped forwards of torchboost, and computes in the precision of
    its parameters. A normalised head is kept.

    The result is checked: with ``sample`` immediately, without it at the first call of the copy, when an unfolded copy
    runs on the same inputs. If the outputs differ, or the forward does not work channels-last (``view``), the copy is
    kept in contiguous memory, or it is not folded and a warning is issued. Pickles and copies of a copy that was never
    called are not checked.

    Cost: one copy of the parameters, and a second one until the check. With ``sample`` a few more passes: of the forms
    that passed the check, the fastest is returned.

    Args:
        network: Wrapped or not. It is not changed.
        sample: An example input of the copy: a tensor, a tuple of positional arguments or a dict of keyword arguments.

    Raises:
        TypeError: The network cannot be copied, or the copy would compute with tensors of the network, to which a
            function leads, such as a lambda that holds it. Without ``sample`` the first call of the copy raises this.
        ValueError: The network does not run on ``sample``, or it computes NaN or infinities.

    Warns:
        NoEffectWarning: Folding changed the outputs, so the copy is not folded.

    Example:
        >>> import torch
        >>> network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> images = torch.randn(2, 3, 16, 16)
        >>> fast = fast_copy(network, sample=images)
        >>> [type(module).__name__ for module in fast]
        ['Conv2d', 'Identity', 'ReLU']
    """
    bare = unwrap(network)
    with copies_of(bare):
        plain, fast = _as_torch(twin(bare)), twin(bare)
        try:
            folded = bool(fold_batch_norms(fast, sample=sample).folded)
        except IncompatibleError as error:
            warn_no_effect(f"the copy for inference is not folded: {error}")
            folded = False
        _as_torch(fast)
        layout = ChannelsLast()
        forms = {"plain": plain} | ({"folded": fast} if folded else {})
        if sample is None:
            layout.transform(fast)
            _Check(fast, plain, bare)
            return fast
        if layout.needs_transform(fast):
            forms["channels-last"] = twin(fast)
            layout.transform(forms["channels-last"])
        expected = evaluate(plain, sample)
        right = {name: form for name, form in forms.items() if form is plain or _equal(form, sample, expected)}
        if folded and "folded" not in right:
            _warn_of_difference(3)
        return right[fastest(right, sample) if len(right) > 1 else "plain"]


def _as_torch(model: nn.Module) -> nn.Module:
    """Put modules of torch in place of removed BatchNorms, with the attributes of the removed ones."""
    for removed in [module for module in model.modules() if isinstance(module, RemovedNorm)]:
        if removed.layer is not None and not removed.copies:
            show_bias(removed.layer)
        if removed is model or removed.copies:
            continue  # torch has no module that returns a copy
        tail = OrderedDict((name, removed.get_submodule(name)) for name in removed.tail)
        stand_in = nn.Sequential(tail) if tail else nn.Identity()
        internal = {*vars(nn.Module()), "copies", "tail", "adds_bias", "loads_first", "_layer", "_near"}
        vars(stand_in).update({name: value for name, value in vars(removed).items() if name not in internal})
        replace_module(model, removed, stand_in)
    return model


def _equal(form: nn.Module, sample: Any, expected: list[Tensor]) -> bool:
    try:
        outputs = evaluate(form, sample)
    except RuntimeError:  # such as a view that channels-last does not allow
        return False
    kinds = [one.dtype for one in expected if one.is_floating_point()]
    allowed = max([_TOLERANCE, *(64 * torch.finfo(kind).eps for kind in kinds)])
    return largest_difference(expected, outputs) <= allowed


def _warn_of_difference(level: int) -> None:
    warn_no_effect(
        "folding BatchNorm changed the outputs of the copy for inference, so the copy is not folded. The data flow is "
        "not what a trace shows. Pass a typical input as sample=.",
        above=level,
    )


class _Check:
    """Compares a copy with the network at its first call, in front of which a gate stands until then.

    A call that would compute with tensors of the original raises, and so do later ones.
    """

    def __init__(self, fast: nn.Module, plain: nn.Module, original: nn.Module) -> None:
        # A function may keep a part of the original alive, without the whole.
        self._originals = [weakref.ref(module) for module in original.modules()]
        self._fast, self._plain = fast, plain
        Gate(fast, self.meet, keep=self)

    def meet(self, call: Call) -> bool:
        """Decide whether the copy remains folded. Do nothing if the network does not run on these inputs."""
        if is_tracing():
            return False
        fast, plain = self._fast, self._plain
        with copies_of(*(module for ref in self._originals if (module := ref()) is not None)):
            same = _compare(fast, plain, Arguments(*call))
        if same is False:
            vars(fast).clear()
            vars(fast).update(vars(plain))
            _warn_of_difference(4)
        return same is not None


def _compare(fast: nn.Module, plain: nn.Module, sample: Arguments) -> bool | None:
    """Whether a copy, if necessary in contiguous memory, computes the same as the network. None if undecided."""
    try:
        expected = evaluate(plain, sample)
    except ReachesOriginal:
        raise
    except Exception:  # the call itself raises it
        return None
    if any(bool(outputs.isnan().any()) for outputs in expected):
        return None
    if _equal(fast, sample, expected):
        return True
    for parameter in fast.parameters():
        parameter.data = parameter.data.contiguous()
    return _equal(fast, sample, expected)


def fastest(forms: Mapping[str, nn.Module], sample: Any) -> str:
    """Return the name of the fastest form on a sample. The forms are timed in turns."""
    device = next((p.device for form in forms.values() for p in form.parameters()), torch.device("cpu"))
    calls = {name: torch.no_grad()(functools.partial(call, form, sample)) for name, form in forms.items()}
    warmup = Warmup(least=2, window=1, limit=4, seconds=10)
    times = compare(calls, baselines=[], pairs=8, warmup=warmup, clock=Clock.of(device)).samples
    return min(times, key=lambda name: statistics.median(times[name]))
