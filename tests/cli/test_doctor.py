"""The doctor: what it prints for planted machines, and whom it blames for a slow step."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typer.testing import CliRunner

from torchboost.bench.workloads.factory import Parts
from torchboost.cli import doctor
from torchboost.cli.app import app
from torchboost.cli.small_compile import SmallCompile
from torchboost.measure.machine import Products, StepParts
from torchboost.measure.stopwatch import Clock

FACTORY = """
    import torch
    from torch import nn

    def make(seed):
        model = nn.Linear(2, 2)
        batches = [(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))] * 2
        return model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, batches

    def empty(seed):
        return (*make(seed)[:3], [])

    def wrong(seed):
        return 3

    def faulty(seed):
        def loss(outputs, targets):
            raise ValueError("of the user")
        model, optimizer, _, batches = make(seed)
        return model, optimizer, loss, batches
"""


def run(*words: str):
    return CliRunner().invoke(app, ["doctor", *words])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(FACTORY))
    return path


@pytest.fixture
def planted(monkeypatch, bfloat16):
    """A machine that answers at once."""
    seen = []

    def products(kind, device, *, seconds):
        seen.append((kind, device))
        return Products(kind=kind, size="8 x 8 x 8", ratio=0.5, float32=4e11, bfloat16=2e11, pairs=9)

    bfloat16(0.5, 0.5)
    monkeypatch.setattr(doctor, "products", products)
    monkeypatch.setattr(doctor, "copy_bandwidth", lambda device: 12.34e9)
    monkeypatch.setattr(doctor, "small_compile", lambda: SmallCompile(seconds=11.25))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return seen


def test_what_was_measured_is_printed(planted):
    result = run()
    assert result.exit_code == 0, result.output
    lines = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in result.stdout.splitlines()}
    assert lines["matrix product, cpu"] == "float32 400, bfloat16 200 GFLOP/s (8 x 8 x 8)"
    assert lines["convolution, cpu"] == "float32 400, bfloat16 200 GFLOP/s (8 x 8 x 8)"
    assert lines["fast bfloat16, cpu"].startswith("no: a bfloat16 matrix product takes 2.0 times the time")
    assert lines["copy, cpu"] == "12.3 GB/s, read and written bytes"
    assert lines["small compilation"] == "11.2 s"
    assert {"gloo", "NCCL", "C++ compiler", "torch.compile"} <= set(lines)
    assert planted == [("matrix product", "cpu"), ("convolution", "cpu")]
    assert "machine: 0 of 5 (bfloat16 in plans, cpu)" in result.stderr
    assert "machine: 5 of 5" in result.stderr
    assert "machine:" not in result.stdout


def test_a_gpu_is_measured_too(planted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("torchboost.core.hardware.device_name", lambda device: "a GPU")
    found = json.loads(run("--json").stdout)["measured"]
    assert list(found["products"]) == list(found["copy_gb_per_s"]) == ["cpu", "cuda"]
    assert planted[2:] == [("matrix product", "cuda"), ("convolution", "cuda")]


def test_everything_in_json(planted, file):
    found = json.loads(run(f"{file}:make", "--steps", "4", "--json").stdout)
    speed = found["measured"]["products"]["cpu"]["convolution"]
    assert (speed["float32_gflop_per_s"], speed["bfloat16_gflop_per_s"], speed["ratio"]) == (400.0, 200.0, 0.5)
    assert found["measured"]["bfloat16"]["cpu"]["fast"] is False
    assert found["measured"]["copy_gb_per_s"]["cpu"] == pytest.approx(12.34)
    assert found["measured"]["small_compile"] == {"seconds": 11.25, "fault": ""}
    assert found["step"]["steps"] == 4
    assert list(found["step"]["parts"]) == ["data loading", "forward", "backward", "optimizer"]
    assert sum(part["share"] for part in found["step"]["parts"].values()) == pytest.approx(1.0)
    assert found["step"]["num_workers"] is None


def test_faults_are_printed_as_findings(planted, monkeypatch):
    monkeypatch.setattr(doctor, "products", lambda kind, device, seconds: Products(kind=kind, fault="no kernel"))
    monkeypatch.setattr(doctor, "small_compile", lambda: SmallCompile(fault="No working C++ compiler"))
    shown = run().stdout
    assert "no kernel" in shown
    assert "No working C++ compiler" in shown
    assert "GFLOP/s" not in shown


def test_without_measuring_nothing_is_timed(planted, file):
    result = run("--no-measure")
    assert result.exit_code == 0
    assert planted == []
    assert "GB/s" not in result.stdout
    assert "share" not in result.stdout
    assert json.loads(run("--no-measure", "--json").stdout)["measured"] is None
    shown = run("--no-measure", f"{file}:make", "--steps", "2")
    assert "part of a step (2 steps, cpu)" in shown.stdout
    assert "steps: 5 of 5" in shown.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{file}:wrong",), "the factory returned int"),
        (("{file}:gone",), "does not define a function 'gone'"),
        (("none.py:make",), "found no file"),
        (("{file}:make", "--device", "toaster"), "--device"),
        (("{file}:empty",), "the batches ended in the warm-up"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, said, file, planted):
    result = run(*(word.format(file=file) for word in words), "--no-measure")
    assert result.exit_code == 1
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert planted == []


def test_an_error_in_the_training_keeps_its_traceback(file):
    result = run(f"{file}:faulty", "--no-measure")
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == "of the user"


class SlowImages(Dataset[tuple[Tensor, int]]):
    """Images that take planted time to read."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._clock[0] += self._seconds
        return torch.ones(2), 0


