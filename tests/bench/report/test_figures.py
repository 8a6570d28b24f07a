from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from tests.support.reports import contestant, report, winning_report
from torchboost.bench.report.figures import colour_classes, curve_figure, step_time_figure

NS = "{http://www.w3.org/2000/svg}"


def texts(figure: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(figure).iter("text")]


@pytest.mark.parametrize("narrow", [False, True])
def test_step_times_are_labelled(narrow):
    shown = texts(step_time_figure(winning_report(), narrow=narrow))
    assert {"stock", "hand", "O1", "O2", "50.0 ms", "16.0 ms"} <= set(shown)
    assert any("3.12\N{MULTIPLICATION SIGN}" in text for text in shown)
    assert any("1.25\N{MULTIPLICATION SIGN}" in text for text in shown)


def test_bars_are_proportional_to_time():
    tree = ET.fromstring(step_time_figure(winning_report()))
    widths = [float(node.get("width", "nan")) for node in tree.iter("rect")]
    assert widths[0] / widths[1] == pytest.approx(0.05 / 0.02, rel=0.01)


def test_narrow_bars_say_what_ratios_are_against_and_mark_stock():
    figure = step_time_figure(winning_report(), narrow=True)
    shown = texts(figure)
    assert any(text.endswith("against stock") for text in shown)
    assert any(text.endswith("against best hand") for text in shown)
    tree = ET.fromstring(figure)
    dotted = [node for node in tree.iter("line") if node.get("class") == "reference"]
    rows = len(winning_report().contestants)
    assert len(dotted) == rows
    assert {node.get("x1") for node in dotted} == {dotted[0].get("x2")}
    bars = list(tree.iter("rect"))
    for line, bar in zip(dotted, bars, strict=True):
        middle = float(bar.get("y", "nan")) + 8
        assert float(line.get("y1", "nan")) < middle < float(line.get("y2", "nan"))


@pytest.mark.parametrize("size", [{}, {"narrow": True}, {"wide": True}])
@pytest.mark.parametrize(("y", "x"), [("metric", "seconds"), ("train_loss", "seconds"), ("metric", "epochs")])
def test_curves_have_a_line_per_seed_and_a_mean(y, x, size):
    tree = ET.fromstring(curve_figure(winning_report(), y, x, **size))
    lines = [node.get("class") for node in tree.iter("path")]
    assert lines.count("seed") == 6 * 4
    assert lines.count("mean") == 6 + 6
    left, _, width, _ = (float(v) for v in tree.get("viewBox", "").split())
    assert left == 0
    assert all(float(node.get("x", "nan")) < width for node in tree.iter("text"))


def test_a_cut_axis_says_so():
    assert any("axis starts at" in text for text in texts(curve_figure(winning_report(), "metric", "epochs")))


def test_long_runs_are_thinned_but_keep_their_end():
    made = report(contestant("stock", "stock", 0.05, seeds=1))
    steps = [float(k) for k in range(5000)]
    long = (
        made.contestants[0]
        .curves[0]
        .model_copy(
            update={"epochs": steps, "seconds": steps, "train_loss": steps, "metric": [k / 5000 for k in steps]}
        )
    )
    made = report(made.contestants[0].model_copy(update={"curves": [long]}))
    figure = curve_figure(made, "train_loss", "seconds")
    assert len(figure) < 12_000
    assert "4999" not in figure


def test_divergence_and_flat_lines_can_be_drawn():
    nan = contestant("O1", "level", 0.02, math.nan)
    made = report(contestant("stock", "stock", 0.05), nan)
    assert "nan" not in curve_figure(made, "metric", "seconds").lower()
    flat = contestant("stock", "stock", 0.05, seeds=1)
    still = flat.curves[0].model_copy(update={"metric": [0.1] * 8, "train_loss": [0.0] * 8})
    flat = flat.model_copy(update={"curves": [still]})
    for y in ("metric", "train_loss"):
        assert "nan" not in curve_figure(report(flat), y, "seconds").lower()


def test_no_curves_no_figure():
    assert curve_figure(report(contestant("stock", "stock", 0.05, seeds=0)), "metric", "seconds") == ""


def test_stock_is_grey_and_the_others_differ():
    classes = colour_classes(winning_report())
    assert classes["stock"] == "k0"
    assert len(set(classes.values())) == 6


def test_names_are_escaped():
    hostile = "<svg onload=x>&"
    made = report(contestant(hostile, "stock", 0.05))
    bars = [step_time_figure(made), step_time_figure(made, narrow=True)]
    for figure in [*bars, curve_figure(made, "metric", "seconds")]:
        assert "<svg onload" not in figure
        assert hostile in texts(figure)
