from __future__ import annotations

import builtins
import importlib.util
import io
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import torchboost
from tests.support.reports import winning_report
from tests.tuning.test_sentences import finding
from tests.tuning.test_sentences import report as tuning
from torchboost.cli import main
from torchboost.cli.app import app
from torchboost.registry import LEVELS, REGISTRY

COMMANDS = ("bench", "levels", "check", "explain", "report", "doctor", "pca")


def run(*words: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(words), input=stdin)


def answer(*words: str):
    result = run(*words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def saved(tmp_path):
    return winning_report().save(tmp_path / "report.json")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output


def test_levels():
    found = answer("levels", "--json")
    assert list(found["levels"]) == list(LEVELS)
    assert [a["name"] for a in found["algorithms"]] == list(REGISTRY)
    shown = run("levels").stdout
    assert all(name in shown for name in [*LEVELS, *REGISTRY])


def test_explain_says_what_was_measured(bfloat16):
    bfloat16(0.48, 2.0)
    shown = run("explain", "--level", "O1", "--convolutions", "0").stdout
    assert "a bfloat16 matrix product takes 2.1 times the time of a float32 one here" in shown
    bfloat16(1.5, 0.5)
    assert "autocast" in [a["name"] for a in answer("explain", "--convolutions", "0", "--json")["algorithms"]]
    assert "a bfloat16 convolution takes 2.0 times" in run("explain", "--convolutions", "9").stdout


def test_check_accepts(tmp_path):
    path = tmp_path / "boost.json"
    path.write_text('{"boost": {"mode": "manual", "less_bn": true}}')
    assert run("check", str(path)).stdout.endswith("valid, mode manual\n")
    assert answer("check", str(path), "--json")["config"]["boost"]["less_bn"] is True
    assert run("check", "-", stdin="{}").exit_code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"bost": {}}', "Did you mean 'boost'?"),
        ('{"extra": {"less_bnn": true}}', "extra.less_bnn"),
        ('{"extra": {"channels_last": {"speed": 1}}}', "extra.channels_last.speed"),
        ("[]", "text on standard input"),
        ("", "nothing on standard input"),
    ],
)
def test_check_refuses_with_one_message(text, said):
    result = run("check", "-", stdin=text)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_check_refuses_in_json_too(tmp_path):
    result = run("check", str(tmp_path / "none.json"), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["valid"] is False


def test_explain():
    shown = run("explain", "--level", "O1", "--convolutions", "0").stdout
    assert "the model has no convolution" in shown
    found = answer("explain", "--level", "O1", "--convolutions", "0", "--nodes", "2", "--json")
    assert "channels_last" in [d["name"] for d in found["dropped"]]
    assert {a["name"] for a in found["algorithms"]}.isdisjoint(d["name"] for d in found["dropped"])
    assert answer("explain", "--level", "O0", "--json")["algorithms"] == []


def test_explain_refuses_in_json_too():
    for words in (("none.json",), ("--level", "O9")):
        result = run("explain", *words, "--json")
        assert result.exit_code == 1
        found = json.loads(result.stdout)
        assert found["valid"] is False
        assert found["message"]


def test_a_device_that_is_not_here_is_said_to_be_unknown(monkeypatch):
    monkeypatch.setattr("torchboost.cli.app.device_fault", lambda device: "not here")
    shown = run("explain", "--level", "O1", "--device", "cuda").stdout
    assert "cuda is not available here, so it is not known whether it computes faster in bfloat16" in shown
    assert "does not compute faster" not in shown


def test_version():
    assert run("--version").stdout == f"torchboost {torchboost.__version__}\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("explain", "--level", "O9"), 1, "Did you mean"),
        (("explain", "--device", "toaster"), 1, "--device"),
        (("explain", "--nodes", "0"), 2, "nodes"),
        (("explain", "none.json"), 1, "there is no such file"),
        (("report", "none.json"), 1, "none.json: No such file"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_errors_are_short(words, code, said):
    result = run(*words)
    assert result.exit_code == code
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_report(saved, tmp_path):
    assert "O1 promises to be no slower than stock" in run("report", str(saved)).stdout
    assert run("report", str(saved), "--markdown").stdout.startswith("## A small benchmark")
    page = tmp_path / "deep" / "page.html"
    assert answer("report", str(saved), "--html", str(page), "--json")["html"] == str(page)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert run("report", str(saved), "--html", str(page)).stdout == f"wrote {page}\n"


def test_report_of_a_tuning(tmp_path):
    saved = tuning(findings=[finding("kept", "it saves time")], whole=[finding("kept")], notes=["a note"])
    path = str(saved.save(tmp_path / "boost.report.json"))
    shown = run("report", path)
    assert shown.exit_code == 0, shown.output
    for said in ("it saves time", "Turn on fast. A training then takes 67% of the time.", "steps", "Note: a note."):
        assert said in shown.stdout
    page = tmp_path / "page.html"
    assert run("report", path, "--html", str(page)).stdout == f"wrote {page}\n"
    assert "Tuning of a model" in page.read_text(encoding="utf-8")
    found = answer("report", path, "--json")
    assert (found["headline"][:12], found["html"], found["drop"]) == ("Turn on fast", None, 0.005)
    refused = run("report", path, "--markdown")
    assert refused.exit_code == 1
    assert "Error: --markdown: this is a report of `torchboost tune`" in refused.stderr
    (tmp_path / "broken.json").write_text('{"findings": []}', encoding="utf-8")
    assert "this is not a report of torchboost: title" in run("report", str(tmp_path / "broken.json")).stderr


def test_report_refuses_other_files(tmp_path):
    for content in (b"not json", b'{"format": 2}', b"[]", b'{"title": "\xff\xfe"}', "{}".encode("utf-16")):
        path = tmp_path / "report.json"
        path.write_bytes(content)
        result = run("report", str(path))
        assert result.exit_code == 1
        assert "this is not a report of torchboost" in result.stderr


def test_the_package_runs_as_a_module():
    said = subprocess.run(
        [sys.executable, "-m", "torchboost", "--help"], capture_output=True, text=True, check=True, env=os.environ
    ).stdout
    assert "Usage: torchboost" in said


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else real(name))
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert "needs rich" in said
    assert said.endswith("install it from the folder of the project: pip install '.[cli]'\n")


def test_the_check_for_the_extra_imports_nothing(monkeypatch):
    def refuse(name, *rest, **more):
        if name in ("typer", "rich"):
            raise AssertionError(name)
        return real(name, *rest, **more)

    real = builtins.__import__
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SystemExit):
        main()


def test_stopped_while_torch_is_imported(monkeypatch, capsys):
    def interrupted(name, *rest, **more):
        if name == "torchboost.cli.app":
            raise KeyboardInterrupt
        return real(name, *rest, **more)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "\nStopped.\n"


@pytest.mark.parametrize(
    ("encoding", "words", "escaped"),
    [
        ("ascii", ["report", "{saved}"], b"3.57\\xd7"),
        ("utf-8", ["report", "{saved}", "--html", "{folder}/x\udcff.html"], b"x\\udcff.html"),
    ],
)
def test_output_that_cannot_be_shown_is_escaped(encoding, words, escaped, saved, monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "argv", ["torchboost", *(w.format(saved=saved, folder=saved.parent) for w in words)])
    with pytest.raises(SystemExit) as stopped:
        main()
    written.flush()
    assert stopped.value.code == 0
    assert escaped in written.buffer.getvalue()
