"""Hidden matrices, filters and stacks go to Muon, everything else to AdamW; and optimizers that are built by name."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from tests.graph.test_matrix_uses import Experts
from tests.support.models import cnn, mlp
from torchboost.errors import NoEffectWarning
from torchboost.optim import (
    GroupRule,
    MixedOptimizer,
    MuonSplit,
    ScheduleFreeAdamW,
    muon_from,
    muon_groups,
    named_optimizer,
    no_decay,
)
from torchboost.workloads.models import GPT, BasicBlock, ResNet


def names(groups: MuonSplit) -> dict[str, set[str]]:
    return {
        rule: {name for group in groups if group["rule"] == rule for name in group["param_names"]}
        for rule in ("muon", "adamw")
    }


def test_a_gpt():
    model = GPT(20, context=8, layers=2, heads=2, width=8)
    groups = muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 3e-3, "weight_decay": 0.1})
    assert names(groups)["muon"] == {
        f"blocks.{n}.{part}.weight" for n in (0, 1) for part in ("qkv", "proj", "mlp.0", "mlp.2")
    }
    assert {(group["rule"], group["lr"]) for group in groups} == {("muon", 0.02), ("adamw", 3e-3)}
    placed = [param for group in groups for param in group["params"]]
    assert len(placed) == len(set(placed)) == len(list(model.parameters()))  # tied weights once
    MixedOptimizer(groups)
    lines = str(groups).splitlines()
    assert lines[0].split() == ["parameter", "shape", "rule", "why"]
    assert len(lines) == 3 + len(placed)
    assert lines[-1].startswith("muon:")
    assert any(line.endswith("vector") for line in lines)


def test_fused_projections_and_gates_are_split():
    model = GPT(20, context=8, layers=2, heads=2, width=8)
    groups = muon_groups(model, muon={"lr": 0.02})
    by_name = {name: group for group in groups for name in group["param_names"]}
    assert {name: group["split"] for name, group in by_name.items() if "split" in group} == {
        f"blocks.{n}.qkv.weight": 3 for n in (0, 1)
    }
    assert [line for line in str(groups).splitlines() if "3 matrices of 8 x 8" in line]
    whole = muon_groups(model, muon={"lr": 0.02}, split=False)
    assert len(whole) == len(groups) - 1
    assert all("split" not in group for group in whole)
    chosen = muon_groups(model, [GroupRule({"split": 1}, name="qkv")])
    assert {group.get("split", 1) for group in chosen} == {1}
    optimizer = MixedOptimizer(groups)
    model(torch.randint(0, 20, (2, 8))).square().mean().backward()
    optimizer.step()
    assert {group["split"] for group in optimizer.param_groups if group["rule"] == "muon"} == {1, 3}
    before = MixedOptimizer(whole).state_dict()
    with pytest.raises(ValueError, match=r"has 2 param groups, this optimizer 3.*muon_groups\(model, split=False\)"):
        optimizer.load_state_dict(before)
    MixedOptimizer(muon_groups(model, muon={"lr": 0.02}, split=False)).load_state_dict(before)


def test_the_table_says_what_is_split():
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.filters = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 3)
            self.heads, self.columns = nn.Linear(3, 12), nn.Parameter(torch.randn(3, 8))
            self.experts, self.head = nn.Parameter(torch.randn(2, 3, 6)), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.glu(self.filters(self.enter(x)), 1).mean((2, 3))
            many, few = self.heads(x).view(-1, 2, 6).split([4, 2], -1)
            x = x + few.sum((1, 2))[:, None] * many.sum((1, 2))[:, None]
            left, right = (x @ self.columns).chunk(2, -1)
            x = x * (left * right).mean(-1, keepdim=True)
            return self.head(sum(nn.functional.glu(x @ expert) for expert in self.experts))

    rows = {row.name: row.reason for row in muon_groups(Fused(), sample=torch.randn(2, 3, 6, 6)).rows}
    assert rows["filters.weight"] == "2 filters of 3 x 36"
    assert rows["heads.weight"] == "2 matrices of 8 x 3, 4 x 3"
    assert rows["columns"] == "2 matrices of 3 x 4"
    assert rows["experts"] == "2 stacks of 3 x 3"


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_types_know_gates_and_experts_that_are_not_chosen_are_split_as_the_others():
    class Gated(nn.Module):
        """Two inputs, so that none can be guessed."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)
            self.lstm = nn.LSTM(4, 6, proj_size=4, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.gru, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 9)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.lstm(self.table(x) + self.table(y))[0]
            return self.head(self.gru(self.attention(x, x, x)[0])[0])

    sample = (torch.zeros(2, 5, dtype=torch.long),) * 2
    for groups in (muon_groups(Gated()), muon_groups(Gated(), sample=sample)):
        split = {name: group.get("split", 1) for group in groups for name in group["param_names"]}
        assert {name: parts for name, parts in split.items() if parts > 1} == {
            **dict.fromkeys(("lstm.weight_ih_l0", "lstm.weight_hh_l0"), 4),
            **dict.fromkeys(("gru.weight_ih_l0", "gru.weight_hh_l0", "attention.in_proj_weight"), 3),
        }
    model = Routed()
    model.experts = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 24, bias=False), nn.GLU(), nn.Linear(12, 8, bias=False)) for _ in range(16)
    )
    groups = muon_groups(model, sample=torch.zeros(1, 1, dtype=torch.long))
    split = {name: group.get("split", 1) for group in groups for name in group["param_names"]}
    assert {name for name, parts in split.items() if parts == 2} == {f"experts.{n}.0.weight" for n in range(16)}


