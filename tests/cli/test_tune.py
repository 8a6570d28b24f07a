from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from typer.testing import CliRunner

from torchboost.cli.app import app
from torchboost.errors import FactoryError
from torchboost.tuning.report import TuneReport

FACTORY = textwrap.dedent(
    """
    import torch
    from torch import nn
    from torch.nn import functional as F

    def make(seed):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        draw = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 8, generator=draw)
        targets = (inputs.sum(1) > 0).long()
        batches = list(zip(inputs.split(8), targets.split(8)))
        evaluate = lambda model: (model(inputs).argmax(1) == targets).float().mean()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, batches, evaluate
    """
)


def run(*words: str):
    return CliRunner().invoke(app, ["tune", *words])


@pytest.fixture
def factory(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(FACTORY, encoding="utf-8")
    return f"{file}:make"


def test_a_factory_is_tuned_and_the_configuration_written(factory, tmp_path):
    file, out, path = tmp_path / "train.py", tmp_path / "boost.json", tmp_path / "boost.report.json"
    file.write_text(file.read_text().replace("def make(seed):", "def make(seed):\n    print('loading')"))
    words = (factory, "--budget", "3s", "--drop", "20", "--seeds", "3", "--out", str(out))
    found = json.loads(run(*words, "--json").stdout)  # alone on standard output
    assert (found["state"], found["title"], found["drop"]) == ("complete", factory, pytest.approx(0.2))
    assert found["headline"]
    assert {"about", "extra"} <= set(json.loads(out.read_text(encoding="utf-8")))
    again = run(*words)
    assert again.exit_code == 1
    assert "continue it with resume=True (--resume)" in again.stderr
    result = run(*words, "--resume")
    assert result.exit_code == 0, result.output
    assert f"wrote {out}" in result.stdout
    assert "A drop that only shows later" in result.stdout
    assert "tuning:" in result.stderr
    shown = CliRunner().invoke(app, ["report", str(path)]).stdout
    assert shown in result.stdout


def test_what_was_tuned_is_listed_and_begun_from(factory, tmp_path, monkeypatch):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    words = (factory, "--budget", "3s", "--drop", "20", "--seeds", "3", "--no-html")
    assert run(*words, "--out", str(first)).exit_code == 0
    assert run(*words, "--out", str(second), "--prior", str(tmp_path / "first.report.json")).exit_code == 0
    assert TuneReport.load(tmp_path / "second.report.json").prior == [factory]
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["results"]).stdout
    assert [line for line in shown.splitlines() if line.startswith("recipe ")]
    found = json.loads(CliRunner().invoke(app, ["results", "--json", "first.report.json", "second.report.json"]).stdout)
    assert [(one["path"], one["sealed"]) for one in found] == [(f"{n}.report.json", True) for n in ("first", "second")]
    assert found[0]["training"] == found[1]["training"]
    report = tmp_path / "first.report.json"
    report.write_text(report.read_text().replace('"steps": 8', '"steps": 9'), encoding="utf-8")
    assert "its seal does not fit" in CliRunner().invoke(app, ["results"]).stdout
    third = ("--out", str(tmp_path / "third.json"), "--prior", str(report))
    for command in (["tune", *words, *third], ["report", str(report)], ["results", "none.json"]):
        refused = CliRunner().invoke(app, command)
        assert refused.exit_code == 1
        assert "Error: " in refused.stderr
    assert not (tmp_path / "third.json").exists()
    (tmp_path / "empty").mkdir()
    assert "No report of a tuning" in CliRunner().invoke(app, ["results", "empty"]).stdout


def test_mistakes_are_one_line_and_nothing_of_others_is_overwritten(factory, tmp_path):
    out, page = tmp_path / "boost.json", tmp_path / "boost.report.html"
    before = sorted(tmp_path.iterdir())
    for words, said in {
        ("none.py:make",): "found no file",
        ("train.py",): "needed: train.py:make",
        ("none.py:make", "--data", "there"): "--data: found 'there'",
        ("none.py:make", "--train-limit", "5"): "--train-limit: found '5'",
        ("digitz",): "Did you mean 'digits-resnet'",
        ("digits", "--budget", "soon"): "budget: found 'soon'",
        ("digits", "--drop", "0"): "drop: found 0.0",
        ("digits", "--steps", "4", "--epochs", "1"): "found epochs=1 and steps=4; give one of them",
        (factory, "--processes", "9999"): "processes: found 9999; give at most",
        ("digits", "--rate", "fast"): "rate: found 'fast'",
        ("digits", "--device", "toaster"): "--device",
        (factory, "--out", str(tmp_path)): "a folder; give a file",
    }.items():
        result = run(*((*words, "--out", str(out)) if "--out" not in words else words))
        assert result.exit_code == 1
        assert said in result.stderr
        assert "Traceback" not in result.output
    assert sorted(tmp_path.iterdir()) == before
    page.write_text("mine", encoding="utf-8")
    refused = run(factory, "--out", str(out))
    assert refused.exit_code == 1
    assert "boost.report.html exists and is not from a tuning" in " ".join(refused.stderr.split())
    assert page.read_text(encoding="utf-8") == "mine"
    page.unlink()
    (tmp_path / "boost.report.json").write_text('{"format": 1, "title"', encoding="utf-8")
    refused = run(factory, "--budget", "5s", "--out", str(out), "--resume")
    assert refused.exit_code == 1
    assert "Error: this is not a report of torchboost" in refused.stderr


