"""What each contestant of a benchmark is: its name, its loop, and what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.bench.test_bench import BATCHES, HALVING, accuracy, network, planner_of, sgd, tiny
from torchboost.algorithms.grad_accumulation import GradAccumulation
from torchboost.bench.contestants import Recipe, averaged, build_loop, plan_for, version_of
from torchboost.bench.factory import Factory, Parts
from torchboost.errors import IncompatibleError
from torchboost.optim import ScheduleFreeAdamW
from torchboost.plan import Plan


def weights(name: str, **settings: Any) -> torch.Tensor:
    loop = build_loop(Recipe.parse(name), tiny(), seed=1, steps=8, **settings)
    for inputs, labels in BATCHES:
        loop.step(inputs, labels)
    return torch.cat([p.detach().flatten() for p in loop.parts.model.parameters()])


def test_names_of_contestants() -> None:
    for name, kind, planned, compiled in (
        ("stock", "stock", (), False),
        ("hand", "hand", (), False),
        ("hand+compile", "hand", (), True),
        ("hand+compile+less_bn", "algorithm", ("less_bn",), True),
        ("stock+compile", "algorithm", ("compile",), False),
        ("O2", "level", (), False),
        ("O1+compile", "level", ("compile",), False),
    ):
        recipe = Recipe.parse(name)
        assert (recipe.kind, recipe.planned, recipe.compiled_by_hand) == (kind, planned, compiled)
    for name, message in {"stok": "found 'stok'.*Did you mean 'stock'", "hand+": "once", "hand+a+a": "once"}.items():
        with pytest.raises(ValueError, match=message):
            Recipe.parse(name)


def test_stock_is_the_loop_one_would_write_and_o0_the_same_bit_for_bit() -> None:
    torch.manual_seed(1)
    model = network()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    for inputs, labels in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(weights("stock"), expected)
    assert torch.equal(weights("O0"), expected)


@pytest.mark.parametrize(
    "name", ["stock", "hand", "O0", "O1", "stock+gradient_centralization", "muon", "schedule_free_adamw"]
)
def test_every_contestant_clips_its_gradients_as_the_factory_says(name: str, tmp_path: Path) -> None:
    clipped: list[float] = []

    def clip(model: nn.Module) -> None:
        clipped.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.0)))

    def make(seed: int) -> Any:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, F.cross_entropy, BATCHES, None, None, None, clips

    if name in ("muon", "schedule_free_adamw"):
        file = tmp_path / "boost.json"
        file.write_text(json.dumps({"recipe": {"optimizer": name, "lr": 0.02}}), encoding="utf-8")
        name = str(file)
    for clips in (clip, None):
        loop = build_loop(Recipe.parse(name), replace(tiny(), make=make), seed=1, steps=4)
        first = [weight.detach().clone() for weight in loop.parts.model.parameters()]
        for inputs, labels in BATCHES:
            loop.step(inputs, labels)
        same = all(map(torch.equal, first, loop.parts.model.parameters()))
        assert same is (clips is clip)
    assert len(clipped) == len(BATCHES)
    assert min(clipped) > 0


def test_a_model_in_evaluation_mode_is_trained_in_training_mode() -> None:
    for name in ("stock", "hand", "O0", "O1"):
        loop = build_loop(Recipe.parse(name), tiny(train=False), seed=1, steps=8)
        assert all(module.training for module in (*loop.parts.model.modules(), *loop.predict.modules()))


def test_the_hand_loop_computes_the_same_and_in_bfloat16_only_where_that_is_fast(bfloat16: Callable[..., None]) -> None:
    for speed, half in ((0.5, False), (2.0, True)):
        bfloat16(speed, 2.0)
        seen: list[torch.dtype] = []
        loop = build_loop(Recipe.parse("hand"), tiny(), seed=1, steps=8)
        loop.parts.model.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.dtype))
        loop.step(*BATCHES[0])
        assert loop.parts.model.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)
        assert loop.notes == [f"by hand: fused optimizer, channels-last{', bfloat16 autocast' if half else ''}"]
        assert seen == [torch.bfloat16 if half else torch.float32]
    bfloat16(0.5, 2.0)
    torch.testing.assert_close(weights("hand"), weights("stock"), rtol=1e-3, atol=1e-5)


def test_the_hand_loop_takes_every_form_of_inputs_with_convolutions() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, images: Tensor, scale: Tensor) -> Tensor:
            seen.append(images.is_contiguous(memory_format=torch.channels_last))
            return self.layers(images) * scale[:, None]

    def make(seed: int) -> Parts:
        model = Named()
        images, labels = BATCHES[0]
        return Parts(model, sgd(model), F.cross_entropy, [({"images": images, "scale": torch.ones(8)}, labels)])

    seen: list[bool] = []
    loop = build_loop(Recipe.parse("hand"), replace(tiny(), make=make), seed=1, steps=8)
    loop.step(*loop.parts.batches[0])  # pyright: ignore[reportIndexIssue]
    assert seen == [True]


def test_the_hand_loop_keeps_the_groups_of_the_user_and_is_fused_where_that_exists() -> None:
    for kind, fused in ((torch.optim.SGD, True), (torch.optim.Rprop, False)):

        def make(seed: int, kind: Any = kind) -> Parts:
            model = network()
            groups = [{"params": [model.get_parameter("0.weight")], "lr": 0.5}, {"params": [model[4].weight]}]
            return Parts(model, kind(groups, lr=0.1), F.cross_entropy, BATCHES)

        loop = build_loop(Recipe.parse("hand"), replace(tiny(), make=make), seed=1, steps=8)
        assert type(loop.parts.optimizer) is kind
        groups = loop.parts.optimizer.param_groups
        assert [(group["lr"], bool(group.get("fused"))) for group in groups] == [(0.5, fused), (0.1, fused)]
        assert groups[0]["params"][0] is loop.parts.model.get_parameter("0.weight")
        assert ("fused optimizer" in loop.notes[0]) is fused


def test_levels_and_additions_go_through_the_planner() -> None:
    loop = build_loop(Recipe.parse("O1"), tiny(), seed=1, steps=8, planner=HALVING)
    assert [(row.name, row.settings) for row in loop.algorithms] == [("halved", "Halved()")]
    assert [(row.name, row.reason) for row in loop.dropped] == [("less_bn", "not today")]
    for base in ("stock", "hand"):
        assert not torch.equal(weights(f"{base}+halved", planner=HALVING), weights(base))
    seen: list[tuple[str, tuple[str, ...]]] = []

    def planner(level: str, added: Sequence[str], model: nn.Module, optimizer: Optimizer, total_steps: int) -> Plan:
        seen.append((level, tuple(added)))
        return Plan(level=level, mode="auto", algorithms=())

    for name in ("stock", "hand", "hand+less_bn", "O2", "O1+compile"):
        build_loop(Recipe.parse(name), tiny(), seed=0, steps=8, planner=planner)
    assert seen == [("O0", ("less_bn",)), ("O2", ()), ("O1", ("compile",))]


def test_a_configuration_takes_additions_as_levels_do(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for extra, settings in (
        ({}, "GradientCentralization()"),
        ({"gradient_centralization": False}, "GradientCentralization()"),
        ({"grad_freeze": {"groups": 2}}, "groups=2"),
    ):
        Path("half.json").write_text(json.dumps({"recipe": {"length": 0.5}, "extra": extra}), encoding="utf-8")
        added = "gradient_centralization" if "grad_freeze" not in extra else "grad_freeze"
        recipe = Recipe.parse(f"half.json+{added}")
        assert (recipe.kind, recipe.base, recipe.planned) == ("config", "half.json", (added,))
        loop = build_loop(recipe, tiny(), seed=1, steps=8)
        assert loop.steps == 4
        assert any(settings in row.settings for row in loop.algorithms), loop.algorithms
    assert version_of(f"half.json+{added}") == version_of("half.json") != ""
    with pytest.raises(ValueError, match="name each addition once"):
        Recipe.parse("half.json+")


def test_a_schedule_of_the_user_stays_with_a_schedule_free_optimizer_of_the_user(tmp_path: Path) -> None:
    file, seen = tmp_path / "boost.json", list[int]()
    file.write_text('{"recipe": {"length": 0.5}}', encoding="utf-8")

    def schedule(optimizer: Optimizer, steps: int) -> Any:
        seen.append(steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def make(seed: int) -> Parts:
        model = network()
        return Parts(model, ScheduleFreeAdamW(model.parameters()), F.cross_entropy, BATCHES, accuracy, schedule)

    build_loop(Recipe.parse(str(file)), replace(tiny(), make=make), seed=0, steps=8)
    assert seen == [4]


def test_a_schedule_free_configuration_is_evaluated_with_its_average(tmp_path: Path) -> None:
    file = tmp_path / "boost.json"
    file.write_text('{"recipe": {"optimizer": "schedule_free_adamw", "lr": 0.01}}', encoding="utf-8")
    loop = build_loop(Recipe.parse(str(file)), tiny(), seed=0, steps=4)
    for inputs, targets in BATCHES:
        loop.step(inputs, targets)
    weight = next(loop.parts.model.parameters())
    trained = weight.detach().clone()
    with averaged(loop.parts.optimizer):
        assert not torch.equal(weight, trained)
    assert torch.allclose(weight, trained, atol=1e-6)


def test_a_level_is_boosted_and_decided_at_the_first_step() -> None:
    loop = build_loop(Recipe.parse("O1"), tiny(), seed=1, steps=8)
    assert loop.notes == []
    loop.step(*BATCHES[0])
    assert "channels_last" in {row.name for row in loop.algorithms}
    assert any(note.startswith("channels_last: exact here") for note in loop.notes), loop.notes
    assert "compile" in {row.name for row in loop.dropped}
    assert [row.name for row in build_loop(Recipe.parse("O0"), tiny(), seed=1, steps=8).algorithms] == []


def test_a_lever_without_effect_is_said_to_have_none() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.words(ids).mean(1))  # reads the padding

    def make(seed: int) -> Parts:
        model = Padded()
        return Parts(model, sgd(model), F.cross_entropy, BATCHES)

    loop = build_loop(Recipe.parse("O1"), replace(tiny(), make=make), seed=1, steps=8)
    ids = torch.tensor([[1, 2, 3, 4], [5, 0, 0, 0]])
    for _ in range(3):
        loop.step(ids, torch.tensor([0, 1]))
    assert [note for note in loop.notes if note.startswith("unpad: ")] == [
        "unpad: not in effect: mean: it combines positions"
    ]


def test_the_loop_by_hand_alone_cuts_its_batches_to_the_longest_sequence() -> None:
    widths: dict[str, list[int]] = {}

    def factory(name: str) -> Factory:
        def make(seed: int) -> Parts:
            model = nn.Sequential(nn.AdaptiveAvgPool2d(8), network())
            model.register_forward_pre_hook(lambda _, args: widths.setdefault(name, []).append(args[0].shape[-1]))
            return Parts(model, sgd(model), F.cross_entropy, BATCHES)

        return replace(tiny(), make=make, shorten=lambda inputs: inputs[..., :6])

    for name in ("stock", "hand", "O0"):
        loop = build_loop(Recipe.parse(name), factory(name), seed=1, steps=8)
        loop.step(*BATCHES[0])
        assert any("padded to their longest sequence" in note for note in loop.notes) is (name == "hand")
    assert widths == {"stock": [8], "hand": [6], "O0": [8]}


def test_the_real_planner_knows_levels_and_single_algorithms() -> None:
    model = network()
    optimizer = sgd(model)
    assert plan_for("O0", (), model, optimizer, 8).algorithms == ()
    single = plan_for("O0", ("gradient_centralization",), model, optimizer, 8)
    assert [a.name for a in single.algorithms] == ["gradient_centralization"]
    level = plan_for("O2", (), model, optimizer, 8)
    assert {a.name for a in level.algorithms} | {d.name for d in level.dropped} >= {"less_bn", "channels_last"}
    with pytest.raises(ValueError, match="no_such_thing"):
        plan_for("O0", ("no_such_thing",), model, optimizer, 8)


def test_scales_of_the_loss_are_refused_because_no_loop_here_uses_them() -> None:
    with pytest.raises(IncompatibleError, match="loss_scale_group has no effect here"):
        build_loop(Recipe.parse("stock+loss_scale_group"), tiny(), seed=0, steps=8)


def test_a_plan_with_accumulation_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "boost.json"
    file.write_text('{"extra": {"grad_accumulation": {"steps": 2}}}', encoding="utf-8")
    for name, planner in ("O1", planner_of(GradAccumulation(steps=2))), (str(file), None):
        with pytest.raises(ValueError, match="accumulates gradients"):
            build_loop(Recipe.parse(name), tiny(), seed=0, steps=8, planner=planner)
