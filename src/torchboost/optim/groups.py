"""Param groups of a model: by rules, and for Muon."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchboost.core.arguments import check_flag, check_module, check_number, check_shapes
from torchboost.core.torch_private import AnyConv, AnyNorm
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.errors import IncompatibleError, in_a_line
from torchboost.graph.blocks import blocks_of
from torchboost.graph.fused_matrices import agreed_parts, parts_of_gates
from torchboost.graph.matrix_uses import Place, Use, matrix_uses
from torchboost.optim.transforms import CENTRALIZE
from torchboost.sheet import Sheet

ParamGroup = dict[str, Any]

Predicate = Callable[[str, nn.Parameter, nn.Module], bool]

NORMS = (AnyNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""torch's normalisation layers that have weights."""

_MATRICES = (nn.Linear, AnyConv, nn.RNNBase, nn.MultiheadAttention)
"""Holders of matrices in a model that cannot be run here."""

_WHY: Mapping[Place, str] = {
    "input": "reads the model's input",
    "hidden": "hidden matrix",
    "output": "head",
    "lookup": "table of rows",
    "other": "not multiplied as a matrix",
    "not reached": "not used by the pass",
}


def options_of(group: Mapping[str, Any]) -> ParamGroup:
    """Return the options of a param group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


@dataclass(frozen=True, slots=True, repr=False)
class GroupRule:
    r"""Options for the parameters that meet all of the given criteria.

    Tied weights, and weights of a module that has several names, have several names and places. They match if one of
    these places meets all criteria.

    Args:
        options: Entries of the param group, such as ``lr``, ``weight_decay`` or ``grad_centralization``. They are
            copied. Any key is accepted, as in torch, which silently keeps unknown entries.
        modules: Module types, subclasses included. Selects the parameters in such a module and in its submodules.
        name: Regular expression that is searched for anywhere in the parameter's name (``re.search``), as given by
            ``named_parameters()`` of the bare model. Anchor it with ``^`` and ``$``, and write a dot as ``\.``.
        when: Called with the name, the parameter and the module that holds it. Returns True if the rule applies.
        optional: Whether the rule may match nothing.

    Raises:
        TypeError: An argument, an option's key, a learning rate or a decay has the wrong type.
        ValueError: No option, no criterion, a reserved key (``params``, ``param_names``), an invalid regular
            expression, or a learning rate or decay that is negative or not finite.

    Example:
        >>> GroupRule({"lr": 1e-4}, modules=nn.Embedding, name=r"^tokens\.")
        GroupRule({'lr': 0.0001}, modules=Embedding, name='^tokens\\.')
    """

    options: Mapping[str, Any] = field(hash=False)
    _: KW_ONLY
    modules: type | tuple[type, ...] | None = None
    name: str | re.Pattern[str] | None = None
    when: Predicate | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        _check_options("options", self.options)
        if not self.options:
            raise ValueError("options: found none; give at least one, such as {'weight_decay': 0.0}.")
        if self.modules is None and self.name is None and self.when is None:
            raise ValueError(
                "found no criterion; give modules, name or when. For all parameters use 'defaults' of param_groups."
            )
        _check_types("modules", () if self.modules is None else self.modules)
        if self.name is not None:
            if not isinstance(_pattern(self.name), str):
                raise TypeError(f"name: found {self.name!r}; give a regular expression as a string.")
            try:
                re.compile(self.name)
            except re.error as error:
                raise ValueError(f"name: found {self.name!r}, not a valid regular expression: {error}.") from error
        if self.when is not None and (not callable(self.when) or isinstance(self.when, type)):
            raise TypeError(f"when: found {self.when!r}; give a function of name, parameter and module.")
        object.__setattr__(self, "options", dict(self.options))

    def __repr__(self) -> str:
        parts = [repr(self.options)]
        if self.modules is not None:
            names = [kind.__name__ for kind in _as_tuple(self.modules)]
            parts.append(f"modules={names[0] if len(names) == 1 else '(' + ', '.join(names) + ')'}")
        if self.name is not None:
            parts.append(f"name={_pattern(self.name)!r}")
        if self.when is not None:
            parts.append(f"when={getattr(self.when, '__name__', None) or repr(self.when)}")
        return f"GroupRule({', '.join([*parts, 'optional=True'] if self.optional else parts)})"


def param_groups(
    model: nn.Module,
    rules: Iterable[GroupRule],
    *,
    defaults: Mapping[str, Any] | None = None,
    include_frozen: bool = False,
) -> list[ParamGroup]:
    """Sort the parameters of a model into groups with separate options, for any ``torch.optim`` optimizer.

    A parameter gets the options of **all** rules it matches. If two rules set the same option, the later one wins, so
    write the general rules first. Parameters that match the same rules form one group.

    Every trainable parameter is in exactly one group. Tied weights appear once, under their first name. Groups are
    ordered by the first rule they match, then by the next. Parameters without a rule come last. Inside a group the
    parameters keep the order of the model. Names are stored as ``param_names``, which torch saves with the optimizer's
    state. Cost: one pass over the parameters per rule, in Python.

    Args:
        model: Bare, inside DDP, ``DataParallel`` or ``torch.compile`` (whose prefixes are not part of the names), or
            after ``fully_shard``.
        rules: May be empty.
        defaults: Options of every group, which rules override. The optimizer sets all others.
        include_frozen: Whether parameters with ``requires_grad=False`` also get a group. Set it if they are unfrozen
            later, or frozen in turns. torch skips them while they have no gradient.

    Raises:
        TypeError: An argument has the wrong type, or a rule's ``when`` returned something other than a boolean.
        ValueError: A rule matches no parameter, frozen ones included, the model has no trainable parameter, or a
            parameter of a lazy module has no shape yet.
        IncompatibleError: The model is sharded by FSDP1, whose flat parameters do not keep their shapes.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> rules = [GroupRule({"lr": 1e-4}, modules=nn.Embedding), *no_decay()]
        >>> groups = param_groups(model, rules, defaults={"lr": 1e-3, "weight_decay": 0.1})
        >>> for group in groups:
        ...     print(group["param_names"], group["lr"], group["weight_decay"])
        ['0.weight'] 0.0001 0.1
        ['1.weight', '1.bias', '2.bias'] 0.001 0.0
        ['2.weight'] 0.001 0.1
        >>> optimizer = torch.optim.AdamW(groups)
    """
    check_module(model)
    rules = list(rules)
    for index, rule in enumerate(rules):
        if not isinstance(rule, GroupRule):
            raise TypeError(f"rules[{index}]: found {rule!r}; give a GroupRule, and unpack tuples: [*no_decay()].")
    common = {} if defaults is None else defaults
    _check_options("defaults", common)
    network = _with_shapes(model)
    places = _places(network)
    matched = {
        parameter: tuple(i for i, rule in enumerate(rules) if any(_holds_at(rule, parameter, place) for place in at))
        for parameter, at in places.items()
    }
    used = {index for indices in matched.values() for index in indices}
    for index, rule in enumerate(rules):
        if index not in used and not rule.optional:
            raise ValueError(_unmatched(index, rule, network, [name for at in places.values() for name, *_ in at]))
    members: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter, indices in matched.items():
        if include_frozen or parameter.requires_grad:
            members.setdefault(indices, []).append(parameter)
    if not members:
        raise ValueError(
            f"found no parameter to train among the {len(places)} of {type(network).__name__}; "
            "set requires_grad, or give include_frozen=True."
        )
    groups: list[ParamGroup] = []
    for indices in sorted(members, key=lambda indices: (not indices, indices)):
        names = [places[parameter][0].name for parameter in members[indices]]
        group: ParamGroup = {"params": members[indices], "param_names": names, **common}
        for index in indices:
            group |= rules[index].options
        groups.append(group)
    return groups


def no_decay(*, also: type | tuple[type, ...] = ()) -> tuple[GroupRule, ...]:
    """Return rules that disable weight decay for norms, biases and other vectors, found by structure.

    These are all parameters of at most one axis (biases, the scales and shifts of any norm, layer scales,
    temperatures), and all parameters of torch's norm layers, as is common since BERT (Devlin et al., 2019).
    Parameters of several axes in a custom norm still decay, unless its type is in ``also``.

    Put these rules after others that set ``weight_decay``, because the later rule wins. The model need not have such
    parameters. The coupled decay of :class:`~torchboost.optim.transforms.Decay` is a separate option and still applies.

    Args:
        also: More module types whose parameters do not decay, such as ``nn.Embedding``. Must match something. A tied
            embedding is one parameter, so the head that shares it does not decay either.

    Raises:
        TypeError: ``also`` is not a type or a tuple of types.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> for group in param_groups(model, no_decay()):
        ...     print(group["param_names"], group.get("weight_decay"))
        ['0.bias', '1.weight', '1.bias'] 0.0
        ['0.weight'] None
    """
    _check_types("also", also)
    options = {"weight_decay": 0.0}
    vectors = GroupRule(options, when=_is_vector_or_of_norm, optional=True)
    return (vectors,) if also == () else (vectors, GroupRule(options, modules=also))


def layer_wise_decay(model: nn.Module, base_lr: float, *, factor: float) -> tuple[GroupRule, ...]:
    """Return one rule per block that lowers the learning rate from the head down, for fine-tuning.

    ``lr = base_lr * factor ** (number of blocks after this one)``: the last block, usually the head, learns with
    ``base_lr``, the first block with the lowest rate (ELECTRA, Clark et al., 2020; BEiT, Bao et al., 2022, with factors
    from 0.65 to 0.9). Blocks are those of freezing (:func:`torchboost.graph.blocks.blocks_of`): in the order in which
    they run, a norm together with the layer before it, and embeddings in two modules as two blocks. BEiT puts a final
    norm with the head, and ELECTRA all embeddings at one depth. Tied weights count once, at their last use.

    The rules name parameters, so they also fit a copy of the model. They set only ``lr``. Add other rules to them.
    Cost: one symbolic trace of the forward pass, or one forward pass on two samples.

    Args:
        model: Wrapped or not. Frozen blocks count like others.
        base_lr: Learning rate of the last block, above 0.
        factor: Per block, above 0 and at most 1.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is out of range, the model has no parameters, or a lazy module has no shape yet.
        IncompatibleError: The model is sharded by FSDP1.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> rules = layer_wise_decay(model, 0.1, factor=0.5) + no_decay()
        >>> for group in param_groups(model, rules):
        ...     print(group["param_names"], group["lr"], group.get("weight_decay"))
        ['0.weight'] 0.025 None
        ['0.bias'] 0.025 0.0
        ['2.weight'] 0.05 None
        ['2.bias'] 0.05 0.0
        ['4.weight'] 0.1 None
        ['4.bias'] 0.1 0.0
    """
    check_module(model)
    check_number("base_lr", base_lr, above=True)
    check_number("factor", factor, above=True)
    if factor > 1:
        raise ValueError(f"factor: found {factor!r}; give a number above 0 and at most 1, such as 0.75.")
    names = {parameter: name for name, parameter in _with_shapes(model).named_parameters()}
    if not names:
        raise ValueError(f"model: found no parameters in {type(model).__name__}; give a model that has some.")
    blocks = blocks_of(model)
    return tuple(
        GroupRule(
            {"lr": base_lr * factor ** (len(blocks) - 1 - index)},
            name=f"^({'|'.join(re.escape(names[parameter]) for parameter in block.parameters)})$",
        )
        for index, block in enumerate(blocks)
    )


class _Place(NamedTuple):
    """The place of a parameter: its name, the module that holds it, and all modules around that, from the root."""

    name: str
    holder: nn.Module
    around: tuple[nn.Module, ...]


def _is_vector_or_of_norm(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    return parameter.ndim <= 1 or isinstance(module, NORMS)


def _with_shapes(model: nn.Module) -> nn.Module:
    """Return the bare model. Refuse one whose parameters do not have the shapes they compute with."""
    network = unwrap(model)
    if wrapper_of(network) == "FullyShardedDataParallel":
        raise IncompatibleError(
            "the model is sharded by FullyShardedDataParallel (FSDP1), whose flat parameters do not keep names and "
            "shapes; use fully_shard (FSDP2)."
        )
    check_shapes(network)
    return network


def _places(network: nn.Module) -> dict[nn.Parameter, list[_Place]]:
    """Return all places of every parameter. Parameters, and the places of each, are in the order of the model."""
    around: dict[str, tuple[nn.Module, ...]] = {}
    places: dict[nn.Parameter, list[_Place]] = {}
    for path, module in network.named_modules(remove_duplicate=False):
        around[path] = (*around.get(path.rpartition(".")[0], ()), module)
        for name, parameter in module.named_parameters(path, recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append(_Place(name, module, around[path]))
    return places


def _holds_at(rule: GroupRule, parameter: nn.Parameter, place: _Place) -> bool:
    if rule.modules is not None and not any(isinstance(module, rule.modules) for module in place.around):
        return False
    if rule.name is not None and not re.search(rule.name, place.name):
        return False
    verdict = rule.when is None or rule.when(place.name, parameter, place.holder)
    if not isinstance(verdict, bool):
        raise TypeError(f"{rule!r}: 'when' returned {verdict!r} for '{place.name}'; return True or False.")
    return verdict


def _check_options(what: str, options: Any) -> None:
    if not isinstance(options, Mapping):
        raise TypeError(f"{what}: found {options!r}; give a dict of options, such as {{'weight_decay': 0.0}}.")
    for key, value in options.items():
        if not isinstance(key, str):
            raise TypeError(f"{what}: found the key {key!r}; give names of options, such as 'lr'.")
        if key in ("params", "param_names"):
            raise ValueError(f"{what}: found '{key}', which param_groups sets itself; leave it out.")
        if key in ("lr", "weight_decay") and not callable(value) and not isinstance(value, (Tensor, list, tuple)):
            check_number(f"{what}: {key}", value)
        if key == CENTRALIZE:
            check_flag(f"{what}: {key}", value)


def _check_types(what: str, kinds: Any) -> None:
    if not all(isinstance(kind, type) for kind in _as_tuple(kinds)):
        raise TypeError(f"{what}: found {kinds!r}; give a module type or a tuple of types, not an instance or a list.")


def _unmatched(index: int, rule: GroupRule, network: nn.Module, names: Collection[str]) -> str:
    """Say which rule matched nothing, and list the possible matches."""
    parts = [f"rules[{index}]: {rule!r} matches no parameter of {type(network).__name__}."]
    if rule.modules is not None:
        kinds = dict.fromkeys(type(m).__name__ for m in network.modules() if next(m.parameters(), None) is not None)
        parts.append(f"Its modules with parameters are of type {', '.join(kinds)}.")
    parts.append(f"Its {len(names)} parameters begin with {', '.join(map(repr, list(names)[:3]))}.")
    parts.append("Correct the rule, remove it, or set optional=True.")
    return " ".join(parts)


def _as_tuple(kinds: Any) -> tuple[Any, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _pattern(name: Any) -> Any:
    return name.pattern if isinstance(name, re.Pattern) else name


class Row(NamedTuple):
    """The rule of one parameter, and the reason."""

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str


class MuonSplit(list[ParamGroup]):
    """Param groups for :class:`~torchboost.optim.MixedOptimizer`. ``print`` shows them, a row for each parameter."""

    def __init__(self, groups: Iterable[ParamGroup], rows: Iterable[Row]) -> None:
        super().__init__(groups)
        self.rows = tuple(rows)

    @property
    def sheet(self) -> Sheet:
        """A row for each parameter, and the number of weights of each rule."""
        totals: Counter[str] = Counter()
        for group in self:
            totals[group["rule"]] += sum(param.numel() for param in group["params"])
        return Sheet(
            headings=("parameter", "shape", "rule", "why"),
            rows=tuple((row.name, " x ".join(map(str, row.shape)), row.rule, row.reason) for row in self.rows),
            after=(", ".join(f"{rule}: {count:,} weights" for rule, count in totals.items()),),
        )

    def __str__(self) -> str:
        return str(self.sheet)

    def _repr_html_(self) -> str:
        return self.sheet._repr_html_()


def muon_groups(
    model: nn.Module,
    rules: Iterable[GroupRule] = (),
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    sample: Any = None,
    include_frozen: bool = False,
    split: bool = True,
) -> MuonSplit:
    """Sort the parameters of a model into groups for Muon and AdamW, by how its forward pass uses them.

    Muon gets hidden matrices, filters and stacks of matrices. AdamW gets the rest: tables such as embeddings, the
    output layer, layers that read the model's input, norms, biases, matrices of one row or column, and weights that are
    shared with one of these. Several matrices in one parameter, such as the gates of recurrent layers and fused
    projections, are orthogonalised each by itself. The uses are found in one forward pass
    (:func:`~torchboost.graph.matrix_uses.matrix_uses`). If the model cannot be run here, types of modules decide:
    matrices and filters of torch's layers go to Muon, but the last of these layers, and without embeddings the first,
    go to AdamW. Fused projections are then not split, with a warning if a layer may be one. Types also decide about
    parameters that the pass did not use, such as experts that were not chosen.

    Args:
        model: Wrapped or not. It is not changed.
        rules: Options by parameter, as in :func:`~torchboost.optim.param_groups`. They override this function, as
            ``GroupRule({"rule": "adamw"}, name="gate")`` does.
        muon: Options of the groups with Muon, such as ``{"lr": 0.02}``.
        adamw: Options of the groups with AdamW.
        sample: An input of the model: a tensor, a tuple of positional or a dict of keyword arguments. None guesses one.
        include_frozen: Whether parameters with ``requires_grad=False`` get a group too.
        split: If False, each parameter is one matrix, as in checkpoints of groups without a split.

    Returns:
        Groups to pass to :class:`~torchboost.optim.MixedOptimizer`. Cost: two forward passes of a copy of the model.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The model does not run on ``sample``, a rule matches nothing, or there is nothing to train.
        IncompatibleError: The model is sharded by FSDP1.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> groups = muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 3e-3})
        >>> for group in groups:
        ...     print(group["rule"], group["lr"], group["param_names"])
        muon 0.02 ['2.weight']
        adamw 0.003 ['0.weight', '0.bias', '2.bias', '4.weight', '4.bias']
    """
    groups = param_groups(model, rules, include_frozen=include_frozen)
    failures: list[Exception] = []
    found = matrix_uses(model, sample, failures=failures)
    if found is None and split:
        _warn_of_types(model, failures)
    uses = _with_types(found, unwrap(model))
    presets = {"muon": dict(muon or {}), "adamw": dict(adamw or {})}
    chosen = {p: (n, group) for group in groups for p, n in zip(group["params"], group["param_names"], strict=True)}
    sorted_in: dict[frozenset[tuple[str, str]], ParamGroup] = {}
    rows = []
    for param, use in uses.items():
        if param not in chosen:
            continue
        use = use if split else use._replace(parts=None)
        name, group = chosen[param]
        options = options_of(group)
        reason = _reason(param, use)
        rule = options.get("rule", "muon" if reason is None else "adamw")
        why = reason or use.described(param)
        rows.append(Row(name, tuple(param.shape), rule, f"chosen; {why}" if "rule" in options else why))
        shape: ParamGroup = {} if use.parts is None else use.parts.options()
        shape |= {"stacked": True} if param.ndim > 2 and not use.filter else {}
        options = {"rule": rule, **presets.get(rule, {}), **(shape if rule == "muon" else {}), **options}
        described = frozenset((key, repr(value)) for key, value in options.items())
        members = sorted_in.setdefault(described, {"params": [], "param_names": [], **options})
        members["params"].append(param)
        members["param_names"].append(name)
    return MuonSplit(sorted(sorted_in.values(), key=lambda group: group["rule"] != "muon"), rows)


def _warn_of_types(model: nn.Module, failures: Sequence[Exception]) -> None:
    """Warn that the model was not run, if it has a layer that may be a fused projection, and values of its own."""
    bare = unwrap(model)
    if wrapper_of(model) == "fully_shard" or any(parameter.is_meta for parameter in bare.parameters()):
        return
    if _may_be_fused(bare):
        reads_tokens = any(isinstance(module, nn.Embedding) for module in bare.modules())
        why = f" ({in_a_line(failures[-1 if reads_tokens else 0])})" if failures else ""
        warnings.warn(
            f"Muon: this {type(bare).__name__} does not run on a guessed input{why}, so the types of its modules "
            "decide which matrices Muon trains, and fused projections, such as those of queries, keys and values, are "
            "not split. Pass a batch, such as sample=(x, y), to torchboost.optim.muon_from or muon_groups.",
            UserWarning,
            stacklevel=3,
        )


def _may_be_fused(model: nn.Module) -> bool:
    """Whether a layer has a multiple of its inputs as outputs that no layer after it or in its module reads.

    The wide layer of a perceptron has such a reader.
    """
    around = {child: parent for parent in model.modules() for child in parent.children()}
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for one, after in itertools.pairwise(layers):
        near = [after, *(m for m in around[one].children() if isinstance(m, nn.Linear))]
        wide = one.out_features > one.in_features > 0 and one.out_features % one.in_features == 0
        if wide and all(layer.in_features != one.out_features for layer in near):
            return True
    return False


def _reason(parameter: nn.Parameter, use: Use) -> str | None:
    """Return why a parameter is not for Muon, or None."""
    if parameter.ndim < 2:
        return "vector"
    if parameter.is_complex():
        return "complex"
    if use.place != "hidden":
        return _WHY[use.place]
    if use.reshaped:
        return "multiplied in another shape"
    if min(map(min, use.sides(parameter))) < 2 or (use.filter and parameter.shape[1] == 1):
        return "one row or column"
    return None


def _with_types(uses: Mapping[nn.Parameter, Use] | None, model: nn.Module) -> dict[nn.Parameter, Use]:
    """Return the uses, guessed from the types of modules for parameters that the pass did not reach, as of experts."""
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    holders = [module for module in model.modules() if isinstance(module, _MATRICES)]
    guesses = {parameter: Use("other") for parameter in model.parameters()}
    for position, module in enumerate(holders):
        place: Place = "hidden"
        if uses is None and position + 1 == len(holders):
            place = "output"
        elif uses is None and position == 0 and not tables:
            place = "input"
        filters = isinstance(module, AnyConv)
        members = module.parameters(recurse=False)
        guesses |= {parameter: Use(place, filters, parts=parts_of_gates(module, parameter)) for parameter in members}
    for table in tables:
        guesses |= dict.fromkeys(table.parameters(recurse=False), Use("lookup"))  # also if a head shares it
    reached = {parameter: use for parameter, use in (uses or {}).items() if use.place != "not reached"}
    agreed = agreed_parts({parameter: use.parts for parameter, use in reached.items()})
    for parameter, guess in guesses.items():
        guesses[parameter] = guess._replace(parts=guess.parts or agreed.get(parameter.shape))
    return guesses | reached
