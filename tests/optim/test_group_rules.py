"""Param groups by rules: what a rule selects, how rules merge, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F

from tests.support.models import BottleneckNet, TinyGPT, batch_for, cnn, mlp
from tests.support.ranks import run_ranks
from torchboost.errors import IncompatibleError
from torchboost.graph.blocks import blocks_of
from torchboost.optim import GroupRule, layer_wise_decay, no_decay, param_groups
from torchboost.workloads.models import GPT


def gpt() -> GPT:
    """Head and token embedding share one weight."""
    return GPT(16, context=8, layers=2, heads=2, width=8)


def names(groups: list[dict[str, Any]]) -> list[list[str]]:
    return [group["param_names"] for group in groups]


def options_by_name(groups: list[dict[str, Any]], key: str) -> dict[str, object]:
    return {name: group.get(key) for group in groups for name in group["param_names"]}


def holds(text: str, **options: object) -> GroupRule:
    return GroupRule(options or {"lr": 0.1}, name=text)


def test_a_rule_selects_by_module_type_name_and_function_together():
    class Mine(nn.Linear):
        pass

    model = nn.Sequential(Mine(2, 2), nn.Sequential(nn.LayerNorm(2)), nn.Conv1d(2, 2, 1))
    assert names(param_groups(model, [GroupRule({"lr": 0.1}, modules=nn.Linear)]))[0] == ["0.weight", "0.bias"]
    inner = param_groups(model[1], [GroupRule({"lr": 0.1}, modules=nn.Sequential)])
    assert names(inner) == [["0.weight", "0.bias"]]
    both = param_groups(model, [GroupRule({"lr": 0.1}, modules=(nn.LayerNorm, nn.Conv1d))])
    assert names(both) == [["1.0.weight", "1.0.bias", "2.weight", "2.bias"], ["0.weight", "0.bias"]]

    for pattern in (r"\.qkv\.", re.compile(r"\.QKV\.", re.IGNORECASE)):
        first, _ = param_groups(TinyGPT(), [GroupRule({"lr": 0.1}, name=pattern)])
        assert first["param_names"] == [f"blocks.{i}.qkv.{kind}" for i in (0, 1) for kind in ("weight", "bias")]

    images = cnn()

    def strided(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
        assert images.get_parameter(name) is parameter
        assert parameter in set(module.parameters(recurse=False))
        return isinstance(module, nn.Conv2d) and parameter.shape[0] == 16

    assert names(param_groups(images, [GroupRule({"lr": 0.1}, when=strided)]))[0] == ["4.weight"]
    rule = GroupRule({"lr": 0.1}, modules=nn.LayerNorm, name=r"^blocks\.0", when=lambda n, p, m: n.endswith("weight"))
    assert names(param_groups(TinyGPT(), [rule]))[0] == ["blocks.0.norm1.weight", "blocks.0.norm2.weight"]


def test_rules_merge_and_the_later_one_wins():
    model = mlp()
    rules = [holds("^[24]", lr=0.2, weight_decay=0.1), holds("^4", lr=0.4)]
    groups = param_groups(model, rules, defaults={"lr": 0.1, "betas": (0.8, 0.9)})
    assert names(groups) == [["2.weight", "2.bias"], ["4.weight", "4.bias"], ["0.weight", "0.bias"]]
    assert [(group["lr"], group.get("weight_decay")) for group in groups] == [(0.2, 0.1), (0.4, 0.1), (0.1, None)]
    assert all(group["betas"] == (0.8, 0.9) for group in groups)
    ordered = param_groups(mlp(), [holds("bias"), holds("^4"), holds("^0")])
    assert names(ordered) == [["2.bias"], ["4.bias"], ["0.bias"], ["4.weight"], ["0.weight"], ["2.weight"]]
    assert names(param_groups(mlp(), [])) == [[name for name, _ in mlp().named_parameters()]]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs, labels = batch_for(model, torch.Generator().manual_seed(1))
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


class ScaleNorm(nn.Module):
    """A norm that torch does not know, whose attributes are called neither weight nor bias."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gain, self.temperature = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(()))


def test_no_norm_decays():
    for norm in (
        *(nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, affine=True), nn.GroupNorm(2, 4)),
        *(nn.LayerNorm([4, 3, 3]), nn.RMSNorm([3, 3]), ScaleNorm(4)),
    ):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), norm)
        decays = options_by_name(param_groups(model, no_decay(), defaults={"weight_decay": 0.1}), "weight_decay")
        assert {name for name, decay in decays.items() if decay} == {"0.weight"}, norm


