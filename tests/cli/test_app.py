from __future__ import annotations

import builtins
import csv
import importlib.util
import io
import json
import math
import runpy
import subprocess
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
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.callback.__name__
        result = run(name, "--help")
        assert result.exit_code == 0
        assert "--json" in result.output


def test_the_version_and_every_help_load_neither_torch_nor_what_a_command_needs():
    asked = (["--version"], ["--help"], ["bench", "--help"], ["doctor", "--help"])
    code = (
        f"import sys\nfrom torchboost.cli import main\nfor words in {asked!r}:\n"
        "    sys.argv = ['torchboost', *words]\n"
        "    try:\n        main()\n    except SystemExit as end:\n        assert not end.code, words\n"
        "    print('loaded', words, sorted({'torch', 'numpy', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("loaded ")]
    assert told == [f"loaded {words} []" for words in asked]


def test_csv_has_the_plain_numbers_of_the_table(saved, tmp_path):
    bench = list(csv.DictReader(io.StringIO(run("report", str(saved), "--csv").stdout)))
    assert [row["name"] for row in bench] == ["stock", "hand", "O1", "O2", "freeze", "compile"]
    assert float(bench[2]["step_seconds.mid"]) == 0.016
    assert float(bench[2]["stock.interval.mid"]) == pytest.approx(0.05 / 0.016)
    assert (bench[0]["stock.interval.mid"], bench[2]["difference.seeds"]) == ("", "4")
    tuned = tuning(findings=[finding("kept", "it saves time")], whole=[finding("lost")])
    tuned = tuned.save(tmp_path / "boost.report.json")
    row, test = csv.DictReader(io.StringIO(run("report", str(tuned), "--csv").stdout))
    assert (row["outcome"], row["reason"], float(row["speed.mid"])) == ("kept", "it saves time", 1.5)
    assert [(each["part"], each["outcome"]) for each in (row, test)] == [("search", "kept"), ("confirmation", "lost")]
    (line,) = csv.DictReader(io.StringIO(run("results", str(tmp_path), "--csv").stdout))
    assert line["report"] == str(tuned)
    algorithms = list(csv.DictReader(io.StringIO(run("levels", "--csv").stdout)))
    assert [row["algorithm"] for row in algorithms] == list(REGISTRY)
    both = run("levels", "--csv", "--json")
    assert (both.exit_code, "--json and --csv" in both.stderr) == (2, True)


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
    file = tmp_path / "boost.json"
    file.write_text('{"extra": {"less_bnn": true}}')
    shown = " ".join(run("explain", str(file)).stderr.split())
    assert f"extra.less_bnn in '{file}': found an unknown algorithm" in shown
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
    assert answer("explain", "--level", "O0", "--device", "auto", "--json")["algorithms"] == []
    recipe = {"optimizer": "muon", "lr": None, "rate": 0.5, "length": 0.55}
    found = json.loads(run("explain", "-", "--json", stdin=json.dumps({"recipe": recipe})).stdout)
    assert found["recipe"] == recipe
    bfloat16(0.48, 2.0)  # it says what was measured
    shown = run("explain", "--level", "O1", "--convolutions", "0").stdout
    assert "a bfloat16 matrix product takes 2.1 times the time of a float32 one here" in shown
    bfloat16(1.5, 0.5)
    assert "autocast" in [a["name"] for a in answer("explain", "--convolutions", "0", "--json")["algorithms"]]
    assert "a bfloat16 convolution takes 2.0 times" in run("explain", "--convolutions", "9").stdout
    monkeypatch.setattr("torchboost.cli.plans.device_fault", lambda device: "not here")
    shown = run("explain", "--level", "O1", "--device", "cuda").stdout
    assert "cuda is not available here, so it is not known whether it computes faster in bfloat16" in shown
    assert "does not compute faster" not in shown


def test_the_plan_of_a_model_is_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("new", "train.py")
    shown = run("explain", "train.py:make", "--total-steps", "20000").stdout
    assert "for AdamW, 20,000 steps" in shown
    found = answer("explain", "train.py:make", "--total-steps", "20000", "--json")
    assert found["total_steps"] == 20_000
    named = {row["name"] for row in found["algorithms"]} | set(found["waiting"])
    assert {"fused_optimizer", "channels_last"} <= named
    assert set(found["waiting"]).isdisjoint(row["name"] for row in found["dropped"])
    monkeypatch.setenv("TORCHBOOST_CALIBRATE", "1")  # so that switches wait for a trial; nothing is trained
    found = answer("explain", "train.py:make", "--total-steps", "20000", "--json")
    reasons = {row["name"]: row["reason"] for row in found["dropped"]}
    assert reasons["sparse_head"].startswith("does not apply: the model has no output head")
    assert "fused_optimizer" in found["waiting"]
    assert set(found["waiting"]).isdisjoint(reasons)
    assert run("explain", "train.py:other").exit_code == 1
    assert run("explain", "train.py:make", "--nodes", "2").exit_code == 1


def test_version():
    assert run("--version").stdout == f"torchboost {torchboost.__version__}\n"


def test_errors_are_short():
    for words, code, said in (
        (("explain", "--level", "O9"), 1, "Did you mean"),
        (("explain", "--device", "toaster"), 1, "--device"),
        (("explain", "--nodes", "0"), 2, "nodes"),
        (("explain", "none.json"), 1, "there is no such file"),
        (("explain", "train.py"), 1, "found 'train.py' without a function; needed: train.py:make."),
        (("doctor", "train.py"), 1, "found 'train.py' without a function; needed: train.py:make."),
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


def test_compare_gives_the_difference_and_what_else_differs(saved, tmp_path):
    first = winning_report()
    faster = [c.model_copy(update={"samples": [s / 2 for s in c.samples]}) for c in first.contestants[:3]]
    other = first.model_copy(
        update={
            "contestants": faster,
            "environment": first.environment.model_copy(update={"torch": "9.9", "threads": 8}),
        }
    )
    path = other.save(tmp_path / "other.json")
    shown = run("compare", str(saved), str(path)).stdout
    for said in (
        "2.00\N{MULTIPLICATION SIGN} (1.98 to 2.02)",
        "The machine or the versions differ, and the differences above with them. threads: 2, 8; torch: 2.13.0, 9.9.",
        "In one report only: O2, compile, freeze.",
        "were not timed in turns",
    ):
        assert said in shown
    found = answer("compare", str(saved), str(path), "--json")
    assert [row["name"] for row in found["contestants"]] == ["stock", "hand", "O1"]
    assert (found["contestants"][0]["difference"]["low"], found["contestants"][0]["seeds"]) == (0.0, 4)
    plain = [c.model_copy(update={"algorithms": []}) for c in faster]
    less = first.model_copy(update={"contestants": plain}).save(tmp_path / "less.json")
    assert (
        "O1 is not the same in both: A turned on channels_last, B nothing."
        in run("compare", str(saved), str(less)).stdout
    )
    same = answer("compare", str(saved), str(saved), "--json")
    assert len(same["remarks"]) == 1
    rows = list(csv.DictReader(io.StringIO(run("compare", str(saved), str(path), "--csv").stdout)))
    assert float(rows[0]["speed.mid"]) == pytest.approx(2.0)
    few = first.model_copy(update={"contestants": [c.model_copy(update={"samples": [1.0]}) for c in faster]})
    assert answer("compare", str(saved), str(few.save(path)), "--json")["contestants"][0]["speed"] is None
    tuned = str(tuning(findings=[finding("kept", "it saves time")]).save(tmp_path / "boost.report.json"))
    mixed = run("compare", str(saved), tuned)
    assert (mixed.exit_code, "give two of the same command" in mixed.stderr) == (1, True)
    assert run("compare", tuned, tuned).stdout == run("results", tuned, tuned).stdout


def strict(text: str):
    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_has_no_infinity(tmp_path):
    first = winning_report()
    short = [c.model_copy(update={"curves": c.curves[:1]}) for c in first.contestants]
    bench = str(first.model_copy(update={"contestants": short}).save(tmp_path / "report.json"))
    (row, *_) = strict(run("compare", bench, bench, "--json").stdout)["contestants"]
    assert (row["difference"]["low"], row["difference"]["high"]) == ("-Infinity", "Infinity")
    diverged = finding("kept").model_copy(update={"rates": {1.0: 0.9, 2.0: math.nan}})
    tuned = tuning(findings=[diverged]).save(tmp_path / "boost.report.json")
    saved = strict(tuned.read_text(encoding="utf-8"))["findings"]
    assert strict(run("report", str(tuned), "--json").stdout)["findings"] == saved
    assert strict(run("results", str(tuned), "--json").stdout)[0]["findings"] == saved


def test_metrics_of_two_directions_are_not_subtracted(saved, tmp_path):
    other = winning_report().model_copy(update={"metric_name": "metric", "metric_higher_is_better": False})
    second = str(other.save(tmp_path / "other.json"))
    shown = run("compare", str(saved), second).stdout
    assert "accuracy, A" in shown
    assert "metric, B" in shown
    first = str(other.model_copy(update={"metric_higher_is_better": True}).save(tmp_path / "first.json"))
    found = answer("compare", first, second, "--json")
    assert {row["difference"] for row in found["contestants"]} == {None}
    assert "metric_higher_is_better: True, False" in found["remarks"][0]


def test_csv_holds_no_formula_and_results_are_plain_numbers(tmp_path):
    first = winning_report()
    named = [
        c.model_copy(update={"name": name})
        for c, name in zip(first.contestants, ("=1+1", "@SUM(1)", "-x", "+y", "-5"), strict=False)
    ]
    bench = first.model_copy(update={"contestants": named}).save(tmp_path / "report.json")
    rows = list(csv.DictReader(io.StringIO(run("compare", str(bench), str(bench), "--csv").stdout)))
    assert [row["name"] for row in rows] == ["'=1+1", "'@SUM(1)", "'-x", "'+y", "-5"]
    tuned = tuning(findings=[finding("kept")], whole=[finding("kept")]).save(tmp_path / "boost.report.json")
    (row,) = csv.DictReader(io.StringIO(run("results", str(tuned), "--csv").stdout))
    assert float(row["time"]) == pytest.approx(1 / 1.5)
    assert float(row["tuning"]) >= 0
    assert float(row["metric against stock.mid"]) <= 1


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


def test_a_new_file_runs_at_once_and_none_is_overwritten(tmp_path):
    pytest.importorskip("sklearn")
    file = tmp_path / "deep" / "my train.py"
    found = answer("new", str(file), "--json")
    assert found == {"file": str(file), "next": f"torchboost bench '{file}':make --epochs 10 --accuracy"}
    out = str(tmp_path / "out")
    words = ("--contestants", "stock,O0", "--pairs", "1", "--seeds", "1", "--epochs", "1", "--accuracy", "--out", out)
    result = run("bench", f"{file}:make", *words)
    assert result.exit_code == 0, result.output
    file.write_text("mine")
    for name, said in (
        (str(file), "exists; choose another name"),
        ("train", "a name that ends with .py"),
        (str(file / "x.py"), "my train.py"),
    ):
        refused = run("new", name)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert refused.stderr.startswith("Error: ")
        assert said in refused.stderr
    assert file.read_text() == "mine"
