"""The trial at the first training call leaves a run that is bit for bit the one that was given the plan."""

from __future__ import annotations

import copy
import logging
import random
import re
import signal
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchboost
from tests.support.boosted import in_one_line
from torchboost import Boosted
from torchboost.calibration import calibration as module
from torchboost.calibration import snapshot
from torchboost.calibration.calibration import resolved
from torchboost.calibration.choice import Choice
from torchboost.calibration.search import Price
from torchboost.calibration.trial import Trial
from torchboost.core.hardware import Streams
from torchboost.core.torch_private import compiled_call, interceptor_of
from torchboost.graph.removed_norm import RemovedNorm
from torchboost.levers import Levers
from torchboost.workloads.models import Bottleneck, ResNet

CUT = {"extra": {"compile": False}}


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


def boosted(config: Any = None, *, calibrate: Any = 5.0, steps: int | None = 9, **options: Any) -> Boosted:
    model = network()
    return torchboost.boost(
        model, adamw(model), total_steps=steps, config=config or CUT, calibrate=calibrate, **options
    )


def told(pair: Boosted) -> str:
    """What the rows of explain() say."""
    return "; ".join(row.did for row in pair.levers.explanation().rows)


def on(pair: Boosted) -> set[str]:
    return set(LEVERS) & set(pair.attached)


def choose(monkeypatch: pytest.MonkeyPatch, kept: set[str]) -> None:
    """Let the search find what a test wants, after it has run real trial steps."""

    def search(levers, bench: Trial, **_):
        for lever in levers:
            bench.build([lever], within=60)
            bench.sample(within=60)
        verdicts = [{"lever": lever, "kept": lever in kept, "reason": "planted", "pairs": 9} for lever in levers]
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
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0) if scaled else None
        config = CUT if calibrate else {"extra": {"compile": False, **{lever: lever in kept for lever in LEVERS}}}
        pair = boosted(config, calibrate=calibrate, steps=8, level=level, scaler=scaler)
        results.append(train(*pair, scaler=scaler))
        assert on(pair) == kept
        assert {a.name for a in pair.plan.algorithms} >= kept
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))


def test_accumulation_and_the_training_step_stay(monkeypatch):
    choose(monkeypatch, {"fused_optimizer"})
    results = []
    for calibrate in (5.0, False):
        extra = {"compile": False, "grad_accumulation": {"steps": 2}}
        if not calibrate:
            extra |= {lever: lever == "fused_optimizer" for lever in LEVERS}
        pair = boosted({"extra": extra}, calibrate=calibrate, steps=8)
        step = pair.step(nn.functional.cross_entropy)
        torch.manual_seed(7)
        losses = [step(x, y).loss for x, y in batches()]
        results.append([*losses, *pair.model.state_dict().values()])
    assert all(map(torch.equal, *results))


def test_a_real_trial_decides_and_explains():
    pair = boosted(calibrate=2.0, steps=10_000)
    assert pair.choice is None
    train(*pair, steps=2)
    assert pair.choice.source == "trial"
    assert {verdict.lever for verdict in pair.choice.verdicts} == set(LEVERS)
    assert on(pair) == pair.choice.kept
    for verdict in pair.choice.verdicts:
        (row,) = [row for row in pair.levers.explanation().rows if row.name == verdict.lever]
        assert (row.state == "on") is verdict.kept
        assert verdict.found in row.did
    assert pair.explain().count("calibrate=") == any(verdict.longer for verdict in pair.choice.verdicts)


def test_the_choice_is_logged(monkeypatch, caplog):
    choose(monkeypatch, {"autocast"})
    with caplog.at_level("INFO", logger="torchboost"):
        train(*boosted(), steps=1)
    record = caplog.records[-1]
    assert re.search(r"autocast +on .*planted", record.message)
    assert re.search(r"channels_last +off .*planted", record.message)