def test_structure_decides_not_the_name_and_embeddings_decay_unless_they_are_named():
    model = nn.Sequential(nn.ParameterDict({"bias": torch.zeros(3, 3)}), ScaleNorm(1, 4, 1))
    free, rest = param_groups(model, no_decay())
    assert (free["param_names"], rest["param_names"]) == (["1.temperature"], ["0.bias", "1.gain"])
    decays = options_by_name(param_groups(model, no_decay(also=ScaleNorm)), "weight_decay")
    assert decays == {"0.bias": None, "1.gain": 0.0, "1.temperature": 0.0}
    model = TinyGPT()
    assert options_by_name(param_groups(model, no_decay()), "weight_decay")["tokens.weight"] is None
    decays = options_by_name(param_groups(model, no_decay(also=nn.Embedding)), "weight_decay")
    assert (decays["tokens.weight"], decays["positions.weight"], decays["head.weight"]) == (0.0, 0.0, None)
    bare = nn.Linear(2, 2, bias=False)  # without vectors
    assert names(param_groups(bare, no_decay())) == [["weight"]]
    with pytest.raises(ValueError, match=r"rules\[1\].*modules=Embedding.*matches no parameter of Linear"):
        param_groups(bare, no_decay(also=nn.Embedding))


class Reversed(nn.Module):
    """The order of registration is not that of execution."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.stem = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x))


def test_the_learning_rate_falls_by_the_factor_from_block_to_block():
    for build in [cnn, mlp, BottleneckNet, TinyGPT, gpt, Reversed]:
        model = build()
        rates = options_by_name(param_groups(model, layer_wise_decay(model, 0.1, factor=0.5)), "lr")
        blocks = blocks_of(model)
        first_name = {parameter: name for name, parameter in model.named_parameters()}
        expected = {
            first_name[parameter]: 0.1 * 0.5 ** (len(blocks) - 1 - index)
            for index, block in enumerate(blocks)
            for parameter in block.parameters
        }
        assert rates == pytest.approx(expected)
        assert len(rates) == len(list(model.parameters()))


def test_layer_wise_decay_goes_together_with_other_rules():
    model = gpt()
    rules = [*layer_wise_decay(model, 0.1, factor=0.5), *no_decay(), holds("^head", lr=1.0)]
    groups = param_groups(model, rules, defaults={"weight_decay": 0.01})
    rates, decays = options_by_name(groups, "lr"), options_by_name(groups, "weight_decay")
    assert (rates["tokens.weight"], decays["tokens.weight"]) == (1.0, 0.01)
    assert (rates["blocks.1.qkv.bias"], decays["blocks.1.qkv.bias"]) == (0.05, 0.0)
    assert len(torch.optim.AdamW(groups).param_groups) == 6
    rates = options_by_name(param_groups(Reversed(), layer_wise_decay(Reversed(), 1.0, factor=0.5)), "lr")
    assert (rates["head.weight"], rates["stem.weight"]) == (1.0, 0.5)


def test_rules_of_blocks_fit_a_copy_and_no_other_model():
    model = TinyGPT()
    rules = pickle.loads(pickle.dumps(layer_wise_decay(model, 0.1, factor=0.5)))
    assert rules == layer_wise_decay(model, 0.1, factor=0.5)
    assert names(param_groups(copy.deepcopy(model), rules)) == names(param_groups(model, rules))
    with pytest.raises(ValueError, match=r"\^\(tokens.* matches no parameter"):
        param_groups(cnn(), rules)


def test_tied_weights_are_one_parameter_that_every_place_selects():
    model = gpt()
    for rule in (holds("^head"), holds("^tokens"), GroupRule({"lr": 0.1}, modules=nn.Embedding, name="^tokens")):
        groups = param_groups(model, [rule])
        assert names(groups)[0] == ["tokens.weight"]
        assert sum(parameter is model.head.weight for group in groups for parameter in group["params"]) == 1
    with pytest.raises(ValueError, match="matches no parameter"):  # no place is both
        param_groups(model, [GroupRule({"lr": 0.1}, modules=nn.Embedding, name="^head")])
    shared = nn.Linear(2, 2)  # a module under two names
    model = nn.ModuleDict({"first": shared, "second": shared})
    assert names(param_groups(model, [holds("^second")])) == [["first.weight", "first.bias"]]


def test_frozen_parameters_stay_out_unless_they_are_wanted():
    model = mlp()
    model[0].requires_grad_(False)
    rules = [holds("^0"), holds("^4")]
    assert names(param_groups(model, rules)) == [["4.weight", "4.bias"], ["2.weight", "2.bias"]]
    assert names(param_groups(model, rules, include_frozen=True))[0] == ["0.weight", "0.bias"]
    assert len(param_groups(model, layer_wise_decay(model, 0.1, factor=0.5))) == 2


def test_wrappers_leave_the_names_alone():
    for wrap in [nn.DataParallel, lambda model: torch.compile(model, backend="eager")]:
        model = mlp()
        wrapped = wrap(model)
        rules = [holds(r"^4\.bias$"), *layer_wise_decay(wrapped, 0.1, factor=0.5)]
        groups = param_groups(wrapped, rules)
        assert names(groups) == names(param_groups(model, rules))
        assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.parameters()}


def _sharded() -> list[list[str]]:
    old = nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    for call in (lambda: param_groups(old, no_decay()), lambda: layer_wise_decay(old, 0.1, factor=0.5)):
        with pytest.raises(IncompatibleError, match="FSDP1"):
            call()
    model = mlp()
    fully_shard(model)
    groups = param_groups(model, [*layer_wise_decay(model, 0.1, factor=0.5), *no_decay()])
    step(model, torch.optim.AdamW(groups))
    return names(groups)


@pytest.mark.dist
def test_sharded_by_fsdp2_the_groups_are_the_same_and_fsdp1_is_refused():
    model = mlp()
    expected = names(param_groups(model, [*layer_wise_decay(model, 0.1, factor=0.5), *no_decay()]))
    assert run_ranks(_sharded, 2) == [expected] * 2


MODELS = [cnn(), mlp(), BottleneckNet(), TinyGPT(), gpt(), nn.ModuleList([(shared := nn.Linear(2, 2)), shared])]
RULES = st.builds(
    GroupRule,
    st.fixed_dictionaries({"lr": st.floats(0, 1)}, optional={"weight_decay": st.floats(0, 1)}),
    modules=st.none() | st.sampled_from([nn.Linear, nn.Conv2d, (nn.Embedding, nn.LayerNorm), nn.Sequential]),
    name=st.sampled_from(["bias$", "weight", r"\d", "head", "^blocks", "nothing"]),
    when=st.none() | st.just(lambda name, parameter, module: parameter.numel() % 2 == 0),
    optional=st.just(True),
)


@settings(max_examples=40)
@given(st.sampled_from(MODELS), st.lists(RULES, max_size=5), st.data())
def test_any_rules_put_every_trainable_parameter_into_exactly_one_group(model, rules, data):
    flags = data.draw(st.lists(st.booleans(), min_size=60, max_size=60))
    parameters = list(model.parameters())
    for flag, parameter in zip(flags, parameters, strict=False):
        parameter.requires_grad_(flag)
    parameters[0].requires_grad_(True)
    everything = data.draw(st.booleans())
    groups = param_groups(model, rules, include_frozen=everything)
    wanted = {id(p): name for name, p in model.named_parameters() if everything or p.requires_grad}
    placed = [(id(p), n) for group in groups for p, n in zip(group["params"], group["param_names"], strict=True)]
    assert sorted(placed) == sorted(wanted.items())
    position = {parameter: index for index, parameter in enumerate(wanted)}
    for group in groups:
        order = [position[id(parameter)] for parameter in group["params"]]
        assert order == sorted(order)
        assert order
    torch.optim.AdamW(groups)


def test_options_are_copied_a_rate_has_any_form_and_an_optional_rule_may_match_nothing():
    options = {"lr": 0.1}
    rule = GroupRule(options, name="0")
    options["lr"] = 5.0
    (first, _), (again, _) = param_groups(mlp(), [rule]), param_groups(mlp(), [rule])
    first["lr"] = 3.0
    assert (rule.options, again["lr"]) == ({"lr": 0.1}, 0.1)
    assert len({rule, GroupRule({"lr": 0.1}, name="0"), GroupRule({"lr": 0.1}, name="1")}) == 2
    for lr in (torch.tensor(0.1), [0.1, 0.2], lambda step: 0.1):
        assert param_groups(mlp(), [], defaults={"lr": lr})[0]["lr"] is lr
    rule = GroupRule({"lr": 0.1}, name="nothing", optional=True)
    assert repr(rule) == "GroupRule({'lr': 0.1}, name='nothing', optional=True)"
    assert len(param_groups(mlp(), [rule])) == 1


def test_a_rule_that_matches_nothing_is_named_with_what_there_is():
    with pytest.raises(ValueError, match=r"rules\[1\]: .*name='\^haed\\\\\.'.*Its 29 parameters begin with 'tok"):
        param_groups(TinyGPT(), [holds("bias"), holds(r"^haed\.")])
    kinds = (
        r"modules=\(Conv1d, Conv3d\)\) matches no parameter of Sequential.*Sequential, Conv2d, BatchNorm2d, Linear\."
    )
    with pytest.raises(ValueError, match=kinds):
        param_groups(cnn(), [GroupRule({"lr": 0.1}, modules=(nn.Conv1d, nn.Conv3d))])


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: GroupRule(["lr"], name="x"), TypeError, r"options: found \['lr'\]; give a dict"),
    (lambda: GroupRule({}, name="x"), ValueError, "options: found none"),
    (lambda: GroupRule({1: 2}, name="x"), TypeError, "the key 1; give names"),
    (lambda: GroupRule({"params": []}, name="x"), ValueError, "found 'params', which param_groups"),
    (lambda: holds("x", lr="1e-3"), TypeError, "options: lr: found '1e-3'; give a finite number"),
    (lambda: holds("x", lr=None), TypeError, "options: lr: found None"),
    (lambda: holds("x", weight_decay=-0.1), ValueError, "options: weight_decay: found -0.1"),
    (lambda: holds("x", weight_decay=True), TypeError, "options: weight_decay: found True"),
    (lambda: holds("x", weight_decay={}), TypeError, "options: weight_decay: found {}"),
    (lambda: holds("x", grad_centralization=1), TypeError, "grad_centralization: found 1; give True"),
    (lambda: GroupRule({"lr": 0.1}), ValueError, "no criterion; give modules, name or when"),
    (lambda: GroupRule({"lr": 0.1}, modules=nn.ReLU()), TypeError, r"modules: found ReLU\(\)"),
    (lambda: GroupRule({"lr": 0.1}, modules=[nn.ReLU]), TypeError, "modules: found .*not an instance"),
    (lambda: GroupRule({"lr": 0.1}, name=1), TypeError, "name: found 1; give a regular"),
    (lambda: GroupRule({"lr": 0.1}, name=re.compile(b"x")), TypeError, "name: found re.compile"),
    (lambda: holds("("), ValueError, r"name: found '\(', not a valid regular"),
    (lambda: GroupRule({"lr": 0.1}, when=bool), TypeError, "when: found .*give a function"),
    (lambda: no_decay(also="Embedding"), TypeError, "also: found 'Embedding'; give a module type"),
    (lambda: param_groups([], []), TypeError, r"model must be a torch\.nn\.Module, found list"),
    (lambda: param_groups(mlp(), [{"lr": 1}]), TypeError, r"rules\[0\]: found {'lr': 1}; give a Group"),
    (lambda: param_groups(mlp(), [no_decay()]), TypeError, r"unpack tuples: \[\*no_decay\(\)\]"),
    (lambda: param_groups(mlp(), [], defaults=0.1), TypeError, "defaults: found 0.1; give a dict"),
    (lambda: param_groups(mlp(), [], defaults={"lr": -1.0}), ValueError, "defaults: lr: found -1.0"),
    (
        lambda: param_groups(mlp(), [GroupRule({"lr": 0.1}, when=lambda n, p, m: None)]),
        TypeError,
        "'when' returned None for '0.weight'; return True or False",
    ),
    (
        lambda: param_groups(mlp().requires_grad_(False), []),
        ValueError,
        "no parameter to train among the 6 of Sequential; set requires_grad, or give include_frozen=True",
    ),
    (lambda: param_groups(nn.LazyLinear(2), []), ValueError, "'weight' of a lazy module, which has no shape"),
    (lambda: layer_wise_decay([], 0.1, factor=0.5), TypeError, "model must be"),
    (lambda: layer_wise_decay(nn.ReLU(), 0.1, factor=0.5), ValueError, "no parameters in ReLU"),
    (lambda: layer_wise_decay(nn.LazyLinear(2), 0.1, factor=0.5), ValueError, "lazy module"),
    (lambda: layer_wise_decay(mlp(), 0.0, factor=0.5), ValueError, "base_lr: found 0.0"),
    (lambda: layer_wise_decay(mlp(), 0.1, factor="0.5"), TypeError, "factor: found '0.5'"),
    (lambda: layer_wise_decay(mlp(), 0.1, factor=1.5), ValueError, "factor: found 1.5.*at most 1"),
]


def test_bad_input_is_refused_with_what_was_found():
    for call, error, message in REFUSED:
        with pytest.raises(error, match=message):
            call()
