from __future__ import annotations

import io
import json
import sys

import pytest
import torch
import typer

from tests.support.reports import winning_report
from torchboost.algorithms.channels_last import ChannelsLast
from torchboost.cli import output
from torchboost.errors import ConfigError, IncompatibleError


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a.b", found="1", allowed="2"),
        IncompatibleError("one cannot work with the other"),
        FileNotFoundError(2, "No such file or directory", "x.json"),
        ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow"),
        ImportError("needs pyarrow"),
    ],
)
def test_errors_of_the_user_end_with_one_line(error, capsys):
    with pytest.raises(typer.Exit) as stopped, output.user_errors():
        raise error
    assert stopped.value.exit_code == 1
    said = capsys.readouterr().err
    assert said.startswith("Error: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("package", "pointed"), [("sklearn.datasets", True), ("datasets", False), (None, False)])
def test_the_doctor_is_pointed_at_where_it_knows_the_package(package, pointed, capsys):
    with pytest.raises(typer.Exit), output.user_errors():
        raise ImportError("x is missing", name=package)
    assert ("torchboost doctor" in capsys.readouterr().err) is pointed


@pytest.mark.parametrize("error", [KeyError("ours"), ModuleNotFoundError("x", name="torchboost.gone")])
def test_faults_of_ours_keep_their_traceback(error):
    with pytest.raises(type(error)), output.user_errors():
        raise error


def test_json_prints_what_json_does_not_know(capsys):
    output.print_json({"dtype": torch.bfloat16})
    assert json.loads(capsys.readouterr().out) == {"dtype": "torch.bfloat16"}


def test_tables_are_plain_without_a_terminal(capsys):
    output.print_table(["a", "b"], [["1", "[red]x"]])
    assert capsys.readouterr().out.splitlines()[-1] == "1  [red]x"


def test_tables_on_a_terminal_take_no_markup_from_data(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    output.print_table(["a", "b"], [["1", "[red]x"]])
    assert "[red]x" in capsys.readouterr().out


def test_settings_and_summary():
    assert output.settings_of(ChannelsLast()) == {}
    found = output.summary_of(winning_report())
    assert found["headline"].startswith("O2 trains")
    assert found["verdicts"]["O1"][0]["tone"] == "good"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_json_is_valid_whatever_the_output_can_show(encoding, monkeypatch):
    said = {"path": "pca \ud800", "name": "\xe9\u4e2d"}
    written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", written)
    output.print_json(said)
    written.flush()
    assert json.loads(written.buffer.getvalue()) == said
