"""``torchboost bench``: what it writes, what it refuses, and what it says when it is stopped."""

from __future__ import annotations

import json
import textwrap

import pytest
from typer.testing import CliRunner

from tests.bench.test_factory import GOOD
from tests.support.reports import winning_report
from torchboost.cli.app import app
from torchboost.errors import FactoryError
from torchboost.measure.evidence import BenchReport
from torchboost.workloads.named import WORKLOADS


def run(*words: str):
    return CliRunner().invoke(app, ["bench", *words])


@pytest.fixture
def pretend(monkeypatch):
    """A function that lets no benchmark run, and returns the list of what is asked for; ``end`` ends each."""
    asked = []

    def set_up(end=lambda options: None):
        def benched(factory, **options):
            asked.append({"factory": factory, **options})
            options["progress"]("training", 1, 2, "O1")
            end(options)
            return winning_report()

        monkeypatch.setattr("torchboost.bench.bench.run_bench", benched)
        return asked

    return set_up


def raising(error: BaseException, saved: bool = False):
    def end(options):
        if saved:
            winning_report().save(options["out"])
        raise error

    return end


def place_report(folder, workload="digits-resnet"):
    winning_report().model_copy(update={"workload": workload}).save(folder / "report.json")


def test_defaults_and_what_is_written(pretend, tmp_path):
    asked = pretend()
    result = run("--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert asked[0]["factory"].name.startswith("digits")
    assert asked[0]["contestants"] == ["stock", "hand", "O1", "O2"]
    assert asked[0]["out"] == tmp_path / "report.json"
    assert result.stdout.endswith(f"wrote {tmp_path / 'report.json'}\nwrote {tmp_path / 'report.html'}\n")
    assert "training: 1 of 2 (O1)" in result.stderr
    assert BenchReport.load(tmp_path / "report.json") == winning_report()
    other = tmp_path / "other"
    result = run("text", "--train-limit", "40", "--json", "--no-html", "--out", str(other))
    found = json.loads(result.stdout)  # alone on standard output
    assert (found["html"], found["report"]) == (None, str(other / "report.json"))
    assert found["notes"] == winning_report().notes
    assert [path.name for path in other.iterdir()] == ["report.json"]
    assert asked[1]["factory"].name == "text-gpt"


def test_errors_before_anything_runs(tmp_path):
    for words, said in {
        ("digit-sums",): "digits",
        ("digits", "--contestants", "stock,O7"): "O7",
        ("digits", "--device", "toaster"): "--device",
        ("none.py:make",): "found no file",
        ("train.py",): "train.py:make",
        ("none.py:make", "--data", "x"): "builds model and data",
        ("digits", "--decide", "5x"): "--decide: found '5x'",
        ("digits", "--accuracy"): "--accuracy: leave it out",
        ("digits", "--train-limit", "10"): "found 10 training samples, and a batch has 64; raise --train-limit",
        ("digits", "--contestants", "hand,O1", "--decide", "60s"): "without stock",
    }.items():
        result = run(*words, "--out", str(tmp_path))
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")
        assert said in result.stderr
        assert "Traceback" not in result.output
    (tmp_path / "file").touch()
    result = run("digits", "--out", str(tmp_path / "file"))
    assert (result.exit_code, "a file; give a folder" in result.stderr) == (1, True)
    (tmp_path / "report.json").write_text('{"format": 1, "tit')
    result = run("digits", "--out", str(tmp_path), "--resume", "--pairs", "1")
    assert result.exit_code == 1
    assert "Error: this is not a report of torchboost" in result.stderr


def test_a_factory_at_fault_is_one_line_and_a_fault_in_the_training_is_shown_where_it_is(pretend, tmp_path):
    pretend(raising(FactoryError("the factory's loss returned a float")))
    result = run("--out", str(tmp_path))
    assert result.exit_code == 1
    assert "Error: the factory's loss returned a float" in result.stderr
    assert "Traceback" not in result.output
    pretend(raising(ValueError("inside the training")))
    result = run("--out", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.endswith("ValueError: inside the training\n")
    assert "in end\n    raise error" in result.stderr
    assert "torchboost/cli" not in result.stderr


WRONG = """
import torch
from torch import nn
{before}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.layer(inputs{wrong})

def make(seed):
    {inside}
    model = Net()
    batches = [(torch.randn(8, 4), torch.randint(2, (8,)))] * 4
    return model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, batches
"""


def test_a_factory_that_ends_the_program_is_an_error(tmp_path):
    file = tmp_path / "train.py"
    for parts in ({"before": "import sys; sys.exit(0)"}, {"inside": "import sys; sys.exit(0)"}):
        file.write_text(WRONG.format(**{"before": "", "inside": "pass", "wrong": "", **parts}))
        result = run(f"{file}:make", "--pairs", "1", "--seeds", "0", "--out", str(tmp_path / "out"))
        assert result.exit_code == 1
        assert "was ended with status 0; a factory must return" in result.stderr
        assert f"Error: {file}, line " in result.stderr


def test_an_error_in_the_users_file_is_shown_from_its_line_on(tmp_path):
    file = tmp_path / "train.py"
    for parts, line, said in (
        ({"before": "import gone_for_good"}, "import gone_for_good", "No module named 'gone_for_good'"),
        ({"before": "def broken("}, "def broken(", "SyntaxError"),
        ({"inside": "open('no-such-data.csv')"}, "open('no-such-data.csv')", "FileNotFoundError"),
        ({"inside": "raise ValueError('mine')"}, "raise ValueError('mine')", "ValueError: mine"),
        ({"wrong": "[:, :3]"}, "return self.layer(inputs[:, :3])", "shapes cannot be multiplied"),
    ):
        file.write_text(WRONG.format(**{"before": "", "inside": "pass", "wrong": "", **parts}))
        words = (f"{file}:make", "--contestants", "stock,O1", "--pairs", "1", "--out", str(tmp_path / "out"))
        result = run(*words, "--json")
        assert (result.exit_code, result.stdout) == (1, ""), parts
        assert line in result.stderr
        assert said in result.stderr
        assert "/torchboost/" not in result.stderr


def test_a_schedule_that_cannot_drive_a_configuration_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cycle = "lambda o, n: torch.optim.lr_scheduler.OneCycleLR(o, [group['lr'] for group in o.param_groups], n)"
    text = WRONG.format(before="", inside="pass", wrong="").replace("nn.Linear(4, 2)", "wide()")
    text = text.replace("lr=0.1", "0.1, 0.9")
    text = text.replace("cross_entropy, batches", f"cross_entropy, batches, None, {cycle}")
    wide = "\n\ndef wide():\n    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))\n"
    (tmp_path / "train.py").write_text(text + wide)
    (tmp_path / "muon.json").write_text('{"recipe": {"optimizer": "muon"}}')
    result = run("train.py:make", "--contestants", "stock,muon.json", "--pairs", "1", "--seeds", "0")
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: contestant 'muon.json': the schedule raises ValueError: ")
    assert last.endswith("let the schedule pass cycle_momentum=False.")


def test_interrupted(pretend, tmp_path):
    saved = "24 finished training runs; repeat the command with --resume"
    for folder, earlier, saves, words, said in (
        ("new", False, True, (), saved),
        ("none", False, False, (), "Nothing was saved"),
        ("old", True, False, ("--force",), "Nothing was saved"),
        ("old", True, False, ("--resume",), saved),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        if earlier:
            place_report(tmp_path / folder)
        pretend(raising(KeyboardInterrupt(), saved=saves))
        result = run("--out", str(tmp_path / folder), *words)
        assert result.exit_code == 130
        assert said in result.stderr


def test_a_report_that_is_there_is_not_overwritten(pretend, tmp_path):
    asked = pretend()
    place_report(tmp_path)
    before = (tmp_path / "report.json").read_bytes()
    result = run("--out", str(tmp_path))
    assert result.exit_code == 1
    assert "exists; continue it with --resume, overwrite it with --force, or choose another folder" in result.stderr
    assert (tmp_path / "report.json").read_bytes() == before
    assert not asked
    assert run("--out", str(tmp_path), "--force").exit_code == 0
    assert run("--out", str(tmp_path), "--resume").exit_code == 0


def test_a_relative_folder_is_that_of_the_start(pretend, monkeypatch, tmp_path):
    asked = pretend()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "train.py"
    path.write_text("import os\nos.chdir('elsewhere')\n" + textwrap.dedent(GOOD))
    result = run(f"{path}:make", "--out", "found")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "found" / "report.json").is_file()
    assert asked[0]["out"] == tmp_path / "found" / "report.json"


def test_help_names_the_workloads():
    shown = " ".join(run("--help").output.split())
    for workload in WORKLOADS:
        assert workload.name.partition("-")[0] in shown.partition("train.py:make")[0]


def test_a_factory_of_the_user_end_to_end(tmp_path):
    path, out = tmp_path / "train.py", tmp_path / "out"
    path.write_text(textwrap.dedent(GOOD))
    words = (f"{path}:make", "--contestants", "stock,O0", "--pairs", "2", "--seeds", "2", "--epochs", "2")
    result = run(*words, "--out", str(out))
    assert result.exit_code == 0, result.output
    whole = BenchReport.load(out / "report.json")
    stock, level = whole.contestants
    assert whole.metric_name == "metric"
    assert "accuracy" not in result.stdout
    said = "O0 ends 0 from stock in the metric over 2 seeds. The difference is the same on each, which gives no bounds."
    assert said in result.stdout.replace("+0", "0")
    # Level O0 changes nothing: the same numbers, seed by seed.
    assert [c.metric for c in stock.curves] == [c.metric for c in level.curves]
    assert [c.train_loss for c in stock.curves] == [c.train_loss for c in level.curves]
    again = run(*words, "--out", str(out), "--resume", "--json")
    assert again.exit_code == 0, again.output
    assert BenchReport.load(out / "report.json").contestants == whole.contestants
    refused = run(*words, "--out", str(out), "--force", "--decide", "5s")
    assert refused.exit_code == 1
    assert "--accuracy if it is an accuracy" in refused.stderr
