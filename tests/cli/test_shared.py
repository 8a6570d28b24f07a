"""What all commands share: errors, tables, JSON, progress, and the choice of workload and device."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
import typer

from tests.support.reports import winning_report
from torchboost.bench.factory import Factory
from torchboost.cli import shared
from torchboost.cli.shared import chosen, usable_device
from torchboost.errors import ConfigError, IncompatibleError


def test_errors_of_the_user_end_with_one_line(capsys):
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


@pytest.mark.parametrize("error", [KeyError("ours"), ModuleNotFoundError("x", name="torchboost.gone")])
def test_faults_of_ours_keep_their_traceback(error):
    with pytest.raises(type(error)), shared.user_errors():
        raise error


def test_tables_take_no_markup_from_data(capsys, monkeypatch):
    shared.print_table(["a", "b"], [["1", "[red]x"]])
    assert capsys.readouterr().out.splitlines()[-1] == "1  [red]x"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shared.print_table(["a", "b"], [["1", "[red]x"]])
    assert "[red]x" in capsys.readouterr().out


def test_summary():
    found = shared.summary_of(winning_report())
    assert found["headline"].startswith("O2 trains")
    assert found["verdicts"]["O1"][0]["tone"] == "good"


def test_json_is_valid_whatever_the_output_can_show(monkeypatch, capsys):
    shared.print_json({"dtype": torch.bfloat16})
    assert json.loads(capsys.readouterr().out) == {"dtype": "torch.bfloat16"}
    said = {"path": "pca \ud800", "name": "\xe9\u4e2d"}
    for encoding in ("utf-8", "ascii", "latin-1"):
        written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", written)
            shared.print_json(said)
        written.flush()
        assert json.loads(written.buffer.getvalue()) == said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_few_lines_or_bars_on_a_terminal():
    for stream in (io.StringIO(), Terminal()):
        with shared.display(stream) as shown:
            shown("data", 0, 0)  # nothing to do is no division by zero
            for done in range(101):
                shown("timing", done, 100)
            shown("training", 0, 4, "O1 [seed 0]")
            shown("training", 4, 4)
        assert shown.phase == "training"
        if isinstance(stream, Terminal):
            assert "timing" in stream.getvalue()
            continue
        lines = stream.getvalue().splitlines()
        assert (lines[0], lines[1], lines[11]) == ("data: 0 of 0", "timing: 0 of 100", "timing: 100 of 100")
        assert lines[12:] == ["training: 0 of 4 (O1 [seed 0])", "training: 4 of 4"]


def test_a_device_must_be_here():
    assert usable_device("cpu") == torch.device("cpu")
    for device in ("toaster", "cuda:99"):
        with pytest.raises(ValueError, match=f"--device: '{device}' cannot be used here: ") as caught:
            usable_device(device)
        assert "\n" not in str(caught.value)


def test_a_workload_is_a_name_or_a_factory_that_makes_model_and_data(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("def make(seed): ...")
    factory = chosen(f"{file}:make", model=None)
    assert isinstance(factory, Factory)
    assert factory.name == f"{file}:make"
    assert chosen("cifar10", model="vgg").name == "cifar10-vgg"
    with pytest.raises(ValueError, match=r"without a function; needed: train\.py:make"):
        chosen("train.py", model=None)
    with pytest.raises(ValueError, match="--train-limit: found '5'; leave it out"):
        chosen("train.py:make", model=None, train_limit=5)
