"""The trial at the first training call leaves a run that is bit for bit the one that was given the plan."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchboost
from torchboost.calibration import calibration as module
from torchboost.calibration import watch as watch_module
from torchboost.calibration.calibration import check_calibrate, resolved
from torchboost.calibration.choice import Choice, Verdict
from torchboost.calibration.trial import Trial
from torchboost.core.torch_private import compiled_call, interceptor_of


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHBOOST_CACHE", str(tmp_path / "cache"))


CUT = {"extra": {"compile": False}}
UNFROZEN = {"extra": {"compile": False, "grad_freeze": False}}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(16 * 64, 4))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(count: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(4, 3, 12, 12, generator=generator), torch.randint(0, 4, (4,), generator=generator))
        for _ in range(count)
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8, scaler=None) -> list[Tensor]:
    """Train with a schedule, clipping and an average of the weights; return everything that a run leaves behind."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.manual_seed(7)
    losses = []
    for x, y in batches(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model)
        losses.append(loss.detach())
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    rest = [torch.get_rng_state(), torch.tensor(scheduler.get_last_lr())]
    return [*losses, *model.state_dict().values(), *average.state_dict().values(), *state, *rest]


def choose(monkeypatch: pytest.MonkeyPatch, kept: set[str]) -> None:
    """Let the search find what a test wants, after it has run real trial steps."""

    def search(levers, bench: Trial, **_):
        for lever in levers:
            bench.build([lever], within=60)
            bench.sample(within=60)
        verdicts = [{"lever": lever, "kept": lever in kept, "reason": "planted"} for lever in levers]
        return Choice.model_validate({"verdicts": verdicts, "source": "trial"}).verdicts, None

    monkeypatch.setattr(module, "search", search)


LEVERS = ("channels_last", "autocast", "fused_optimizer")
CHOICES = [set(), {"fused_optimizer"}, {"channels_last", "autocast"}, set(LEVERS)]


@pytest.mark.parametrize("kept", CHOICES, ids=lambda kept: "+".join(sorted(kept)) or "none")
@pytest.mark.parametrize(("level", "scaled"), [("O1", False), ("O2", True)], ids=["O1", "O2, scaler"])
def test_a_calibrated_run_is_the_run_that_was_given_the_plan(monkeypatch, level, kept, scaled):
    choose(monkeypatch, kept)
    results = []
    for calibrate in (5.0, False):
        model = network()
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0) if scaled else None
        config = CUT if calibrate else {"extra": {"compile": False, **{lever: lever in kept for lever in LEVERS}}}
        boosted = torchboost.boost(
            model, optimizer, level=level, total_steps=8, config=config, scaler=scaler, calibrate=calibrate
        )
        results.append(train(*boosted, scaler=scaler))
        assert set(LEVERS) & set(boosted.attached) == kept
        assert {a.name for a in boosted.plan.algorithms} >= kept
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))


def test_accumulation_and_the_training_step_stay(monkeypatch):
    choose(monkeypatch, {"fused_optimizer"})
    results = []
    for calibrate in (5.0, False):
        model = network()
        optimizer = adamw(model)
        extra = {"compile": False, "grad_accumulation": {"steps": 2}}
        if not calibrate:
            extra |= {lever: lever == "fused_optimizer" for lever in LEVERS}
        boosted = torchboost.boost(model, optimizer, total_steps=8, config={"extra": extra}, calibrate=calibrate)
        step = boosted.step(nn.functional.cross_entropy)
        torch.manual_seed(7)
        losses = [step(x, y).loss for x, y in batches()]
        results.append([*losses, *model.state_dict().values()])
    assert all(map(torch.equal, *results))


def test_a_real_trial_decides_and_explains():
    model = network()
    boosted = torchboost.boost(model, adamw(model), total_steps=10_000, config=CUT, calibrate=3.0)
    assert boosted.choice is None
    assert "the trial at the first training call decides" not in [d.reason for d in boosted.plan.dropped if d in LEVERS]
    train(*boosted, steps=2)
    assert boosted.choice is not None
    assert boosted.choice.source == "trial"
    assert {verdict.lever for verdict in boosted.choice.verdicts} == set(LEVERS)
    assert set(LEVERS) & set(boosted.attached) == boosted.choice.kept
    for verdict in boosted.choice.verdicts:
        assert f"{verdict.lever}  {'on' if verdict.kept else 'off'}: {verdict.reason}" in boosted.explain()


