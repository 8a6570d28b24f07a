"""What all commands share: errors, tables, JSON, progress, and the choice of workload and device."""

from __future__ import annotations

import io
import json

import pytest
import torch
import typer

from tests.support.reports import winning_report
from torchboost.bench.factory import Factory
from torchboost.bench.report.table import print_table
from torchboost.cli import shared
from torchboost.errors import ConfigError, IncompatibleError


def test_errors_of_the_user_end_with_one_line_and_faults_of_ours_keep_their_traceback(capsys):
    for error, pointed in (
        (ConfigError("a.b", found="1", allowed="2"), False),
        (IncompatibleError("one cannot work with the other"), False),
        (FileNotFoundError(2, "No such file or directory", "x.json"), False),
        (ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow"), True),
        (ImportError("x is missing", name="sklearn.datasets"), True),
        (ImportError("x is missing", name="datasets"), False),
        (ImportError("needs pyarrow"), False),
    ):
        with pytest.raises(typer.Exit) as stopped, shared.user_errors():
            raise error
        assert stopped.value.exit_code == 1
        said = capsys.readouterr().err
        assert said.startswith("Error: ")
        assert said.count("\n") == 1
        assert ("torchboost doctor" in said) is pointed
    for error in (KeyError("ours"), ModuleNotFoundError("x", name="torchboost.gone")):
        with pytest.raises(type(error)), shared.user_errors():
            raise error


def test_tables_fit_the_terminal_and_json_is_ascii(capsys, monkeypatch):
    shared.print_json({"dtype": torch.bfloat16, "path": "pca \ud800", "name": "\xe9\u4e2d"})
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {"dtype": "torch.bfloat16", "path": "pca \ud800", "name": "\xe9\u4e2d"}
    monkeypatch.setenv("COLUMNS", "9")
    for terminal, expected in ((False, "1.00  1.00 (0.90 to 1.10)"), (True, "1.00  1.00")):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal, raising=False)
        print_table(["a", "b"], [["1.00", "1.00 (0.90 to 1.10)"]])
        assert capsys.readouterr().out.splitlines()[-1] == expected
    summary = shared.summary_of(winning_report())
    assert summary["headline"].startswith("O2 trains")
    assert summary["verdicts"]["O1"][0]["tone"] == "good"


def test_progress_is_a_few_lines():
    lines = io.StringIO()
    shown = shared.Display(lines)
    shown("data", 0, 0)  # nothing to do is no division by zero
    for done in range(101):
        shown("timing", done, 100)
    shown("training", 0, 4, "O1 [seed 0]")
    shown("training", 4, 4)
    assert shown.phase == "training"
    text = lines.getvalue().splitlines()
    assert (text[0], text[1], text[11]) == ("data: 0 of 0", "timing: 0 of 100", "timing: 100 of 100")
    assert text[12:] == ["training: 0 of 4 (O1 [seed 0])", "training: 4 of 4"]


def test_a_workload_is_a_name_or_a_factory_that_makes_model_and_data_and_a_device_must_be_here(tmp_path, monkeypatch):
    file = tmp_path / "train.py"
    file.write_text("def make(seed): ...")
    factory = shared.chosen(f"{file}:make")
    assert isinstance(factory, Factory)
    assert factory.name == f"{file}:make"
    assert shared.chosen("cifar10-vgg").name == "cifar10-vgg"
    with pytest.raises(ValueError, match=r"without a function; needed: train\.py:make"):
        shared.chosen("train.py")
    with pytest.raises(ValueError, match="--train-limit: found '5'; leave it out"):
        shared.chosen("train.py:make", train_limit=5)
    assert shared.usable_device("cpu") == torch.device("cpu")
    for found, chosen in ((None, "cpu"), ("cuda", "cpu"), ("meta", "meta")):  # the second one cannot be used
        device = None if found is None else torch.device(found)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, device=device: device)
        assert shared.usable_device("auto") == torch.device(chosen)
    for device in ("toaster", "cuda:99"):
        with pytest.raises(ValueError, match=f"--device: '{device}' cannot be used here: ") as caught:
            shared.usable_device(device)
        assert "\n" not in str(caught.value)