def test_a_trial_without_a_gain_is_a_warning(monkeypatch, caplog, capsys):
    choose(monkeypatch, set())
    with caplog.at_level("INFO", logger="torchboost"):
        train(*boosted(), steps=1)
    record = caplog.records[-1]
    assert record.levelname == "WARNING"
    assert "no gain was found" in record.message
    assert "boosted.waste(*inputs), or boosted.waste(**batch) for a dict, shows" in record.message
    logger = logging.getLogger("torchboost")
    monkeypatch.setattr(type(logger), "hasHandlers", lambda self: False)
    for level, lines in ((logging.CRITICAL, 0), (logging.NOTSET, 1)):
        logger.setLevel(level)
        train(*boosted(), steps=1)
        assert capsys.readouterr().err.count("torchboost: warning: O1: no gain was found") == lines


def test_the_first_step_speaks_unless_logging_says_otherwise(monkeypatch, capsys):
    """A line before the trial and one after it on stderr; with a level of the logger, none there."""
    logger = logging.getLogger("torchboost")
    monkeypatch.setattr(type(logger), "hasHandlers", lambda self: False)
    for level, lines in ((logging.NOTSET, 2), (logging.WARNING, 0)):
        monkeypatch.setattr(logger, "level", level)
        train(*boosted(calibrate=3.0, steps=10_000), steps=1)
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("torchboost: ")]
        assert len(said) == lines


@pytest.mark.parametrize("kept", [set(), {"fused_optimizer"}])
def test_what_is_on_without_being_timed_is_named(monkeypatch, capsys, kept):
    choose(monkeypatch, kept)
    logger = logging.getLogger("torchboost")
    monkeypatch.setattr(type(logger), "hasHandlers", lambda self: False)
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    torch.manual_seed(0)
    model = ResNet(Bottleneck, [1, 1], width=8, classes=4)
    config = {"extra": {"compile": False, "grad_freeze": False}}
    pair = torchboost.boost(model, adamw(model), "O2", total_steps=10_000, calibrate=5.0, config=config)
    model(batches(1)[0][0]).sum().backward()
    gone = sum(isinstance(module, RemovedNorm) for module in model.modules())
    left = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    told = f"also on, not timed: less_bn ({gone} of {gone + left} BatchNorms removed), gradient_centralization"
    assert gone
    assert told in capsys.readouterr().err
    assert told in in_one_line(pair.explain())
    row = next(row for row in pair.levers.explanation().rows if row.name == "less_bn")
    assert row.did.endswith(f"; {gone} of {gone + left} BatchNorms removed")
    assert "less_bn: with fewer BatchNorms, tune the learning rate again" in pair.levers.explanation().notes


