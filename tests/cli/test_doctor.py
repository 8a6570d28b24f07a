"""The doctor: what it prints for planted machines, and whom it blames for a slow step."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
import time
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typer.testing import CliRunner

from torchboost.bench.factory import Parts
from torchboost.cli import doctor
from torchboost.cli.app import app
from torchboost.measure.machine import Products
from torchboost.measure.stopwatch import Clock

FACTORY = """
    import torch
    from torch import nn

    def make(seed):
        model = nn.Linear(2, 2)
        batches = [(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))] * 2
        return model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, batches

    def sparse(seed):
        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.out = nn.Embedding(9, 16), nn.Linear(16, 400)

            def forward(self, ids):
                return self.out(self.words(ids))

        def loss(logits, labels):
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

        model, labels = Tagger(), torch.full((16, 64), -100)
        labels[:, 0] = 1
        batches = [(torch.ones(16, 64, dtype=torch.long), labels)]
        return model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batches

    def unmeasured(seed):
        class Reentrant(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)

            def forward(self, inputs):
                return torch.utils.checkpoint.checkpoint(self.layer, inputs.requires_grad_(), use_reentrant=True)

        model = Reentrant()
        return (model, torch.optim.SGD(model.parameters(), lr=0.1), *make(seed)[2:])

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


class Environment(NamedTuple):
    """What ``collect_env`` finds, after seconds."""

    python_version: str = "3.12.3"
    os: str = "Linux"
    python_platform: str = "x86_64"
    nvidia_driver_version: str | None = None


@pytest.fixture(autouse=True)
def _planted_environment(monkeypatch, request):
    if "slow" not in request.keywords:
        monkeypatch.setattr(doctor, "get_env_info", Environment)


@pytest.fixture
def planted(monkeypatch, bfloat16):
    """A machine that answers at once."""
    seen = []

    def products(kind, device, *, seconds):
        seen.append((kind, device))
        return Products(kind=kind, size="8 x 8 x 8", ratio=0.5, float32=4e11, bfloat16=2e11, pairs=9)

    bfloat16(0.5, 0.5)
    monkeypatch.setattr(doctor, "products", products)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return seen


def test_what_was_measured_is_printed(planted):
    result = run()
    assert result.exit_code == 0, result.output
    lines = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in result.stdout.splitlines()}
    assert lines["matrix product, cpu"] == "float32 400, bfloat16 200 GFLOP/s (8 x 8 x 8)"
    assert lines["convolution, cpu"] == "float32 400, bfloat16 200 GFLOP/s (8 x 8 x 8)"
    assert lines["fast bfloat16, cpu"].startswith("no: a bfloat16 matrix product takes 2.0 times the time")
    assert {"gloo", "NCCL", "C++ compiler", "torch.compile"} <= set(lines)
    assert planted == [("matrix product", "cpu"), ("convolution", "cpu")]
    assert "machine: 0 of 3 (bfloat16 in plans, cpu)" in result.stderr
    assert "machine: 3 of 3" in result.stderr
    assert "machine:" not in result.stdout


def test_everything_in_json_for_a_gpu_too(planted, file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    file.write_text("print('mine')\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    found = json.loads(run(f"{file}:make", "--steps", "4", "--json").stdout)
    measured, step = found["measured"], found["step"]
    speed = measured["products"]["cpu"]["convolution"]
    assert (speed["float32_gflop_per_s"], speed["bfloat16_gflop_per_s"], speed["ratio"]) == (400.0, 200.0, 0.5)
    assert measured["bfloat16"]["cpu"]["fast"] is False
    assert list(measured["products"]) == ["cpu", "cuda"]
    assert planted[2:] == [("matrix product", "cuda"), ("convolution", "cuda")]
    assert (step["steps"], step["num_workers"]) == (4, None)
    assert list(step["parts"]) == ["data loading", "forward", "backward", "optimizer"]
    assert sum(part["share"] for part in step["parts"].values()) == pytest.approx(1.0)


def test_faults_are_printed_as_findings(planted, monkeypatch):
    monkeypatch.setattr(doctor, "products", lambda kind, device, seconds: Products(kind=kind, fault="no kernel"))
    shown = run().stdout
    assert "no kernel" in shown
    assert "GFLOP/s" not in shown


KINDS = [
    "waiting for data",
    "padding",
    "unlabelled head",
    "masks that mask nothing",
    "activation checkpointing",
    "forward pass of frozen layers",
    "host synchronisations",
]


@pytest.mark.usefixtures("planted")
def test_the_waste_of_a_step_is_measured(file, monkeypatch):
    """In processor time, of which other programs take nothing."""
    monkeypatch.setattr(Clock, "of", lambda device="cpu": Clock(read=time.process_time))
    found = json.loads(run(f"{file}:sparse", "--steps", "3", "--json").stdout)["waste"]
    kinds = {kind["kind"]: kind for kind in found["kinds"]}
    assert (list(kinds), found["fault"]) == (KINDS, "")
    assert kinds["unlabelled head"]["share"] > 0.1  # the loss is outside of the model
    assert (kinds["padding"]["share"], kinds["padding"]["seconds"]) == (None, None)
    shown = run(f"{file}:sparse", "--steps", "3").stdout
    assert re.search(r"^padding +not known *$", shown, re.MULTILINE), shown
    assert "padding: no mask seen" in shown
    assert "waste of a step" in shown
    assert "Remedy: boost tries the switch sparse_head" in shown
    assert json.loads(run("--json").stdout)["waste"] is None
    shown = run(f"{file}:unmeasured", "--steps", "2")
    assert shown.exit_code == 0
    assert "The waste of a step was not measured: IncompatibleError: torch.utils.checkpoint" in shown.stdout


@pytest.mark.usefixtures("planted")
def test_a_step_is_timed_in_parts_and_faults_are_one_line(file):
    shown = run(f"{file}:make", "--steps", "2")
    assert shown.exit_code == 0
    assert "part of a step (2 steps, cpu)" in shown.stdout
    assert "steps: 5 of 5" in shown.stderr
    assert json.loads(run("--json").stdout)["step"] is None
    for words, said in {
        (f"{file}:wrong",): "the factory returned int",
        (f"{file}:gone",): "does not define a function 'gone'",
        ("none.py:make",): "found no file",
        (f"{file}:make", "--device", "toaster"): "--device",
        (f"{file}:empty",): "batches gave nothing in pass 1",
    }.items():
        result = run(*words)
        assert result.exit_code == 1
        assert said in result.stderr
        assert "Traceback" not in result.output
    faulty = run(f"{file}:faulty")
    assert faulty.exit_code == 1
    assert 'raise ValueError("of the user")\nValueError: of the user\n' in faulty.stderr
    assert "torchboost/cli" not in faulty.stderr


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


def test_batches_that_are_there_already_are_not_copied_in_the_time_of_loading():
    """The copy of a large batch takes as long as a small network. What a loss takes out of a batch stays in it."""
    seen: list[int] = []

    class Looking(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(input.data_ptr())
            return super().forward(input)

    batch, model = {"input": torch.ones(4, 2), "labels": torch.tensor([0, 1, 0, 1])}, Looking(2, 2)
    batches = [({"input": batch["input"]}, batch)]
    parts = Parts(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets.pop("labels")),
        batches,
    )
    doctor.measure_step(parts, steps=2, device=torch.device("cpu"))
    assert set(seen) == {batch["input"].data_ptr()}
    assert list(batch) == ["input", "labels"]


def test_the_steps_of_the_doctor_clip_their_gradients_as_the_factory_says():
    def clip(model: nn.Module) -> None:
        clipped.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.0)))

    clipped: list[float] = []
    model, batches = nn.Linear(2, 2), [(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))]
    first, optimizer = model.weight.detach().clone(), torch.optim.SGD(model.parameters(), lr=0.1)
    parts = Parts(model, optimizer, nn.functional.cross_entropy, batches, before_step=clip)
    doctor.measure_step(parts, steps=2, device=torch.device("cpu"))
    assert len(clipped) == doctor.WARMUP + 2
    assert min(clipped) > 0
    assert torch.equal(model.weight, first)