class SlowNet(nn.Module):
    """A network whose forward takes planted time."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self._clock, self._seconds = clock, seconds

    def forward(self, inputs: Tensor) -> Tensor:
        self._clock[0] += self._seconds
        return self.layer(inputs)


@pytest.mark.parametrize(
    ("of_image", "share", "said"),
    [
        (
            0.75,
            0.75,
            "The loader is the bottleneck: it takes 75% of a step, and no level helps; raise num_workers (found 0), or "
            "do less work per sample.",
        ),
        (
            1 / 12,
            0.25,
            "A level acts on forward, backward and optimizer, which take 75% of a step. If they took no time, a step "
            "would be 4.0 times as fast.",
        ),
    ],
)
def test_a_slow_loader_is_found(of_image, share, said):
    now = [0.0]
    model = SlowNet(now, 1.0)
    before = model.layer.weight.detach().clone()
    loader = DataLoader(SlowImages(now, of_image), batch_size=4)
    parts = Parts(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, loader)
    found = doctor.measure_step(parts, steps=7, device=torch.device("cpu"), clock=Clock(read=lambda: now[0]))
    assert found["parts"]["data loading"] == pytest.approx({"median_ms": 4000 * of_image, "share": share})
    assert found["parts"]["forward"] == pytest.approx({"median_ms": 1000, "share": 1 - share})
    assert found["num_workers"] == 0
    assert found["verdict"] == said
    assert not torch.equal(before, model.layer.weight)


def timed(loading: float) -> StepParts:
    return StepParts({"data loading": [loading], "forward": [1 - loading]})


@pytest.mark.parametrize(
    ("loading", "workers", "said"),
    [
        (0.51, None, "load the batches with a DataLoader and num_workers"),
        (0.51, 8, "raise num_workers (found 8)"),
        (0.5, 0, "If they took no time, a step would be 2.0 times as fast."),
    ],
)
def test_the_verdict(loading, workers, said):
    assert said in doctor.verdict(timed(loading), workers)


def test_the_verdict_promises_no_factor_without_a_limit():
    assert doctor.verdict(timed(0.0), 0).endswith("take 100% of a step.")