def test_calls_without_training_are_not_the_first_call(monkeypatch):
    choose(monkeypatch, set())
    pair, x = boosted(), batches(1)[0][0]
    model = pair.model
    with torch.no_grad():
        model(x)
    model.eval()(x)
    copy.deepcopy(model).train()(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        torch.jit.trace(model, x)
    assert pair.choice is None
    assert compiled_call(model) is None
    model.train()(x)
    assert pair.choice is not None
    assert interceptor_of(model) is None


def test_an_interrupt_leaves_the_pair_as_it_was_and_the_next_call_decides(monkeypatch):
    pair, x = boosted(), batches(1)[0][0]
    model, optimizer = pair
    before = [value.clone() for value in model.state_dict().values()]
    strides = [parameter.stride() for parameter in model.parameters()]
    flags, attached = [group["fused"] for group in optimizer.param_groups], set(pair.attached)
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
    assert set(pair.attached) == attached
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    choose(monkeypatch, set())
    model(x)
    assert pair.choice is not None


@pytest.mark.parametrize(
    ("owner", "name"),
    [(snapshot._Tensor, "restore"), (Streams, "restore"), (snapshot, "write_dict"), (Levers, "_put_on")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_second_interrupt_waits_until_everything_is_put_back(monkeypatch, owner, name):
    pair, x = boosted({"extra": {"compile": False, "fused_optimizer": True}}), batches(1)[0][0]
    model, hooked = pair.model, []
    model.register_forward_hook(lambda *_: hooked.append(1))
    before, attached = [value.clone() for value in model.state_dict().values()], set(pair.attached)
    streams, original = torch.get_rng_state(), getattr(owner, name)

    def again(*arguments):
        signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    with monkeypatch.context() as patch:

        def search(*_, **__):
            model(x)
            patch.setattr(owner, name, again)
            raise KeyboardInterrupt

        patch.setattr(module, "search", search)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), streams)
    assert set(pair.attached) == attached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    choose(monkeypatch, set())
    model(x)
    assert hooked == [1]
    assert pair.choice is not None


def test_a_trial_that_raises_or_has_no_memory_leaves_the_prior(monkeypatch, capsys):
    logger = logging.getLogger("torchboost")
    monkeypatch.setattr(type(logger), "hasHandlers", lambda self: False)
    monkeypatch.setattr(logger, "level", logging.NOTSET)

    def broken(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr(module, "search", broken)
    pair = boosted()
    train(*pair, steps=1)
    assert on(pair) == set(LEVERS)
    assert pair.choice.source == "prior"
    assert "the trial raised RuntimeError: planted" in " ".join(pair.explain().split())
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("torchboost: warning: O1: the trial failed, so rules chose; on: ")
    assert all(name in last for name in LEVERS)
    monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(module, "Trial", None)  # nothing is copied
    pair = boosted()
    train(*pair, steps=1)
    assert "not measured: a snapshot and the gradients need about" in " ".join(pair.explain().split())


def test_a_resumed_run_does_not_measure_again(monkeypatch):
    choose(monkeypatch, {"fused_optimizer"})
    first = boosted()
    result = train(*first, steps=2)
    assert first.choice.source == "trial"
    monkeypatch.setattr(module, "Trial", None)
    again = boosted()
    again.load_state_dict(first.state_dict())
    assert all(map(torch.equal, result, train(*again, steps=2)))
    assert again.choice.source == "checkpoint"
    assert on(again) == {"fused_optimizer"}


def test_a_resumed_run_that_checks_nothing_keeps_what_the_checkpoint_attached(monkeypatch):
    choose(monkeypatch, {"fused_optimizer"})
    first = boosted(verify=False)
    train(*first, steps=1)
    again = boosted(verify=False)
    again.load_state_dict(first.state_dict())
    before = {name: again.attached[name] for name in again.attached}
    train(*again, steps=1)
    assert again.choice.source == "checkpoint"
    assert {name: again.attached[name] for name in again.attached} == before


def test_a_saved_plan_is_the_choice_and_measures_nothing(monkeypatch, tmp_path):
    choose(monkeypatch, {"channels_last"})
    pair = boosted()
    first = train(*pair)
    pair.plan.save(tmp_path / "boost.json")
    monkeypatch.setattr(module, "Trial", None)
    again = boosted(str(tmp_path / "boost.json"))
    assert all(map(torch.equal, first, train(*again)))
    assert again.choice is None
    assert again.checks.keys() == {"channels_last"}


def test_removal_before_the_first_call_leaves_nothing(monkeypatch):
    strides = [parameter.stride() for parameter in network().parameters()]
    pair = boosted()
    pair.remove()
    assert interceptor_of(pair.model) is None
    assert [parameter.stride() for parameter in pair.model.parameters()] == strides
    monkeypatch.setattr(module, "Trial", None)
    pair.model(batches(1)[0][0])
    assert pair.choice is None


def test_a_compiled_model_keeps_the_prior(monkeypatch):
    monkeypatch.setattr(module, "Trial", None)
    x = batches(1)[0][0]
    pair = boosted()
    torch.compile(pair.model, backend="eager")(x).sum().backward()
    assert pair.choice is None
    pair = boosted({"extra": {"compile": {"backend": "eager"}}}, verify=False)
    pair.model.eval()(x)
    pair.model.train()(x).sum().backward()
    assert compiled_call(pair.model) is not None
    assert pair.attached["compile"].graphs == 2
    assert all("compile was asked for" in verdict.reason for verdict in pair.choice.verdicts)
    pair.remove()
    assert compiled_call(pair.model) is None


def test_a_compilation_that_was_withdrawn_does_not_keep_the_trial_away(monkeypatch):
    choose(monkeypatch, {"fused_optimizer"})
    pair = boosted({"extra": {"compile": {"backend": "eager"}}})
    pair.withdraw("compile", "a test")
    train(*pair, steps=1)
    assert compiled_call(pair.model) is None
    assert pair.choice.source == "trial"


def test_o0_and_named_levers_are_not_measured(monkeypatch):
    assert interceptor_of(boosted(level="O0", calibrate="auto").model) is None
    choose(monkeypatch, set())
    pair = boosted({"extra": {"autocast": True, "compile": False}})
    train(*pair, steps=1)
    assert "autocast" in pair.attached
    assert "autocast" not in {verdict.lever for verdict in pair.choice.verdicts}


def test_auto_boost_calibrates_too(monkeypatch):
    choose(monkeypatch, {"channels_last"})
    model = network()
    booster = torchboost.AutoBoost("O1", CUT, total_steps=9, calibrate=5.0)
    train(*booster.network_auto_process_train(model, adamw(model)), steps=1)
    assert set(LEVERS) & {a.name for a in booster.plan.algorithms} == {"channels_last"}
    assert set(LEVERS) & set(booster.attached) == {"channels_last"}


def test_bad_values_are_refused_and_the_environment_switches_auto_off(monkeypatch):
    for value in ("yes", 0, -1.0, float("inf"), None, [1]):
        with pytest.raises(ValueError, match=r'calibrate: found .* pass "auto"'):
            resolved(value)
    monkeypatch.setenv("TORCHBOOST_CALIBRATE", "0")
    assert (resolved("auto"), resolved(3.0)) == (False, 3.0)
    monkeypatch.delenv("TORCHBOOST_CALIBRATE")
    assert resolved("auto") == "auto"


def test_a_choice_from_another_machine_is_used_with_one_warning(monkeypatch, caplog):
    choose(monkeypatch, {"fused_optimizer"})
    pair = boosted()
    train(*pair, steps=2)
    state = pair.state_dict()
    here = Choice.model_validate_json(state["choice"])
    with monkeypatch.context() as patch:
        patch.setattr(module, "Trial", None)
        boosted().load_state_dict(state)
        unknown = here.model_copy(update={"machine": None})
        boosted().load_state_dict(state | {"choice": unknown.model_dump_json()})
        assert caplog.records == []
        there = {**here.machine, "torch": "1.2.3", "threads": 96}
        resumed = boosted()
        resumed.load_state_dict(state | {"choice": here.model_copy(update={"machine": there}).model_dump_json()})
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("torchboost", "WARNING")
        assert f"threads: found 96, here 1; torch: found 1.2.3, here {torch.__version__})" in record.message
        assert "processor" not in record.message
        train(*resumed, steps=1)
        assert (resumed.choice.source, on(resumed)) == ("checkpoint", {"fused_optimizer"})
    del state["choice"]
    measured = boosted()
    measured.load_state_dict(state)
    train(*measured, steps=1)
    assert measured.choice.source == "trial"


def test_a_run_that_is_too_short_for_a_trial_has_none(monkeypatch):
    monkeypatch.delenv("TORCHBOOST_CALIBRATE")
    for calibrate, steps, measured in (("auto", 299, False), ("auto", 300, True), (5.0, 100, True)):
        choose(monkeypatch, set())
        pair = boosted(calibrate=calibrate, steps=steps)
        pair.model(batches()[0][0])
        assert (pair.choice.source == "trial") is measured
        assert measured or "calibrate=10" in pair.choice.verdicts[0].reason


def budget(calibrate: Any, steps: int | None) -> module.Calibration:
    return module.Calibration(levers=(), prior=frozenset(), calibrate=calibrate, total_steps=steps)


def test_the_price_follows_the_length_of_the_run():
    for calibrate, steps, expected in (
        *(("auto", None, 3.0), ("auto", 500, 2.0), ("auto", 1000, 4.0), ("auto", 4000, 4.0), ("auto", 10_000, 10.0)),
        *(("auto", 10**6, 60.0), (True, 1000, 4.0), (7.5, 10, 7.5)),
    ):
        assert budget(calibrate, steps).seconds(0.1) == pytest.approx(expected)


def test_a_price_that_is_worth_it_makes_the_trial_longer():
    for calibrate, steps, price, expected in (
        ("auto", 10_000, (27.0, 1, 1.5), 37.0),  # 1 % of the run and the price
        ("auto", 10_000, (36.0, 1, 1.5), 48.0),  # three quarters are set aside for the price
        ("auto", 10_000, (38.0, 1, 1.5), 10.0),  # it would take more than 5 % of the run
        ("auto", 10_000, (7.0, 1, 1.5), 10.0),  # it fits as it is
        ("auto", 10_000, (27.0, 4, 1.5), 37.0),
        ("auto", 10_000, (27.0, 5, 1.5), 10.0),  # the run must save three times what it pays
        ("auto", 10_000, (27.0, 1, 1.05), 10.0),
        ("auto", None, (27.0, 1, 1.5), 3.0),
        (12.5, 10_000, (27.0, 1, 1.5), 12.5),
    ):
        seconds, times, ratio = price
        asked = Price(expected=seconds, best_ratio=ratio, times=times)
        assert budget(calibrate, steps).seconds(0.1, asked) == pytest.approx(expected), (calibrate, steps, price)
    for calibrate, steps, expected in (
        ("auto", 200_000, 250.0),
        ("auto", 40_000, 40.0),
        ("auto", None, 3.0),
        (1, 9, 1),
    ):
        dearer = Price(expected=150.0, best_ratio=1.15)
        assert budget(calibrate, steps).seconds(0.1, dearer, 50.0) == pytest.approx(expected)


@pytest.mark.parametrize(("rate", "verify", "times"), [(0.2, True, 2), (0.0, True, 1), (0.2, False, 1)])
def test_the_check_of_a_model_with_dropout_costs_one_more_compilation(monkeypatch, rate, verify, times):
    seen: list[Price] = []

    def search(levers, bench: Trial, *, prices, **_):
        seen.append(prices["compile"])
        return (), None

    monkeypatch.setattr(module, "search", search)
    model = network()
    model[6].p = rate
    torchboost.boost(model, adamw(model), "O1", total_steps=10**6, calibrate=5.0, verify=verify).model(batches()[0][0])
    assert [price.times for price in seen] == [times]


def test_a_trial_on_the_cpu_is_not_longer_for_the_price_of_compilation(monkeypatch):
    monkeypatch.delenv("TORCHBOOST_CALIBRATE")
    asked = []
    monkeypatch.setattr(
        module.Calibration, "seconds", lambda self, step, price=None, spent=0.0: asked.append(price) or 0.3
    )
    model = network()
    torchboost.boost(model, adamw(model), level="O1", total_steps=10_000).model(batches()[0][0])
    assert set(asked) == {None}


def test_an_optimizer_that_needs_a_closure_gets_no_trial_and_explain_says_why():
    model, (x, y) = network(), batches(1)[0]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    pair = torchboost.boost(model, optimizer, "O1", total_steps=10_000, calibrate=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    said = pair.explain()
    assert "not measured: LBFGS.step needs a closure, with which it computes several passes" in said
    assert "TypeError" not in said
    assert "autocast" in pair.checks
