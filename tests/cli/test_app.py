from __future__ import annotations

import builtins
import importlib.util
import io
import json
import runpy
import sys

import pytest
from typer.testing import CliRunner

import torchboost
from tests.support.reports import winning_report
from tests.tuning.test_report import finding
from tests.tuning.test_report import report as tuning
from torchboost.cli import main
from torchboost.cli.app import app
from torchboost.registry import LEVELS, REGISTRY

COMMANDS = ("bench", "levels", "explain", "report", "doctor", "tune")


def run(*words: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(words), input=stdin)


def answer(*words: str):
    result = run(*words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def saved(tmp_path):
    return winning_report().save(tmp_path / "report.json")


def test_every_command_explains_itself():
    for command in COMMANDS:
        result = run(command, "--help")
        assert result.exit_code == 0
        assert "--json" in result.output


def test_levels():
    found = answer("levels", "--json")
    assert list(found["levels"]) == list(LEVELS)
    assert [a["name"] for a in found["algorithms"]] == list(REGISTRY)
    shown = run("levels").stdout
    assert all(name in shown for name in [*LEVELS, *REGISTRY])


def test_a_wrong_configuration_is_refused_with_one_message(tmp_path):
    for text, said in {
        '{"bost": {}}': "Did you mean 'boost'?",
        '{"extra": {"less_bnn": true}}': "extra.less_bnn",
        '{"extra": {"channels_last": {"speed": 1}}}': "extra.channels_last.speed",
        "[]": "text on standard input",
        "": "nothing on standard input",
    }.items():
        result = run("explain", "-", stdin=text)
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")
        assert said in result.stderr
        assert "Traceback" not in result.output
    for words in (
        ("explain", str(tmp_path / "none.json")),
        ("explain", "--level", "O9"),
    ):
        result = run(*words, "--json")
        found = json.loads(result.stdout)
        assert (result.exit_code, found["valid"]) == (1, False)
        assert found["message"]


def test_explain(bfloat16, monkeypatch):
    shown = run("explain", "--level", "O1", "--convolutions", "0").stdout
    assert "the model has no convolution" in shown
    found = answer("explain", "--level", "O1", "--convolutions", "0", "--nodes", "2", "--json")
    assert "channels_last" in [d["name"] for d in found["dropped"]]
    assert {a["name"] for a in found["algorithms"]}.isdisjoint(d["name"] for d in found["dropped"])
    assert answer("explain", "--level", "O0", "--json")["algorithms"] == []
    recipe = {"optimizer": "muon", "lr": None, "rate": 0.5, "length": 0.55}
    found = json.loads(run("explain", "-", "--json", stdin=json.dumps({"recipe": recipe})).stdout)
    assert found["recipe"] == recipe
    bfloat16(0.48, 2.0)  # it says what was measured
    shown = run("explain", "--level", "O1", "--convolutions", "0").stdout
    assert "a bfloat16 matrix product takes 2.1 times the time of a float32 one here" in shown
    bfloat16(1.5, 0.5)
    assert "autocast" in [a["name"] for a in answer("explain", "--convolutions", "0", "--json")["algorithms"]]
    assert "a bfloat16 convolution takes 2.0 times" in run("explain", "--convolutions", "9").stdout
    monkeypatch.setattr("torchboost.cli.app.device_fault", lambda device: "not here")
    shown = run("explain", "--level", "O1", "--device", "cuda").stdout
    assert "cuda is not available here, so it is not known whether it computes faster in bfloat16" in shown
    assert "does not compute faster" not in shown


def test_version():
    assert run("--version").stdout == f"torchboost {torchboost.__version__}\n"


def test_errors_are_short():
    for words, code, said in (
        (("explain", "--level", "O9"), 1, "Did you mean"),
        (("explain", "--device", "toaster"), 1, "--device"),
        (("explain", "--nodes", "0"), 2, "nodes"),
        (("explain", "none.json"), 1, "there is no such file"),
        (("report", "none.json"), 1, "none.json: No such file"),
        (("nonsense",), 2, "nonsense"),
    ):
        result = run(*words)
        assert result.exit_code == code
        assert said in result.stderr
        assert "Traceback" not in result.output


def test_report(saved, tmp_path):
    assert "O1 promises to be no slower than stock" in run("report", str(saved)).stdout
    page = tmp_path / "deep" / "page.html"
    assert answer("report", str(saved), "--html", str(page), "--json")["html"] == str(page)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert run("report", str(saved), "--html", str(page)).stdout == f"wrote {page}\n"


def test_report_of_a_tuning(tmp_path):
    saved = tuning(findings=[finding("kept", "it saves time")], whole=[finding("kept")], notes=["a note"])
    path = str(saved.save(tmp_path / "boost.report.json"))
    shown = run("report", path)
    assert shown.exit_code == 0, shown.output
    for said in (
        "it saves time",
        "Turn on fast, with channels_last. A training then takes 67 % of the time.",
        "steps",
        "Note: A note.",
    ):
        assert said in shown.stdout
    page = tmp_path / "page.html"
    assert run("report", path, "--html", str(page)).stdout == f"wrote {page}\n"
    assert "Tuning of a model" in page.read_text(encoding="utf-8")
    found = answer("report", path, "--json")
    assert (found["headline"][:12], found["html"], found["drop"]) == ("Turn on fast", None, 0.005)
    (tmp_path / "broken.json").write_text('{"findings": []}', encoding="utf-8")
    assert "this is not a report of torchboost: title" in run("report", str(tmp_path / "broken.json")).stderr


def test_report_refuses_other_files(tmp_path):
    path = tmp_path / "report.json"
    for content in (b"not json", b'{"format": 2}', b"[]", b"5", b'{"title": "\xff\xfe"}', "{}".encode("utf-16")):
        path.write_bytes(content)
        result = run("report", str(path))
        assert result.exit_code == 1
        assert "this is not a report of torchboost" in result.stderr


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchboost", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torchboost", run_name="__main__")
    assert ended.value.code == 0
    assert "Usage: torchboost" in capsys.readouterr().out


def test_without_the_extra_or_stopped_while_torch_is_imported(monkeypatch, capsys):
    def imported(name, *rest, **more):
        if name == "torchboost.cli.app":
            raise KeyboardInterrupt
        return real(name, *rest, **more)

    real, find = builtins.__import__, importlib.util.find_spec
    monkeypatch.setattr(builtins, "__import__", imported)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert (stopped.value.code, capsys.readouterr().err) == (130, "\nStopped.\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else find(name))
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert "needs typer" in said
    assert said.endswith("install it from the folder of the project: pip install '.[cli]'\n")


def test_output_that_cannot_be_shown_is_escaped(saved, monkeypatch):
    for encoding, words, escaped in (
        ("ascii", [], b"3.57\\xd7"),
        ("utf-8", ["--html", f"{saved.parent}/x\udcff.html"], b"x\\udcff.html"),
    ):
        written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", written)
        monkeypatch.setattr(sys, "argv", ["torchboost", "report", str(saved), *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        written.flush()
        assert stopped.value.code == 0
        assert escaped in written.buffer.getvalue()