def test_filters_stems_heads_and_depthwise_filters():
    model = ResNet(BasicBlock, (1,), width=4)
    model.stages[0].append(nn.Conv2d(4, 4, 3, padding=1, groups=4))  # pyright: ignore
    found = names(muon_groups(model))
    assert found["muon"] == {"stages.0.0.conv1.weight", "stages.0.0.conv2.weight"}
    assert {"stem.0.weight", "fc.weight", "stages.0.1.weight"} <= found["adamw"]


def test_stacks_have_their_own_group():
    groups = muon_groups(Experts(), sample=torch.randn(2, 5, 4))
    stacked = [group for group in groups if group.get("stacked")]
    assert [group["param_names"] for group in stacked] == [["experts"]]
    assert stacked[0]["rule"] == "muon"
    assert names(groups)["muon"] == {"experts", "gate", "unused.weight"}  # the type decides about the last


def test_rules_override_and_share_groups():
    model = GPT(20, context=8, layers=2, heads=2, width=8)
    rules = [GroupRule({"rule": "adamw"}, name="qkv"), *no_decay(), GroupRule({"lr": 0.5}, name=r"proj\.weight")]
    groups = muon_groups(model, rules, muon={"lr": 0.02}, adamw={"lr": 3e-3})
    found = {name: group for group in groups for name in group["param_names"]}
    assert found["blocks.0.qkv.weight"]["rule"] == "adamw"
    assert found["blocks.0.qkv.weight"]["lr"] == 3e-3
    assert found["blocks.0.proj.weight"]["lr"] == 0.5
    assert found["norm.weight"]["weight_decay"] == 0.0
    assert "weight_decay" not in found["tokens.weight"]
    assert len(groups) == 4
    row = next(row for row in groups.rows if row.name == "blocks.0.qkv.weight")
    assert row.rule == "adamw"
    assert row.reason == "chosen; 3 matrices of 8 x 8"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrapped_models_have_bare_names_and_frozen_parameters_may_join():
    model = cnn()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    bare = muon_groups(model)
    assert names(bare) == names(muon_groups(torch.compile(model)))  # pyright: ignore
    assert "0.weight" not in {row.name for row in bare.rows}
    assert "0.weight" in {row.name for row in muon_groups(model, include_frozen=True).rows}


class Unknown(nn.Module):
    """Two inputs, so that none can be guessed."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.hidden, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.table = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.leave(self.hidden(self.enter(x + y)) + self.table[:1])


class Attending(Unknown):
    """Also a fused projection of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"fused": nn.Linear(8, 24), "out": nn.Linear(8, 8)})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        query, key, value = self.block["fused"](self.hidden(self.enter(x + y))).chunk(3, -1)
        return self.leave(self.block["out"](nn.functional.scaled_dot_product_attention(query, key, value)))


