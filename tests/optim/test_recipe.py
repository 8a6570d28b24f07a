"""Muon from a given optimizer: the matrices follow Muon, the rest moves as before, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import cnn
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.optim import (
    FTRL,
    SGD,
    AdamWeightDecay,
    ClipNorm,
    Constant,
    GradientPipeline,
    MixedOptimizer,
    Momentum,
    Muon,
    ScheduleFreeAdamW,
    muon_from,
    muon_groups,
    no_decay,
    param_groups,
)
from torchboost.optim.rules.options import miscomputes

ADAM: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "amsgrad": True, "betas": (0.8, 0.9), "eps": 1e-3},
    {"weight_decay": 0.1, "maximize": True, "foreach": True},
    {"weight_decay": 0.1, "fused": True},
    {"foreach": False},
]
DESCENT: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "foreach": True},
    {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True},
]
OF_TORCH: list[tuple[Any, dict[str, Any]]] = [
    *((torch.optim.SGD, options) for options in DESCENT),
    *((torch.optim.Adam, options) for options in ADAM),
    *((torch.optim.AdamW, options) for options in ADAM),
]
OURS: list[tuple[Any, dict[str, Any]]] = [
    (SGD, {"momentum": 0.9, "transforms": (ClipNorm(0.1),)}),
    (Momentum, {"weight_decay": 0.1, "nesterov": True}),
    (AdamWeightDecay, {"weight_decay": 0.1, "nonfinite": "skip"}),
    (FTRL, {"l1": 0.01}),
    (MixedOptimizer, {"rule": "lamb", "weight_decay": 0.1}),
]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(10, 3))


def hidden(model: nn.Sequential) -> list[Any]:
    return [model[3].weight, model[5].weight]


def run(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], steps: int = 6, start: int = 0) -> None:
    """Take steps on gradients that depend on the number of the step only."""
    for number in range(start, start + steps):
        generator = torch.Generator().manual_seed(number)
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad if param.requires_grad else None
        for optimizer in optimizers:
            optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(left, right, strict=True))


@pytest.mark.parametrize(("kind", "options"), OF_TORCH)
def test_the_rest_moves_as_under_torchs_optimizer(kind: Any, options: dict[str, Any]):
    ours, theirs = network(), network()
    mixed = muon_from(kind(ours.parameters(), lr=0.05, **options), ours, lr=0.02)
    others = [param for param in theirs.parameters() if all(param is not one for one in hidden(theirs))]
    plain = kind(others, lr=0.05, **options)
    decay = plain.param_groups[0]["weight_decay"] * 0.05 / 0.02
    matrices = Muon(hidden(theirs), 0.02, decay, 0.9, maximize=options.get("maximize", False))
    run(ours, [mixed])
    run(theirs, [plain, matrices])
    assert equal(ours.parameters(), theirs.parameters())
    assert not equal(ours.parameters(), network().parameters())
    moved = {param for group in mixed.param_groups if group["rule"] == "muon" for param in group["params"]}
    assert moved == set(hidden(ours))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if mine not in moved:
            states = mixed.state[mine], plain.state[other]
            assert [k for k, v in states[0].items() if v is not None] == [
                k for k, v in states[1].items() if v is not None
            ]


@pytest.mark.parametrize(("kind", "options"), OURS)
def test_the_rest_moves_as_under_our_rules(kind: Any, options: dict[str, Any]):
    ours, theirs = network(), network()
    given = kind(ours.parameters(), lr=0.05, **options)
    mixed = muon_from(given, ours, lr=0.02)
    assert (mixed.transforms, mixed.nonfinite) == (given.transforms, given.nonfinite)
    if "transforms" in options:  # clipping sees all gradients together, so that there is nothing to compare with
        return
    others = [param for param in theirs.parameters() if all(param is not one for one in hidden(theirs))]
    plain = kind(others, lr=0.05, **options)
    run(ours, [mixed])
    run(theirs, [plain])
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True)
        if all(mine is not one for one in hidden(ours))
    )


def test_groups_keep_their_options_and_the_proportion_of_their_rates():
    model = network()
    named = dict(model.named_parameters())
    early, late = ({n: p for n, p in named.items() if n.startswith(("5", "7")) is last} for last in (False, True))
    groups: list[dict[str, Any]] = [
        {"params": list(early.items()), "lr": 0.01, "weight_decay": 0.3, "tag": "early"},
        {"params": list(late.items()), "lr": 0.1, "momentum": 0.5},
    ]
    given = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    before = copy.deepcopy(given.state_dict())
    mixed = muon_from(given, model, lr=0.04)
    assert given.state_dict() == before
    found = [(g["rule"], g["param_names"], g["lr"], g["weight_decay"], g["momentum"]) for g in mixed.param_groups]
    assert found[0] == ("sgd", ["0.weight", "0.bias", "1.weight", "1.bias", "3.bias"], 0.01, 0.3, 0.9)
    assert found[1][:2] == ("muon", ["3.weight"])
    assert found[1][2:] == pytest.approx((0.004, 0.75, 0.9))  # lr * weight_decay = 0.003, as in its group
    assert found[2] == ("sgd", ["5.bias", "7.weight", "7.bias"], 0.1, 0.0, 0.5)
    assert found[3] == ("muon", ["5.weight"], 0.04, 0.0, 0.9)
    assert [group.get("tag") for group in mixed.param_groups] == ["early", "early", None, None]
    assert {group["adjust_lr_fn"] for group in mixed.param_groups if group["rule"] == "muon"} == {"original"}


def test_the_largest_rate_counts_of_groups_that_have_matrices():
    model = network()
    groups = [
        {"params": [model[7].weight, model[7].bias], "lr": 0.5},
        {"params": [*hidden(model)], "lr": 0.1},
        {"params": list(model[0].parameters()), "lr": 0.2},
    ]
    mixed = muon_from(torch.optim.AdamW(groups), model, lr=0.02)
    assert [(group["rule"], group["lr"]) for group in mixed.param_groups] == [
        ("adamw", 0.5),
        ("muon", 0.02),
        ("adamw", 0.2),
    ]


def test_what_does_not_decay_does_not_decay_under_muon():
    model = network()
    groups = param_groups(model, no_decay(also=nn.Linear), defaults={"weight_decay": 0.1})
    mixed = muon_from(torch.optim.AdamW(groups), model, lr=0.02)
    assert {group["weight_decay"] for group in mixed.param_groups} == {0.0}


def test_frozen_foreign_and_left_out_parameters():
    model, loss = network(), nn.Linear(8, 8)
    model[3].requires_grad_(False)
    given = torch.optim.SGD([*model[:7].parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
    mixed = muon_from(given, model, lr=0.02)
    rules = {param: group["rule"] for group in mixed.param_groups for param in group["params"]}
    assert rules.keys() == {*model[:7].parameters(), *loss.parameters()}
    assert {rules[param] for param in loss.parameters()} == {"sgd"}
    assert (rules[model[3].weight], rules[model[5].weight]) == ("muon", "muon")
    before = weights(model)
    run(model, [mixed], steps=2)
    changed = [not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)]
    assert changed == [param.requires_grad and param in rules for param in model.parameters()]
    model[3].requires_grad_(True)  # later
    run(model, [mixed], steps=1, start=2)
    assert not torch.equal(before[4], model[3].weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.table(ids)).tanh())


def test_tied_weights_stay_with_the_rest():
    model = Tied()
    sample = torch.zeros(2, 3, dtype=torch.long)
    mixed = muon_from(torch.optim.AdamW(model.parameters()), model, lr=0.02, sample=sample)
    rules = [(group["rule"], group["params"]) for group in mixed.param_groups]
    assert rules[0][0] == "adamw"
    assert any(param is model.table.weight for param in rules[0][1])
    assert rules[1] == ("muon", [model.inner.weight])


def test_filters_and_stacks_take_the_form_that_their_groups_have_by_structure():
    model = cnn()
    expected = [group for group in muon_groups(model) if group["rule"] == "muon"]
    mixed = muon_from(torch.optim.SGD(model.parameters(), lr=0.1), model, lr=0.02)
    found = [group for group in mixed.param_groups if group["rule"] == "muon"]
    assert [group["params"] for group in found] == [group["params"] for group in expected] != []
    for group, form in zip(found, expected, strict=True):
        assert {key: group[key] for key in form if key not in ("params", "param_names")} == {
            key: value for key, value in form.items() if key not in ("params", "param_names")
        }


def test_without_a_matrix_to_train_it_warns():
    for model in (nn.Sequential(nn.Linear(4, 2)), network()):
        if len(model) > 1:
            model[3].requires_grad_(False)
            model[5].requires_grad_(False)
        given = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with pytest.warns(
            NoEffectWarning, match="no hidden matrix or filter to train in this Sequential, so SGD trains"
        ):
            mixed = muon_from(given, model, lr=0.02)
        assert {param for group in mixed.param_groups for param in group["params"]} == set(model.parameters())


def test_an_entry_that_torchs_class_does_not_read_stays_without_effect():
    ours, theirs = network(), network()
    junk = {"grad_centralization": True, "eps_uncorrected": True, "bias_correction": False, "stacked": True}
    plain = torch.optim.Adam([{"params": [p for p in theirs.parameters() if all(p is not m for m in hidden(theirs))]}])
    mixed = muon_from(torch.optim.Adam([{"params": list(ours.parameters()), **junk}]), ours, lr=0.02)
    assert [group["stacked"] for group in mixed.param_groups if group["rule"] == "muon"] == [False]
    run(ours, [mixed])
    run(theirs, [plain])
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other) or any(mine is one for one in hidden(ours))


def test_tensors_as_rates():
    model = network()
    rate = torch.tensor(0.05)
    mixed = muon_from(torch.optim.SGD(model.parameters(), lr=rate), model, lr=0.02)
    assert mixed.param_groups[0]["lr"] is rate
    assert mixed.param_groups[1]["lr"] == 0.02
    run(model, [mixed])


class OwnSGD(torch.optim.SGD):
    pass


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run(model, [optimizer], steps=1)
    return optimizer


def scheduled(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return optimizer


def piped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    GradientPipeline(ClipNorm(1.0)).attach(optimizer)
    return optimizer


REFUSED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "another rule": (lambda m: torch.optim.RMSprop(m.parameters()), r"found torch.optim.rmsprop.RMSprop.*muon_groups"),
    "a class of one's own": (lambda m: OwnSGD(m.parameters(), lr=0.1), "OwnSGD, whose rule cannot be kept"),
    "schedule-free": (lambda m: ScheduleFreeAdamW(m.parameters()), "ScheduleFreeAdamW, whose rule cannot be kept"),
    "Muon": (lambda m: MixedOptimizer(muon_groups(m)), "has Muon already"),
    "steps": (stepped, "has a state.*load a checkpoint afterwards"),
    "a schedule": (
        scheduled,
        r"found a schedule on the SGD.*build the schedule after muon_from, on the optimizer that it returns",
    ),
    "hooks": (piped, "found hooks on the steps of this SGD"),
    "a schedule as rate": (lambda m: SGD(m.parameters(), lr=Constant(0.1)), "found a schedule as lr of a SGD"),
    "a list as decay": (lambda m: SGD(m.parameters(), weight_decay=[0.1, 0.2]), "found a schedule as weight_decay"),
    "an initial rate": (
        lambda m: torch.optim.SGD([{"params": list(m.parameters()), "initial_lr": 0.1}], lr=0.1),
        "found 'initial_lr' in the groups.*build the schedule after muon_from",
    ),
    "an option": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, differentiable=True), "differentiable: found True"),
    "a rate of 0": (lambda m: torch.optim.SGD(m.parameters(), lr=0.0), "the learning rate 0 for all hidden matrices"),
    "LBFGS": (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS, whose rule cannot be kept"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused(name: str):
    build, message = REFUSED[name]
    model = network()
    optimizer = build(model)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(IncompatibleError, match=message):
        muon_from(optimizer, model, lr=0.02)
    assert optimizer.state_dict()["param_groups"] == before


def test_bad_arguments():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong: Any
    for wrong, error in ((0.0, ValueError), (-1.0, ValueError), (float("nan"), ValueError), ("fast", TypeError)):
        with pytest.raises(error, match="lr"):
            muon_from(optimizer, model, lr=wrong)
    with pytest.raises(ValueError, match="belongs to the model"):
        muon_from(optimizer, network(), lr=0.02)
    with pytest.raises(TypeError, match="optimizer"):
        muon_from(model, model, lr=0.02)  # pyright: ignore[reportArgumentType]


def test_a_resumed_run_is_bit_identical():
    def build(seed: int) -> tuple[nn.Module, MixedOptimizer]:
        model = network(seed)
        given = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
        return model, muon_from(given, model, lr=0.02)

    model, optimizer = build(0)
    run(model, [optimizer], steps=3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(model, [optimizer], steps=3, start=3)
    other, resumed = build(1)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    run(other, [resumed], steps=3, start=3)
    assert equal(model.parameters(), other.parameters())


def test_the_fused_kernels_of_the_forms_are_right_here():
    """The forms above compare with torch's kernels, which must not be among those that compute wrong steps."""
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        assert not miscomputes(kind, torch.float32, torch.device("cpu"))