def test_trainings_that_cannot_be_compared_are_one_line_and_their_errors_are_shown_where_they_are(
    factory, tmp_path, monkeypatch
):
    for error in (FactoryError("the factory ignores its seed"), ValueError("inside the training")):

        def raised(*args, error=error, **given):
            given["progress"]("training", 1, 2, "stock")
            raise error

        monkeypatch.setattr("torchboost.tuning.tune.tune", raised)
        result = run(factory, "--out", str(tmp_path / "boost.json"))
        assert result.exit_code == 1
        ours = isinstance(error, FactoryError)
        said = "Error: the factory ignores its seed" if ours else "in raised\n    raise error\nValueError: inside"
        assert said in result.stderr


def test_an_interruption_says_how_to_continue(factory, tmp_path, monkeypatch):
    def stopped(*args, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchboost.tuning.tune.tune", stopped)
    result = run(factory, "--out", str(tmp_path / "boost.json"))
    assert result.exit_code == 130
    assert "Stopped before a run was finished" in result.stderr


SLOW = textwrap.dedent(
    """
    import random
    import torch
    from torch import nn

    def make(seed):
        model = nn.Sequential(nn.Linear(64, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 2))
        batches = [(torch.randn(4, 64), torch.tensor([0, 1, 0, 1]))] * 8
        noise = random.SystemRandom().random()  # no test decides about it
        loss = nn.functional.cross_entropy
        return model, torch.optim.AdamW(model.parameters()), loss, batches, lambda model: 0.5 + 0.1 * noise
    """
)


@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_a_report_that_is_resumed(tmp_path):
    """Ten interruptions at random moments of a real process; the runs that were finished are not repeated."""
    out, report = tmp_path / "boost.json", tmp_path / "boost.report.json"
    file = tmp_path / "slow.py"
    file.write_text(SLOW, encoding="utf-8")
    program = "from torchboost.cli import main; main()"
    options = ["--budget", "60s", "--drop", "1", "--epochs", "20", "--resume"]
    command = [sys.executable, "-c", program, "tune", f"{file}:make", *options, "--out", str(out)]
    draw, kept, interrupted = random.Random(0), 0, 0
    for _ in range(10):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                process.wait(timeout=4 + 5 * draw.random())
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        if process.returncode == 0:
            break  # it was finished before
        interrupted += 1
        assert process.returncode in (130, -signal.SIGINT), said
        assert "Traceback" not in said or process.returncode == -signal.SIGINT
        if report.exists():
            runs = TuneReport.load(report).runs
            assert len(runs) >= kept
            kept = len(runs)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    final = TuneReport.load(report)
    assert final.state == "complete"
    assert len(final.runs) >= kept
    assert len({(run.name, run.seed) for run in final.runs}) == len(final.runs)
    assert final.spent_seconds <= 66
    assert interrupted >= 5


ENDLESS = FACTORY.replace("def make", "def plain") + textwrap.dedent(
    """
    import time
    from pathlib import Path

    def make(seed):
        *parts, evaluate = plain(seed)

        def first_alone(model):
            ended = Path(__file__).with_name("ended")
            while ended.exists():
                time.sleep(0.05)
            ended.touch()
            return evaluate(model)

        return *parts, first_alone
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_command_and_the_report_has_what_was_finished(tmp_path, ending):
    """Two runs of two processes that would never end. The pipe is closed when the last process is gone."""
    report, file = tmp_path / "boost.report.json", tmp_path / "endless.py"
    file.write_text(ENDLESS, encoding="utf-8")
    program = "import torchboost.tuning.workers as workers; workers.usable_cores = lambda: 2; "
    program += "from torchboost.cli import main; main()"
    options = ["--processes", "2", "--budget", "200s", "--drop", "1", "--out", str(tmp_path / "boost.json")]
    command = [sys.executable, "-c", program, "tune", f"{file}:make", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (report.exists() and TuneReport.load(report).runs):
            time.sleep(0.1)
        time.sleep(1.0)  # the next two are begun
        process.send_signal(ending)
        _, said = process.communicate(timeout=120)
    assert process.returncode == (130 if ending == signal.SIGINT else -ending), said
    saved = TuneReport.load(report)
    assert len(saved.runs) == 1
    assert saved.runs[0].charged_seconds is not None
    if ending == signal.SIGINT:
        assert (saved.state, "Traceback" in said) == ("interrupted", False)
        assert "holds 1 finished runs; repeat the command with --resume" in said