def test_the_choice_is_logged(monkeypatch, caplog):
    choose(monkeypatch, {"autocast"})
    model = network()
    with caplog.at_level("INFO", logger="torchboost"):
        train(*torchboost.boost(model, adamw(model), config=CUT, total_steps=9, calibrate=5.0), steps=1)
    (record,) = caplog.records
    assert "autocast on (planted)" in record.message
    assert "channels_last off (planted)" in record.message


def test_calls_without_training_are_not_the_first_call(monkeypatch):
    choose(monkeypatch, set())
    model, x = network(), batches(1)[0][0]
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
    with torch.no_grad():
        model(x)
    model.eval()(x)
    copy.deepcopy(model).train()(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        torch.jit.trace(model, x)
    assert boosted.choice is None
    assert compiled_call(model) is None
    model.train()(x)
    assert boosted.choice is not None
    assert interceptor_of(model) is None


def test_an_interrupt_leaves_the_pair_as_it_was_and_the_next_call_decides(monkeypatch):
    model, x = network(), batches(1)[0][0]
    optimizer = adamw(model)
    boosted = torchboost.boost(model, optimizer, total_steps=9, config=CUT, calibrate=5.0)
    before = [value.clone() for value in model.state_dict().values()]
    strides = [parameter.stride() for parameter in model.parameters()]
    flags, on = [group["fused"] for group in optimizer.param_groups], set(boosted.attached)
    streams = torch.get_rng_state(), random.getstate()

    def interrupted(*_, **__):
        torch.rand(3)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "search", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert [parameter.stride() for parameter in model.parameters()] == strides
    assert [group["fused"] for group in optimizer.param_groups] == flags
    assert set(boosted.attached) == on
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    choose(monkeypatch, set())
    model(x)
    assert boosted.choice is not None


def test_a_trial_that_raises_leaves_the_prior(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr(module, "search", broken)
    model = network()
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
    train(*boosted, steps=1)
    assert set(LEVERS) <= set(boosted.attached)
    assert boosted.choice is not None
    assert boosted.choice.source == "prior"
    assert "the trial raised RuntimeError: planted" in boosted.explain()


def test_too_little_memory_is_said_before_anything_is_copied(monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(module, "Trial", None)
    model = network()
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
    train(*boosted, steps=1)
    assert "not measured: a snapshot and the gradients need about" in boosted.explain()


def test_a_resumed_run_does_not_measure_again(monkeypatch):
    choose(monkeypatch, {"fused_optimizer"})
    model = network()
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
    train(*boosted, steps=2)
    state = boosted.state_dict()
    monkeypatch.setattr(module, "Trial", None)
    again = network()
    resumed = torchboost.boost(again, adamw(again), total_steps=9, config=CUT, calibrate=5.0)
    resumed.load_state_dict(state)
    train(*resumed, steps=1)
    assert resumed.choice is not None
    assert resumed.choice.source == "checkpoint"
    assert set(LEVERS) & set(resumed.attached) == {"fused_optimizer"}


def test_the_second_start_takes_the_choice_from_the_cache(monkeypatch):
    choose(monkeypatch, {"fused_optimizer"})
    results = []
    for start in range(2):
        if start:
            monkeypatch.setattr(module, "Trial", None)
        model = network()
        boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
        results.append(train(*boosted, steps=2))
        assert boosted.choice is not None
        assert boosted.choice.source == ("cache" if start else "trial")
        assert set(LEVERS) & set(boosted.attached) == {"fused_optimizer"}
    assert all(map(torch.equal, *results))


def test_a_choice_whose_time_was_over_is_not_kept_for_the_next_start(monkeypatch):
    cut = Verdict(lever="fused_optimizer", kept=False, reason="planted", interrupted=True)
    monkeypatch.setattr(module, "search", lambda *_, **__: ((cut,), None))
    sources = []
    for _ in range(2):
        model = network()
        boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
        boosted.model(batches()[0][0])
        assert boosted.choice is not None
        sources.append(boosted.choice.source)
    assert sources == ["trial", "trial"]


def test_a_choice_that_is_measured_again_replaces_the_one_in_the_cache(monkeypatch):
    model = network()
    choose(monkeypatch, {"fused_optimizer"})
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
    report = []
    monkeypatch.setattr(watch_module.StepWatch, "_look", lambda watch, *_: report.append(watch._report))
    train(*boosted, steps=1)
    choose(monkeypatch, {"channels_last"})
    report[0]("steps have become slower")
    train(*boosted, steps=1)
    monkeypatch.setattr(module, "Trial", None)
    again = network()
    boosted = torchboost.boost(again, adamw(again), total_steps=9, config=CUT, calibrate=5.0)
    train(*boosted, steps=1)
    assert boosted.choice is not None
    assert boosted.choice.source == "cache"
    assert boosted.choice.kept == {"channels_last"}


def test_another_length_of_the_run_is_measured_again(monkeypatch):
    sources = []
    for steps in (9, 10):
        choose(monkeypatch, set())
        model = network()
        boosted = torchboost.boost(model, adamw(model), total_steps=steps, config=CUT, calibrate=5.0)
        train(*boosted, steps=1)
        assert boosted.choice is not None
        sources.append(boosted.choice.source)
    assert sources == ["trial", "trial"]


def test_a_saved_plan_is_the_choice_and_measures_nothing(monkeypatch, tmp_path):
    choose(monkeypatch, {"channels_last"})
    model = network()
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
    first = train(*boosted)
    boosted.plan.save(tmp_path / "boost.json")
    monkeypatch.setattr(module, "Trial", None)
    model = network()
    again = torchboost.boost(model, adamw(model), total_steps=9, config=str(tmp_path / "boost.json"), calibrate=5.0)
    assert all(map(torch.equal, first, train(*again)))
    assert again.choice is None
    assert again.checks.keys() == {"channels_last"}


def test_removal_before_the_first_call_leaves_nothing(monkeypatch):
    model = network()
    strides = [parameter.stride() for parameter in model.parameters()]
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
    boosted.remove()
    assert interceptor_of(model) is None
    assert [parameter.stride() for parameter in model.parameters()] == strides
    monkeypatch.setattr(module, "Trial", None)
    model(batches(1)[0][0])
    assert boosted.choice is None


def test_a_compiled_model_keeps_the_prior(monkeypatch):
    monkeypatch.setattr(module, "Trial", None)
    model, x = network(), batches(1)[0][0]
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
    torch.compile(model, backend="eager")(x).sum().backward()
    assert boosted.choice is None


def test_a_compilation_that_was_asked_for_stays(monkeypatch):
    monkeypatch.setattr(module, "Trial", None)
    model, x = network(), batches(1)[0][0]
    config = {"extra": {"compile": {"backend": "eager"}}}
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=config, calibrate=5.0, verify=False)
    model.eval()(x)
    model.train()(x).sum().backward()
    assert compiled_call(model) is not None
    assert boosted.attached["compile"].graphs == 2
    assert boosted.choice is not None
    assert all("compile was asked for" in verdict.reason for verdict in boosted.choice.verdicts)
    boosted.remove()
    assert compiled_call(model) is None


def test_a_compilation_that_was_withdrawn_does_not_keep_the_trial_away(monkeypatch):
    choose(monkeypatch, {"fused_optimizer"})
    model = network()
    config = {"extra": {"compile": {"backend": "eager"}}}
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=config, calibrate=5.0)
    boosted.withdraw("compile", "a test")
    train(*boosted, steps=1)
    assert compiled_call(model) is None
    assert boosted.choice is not None
    assert boosted.choice.source == "trial"


@pytest.mark.parametrize("level", ["O0"])
def test_o0_measures_nothing(level):
    model = network()
    torchboost.boost(model, adamw(model), level=level, calibrate="auto")
    assert interceptor_of(model) is None


def test_named_levers_are_not_measured(monkeypatch):
    choose(monkeypatch, set())
    model = network()
    config = {"extra": {"autocast": True, "compile": False}}
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=config, calibrate=5.0)
    train(*boosted, steps=1)
    assert "autocast" in boosted.attached
    assert boosted.choice is not None
    assert "autocast" not in {verdict.lever for verdict in boosted.choice.verdicts}


