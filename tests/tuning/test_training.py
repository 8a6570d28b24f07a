"""One training of a candidate, and what a tuning tries on a model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost import boost
from torchboost.bench.digests import data_of, fingerprint_of
from torchboost.bench.factory import made_by
from torchboost.errors import ConfigError
from torchboost.measure.machine import PeakMemory
from torchboost.measure.stopwatch import Clock
from torchboost.registry import LEVELS, REGISTRY
from torchboost.tuning import training as module
from torchboost.tuning.report import Candidate, Finding, Run
from torchboost.tuning.runs import Watch
from torchboost.tuning.training import (
    Training,
    looked_at,
    named_candidates,
    standard_recipes,
    try_levers,
)

STEPS = 12
STOCK = Candidate(name="stock")


class Loader:
    """Batches in an order that is drawn from the global generator, as by a shuffling loader."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(24, 3, 8, 8, generator=draw)
        self.targets = torch.randint(0, 4, (24,), generator=draw)
        self.orders: list[list[int]] = []

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        order = torch.randperm(24)
        self.orders.append(order.tolist())
        return iter([(self.inputs[part], self.targets[part]) for part in order.split(4)])


def make(seed: int) -> Any:
    stem = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(*stem, nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = Loader()
    built.append((model, loader))

    def evaluate(model: Any) -> float:
        assert not model.training
        return float((model(loader.inputs).argmax(1) == loader.targets).float().mean())

    def schedule(optimizer: Any, steps: int) -> Any:
        lengths.append(steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)

    return model, optimizer, F.cross_entropy, loader, evaluate, schedule


built: list[Any] = []
lengths: list[int] = []


@pytest.fixture(autouse=True)
def nothing_built():
    built.clear()
    lengths.clear()


def trained(
    make: Callable[[int], Any] = make, candidate: Candidate = STOCK, seed: int = 0, *watch: Watch, **more: Any
) -> Run:
    return Training(**({"make": make, "steps": STEPS, "device": torch.device("cpu")} | more))(candidate, seed, *watch)


def test_stock_is_the_plain_loop_and_leaves_the_random_generators_where_they_were():
    before = torch.get_rng_state()
    run = trained(make, STOCK, 3)
    assert torch.equal(torch.get_rng_state(), before)
    model, _ = built[-1]
    torch.manual_seed(3)
    plain, optimizer, loss, loader, evaluate, schedule = make(3)
    scheduler, done = schedule(optimizer, STEPS), 0
    for epoch in range(2):
        torch.manual_seed(1_000_003 * 3 + epoch)
        for inputs, targets in loader:
            loss(plain(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
    assert done == STEPS == run.steps
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert run.metric == evaluate(plain.eval())
    assert 0 < run.setup_seconds < run.wall_seconds
    assert 0 < run.seconds < run.wall_seconds
    run = trained(make, Candidate(name="stock", share=0.5))  # fewer steps have a schedule of their own
    assert (run.name, run.steps, lengths[-1]) == ("stock, 50% of the steps", 6, 6)


def test_the_budget_pays_for_all_that_a_run_does(monkeypatch):
    class Slow(PeakMemory):
        def __enter__(self) -> Any:
            time.sleep(0.2)
            return super().__enter__()

    monkeypatch.setattr("torchboost.tuning.training.PeakMemory", Slow)
    assert trained(make, STOCK).wall_seconds >= 0.2


def test_a_candidate_gets_the_same_weights_and_batches_and_its_algorithms():
    trained(make, STOCK, 1)
    trained(make, Candidate(name="memory", extra={"channels_last": True}), 1)
    (stock, first), (memory, second) = built
    assert first.orders == second.orders
    assert not stock[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert memory[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(stock[0].weight, memory[0].weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "recipe", [{}, {"optimizer": "muon", "lr": 0.02}, {"optimizer": "schedule_free_adamw", "lr": 0.1}]
)
def test_every_candidate_clips_its_gradients_as_the_factory_says(recipe: dict[str, Any]):
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.0)

    for clips in (clip, None):
        trained(lambda seed, clips=clips: (*make(seed), None, clips), Candidate(name="clipped", recipe=recipe))
        weights, first = built[-1][0].parameters(), made_by(make, 0).model.parameters()
        assert all(map(torch.equal, weights, first)) is (clips is clip)


def test_a_model_is_put_where_the_batches_go_and_into_training_mode():
    """A factory may return it elsewhere, and in evaluation mode as ``from_pretrained`` does: no trial is made there."""
    places: list[torch.device] = []

    class Moved(nn.Sequential):
        def to(self, device: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            places.append(device)
            return super().to(device)

    def elsewhere(seed: int) -> Any:
        plain, _, *rest = make(seed)
        moved.append(Moved(*plain).eval())
        return moved[-1], torch.optim.SGD(moved[-1].parameters(), lr=0.05), *rest

    moved: list[nn.Module] = []
    device = torch.device("cpu")
    reasons = try_levers(elsewhere, steps=2000, seconds=0.5, device=device).reasons
    assert not [reason for reason in reasons.values() if "no training call of the model was seen" in reason]
    looked_at([STOCK], elsewhere, STEPS, device=device)
    trained(elsewhere)
    assert places == [device] * 3
    assert all(model.training for model in moved)


def test_a_generator_draws_its_batches_from_the_seed():
    drawn: list[Tensor] = []

    def draw() -> Any:
        for _ in range(3):
            drawn.append(torch.rand(8, 4))
            yield drawn[-1], torch.arange(8) % 2

    def lazy(seed: int) -> Any:
        model = nn.Linear(4, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, draw(), lambda model: 0.5

    for seed in (1, 1, 2):
        trained(lazy, STOCK, seed, steps=3)
        torch.rand(1)  # the runs do not depend on what the program draws
    assert torch.equal(torch.stack(drawn[:3]), torch.stack(drawn[3:6]))
    assert not torch.equal(torch.stack(drawn[:3]), torch.stack(drawn[6:]))


def test_a_candidate_that_changes_the_whole_process_changes_nothing_for_the_runs_after_it():
    before = torch.get_num_threads()
    run = trained(make, Candidate(name="threads", extra={"threads": {"count": before + 1}}))
    assert (run.failure, torch.get_num_threads()) == ("", before)


def test_a_training_that_diverges_or_takes_too_long_ends_early_with_nan():
    def wild(seed: int) -> Any:
        parts = make(seed)
        for group in parts[1].param_groups:
            group["lr"] = 1e30
        return parts[:5]

    told: list[int] = []
    assert math.isnan(trained(wild, steps=500, told=lambda candidate, seed: told.append(seed)).metric)
    assert told == [0]
    run = trained(make, STOCK, 0, Watch(seconds=0.0), steps=500)
    assert run.too_slow
    assert math.isnan(run.metric)
    assert len(built[-1][1].orders) == 1
    assert not trained(make, STOCK, 0, Watch(seconds=1e9), steps=40).too_slow


def test_an_error_of_a_candidate_is_part_of_its_run_and_that_of_stock_is_raised():
    def failing(seed: int) -> Any:
        parts = make(seed)

        def raises(*_: Any) -> None:
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("boom\nand more")

        parts[0][0].register_forward_pre_hook(raises)
        return parts

    run = trained(failing, Candidate(name="bits", extra={"autocast": True}), steps=3)
    assert run.failure == "RuntimeError: boom"
    assert math.isnan(run.metric)
    assert trained(failing, steps=3).failure == ""

    def broken(seed: int) -> Any:
        raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        trained(broken)


def test_a_batch_without_a_label_does_not_end_a_training():
    """Its loss is not a number and its gradient is 0, so plain torch trains through it."""

    def partly(seed: int) -> Any:
        parts = make(seed)
        parts[3].targets[:4] = -100
        batches = list(zip(parts[3].inputs.split(4), parts[3].targets.split(4), strict=True))
        return (*parts[:3], batches, lambda model: 0.5)

    run = trained(partly, steps=48)
    assert run.metric == 0.5
    assert len(run.losses) == 2
    assert all(math.isfinite(loss) for loss in run.losses)


def two_shapes(seed: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    batches = [(torch.randn(rows, 4), torch.randint(0, 4, (rows,))) for rows in (8, 8, 8, 3)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, batches, lambda model: 0.5


def test_every_training_pays_for_its_compilation_and_no_step_does(monkeypatch):
    """Else the first training pays for all, and a smaller last batch counts as slow steps.

    The clock shows an hour per compilation and a second per step.
    """
    now, compiled = [0.0], []

    def slow(graph: Any, inputs: Any) -> Any:
        now[0] += 3600.0
        compiled.append(graph)

        def forward(*args: Any) -> Any:
            now[0] += 1.0
            return graph.forward(*args)

        return forward

    class Planted:
        @staticmethod
        def of(device: torch.device) -> Clock:
            return Clock(read=lambda: now[0])

    monkeypatch.setattr(module, "Clock", Planted)
    torch._dynamo.register_backend(slow, name="slow_for_a_test")  # pyright: ignore[reportArgumentType]
    candidate = Candidate(name="compile", extra={"compile": {"backend": "slow_for_a_test"}})
    for seed in range(2):
        compiled.clear()
        run = trained(two_shapes, candidate, seed, Watch(seconds=60.0), steps=40)
        assert len(compiled) >= 2  # the first step, and the first smaller batch
        assert not run.too_slow
        assert run.setup_seconds // 3600.0 == len(compiled)
        assert run.seconds == pytest.approx(39.0)


def test_a_run_trains_what_the_configuration_builds():
    """Another rate, another optimizer, fewer steps: as by hand with boost, and the schedule is built after it."""
    sections = (
        Candidate(name="a", rate=0.25, share=0.5),
        Candidate(name="b", recipe={"optimizer": "muon", "lr": 0.02, "rate": 0.5}, rate=2.0),
        Candidate(name="c", extra={"gradient_centralization": True}, share=0.75),
    )
    for candidate in sections:
        run = trained(make, candidate, 3)
        model, _ = built[-1]
        torch.manual_seed(3)
        plain, optimizer, loss, loader, evaluate, schedule = make(3)
        config = {"extra": candidate.extra, "recipe": candidate.section}
        boosted = boost(plain, optimizer, config=config, level="O0", total_steps=STEPS, calibrate=False)
        assert boosted.steps == run.steps == round(candidate.share * STEPS)
        scheduler, done = schedule(boosted.optimizer, boosted.steps), 0
        for epoch in range(2):
            torch.manual_seed(1_000_003 * 3 + epoch)
            for inputs, targets in loader:
                if done < boosted.steps:
                    loss(plain(inputs), targets).backward()
                    boosted.optimizer.step()
                    scheduler.step()
                    boosted.optimizer.zero_grad()
                    done += 1
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        assert run.metric == evaluate(plain.eval())


def test_schedule_free_trains_without_the_schedule_and_is_measured_on_its_average():
    run = trained(make, Candidate(name="free", recipe={"optimizer": "schedule_free_adamw", "lr": 1e-3}))
    assert run.failure == ""
    assert lengths == []
    model, loader = built[-1]
    assert run.metric == float((model.eval()(loader.inputs).argmax(1) == loader.targets).float().mean())


def test_choices_are_made_by_validate():
    def both(seed: int) -> Any:
        return (*make(seed), lambda model: 0.25)

    assert trained(both, STOCK, 0, Watch(chooses=True)).metric == 0.25
    assert trained(both, STOCK, 0).metric != 0.25
    assert trained(make, STOCK, 0, Watch(chooses=True)).metric == trained(make, STOCK, 0).metric


def test_a_training_that_learns_much_slower_than_the_best_is_stopped_at_a_third():
    whole = trained(make, STOCK, 0, steps=120)
    assert len(whole.losses) == 6
    first = whole.first_loss
    assert first is not None
    for best, stopped in (
        (whole.losses, False),
        ([first - 3.1 * (first - loss) for loss in whole.losses], True),
        ([first - 2.9 * (first - loss) for loss in whole.losses], False),
        ([first + 1.0] * 6, False),
        ([], False),
        ([-9.0], False),  # too short to compare
    ):
        run = trained(make, STOCK, 0, Watch(losses=best), steps=120)
        assert run.hopeless == stopped
        assert math.isnan(run.metric) == stopped
        assert len(run.losses) == (2 if stopped else 6)


def test_the_standard_recipes_have_the_levers_and_the_settings_of_the_levels():
    kept, exact, left_out = try_levers(make, steps=2000, seconds=0.5)
    assert set(exact) <= set(kept) - {"autocast", "matmul_precision", "compile"}
    assert {*kept, *left_out} == {name for name, entry in REGISTRY.items() if entry.lever}
    assert all(left_out.values())
    sgd = make(0)[1]
    levers = ["channels_last", "autocast", "fused_optimizer"]
    stock, muon, free, *others = standard_recipes(levers, sgd)
    assert (stock.name, list(stock.extra)) == ("switches: channels_last, autocast, fused_optimizer", levers)
    for one, section in (
        (muon, {"optimizer": "muon", "lr": 0.02}),
        (free, {"optimizer": "schedule_free_adamw", "lr": 1e-3}),
    ):
        assert one.section == section
        assert list(one.extra) == ["channels_last", "autocast"]
    names = {one.name: one for one in others}
    both = "less_bn and gradient_centralization"
    for name, called in (("less_bn", both), ("grad_freeze", "grad_freeze")):
        one = names[f"{called} as in O2"]
        assert one.extra[name] == LEVELS["O2"][name]
        assert levers == list(one.extra)[:3]
    milder = names[f"{both}, milder"].extra  # keeps a BatchNorm in every block
    assert milder["less_bn"] == {"keep": "narrowest", "keep_every": 1}
    assert list(milder) == [*levers, "less_bn", "gradient_centralization"]
    assert {"grad_freeze from 30 % on", "token_drop"} <= names.keys()
    assert standard_recipes([], sgd)[0] == Candidate(name="stock")
    adamw = torch.optim.AdamW(make(0)[0].parameters(), lr=0.005)
    assert standard_recipes([], adamw)[2].section["lr"] == 0.005


def test_named_candidates():
    found = named_candidates({"fast": {"channels_last": True}, "both": {"channels_last": True, "less_bn": {}}})
    assert [one.extra for one in found] == [{"channels_last": True}, {"channels_last": True, "less_bn": {}}]
    on = {"autocast": True}
    names = ("stock", "stock at half", "a, b", "", 1, None)
    for wrong in (*({name: on} for name in names), {"nothing": {"less_bn": False}}, {"empty": {}}, {"a": "autocast"}):
        with pytest.raises(ValueError, match="give a name without a comma that does not begin with 'stock', and a sec"):
            named_candidates(wrong)  # pyright: ignore[reportArgumentType]


def linear(seed: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = [(torch.randn(8, 4), torch.randint(0, 2, (8,)))]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, data, lambda model: 0.0


def residual(blocks: int) -> Callable[[int], Any]:
    """A factory of a network with so many residual blocks."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Sequential(
                *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
                *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
            )

        def forward(self, inputs: Tensor) -> Tensor:
            return F.relu(inputs + self.branch(inputs))

    def factory(seed: int) -> Any:
        stem = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        body = (Block() for _ in range(blocks))
        model = nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, [], lambda model: 0.0

    return factory


def looked(make: Callable[[int], Any], **extras: Any) -> list[Finding]:
    return looked_at(named_candidates(extras), make, 100)


def test_what_cannot_work_here_has_a_reason_and_a_wrong_setting_is_an_error():
    for extra, said in (
        ({"less_bn": {"keep": "narrowest"}}, "less_bn"),
        ({"channels_last": True}, "convolution"),
        ({"loss_scale_group": True}, "loss_scale_group has no effect here"),
        ({"fused_optimizer": True, "less_bn": {}}, "less_bn: "),  # whole, if a part of it cannot work
    ):
        (finding,) = looked(linear, a=extra)
        assert finding.outcome == "not usable"
        assert said in finding.reason
    assert looked(linear, a={"fused_optimizer": True})[0].outcome is None
    assert looked(make, a={"gradient_centralization": True})[0].outcome is None
    for extra, said in (
        ({"les_bn": True}, "Did you mean 'less_bn'"),
        ({"grad_freeze": {"full_share": 3}}, "full_share"),
    ):
        with pytest.raises(ConfigError, match=said):
            looked(linear, a=extra)


def test_recipes_that_cannot_work_here_have_a_reason():
    def one_layer(seed: int) -> Any:
        model = nn.Linear(4, 2)
        data = [(torch.randn(8, 4), torch.randint(0, 2, (8,)))]
        return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, data, lambda model: 0.0

    stock, *others = looked_at(standard_recipes([], make(0)[1]), one_layer, 100)
    assert stock.outcome is None
    muon = next(one for one in others if one.candidate.name == "Muon")
    assert muon.outcome == "not usable"
    assert "no hidden matrix" in muon.reason
    usable = looked_at(standard_recipes(["fused_optimizer"], make(0)[1]), make, 100, ["fused_optimizer"])
    assert [one.outcome for one in usable[:3]] == [None, None, None]


def test_a_schedule_that_cannot_drive_muon_is_seen_before_a_training_with_what_to_pass():
    lrs, rates = torch.optim.lr_scheduler, lambda o: [group["lr"] for group in o.param_groups]
    muon = standard_recipes([], make(0)[1])[1]
    for schedule, said in (
        (lambda o, n: lrs.OneCycleLR(o, rates(o), n), "let the schedule pass cycle_momentum=False"),
        (lambda o, n: lrs.CyclicLR(o, 0.0, rates(o)), "let the schedule pass cycle_momentum=False"),
        (lambda o, n: lrs.OneCycleLR(o, rates(o)[0], n, cycle_momentum=False), "max_lr=[group['lr'] for group in"),
        (lambda o, n: lrs.StepLR(o, o.defaults["momentum"]), "the schedule raises KeyError: 'momentum'"),
        (lambda o, n: lrs.OneCycleLR(o, rates(o), n, cycle_momentum=False), None),
        (lambda o, n: lrs.LambdaLR(o, lambda step: step / n), None),  # which begins at 0 for all
    ):
        (found,) = looked_at([muon], lambda seed, s=schedule: (*make(seed)[:5], s), 100)
        assert found.outcome == (said and "not usable")
        assert (said or "") in found.reason
    (found,) = looked_at([muon], lambda seed: make(seed)[:5], 100)
    assert found.outcome is None


def test_two_candidates_that_come_to_the_same_training_are_one():
    """One BatchNorm is kept in every block or in one of eight, which is the same for a single block."""
    strong = {"less_bn": dict(LEVELS["O2"]["less_bn"])}
    mild = {"less_bn": {**strong["less_bn"], "blocks_per_norm": 1}}
    norms = {"gradient_centralization": {}}
    for blocks, outcome in ((1, "duplicate"), (4, None)):
        first, second, alone = looked(residual(blocks), mild={**mild, **norms}, strong={**strong, **norms}, alone=mild)
        assert (first.outcome, second.outcome, alone.outcome) == (None, outcome, None)
        assert second.reason == ("on this model it is the same as 'mild'" if outcome else "")
    # What is done in the loop is told apart by its settings.
    shares = {"early": 0.3, "late": 0.7, "again": 0.7}
    given = {name: {"grad_freeze": {"pattern": "progressive", "full_share": share}} for name, share in shares.items()}
    assert [one.outcome for one in looked(residual(4), **given)] == [None, None, "duplicate"]


def test_the_fingerprint_sees_modules_and_buffers():
    def changed(change: Callable[[torch.nn.Module], object]) -> str:
        parts = made_by(make, 0)
        change(parts.model)
        return fingerprint_of(parts)

    same = changed(lambda model: None)
    assert changed(lambda model: None) == same
    for change in (
        lambda model: setattr(model, "2", torch.nn.Dropout(0.9)),
        lambda model: model.get_submodule("1").get_buffer("running_mean").add_(1),
        lambda model: model.register_buffer("mask", torch.ones(3, dtype=torch.bool)),
        lambda model: model.register_buffer("phase", torch.ones(3, dtype=torch.complex64)),
    ):
        assert changed(change) != same


def test_data_are_told_apart_by_their_first_batch():
    def changed(change: Callable[[Tensor], Any]) -> str:
        def factory(seed: int) -> Any:
            batches = [({"x": [change(inputs)]}, targets) for inputs, targets in make(0)[3]]
            return (*make(seed)[:3], batches)

        return data_of(made_by(factory, 0))

    before = torch.get_rng_state()
    same = changed(lambda inputs: inputs)
    assert data_of(made_by(make, 0)) == data_of(made_by(make, 0))
    assert torch.equal(before, torch.get_rng_state())
    ways = (lambda x: x, lambda x: x + 1e-6, lambda x: x.half(), lambda x: x.flatten(), lambda x: x * 1j)
    assert [changed(way) == same for way in ways] == [True, False, False, False, False]