class Gated(Unknown):
    """Two wide layers side by side, whose product the third one reads whole."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"gate": nn.Linear(8, 32), "up": nn.Linear(8, 32), "down": nn.Linear(32, 8)})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.hidden(self.enter(x + y))
        return self.leave(self.block["down"](self.block["gate"](hidden) * self.block["up"](hidden)))


def test_types_decide_if_the_model_cannot_be_run():
    for plain in (Unknown(), Gated()):  # without a warning: no layer of them can be a fused projection
        assert "hidden.weight" in names(muon_groups(plain))["muon"]
    error = r"\(TypeError: .*forward\(\) missing 1 required positional argument: 'y'\)"
    with pytest.warns(
        UserWarning, match=rf"does not run on a guessed input {error}.*fused projections.*sample=\(x, y\)"
    ):
        groups = muon_groups(Attending())
    assert names(groups)["muon"] == {"hidden.weight", "block.fused.weight", "leave.weight"}
    with pytest.warns(
        UserWarning, match=r"guessed input \(AttributeError: 'NoneType' object has no attribute 'view'\)"
    ):
        muon_groups(Targeted())
    tokens = torch.zeros(2, 4, dtype=torch.long)
    rows = {row.name: row.reason for row in muon_groups(Targeted(), sample=(tokens, tokens)).rows}
    assert rows["fused.weight"] == "3 matrices of 6 x 6"
    sample = (torch.ones(2, 4), torch.ones(2, 4))
    assert names(muon_groups(Unknown(), sample=sample))["muon"] == {"hidden.weight"}
    with pytest.raises(ValueError, match="does not run on the sample"):
        muon_groups(Unknown(), sample=torch.ones(2, 4))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.fused, self.head = nn.Embedding(16, 6), nn.Linear(6, 18), nn.Linear(6, 16)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        query, key, value = self.fused(self.table(tokens)).chunk(3, -1)
        scores = self.head(nn.functional.scaled_dot_product_attention(query, key, value))
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.view(-1))


class Targeted(WithLoss):
    """Its targets have a default, and it does not run without them."""

    def forward(self, tokens: Tensor, targets: Any = None) -> Tensor:
        return super().forward(tokens, targets)


def test_a_model_that_computes_its_loss_is_run_on_guessed_targets():
    rows = {row.name: row.reason for row in muon_groups(WithLoss()).rows}
    assert rows["fused.weight"] == "3 matrices of 6 x 6"
    assert rows["head.weight"] == "head"


def test_matrices_of_one_row_computed_weights_and_complex_ones_are_for_adamw():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(1, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    assert names(muon_groups(model))["muon"] == {"3.weight"}
    model = nn.Sequential(nn.Linear(4, 4), weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 2))
    assert names(muon_groups(model))["muon"] == {"2.weight"}
    groups = muon_groups(Spectral())
    assert {row.name: row.reason for row in groups.rows}["mix"] == "complex"
    MixedOptimizer(groups)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.mix = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x).to(torch.complex64) @ self.mix).abs())


class Routed(nn.Module):
    """A mixture whose router chooses one expert per token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate = nn.Embedding(50, 8), nn.Linear(8, 16)
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(16))
        self.head = nn.Linear(8, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).flatten(0, 1)
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number in chosen.unique().tolist():
            at = (chosen == number).nonzero()[:, 0]
            out[at] += self.experts[number](x[at])
        return self.head(x + out)