def test_a_slow_loader_is_found():
    for of_image, share, said in (
        (
            0.75,
            0.75,
            "bottleneck: it takes 75 % of a step, and no level helps; raise num_workers (found 0), or do less",
        ),
        (1 / 12, 0.25, "which take 75 % of a step. If they took no time, a step would be 4.0 times as fast."),
    ):
        now = [0.0]
        model = SlowNet(now, 1.0)
        before = model.layer.weight.detach().clone()
        loader = DataLoader(SlowImages(now, of_image), batch_size=4)
        parts = Parts(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, loader)
        clock = Clock(read=lambda now=now: now[0])
        found = doctor.measure_step(parts, steps=7, device=torch.device("cpu"), clock=clock)
        assert found["parts"]["data loading"] == pytest.approx({"median_ms": 4000 * of_image, "share": share})
        assert found["parts"]["forward"] == pytest.approx({"median_ms": 1000, "share": 1 - share})
        assert found["num_workers"] == 0
        assert said in found["verdict"]
        assert not torch.equal(before, model.layer.weight)
        waiting = doctor.measure_waste(parts, found, device=torch.device("cpu"), clock=clock)["kinds"][0]
        assert (waiting["kind"], waiting["share"]) == ("waiting for data", pytest.approx(share))
        assert waiting["seconds"] == pytest.approx(4 * of_image)
        assert "torchboost.loader" in waiting["remedy"]
    for loading, workers, said in (
        (0.51, None, "load the batches with a DataLoader and num_workers"),
        (0.51, 8, "raise num_workers (found 8)"),
        (0.5, 0, "If they took no time, a step would be 2.0 times as fast."),
        (0.0, 0, "take 100 % of a step."),  # no factor without a limit
    ):
        assert said in doctor.verdict(loading, workers)


def test_examine(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else name)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    for follows, said in ((True, "good"), (False, "careful")):
        monkeypatch.setattr(doctor, "compiler_follows_flags", lambda follows=follows: follows)
        found = doctor.examine()
        assert found["compile"].startswith(said)
    assert found["versions"]["torch"] in torch.__version__
    assert found["threads"] == 1
    assert (found["extras"]["workloads"], found["extras"]["cli"]) == (["pyarrow"], [])
    assert (found["distributed"], found["gloo"], found["nccl"]) == (True, False, True)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    found = doctor.examine()
    assert (found["distributed"], found["gloo"], found["nccl"]) == (False, False, False)
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package",))
    assert doctor.examine()["versions"] == {"no-such-package": "not installed"}


def test_the_cpp_compiler_is_the_one_in_cxx(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    for cxx, name in ((None, "g++"), ("clang++-18", "clang++-18"), ("ccache g++ -O2", "ccache"), ("", None)):
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.delenv("CXX", raising=False)
        if cxx is not None:
            monkeypatch.setenv("CXX", cxx)
        assert doctor.cpp_compiler() == (None if name is None else f"/bin/{name}")
        monkeypatch.setattr(shutil, "which", lambda name: None)
        assert doctor.cpp_compiler() is None


@pytest.mark.slow
def test_the_real_environment_has_what_is_shown():
    assert set(Environment._fields) <= set(doctor.examine()["environment"])