def test_auto_boost_calibrates_too(monkeypatch):
    choose(monkeypatch, {"channels_last"})
    model = network()
    booster = torchboost.AutoBoost("O1", CUT, total_steps=9, calibrate=5.0)
    train(*booster.network_auto_process_train(model, adamw(model)), steps=1)
    assert set(LEVERS) & {a.name for a in booster.plan.algorithms} == {"channels_last"}
    assert set(LEVERS) & set(booster.attached) == {"channels_last"}


@pytest.mark.parametrize("value", ["yes", 0, -1.0, float("inf"), None, [1]])
def test_bad_values_are_refused(value):
    with pytest.raises(ValueError, match=r'calibrate: found .* pass "auto"'):
        check_calibrate(value)


def test_slower_steps_are_measured_again_once(monkeypatch, caplog):
    choose(monkeypatch, {"fused_optimizer"})
    model = network()
    boosted = torchboost.boost(model, adamw(model), total_steps=900, config=CUT, calibrate=5.0)
    x, y = batches(1)[0]
    now = [0.0]

    def steps(count: int, seconds: float) -> None:
        for _ in range(count):
            now[0] += seconds
            nn.functional.cross_entropy(boosted.model(x), y).backward()
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()

    monkeypatch.setattr(watch_module.StepWatch.__init__, "__kwdefaults__", {"entries": None, "read": lambda: now[0]})
    steps(60, 0.1)
    choose(monkeypatch, {"channels_last"})
    with caplog.at_level("INFO", logger="torchboost"):
        steps(120, 0.2)
    assert any("measures the levers again, once" in record.message for record in caplog.records)
    assert set(LEVERS) & set(boosted.attached) == {"channels_last"}
    choose(monkeypatch, set())
    steps(250, 0.9)
    assert set(LEVERS) & set(boosted.attached) == {"channels_last"}
    boosted.remove()
    assert not boosted.optimizer._optimizer_step_post_hooks