class Bare(nn.Module):
    """Matrices as bare parameters, and a linear layer as head: the only layer of torch's with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.first, self.second = nn.Parameter(torch.randn(6, 12)), nn.Parameter(torch.randn(12, 6))
        self.head = nn.Linear(6, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head((self.table(tokens) @ self.first).relu() @ self.second)


def test_a_guessed_input_must_reach_the_whole_model_and_experts_that_are_not_chosen_follow_the_others():
    assert names(muon_groups(Bare()))["muon"] == {"first", "second"}
    for sample in [None, torch.zeros(1, 1, dtype=torch.long)]:
        found = names(muon_groups(Routed(), sample=sample))
        assert {name for name in found["muon"] if name.startswith("experts")} == {
            f"experts.{n}.weight" for n in range(16)
        }


def test_a_parameter_of_three_axes_that_is_multiplied_in_another_shape_is_for_adamw():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.query = nn.Linear(4, 16), nn.Parameter(torch.randn(16, 4, 8))
            self.stack, self.leave = nn.Parameter(torch.randn(3, 8, 8)), nn.Linear(32, 2)

        def forward(self, x: Tensor) -> Tensor:
            heads = torch.einsum("nd,dhk->nhk", self.enter(x).relu(), self.query)
            chosen = self.stack[torch.zeros(len(x), dtype=torch.long)]  # the experts of each row
            return self.leave(torch.bmm(heads, chosen).flatten(1))

    groups = muon_groups(Heads())
    assert names(groups)["muon"] == {"stack"}
    assert next(row for row in groups.rows if row.name == "query").reason == "multiplied in another shape"


def test_what_is_refused():
    with pytest.raises(ValueError, match="found no parameter to train"):
        muon_groups(mlp().requires_grad_(False))
    with pytest.raises(ValueError, match="run the model on one batch"):
        muon_groups(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))


def test_the_rate_of_muon_is_not_that_of_adamw():
    model = cnn()
    for rates, found in (({}, (0.02, 0.001)), ({"lr": 0.04}, (0.04, 0.001)), ({"adamw_lr": 3e-3}, (0.02, 3e-3))):
        optimizer = named_optimizer("muon", model, **rates)
        by_rule = {group["rule"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
        assert by_rule == {"muon": (found[0], 0.01), "adamw": (found[1], 0.01)}
        assert optimizer.title == f"Muon at {found[0]:g} and AdamW at {found[1]:g}"
    optimizer = named_optimizer("muon", model)
    assert isinstance(optimizer, MixedOptimizer)
    again = named_optimizer("muon", model, 0.1, adamw_lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    assert again.title == optimizer.title
    assert {param for group in optimizer.param_groups for param in group["params"]} == set(model.parameters())
    with pytest.warns(NoEffectWarning, match="no hidden matrix or filter in this Sequential, so AdamW trains all"):
        optimizer = named_optimizer("muon", nn.Sequential(nn.Linear(4, 2)))
    assert [group["rule"] for group in optimizer.param_groups] == ["adamw"]


@pytest.mark.parametrize("given", [None, torch.optim.SGD, torch.optim.AdamW])
def test_no_schedule_of_torch_moves_the_momentum_of_mixed_groups(given: Any):
    """It refuses to, and its message names the option; without that, the momentum stays."""
    model = mlp()
    optimizer = named_optimizer("muon", model)
    if given is not None:
        optimizer = muon_from(given(model.parameters(), lr=0.1), model, lr=0.02)
    rates, momenta = ([group.get(key) for group in optimizer.param_groups] for key in ("lr", "momentum"))
    for cyclic in (partial(OneCycleLR, total_steps=8), partial(CyclicLR, base_lr=0.0, step_size_up=4)):
        with pytest.raises(ValueError, match="cycle_momentum"):
            cyclic(optimizer, max_lr=rates)
        scheduler = cyclic(optimizer, max_lr=rates, cycle_momentum=False)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        assert [group.get("momentum") for group in optimizer.param_groups] == momenta
        first, second = (group["lr"] / rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
        assert first == pytest.approx(second)


def test_every_name_trains():
    for name, rates in (("muon", {"lr": 0.02, "adamw_lr": 0.01}), ("schedule_free_adamw", {"lr": 0.01})):
        torch.manual_seed(0)
        model = mlp()
        optimizer = named_optimizer(name, model, **rates)
        x, y = torch.randn(64, model[0].in_features), torch.randint(0, 4, (64,))
        losses = []
        for _ in range(40):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0], name


def test_the_default_rate_is_torchs_and_unknown_names_are_refused():
    optimizer = named_optimizer("schedule_free_adamw", mlp())
    assert isinstance(optimizer, ScheduleFreeAdamW)
    assert optimizer.param_groups[0]["lr"] == torch.optim.AdamW(mlp().parameters()).param_groups[0]["lr"]
    with pytest.raises(ValueError, match=r"found the name 'mun'.*muon, schedule_free_adamw.*Did you mean 'muon'"):
        named_optimizer("mun", mlp())
    with pytest.raises(ValueError, match=r"adamw_lr: found 0.01 .*give it as lr"):
        named_optimizer("schedule_free_adamw", mlp(), adamw_lr=0.01)
    wrong: Any
    for wrong, error in ((0.0, ValueError), (-1.0, ValueError), ("fast", TypeError)):
        with pytest.raises(error, match="lr"):
            named_optimizer("muon", mlp(), wrong)


def test_an_evaluation_on_the_weights_of_training_warns_once():
    model = mlp()
    optimizer: Any = named_optimizer("schedule_free_adamw", model, 0.01)
    x = torch.randn(8, model[0].in_features)

    def evaluated(model: nn.Module) -> None:
        with torch.no_grad():
            model.eval()(x)
        model.train()

    evaluated(model)  # nothing is trained yet
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.eval()
    evaluated(model)
    optimizer.train()
    model.eval()(x)  # with gradients: training with the norms at rest
    evaluated(copy.deepcopy(model))
    evaluated(pickle.loads(pickle.dumps(model)))
    with pytest.warns(UserWarning, match=r"weights of training.*optimizer.eval\(\)") as warned:
        evaluated(model)
    evaluated(model)
    assert len(warned) == 1
    assert warned[0].filename == __file__


def test_parameters_that_are_added_later_follow_adamw_at_its_rate() -> None:
    optimizer = named_optimizer("muon", mlp(), lr=0.02, adamw_lr=3e-3)
    optimizer.add_param_group({"params": [("added", nn.Parameter(torch.ones(3)))]})
    added = optimizer.param_groups[-1]
    assert (added["rule"], added["lr"], added["weight_decay"]) == ("adamw", 3e-3, 0.01)
