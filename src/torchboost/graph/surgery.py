"""Replace modules inside a model and update its optimizer accordingly, completely or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from torchboost.core.torch_private import AnyBatchNorm, child_slots, parameter_slots, state_dict_hooks
from torchboost.core.wrapping import living
from torchboost.graph.flow import Dataflow, Node
from torchboost.graph.norms import WEIGHTED, is_customised, norm_tail


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` by ``new`` everywhere inside ``model``: under every name and in every parent that shares it.

    ``new`` gets the training flag of ``old``. Submodules of ``old`` inside ``new`` keep theirs. Parameters and hooks
    are not copied.
    """
    parts = set(old.modules())
    for module in new.modules():
        if module not in parts:
            module.training = old.training
    for parent in list(model.modules()):
        for name, child in child_slots(parent).items():
            if child is old:
                child_slots(parent)[name] = new


@contextmanager
def changing(
    model: nn.Module, optimizers: Sequence[Optimizer] = (), *, written: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Change the modules of a model in this block, and let optimizers follow at its end: all of it or nothing.

    The optimizers and their group dicts remain the same objects, and their number is unchanged. Parameters that are
    gone are removed from their group, and their state is dropped. A new one is inserted right after the weight of its
    module, in the same group. If an optimizer does not hold that weight, it does not get the new parameter. A group
    that loses its last parameter is kept as an empty group, so that schedulers keep their list of learning rates.
    Earlier checkpoints of the optimizer no longer fit, because parameters are stored by position.

    If the block raises or is interrupted, everything is restored: the places of modules and parameters, training flags,
    hooks of state dicts, the parameters and the state of the optimizers, and the values of ``written``, tensors that
    the block changes in place. Objects keep their identity. Buffers, other attributes and the effects of optimizer
    steps are not restored.

    Raises:
        ValueError: In a group, the numbers of names and parameters differ. The block did not run.

    Cost: a copy of ``written``.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        names, parameters = group.get("param_names"), group["params"]
        if names and len(names) != len(parameters):
            raise ValueError(
                f"optimizer: group {index} lists {len(names)} names for {len(parameters)} parameters; "
                "build the optimizer from model.named_parameters(), or from model.parameters()."
            )
    inside = set(model.parameters())
    registries = [
        (slots, dict(slots))
        for module in model.modules()
        for slots in (child_slots(module), parameter_slots(module), *state_dict_hooks(module))
    ]
    modes = [(module, module.training) for module in model.modules()]
    held = [group[name] for group in groups for name in ("params", "param_names") if name in group]
    lists = [(entries, list(entries)) for entries in held]
    states = [(optimizer.state, dict(optimizer.state)) for optimizer in optimizers]
    numbers = [(tensor, tensor.detach().clone()) for tensor in written]
    try:
        yield
        _rebind(optimizers, inside.difference(model.parameters()), _joining(model, inside))
    except BaseException:
        for slots, before in registries:
            slots.clear()
            slots.update(before)  # pyright: ignore[reportArgumentType,reportCallIssue]
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for tensor, before in numbers:
                tensor.copy_(before)
        for entries, before in lists:
            entries[:] = before
        for state, before in states:
            state.update(before)
        raise


def _joining(model: nn.Module, before: set[Parameter]) -> dict[Parameter, list[tuple[str, Parameter]]]:
    """Return the new parameters of a model and their names, by the weight of their module."""
    joining: dict[Parameter, list[tuple[str, Parameter]]] = {}
    for slots in map(parameter_slots, model.modules()):
        for name, new in slots.items():
            if new is not None and new not in before and (weight := slots.get("weight")) is not None:
                joining.setdefault(weight, []).append((name, new))
    return joining


def _rebind(
    optimizers: Sequence[Optimizer], gone: set[Parameter], joining: Mapping[Parameter, list[tuple[str, Parameter]]]
) -> None:
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        entries: list[tuple[str, Parameter]] = []
        names = group.get("param_names") or [""] * len(group["params"])
        for name, parameter in zip(names, group["params"], strict=True):
            if parameter not in gone:
                entries.append((name, parameter))
                path = name.split(".")[:-1]
                entries += [(".".join([*path, label]), new) for label, new in joining.get(parameter, ())]
        group["params"][:] = [parameter for _, parameter in entries]  # in place: LBFGS keeps a reference to the list
        if "param_names" in group:
            group["param_names"][:] = [name for name, _ in entries]
    for optimizer in optimizers:
        for parameter in gone:
            optimizer.state.pop(parameter, None)


def held_elsewhere(model: nn.Module) -> dict[nn.Module, str]:
    """Return modules that plain attributes hold outside the module tree, which :func:`replace_module` does not reach.

    Each comes with its holder, such as ``"'path' of the model"``. Lists, tuples, sets, dicts, bound methods, partial
    functions and unregistered modules in attributes are searched.
    """
    found: dict[nn.Module, str] = {}
    registered = set(model.modules())
    internal = vars(nn.Module()).keys()
    for path, owner in model.named_modules():
        for name, value in vars(owner).items():
            if name in internal:
                continue
            for module in _modules_in(value, registered, set()):
                found.setdefault(module, f"'{name}' of {f'{path!r}' if path else 'the model'}")
    return found


def _modules_in(value: Any, registered: set[nn.Module], seen: set[int]) -> Iterator[nn.Module]:
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        yield value
        inner = () if value in registered else [*value.children(), *vars(value).values()]
    elif isinstance(value, Mapping):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    elif isinstance(value, MethodType):
        inner = [value.__self__]
    elif isinstance(value, partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    for entry in inner:
        yield from _modules_in(entry, registered, seen)


def optimizers_holding(parameters: Iterable[Parameter]) -> list[Optimizer]:
    """Find the optimizers that hold one of these parameters, at the cost of :func:`.living`."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        optimizer
        for optimizer in living(Optimizer)
        if any(id(p) in wanted for group in vars(optimizer).get("param_groups", ()) for p in group["params"])
    ]


def averages_of(model: nn.Module) -> list[AveragedModel]:
    """Find the averages of weights that were made from a model, or may have been.

    One that has averaged nothing yet must have the same values. Of another one only the class of its model, and the
    names and shapes of its parameters are known. Copies of the model outside of an ``AveragedModel`` are not found:
    whether something averages them cannot be known.

    Cost: :func:`~torchboost.core.wrapping.living`, and a comparison of the parameters for each one found.
    """
    own = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in own.items()}
    found = []
    for average in living(AveragedModel):
        copied = getattr(average, "module", None)  # absent if it was only allocated
        if copied is None or type(copied) is not type(model):
            continue
        theirs = dict(copied.named_parameters())
        if {name: parameter.shape for name, parameter in theirs.items()} != shapes:
            continue
        if int(average.n_averaged) or all(_equal(own[name], parameter) for name, parameter in theirs.items()):
            found.append(average)
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.is_meta or other.is_meta or torch.equal(one.detach().to(other), other.detach())


def need_copies(flow: Dataflow, norms: Iterable[int]) -> set[int]:
    """Return which of the removed normalisations must return a copy of their input, not the input itself.

    A normalisation returns a new tensor. If its input is returned instead, a later in-place ReLU or ``+=`` overwrites
    values that others still read (the skip path) or that autograd keeps for the backward pass. This cannot happen if
    the input comes from a convolution or linear layer and is used nowhere else, or if no operation writes in place and
    the output is not one of the model.
    """
    shared = {norm for norm in norms if not _is_alone_behind_a_layer(flow, norm)}
    if not shared or any(map(_writes, flow.nodes)):
        return shared
    return {norm for norm in shared if any(flow.nodes[after].kind == "output" for after in flow.consumers[norm])}


def _is_alone_behind_a_layer(flow: Dataflow, norm: int) -> bool:
    """Whether only this norm reads the output of a layer of torch, which neither autograd nor a hook keeps."""
    inputs = flow.nodes[norm].inputs
    layer = flow.nodes[inputs[0]].module if len(inputs) == 1 and flow.consumers[inputs[0]] == (norm,) else None
    plain = isinstance(layer, WEIGHTED) and type(layer).forward.__module__.startswith("torch.nn.modules")
    return plain and layer is not None and not is_customised(layer)


def _writes(node: Node) -> bool:
    module = node.module
    if module is None:
        return node.writes
    parts = [module.get_submodule(name) for name in norm_tail(module) or ()] if isinstance(module, AnyBatchNorm) else []
    return any(getattr(part, "inplace", False) is True for part in (module, *parts))