def test_inputs_of_another_size_are_measured_again_once(monkeypatch, caplog):
    choose(monkeypatch, {"fused_optimizer"})
    model = network()
    boosted = torchboost.boost(model, adamw(model), total_steps=900, config=CUT, calibrate=5.0)
    x, y = batches(1)[0]

    def steps(count: int, x: Tensor, y: Tensor) -> None:
        for _ in range(count):
            nn.functional.cross_entropy(boosted.model(x), y).backward()
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()

    monkeypatch.setattr(watch_module.StepWatch.__init__, "__kwdefaults__", {"entries": None, "read": lambda: 0.0})
    steps(60, x, y)
    choose(monkeypatch, {"channels_last"})
    with caplog.at_level("INFO", logger="torchboost"):
        steps(300, x[:2], y[:2])
    expected = "O1: the inputs have 864 entries, at the trial 1,728; the next call measures the levers again, once."
    assert [record.message for record in caplog.records if "once" in record.message] == [expected]
    assert set(LEVERS) & set(boosted.attached) == {"channels_last"}
    choose(monkeypatch, set())
    steps(300, x, y)
    assert set(LEVERS) & set(boosted.attached) == {"channels_last"}
    assert interceptor_of(model) is None
    boosted.remove()
    assert not boosted.optimizer._optimizer_step_post_hooks


def resumed(monkeypatch, state):
    monkeypatch.setattr(module, "Trial", None)
    model = network()
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
    boosted.load_state_dict(state)
    return boosted


@pytest.fixture
def state(monkeypatch):
    choose(monkeypatch, {"fused_optimizer"})
    model = network()
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
    train(*boosted, steps=2)
    return boosted.state_dict()


def test_a_choice_from_another_machine_is_used_with_one_warning(monkeypatch, caplog, state):
    here = Choice.model_validate_json(state["choice"])
    assert here.machine is not None
    there = here.machine.model_copy(update={"torch": "1.2.3", "threads": 96})
    state["choice"] = here.model_copy(update={"machine": there}).model_dump_json()
    boosted = resumed(monkeypatch, state)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("torchboost", "WARNING")
    assert f"threads: found 96, here 1; torch: found 1.2.3, here {torch.__version__})" in record.message
    assert "processor" not in record.message
    train(*boosted, steps=1)
    assert boosted.choice is not None
    assert boosted.choice.source == "checkpoint"
    assert set(LEVERS) & set(boosted.attached) == {"fused_optimizer"}


