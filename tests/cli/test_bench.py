from __future__ import annotations

import json
import textwrap

import pytest
import torch
from typer.testing import CliRunner

from tests.bench.test_factory import GOOD
from tests.support.reports import winning_report
from torchboost.cli.app import app
from torchboost.errors import FactoryError
from torchboost.measure.evidence import BenchReport


def run(*words: str):
    return CliRunner().invoke(app, ["bench", *words])


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every benchmark asked for; none is run."""
    seen = []

    def pretend(factory, **options):
        seen.append({"factory": factory, **options})
        options["progress"]("training", 1, 2, "O1")
        return winning_report()

    monkeypatch.setattr("torchboost.cli.bench.run_bench", pretend)
    return seen


def test_defaults_and_what_is_written(calls, tmp_path):
    result = run("--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert calls[0]["factory"].name.startswith("digits")
    assert calls[0]["contestants"] == ["stock", "hand", "O1", "O2"]
    assert calls[0]["out"] == tmp_path / "report.json"
    assert result.stdout.endswith(f"wrote {tmp_path / 'report.json'}\nwrote {tmp_path / 'report.html'}\n")
    assert "training: 1 of 2 (O1)" in result.stderr
    assert BenchReport.load(tmp_path / "report.json") == winning_report()


def test_json_answers_on_standard_output_alone(calls, tmp_path):
    result = run("text", "--train-limit", "40", "--json", "--no-html", "--out", str(tmp_path))
    found = json.loads(result.stdout)
    assert found["html"] is None
    assert found["report"] == str(tmp_path / "report.json")
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
    assert calls[0]["factory"].name == "text-gpt"


def test_errors_before_anything_runs(tmp_path):
    for words, said in {
        ("digit-sums",): "digits",
        ("digits", "--contestants", "stock,O7"): "O7",
        ("digits", "--device", "toaster"): "--device",
        ("none.py:make",): "found no file",
        ("train.py",): "train.py:make",
        ("none.py:make", "--model", "x"): "builds model and data",
        ("none.py:make", "--data", "x"): "builds model and data",
        ("digits", "--decide", "5x"): "--decide: found '5x'",
        ("digits", "--accuracy"): "--accuracy: leave it out",
    }.items():
        result = run(*words, "--out", str(tmp_path))
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")
        assert said in result.stderr
        assert "Traceback" not in result.output


def test_a_factory_at_fault_while_training_is_one_line(monkeypatch, tmp_path):
    def fail(factory, **options):
        options["progress"]("training", 0, 1)
        raise FactoryError("the factory's loss returned a float")

    monkeypatch.setattr("torchboost.cli.bench.run_bench", fail)
    result = run("--out", str(tmp_path))
    assert result.exit_code == 1
    assert "Error: the factory's loss returned a float" in result.stderr
    assert "Traceback" not in result.output


def test_a_report_that_was_cut_is_one_line(tmp_path):
    (tmp_path / "report.json").write_text('{"format": 1, "tit')
    result = run("digits", "--out", str(tmp_path), "--resume", "--pairs", "1")
    assert result.exit_code == 1
    assert "Error: this is not a report of torchboost" in result.stderr


def test_faults_while_training_are_not_hidden(monkeypatch, tmp_path):
    def fail(factory, **options):
        options["progress"]("training", 0, 1)
        raise ValueError("inside the training")

    monkeypatch.setattr("torchboost.cli.bench.run_bench", fail)
    assert isinstance(run("--out", str(tmp_path)).exception, ValueError)


@pytest.mark.parametrize("saved", [True, False])
def test_interrupted(monkeypatch, tmp_path, saved):
    def stop(factory, **options):
        if saved:
            winning_report().save(options["out"])
        raise KeyboardInterrupt

    monkeypatch.setattr("torchboost.cli.bench.run_bench", stop)
    result = run("--out", str(tmp_path))
    assert result.exit_code == 130
    assert ("24 finished training runs; repeat the command with --resume" in result.stderr) is saved
    assert ("Nothing was saved" in result.stderr) is not saved


def test_interrupted_before_anything_was_saved_over_an_earlier_report(monkeypatch, tmp_path):
    place_report(tmp_path)

    def stop(factory, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchboost.cli.bench.run_bench", stop)
    assert "from an earlier run" in run("--out", str(tmp_path)).stderr
    assert "24 finished training runs" in run("--out", str(tmp_path), "--resume").stderr


def place_report(folder, workload="digits-resnet"):
    winning_report().model_copy(update={"workload": workload}).save(folder / "report.json")


def test_the_report_of_another_workload_is_not_overwritten(calls, tmp_path):
    place_report(tmp_path, "text-gpt")
    before = (tmp_path / "report.json").read_bytes()
    result = run("--out", str(tmp_path))
    assert result.exit_code == 1
    assert "holds a report of text-gpt, but this is digits-resnet; choose another folder with --out" in result.stderr
    assert (tmp_path / "report.json").read_bytes() == before
    assert not calls
    assert run("--out", str(tmp_path), "--force").exit_code == 0
    place_report(tmp_path)
    assert run("--out", str(tmp_path)).exit_code == 0
    (tmp_path / "report.json").write_text("{}")
    assert "holds a file that is not a report of torchboost" in run("--out", str(tmp_path)).stderr


def test_a_relative_folder_is_that_of_the_start(calls, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "train.py"
    path.write_text("import os\nos.chdir('elsewhere')\n" + textwrap.dedent(GOOD))
    result = run(f"{path}:make", "--out", "found")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "found" / "report.json").is_file()
    assert calls[0]["out"] == tmp_path / "found" / "report.json"


def test_help_names_the_workloads():
    shown = " ".join(run("--help").output.split())
    for name in ("digits", "cifar10", "text"):
        assert name in shown.partition("train.py:make")[0]


def test_a_factory_of_the_user_end_to_end(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(GOOD))
    words = (
        "--contestants",
        "stock,O0",
        "--pairs",
        "3",
        "--seeds",
        "2",
        "--epochs",
        "2",
        "--out",
        str(tmp_path / "out"),
    )
    result = run(f"{path}:make", *words)
    assert result.exit_code == 0, result.output
    made = BenchReport.load(tmp_path / "out" / "report.json")
    stock, level = made.contestants
    assert made.metric_name == "metric"
    assert "accuracy" not in result.stdout
    assert "O0 ends 0 from stock in the metric over 2 seeds, with 95 % bounds 0 to 0" in result.stdout.replace(
        "+0", "0"
    )
    # Level O0 changes nothing: the same numbers, seed by seed.
    assert [c.metric for c in stock.curves] == [c.metric for c in level.curves]
    assert [c.train_loss for c in stock.curves] == [c.train_loss for c in level.curves]
    again = run(f"{path}:make", *words, "--resume", "--json")
    assert again.exit_code == 0, again.output
    assert BenchReport.load(tmp_path / "out" / "report.json").contestants == made.contestants
    assert torch.isfinite(torch.tensor(stock.step_seconds.mid))
    share = run(f"{path}:make", *words[:-1], str(tmp_path / "share"), "--seeds", "3", "--accuracy", "--no-html")
    assert "O0 keeps accuracy within 0.5 points of stock: +0.00 points" in share.stdout
    refused = run(f"{path}:make", *words, "--force", "--decide", "5s")
    assert refused.exit_code == 1
    assert "--accuracy if it is an accuracy" in refused.stderr
