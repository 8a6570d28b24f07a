"""Levels on the device: losses of the CPU, with and without a trial and a default device; no waits in a steady step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchboost
from tests.device.on_device._rules import reloaded
from tests.device.on_device._training import CLOSE, HALF, NETWORKS, default_device, losses, network, step
from tests.support.pretend_device.waits import Waits

PLAIN = {"extra": {"compile": False, "autocast": False}}
HALVED = {"extra": {"compile": False, "autocast": True}}
LEVEL = pytest.mark.parametrize("level", ["O0", "O1", "O2"])
NETWORK = pytest.mark.parametrize("name", NETWORKS)
pytestmark = pytest.mark.filterwarnings("ignore::torchboost.NoEffectWarning")


def boosted(name: str, level: str, device: str, **options: Any) -> torchboost.Boosted:
    model = network(name, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"calibrate": False, "config": PLAIN, **options}
    return torchboost.boost(model, optimizer, level=level, total_steps=10_000, **options)


def trained(name: str, level: str, device: str, **options: Any) -> list[float]:
    """Return the losses; on the device a further step must not wait."""
    made = boosted(name, level, device, **options)
    found = losses(made.model, made.optimizer, device)
    if device == "cuda":
        with Waits() as waits:
            step(made.model, made.optimizer, "cuda", 4)
        assert waits.seen == {}
    return found


@LEVEL
@NETWORK
@pytest.mark.parametrize("default", [None, "cuda"])
def test_a_level_trains_as_on_the_cpu_and_a_steady_step_does_not_wait(name, level, default):
    wanted = trained(name, level, "cpu")
    with default_device(default):
        found = trained(name, level, "cuda")
    assert found == pytest.approx(wanted, rel=CLOSE["rtol"], abs=CLOSE["atol"])


@pytest.mark.parametrize("level", ["O1", "O2"])
@NETWORK
def test_a_level_in_bfloat16_trains_as_on_the_cpu(name, level):
    wanted, found = (trained(name, level, device, config=HALVED) for device in ("cpu", "cuda"))
    assert found == pytest.approx(wanted, rel=HALF["rtol"], abs=HALF["atol"])


@pytest.mark.parametrize(
    ("level", "name", "default"), [("O1", "cnn", None), ("O1", "gpt", "cuda"), ("O2", "bottleneck", "cuda")]
)
def test_a_trial_measures_and_checks_and_leaves_the_run_as_it_was(name, level, default):
    with default_device(default):
        made = boosted(name, level, "cuda", calibrate=0.5)
        found = losses(made.model, made.optimizer, "cuda")
    assert made.choice is not None
    assert made.choice.source == "trial", made.explain()
    assert any(verdict.pairs for verdict in made.choice.verdicts), made.explain()
    assert set(made.checks) == {verdict.lever for verdict in made.choice.verdicts if verdict.kept}
    assert not any("not checked" in text for text in made.checks.values()), made.explain()
    assert found == pytest.approx(trained(name, level, "cpu"), rel=CLOSE["rtol"], abs=CLOSE["atol"])


@pytest.mark.parametrize("config", [PLAIN, HALVED], ids=["float32", "bfloat16"])
def test_a_trial_tries_tf32_and_leaves_the_process_as_it_was(config, monkeypatch):
    seen, choose = [], torch.set_float32_matmul_precision
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda value: seen.append(value) or choose(value))
    made = boosted("gpt", "O1", "cuda", config=config, calibrate=1.0)
    losses(made.model, made.optimizer, "cuda")
    assert made.choice is not None
    assert "high" in seen, made.explain()
    made.remove()
    assert torch.backends.cuda.matmul.fp32_precision == "none"


def test_tf32_by_name_is_checked_and_stays_until_it_is_removed():
    config = {"extra": {**PLAIN["extra"], "matmul_precision": True}}
    made = boosted("gpt", "O1", "cuda", config=config)
    losses(made.model, made.optimizer, "cuda")
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert made.checks["matmul_precision"].startswith("checked: the gradient differs by")
    assert "computes float32 matrix products in TF32" in made.explain()
    made.remove()
    assert torch.backends.cuda.matmul.fp32_precision == "none"


@pytest.mark.parametrize("location", ["cpu", "cuda"])
def test_a_run_resumes_bit_for_bit(location):
    first = boosted("bottleneck", "O2", "cuda")
    losses(first.model, first.optimizer, "cuda")
    saved = reloaded([part.state_dict() for part in (first, first.model, first.optimizer)], location)
    second = boosted("bottleneck", "O2", "cuda")
    second.model.load_state_dict(saved[1])
    second.optimizer.load_state_dict(saved[2])
    second.load_state_dict(saved[0])
    for number in (4, 5):
        ours, theirs = (step(each.model, each.optimizer, "cuda", number) for each in (second, first))
        assert torch.equal(ours, theirs)
    with Waits() as waits:
        step(second.model, second.optimizer, "cuda", 6)
    assert waits.seen == {}