def test_a_choice_from_this_machine_or_without_a_machine_does_not_warn(monkeypatch, caplog, state):
    resumed(monkeypatch, state)
    unknown = Choice.model_validate_json(state["choice"]).model_copy(update={"machine": None})
    resumed(monkeypatch, state | {"choice": unknown.model_dump_json()})
    assert caplog.records == []


def test_a_state_without_the_choice_is_measured_here(monkeypatch, state, tmp_path):
    monkeypatch.setenv("TORCHBOOST_CACHE", str(tmp_path / "here"))
    del state["choice"]
    model = network()
    boosted = torchboost.boost(model, adamw(model), total_steps=9, config=CUT, calibrate=5.0)
    boosted.load_state_dict(state)
    train(*boosted, steps=1)
    assert boosted.choice is not None
    assert boosted.choice.source == "trial"


def test_the_environment_switches_auto_off(monkeypatch):
    monkeypatch.setenv("TORCHBOOST_CALIBRATE", "0")
    assert resolved("auto") is False
    assert resolved(3.0) == 3.0
    monkeypatch.delenv("TORCHBOOST_CALIBRATE")
    assert resolved("auto") == "auto"


@pytest.mark.parametrize(
    ("calibrate", "steps", "measured"), [("auto", 299, False), ("auto", 300, True), (5.0, 100, True)]
)
def test_a_run_that_is_too_short_for_a_trial_has_none(calibrate, steps, measured, monkeypatch):
    monkeypatch.delenv("TORCHBOOST_CALIBRATE")
    model = network()
    boosted = torchboost.boost(model, adamw(model), level="O1", total_steps=steps, calibrate=calibrate, config=CUT)
    boosted.model(batches()[0][0])
    assert boosted.choice is not None
    assert (boosted.choice.source == "trial") is measured
    assert measured or "calibrate=seconds" in boosted.choice.verdicts[0].reason


@pytest.mark.parametrize(
    ("calibrate", "steps", "expected"),
    [
        ("auto", None, 3.0),
        ("auto", 500, 2.0),
        ("auto", 1000, 4.0),
        ("auto", 4000, 4.0),
        ("auto", 10_000, 10.0),
        ("auto", 10**6, 60.0),
        (True, 1000, 4.0),
        (7.5, 10, 7.5),
    ],
)
def test_the_price_follows_the_length_of_the_run(calibrate, steps, expected):
    made = module.Calibration(levers=(), prior=frozenset(), calibrate=calibrate, total_steps=steps)
    assert made.seconds(0.1) == pytest.approx(expected)


def test_a_trial_on_the_cpu_is_not_longer_for_the_price_of_compilation(monkeypatch):
    monkeypatch.delenv("TORCHBOOST_CALIBRATE")
    asked = []
    monkeypatch.setattr(module.Calibration, "seconds", lambda self, step, price=None: asked.append(price) or 0.3)
    model = network()
    boosted = torchboost.boost(model, adamw(model), level="O1", total_steps=10_000)
    boosted.model(batches()[0][0])
    assert asked == [None]


def test_a_choice_from_the_cache_keeps_what_is_attached_already(tmp_path, monkeypatch):
    """Unless the levers are checked, which needs the plain model."""
    monkeypatch.setenv("TORCHBOOST_CACHE", str(tmp_path))
    sources = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        boosted = torchboost.boost(model, optimizer, level="O1", total_steps=10_000, calibrate=2.0, verify=False)
        before = {name: boosted.attached[name] for name in boosted.attached}
        model(torch.randn(8, 64)).sum().backward()
        assert boosted.choice is not None
        sources.append(boosted.choice.source)
    assert sources == ["trial", "cache"]
    stayed = boosted.choice.kept & before.keys()
    assert all(boosted.attached[name] is before[name] for name in stayed)
    assert set(boosted.attached) == boosted.choice.kept
