"""A report of a benchmark on the terminal, as Markdown and as a page."""

from __future__ import annotations

import html
import io
import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pages import HOSTILE, Page, looked_at
from tests.support.reports import contestant, interval, report, winning_report
from torchboost.bench.report import table, wording
from torchboost.bench.report.page import Scale, bench_page, chart, ticks, write_page
from torchboost.measure.evidence import AlgorithmRow, BenchReport, DroppedRow

TIMES = "\N{MULTIPLICATION SIGN}"


def hostile_report() -> BenchReport:
    rows = {"algorithms": [AlgorithmRow(name=HOSTILE, settings=HOSTILE)], "notes": [HOSTILE]}
    rows["dropped"] = [DroppedRow(name=HOSTILE, reason=HOSTILE)]
    other = contestant("O1 " + HOSTILE, "level", 0.02, stock=0.05).model_copy(update=rows)
    whole = report(contestant(HOSTILE, "stock", 0.05), other, title=HOSTILE, metric=HOSTILE)
    names = ("torchboost", "torch", "processor", "platform", "device", "commit", "date")
    environment = whole.environment.model_copy(update=dict.fromkeys(names, HOSTILE))
    update = {"environment": environment, "notes": [HOSTILE], "workload": HOSTILE, "model": HOSTILE}
    return whole.model_copy(update=update)


def report_with(*values: float) -> BenchReport:
    """Return a report of a metric and losses that go through these values."""
    supply, whole = itertools.cycle(values), winning_report()
    for each in whole.contestants:
        for curve in each.curves:
            curve.metric[:] = curve.train_loss[:] = list(itertools.islice(supply, len(curve.metric)))
    return whole.model_copy(update={"metric_name": "metric"})


def test_everything_is_on_the_page(tmp_path: Path) -> None:
    whole = winning_report()
    content = bench_page(whole)
    path = write_page(content, tmp_path / "a" / "b" / "report.html")
    assert path.read_text(encoding="utf-8") == content == bench_page(winning_report())
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    page, text = Page(content), html.unescape(content)
    assert page.is_safe()
    assert not re.findall(r"@import|url\((?!#)", content)
    for words in (
        *("O2 trains", "ChannelsLast()", "not measured on this device", "272,474 parameters", "2026-01-02"),
        *("50.0 ms", "16.0 ms", f"3.12{TIMES}", "against best hand", "All training curves", "<dt>Commit</dt>"),
        "It must stay inside the margin: half a point",
    ):
        assert words in text
    assert [len(page.of_class(name)) for name in ("chart", "track", "swatch")] == [3, 6, 3 * 6]
    assert len([tag for tag, attrs in page.tags if tag == "svg" and attrs["aria-label"]]) == 3
    assert content.startswith("<!doctype html>")
    legend = re.findall(r'<ul class="legend">(.*?)</ul>', content, re.DOTALL)
    order = [row[0] for row in table.result_table(whole).rows]
    assert [re.findall(r"<li[^>]*>(.*?)</li>", each) for each in legend] == [order] * 3
    assert re.search(r"<title>O1: 9[67]\.\d\d % at 13\.3 s</title>", content)
    assert "<code>torchboost tune digits</code>" in content
    widths = [float(attrs["style"].removeprefix("width:").rstrip("%")) for attrs in page.of_class("bar")]  # type: ignore[union-attr]
    assert widths[0] / widths[1] == pytest.approx(0.05 / 0.02, rel=1e-3)  # bars are proportional to time
    places = {attrs["style"] for attrs in page.of_class("reference") if attrs.get("style")}
    assert places == {f"left:{widths[0]:.2f}%"}  # stock's
    colours = [attrs["class"] for attrs in page.of_class("row") if "heads" not in (attrs["class"] or "")]
    assert (colours[0], len(set(colours))) == ("row k0", 6)  # stock is grey


def test_no_text_of_a_report_becomes_markup() -> None:
    page = Page(bench_page(hostile_report()))
    assert page.is_safe()
    assert HOSTILE in page.words
    assert "49" not in page.words


def test_a_section_without_data_is_absent() -> None:
    text = bench_page(report(contestant("stock", "stock", 0.05, seeds=0)))
    assert "<h2>Training</h2>" not in text
    assert "All training curves" not in text
    assert "<h2>Time per step</h2>" in text
    bare = contestant("hand", "hand", 0.05).model_copy(update={"samples": []})
    assert "Step times of" not in bench_page(report(bare))
    environment = winning_report().environment.model_copy(update={"commit": "", "instructions": ""})
    own = bench_page(winning_report().model_copy(update={"environment": environment, "metric_name": "metric"}))
    assert "<dt>Commit</dt><dd>not recorded</dd>" in own
    assert "half a point" not in own  # the margin of an accuracy is not that of another metric
    assert "torchboost tune --drop tests a limit of your own" in own


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_values_of_any_size_make_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    for values in (
        *((1e308, -1e308, 1.0), (1e308,), (-1e308, 1e-9), (1e308, 5e-324, 1e140), (5e-324,)),
        *((math.inf, 1e308), (math.nan, 0.5)),
    ):
        whole = report_with(*values)
        assert "</html>" in bench_page(whole)
        table.print_report(whole)
        assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 860, 1280])
def test_no_sideways_scroll_and_no_console_errors(tmp_path: Path, width: int) -> None:
    for whole in (winning_report(), hostile_report()):
        seen = looked_at(tmp_path, bench_page(whole), width)
        assert seen.wanted <= seen.room
        assert (seen.figures, seen.cut) == (4, 0)
        assert width < 1280 or whole.title == HOSTILE or seen.scrolled == 0


def test_a_run_that_is_evaluated_once_has_one_chart() -> None:
    once = {"epochs": [1.0], "seconds": [10.0], "train_loss": [0.5], "metric": [0.9]}
    runs = [contestant("stock", "stock", 0.05), contestant("O1", "level", 0.02, stock=0.05)]
    short = [run.model_copy(update={"curves": [c.model_copy(update=once) for c in run.curves]}) for run in runs]
    content = bench_page(report(*short))
    assert [len(Page(content).of_class(name)) for name in ("chart", "pair")] == [1, 0]
    assert "Each dot is the mean over the seeds" in content
    assert "Thin lines" not in content


def coordinates(path: str) -> list[float]:
    return [float(value) for value in re.findall(r"-?[\d.]+", path)]


def test_charts_have_a_line_per_seed_and_their_mean() -> None:
    for quantity, against in (("metric", "seconds"), ("train_loss", "seconds"), ("metric", "epochs")):
        drawn = chart(winning_report(), quantity, against, target=quantity == "metric")
        assert drawn is not None
        assert [(line.name, len(line.seeds)) for line in drawn.lines] == [
            (name, 4) for name in ("stock", "hand", "O1", "O2", "freeze", "compile")
        ]
        assert all(0 <= tick.at <= 100 for tick in (*drawn.across, *drawn.up))
        assert all(len(line.dots) == 8 and line.dots[-1][:2] == line.end for line in drawn.lines)
        assert (drawn.target is not None) is (quantity == "metric")
        assert ("axis starts at" in drawn.title) is (quantity == "metric")  # a cut axis says so
        assert ("logarithmic" in drawn.title) is (quantity == "train_loss")


def test_long_single_flat_and_diverging_runs_can_be_drawn() -> None:
    stock = contestant("stock", "stock", 0.05, seeds=1)

    def line(quantity: str, **values: list[float]):
        curve = stock.curves[0].model_copy(update=values)
        drawn = chart(report(stock.model_copy(update={"curves": [curve]})), quantity, "seconds")  # type: ignore[arg-type]
        assert drawn is not None
        return drawn.lines[0]

    steps = [float(k) for k in range(5000)]
    long = line("train_loss", epochs=steps, seconds=steps, train_loss=steps, metric=[k / 5000 for k in steps])
    assert long.seeds == []
    assert len(long.dots) <= 62
    assert long.dots[-1].text == "stock: 4,999 at 83.3 min"
    assert len(coordinates(long.mean)) < 500  # thinned, with its end
    assert coordinates(long.mean)[-2] == long.end[0] == pytest.approx(100.0)  # type: ignore[index]
    for quantity in ("metric", "train_loss"):
        assert all(map(math.isfinite, coordinates(line(quantity, metric=[0.1] * 8, train_loss=[0.0] * 8).mean)))
    assert line("metric", metric=[0.1, math.nan, *[0.2] * 6]).mean.count("M") == 2
    diverged = line("metric", metric=[math.nan] * 7 + [0.5])
    assert (diverged.mean.count("L"), diverged.end is None) == (0, False)
    assert chart(report(contestant("stock", "stock", 0.05, seeds=0)), "metric", "seconds") is None
    both = chart(report(stock, contestant("O1", "level", 0.02, math.nan)), "metric", "seconds")
    assert both is not None
    assert (both.lines[1].end, both.lines[1].mean) == (None, "")


def test_scales() -> None:
    linear = Scale(0.0, 10.0, 100.0, 200.0)
    assert [linear(v) for v in (0.0, 5.0, 10.0)] == [100.0, 150.0, 200.0]
    log = Scale(0.01, 1.0, 100.0, 0.0, log=True)
    assert log(0.1) == pytest.approx(50.0)
    assert all(map(math.isnan, (log(0.0), linear(math.inf), linear(1e308))))
    assert Scale(5e-324, 1e150, 100.0, 0.0, log=True)(1e150) == pytest.approx(0.0)
    assert [tick.text for tick in log.marks(5)] == ["0.01", "0.03", "0.1", "0.3", "1"]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_ticks_are_few_and_inside(low: float, span: float, most: int) -> None:
    values = ticks(low, low + span, most=most)
    slack = 1e-6 * (span + abs(low))
    assert len(values) <= most + 1
    assert all(low - slack <= value <= low + span + slack for value in values)
    assert 2 <= len(ticks(span, 30 * span, most=most, log=True)) <= most + 2


def test_rows_follow_the_report_without_empty_columns() -> None:
    whole = table.result_table(winning_report())
    assert whole.headings[:4] == ("contestant", "time per step", "against stock", "against best hand")
    assert [row[0] for row in whole.rows] == ["stock", "hand", "O1", "O2", "freeze", "compile"]
    assert whole.rows[2][2] == f"3.12{TIMES} (3.06 to 3.19)"
    assert (whole.headings[-1], whole.rows[0][-1]) == ("memory", "102 MiB")
    alone = table.result_table(report(contestant("stock", "stock", 0.1, seeds=0)))
    assert alone.headings == ("contestant", "time per step", "set-up")
    lines = table.plain(table.Table(("a", "long"), (("x", "1"), ("wide", "2")))).splitlines()
    assert lines == ["a     long", "----  ----", "x     1", "wide  2"]


def test_a_report_is_plain_text() -> None:
    output = io.StringIO()
    table.print_report(winning_report(), output)
    assert "(3.06 to 3.19)" in output.getvalue()
    assert "O1 promises to be no slower than stock and to lose at most 0.5 points: kept here." in output.getvalue()


def test_times_ratios_and_metrics_read_well() -> None:
    seconds = {0.0000123: "12.3 \N{MICRO SIGN}s", 0.01234: "12.3 ms", 0.5: "500 ms", 58.04: "58.0 s"}
    for value, words in (seconds | {600.0: "10.0 min", 36_000.0: "10.0 h", 0.0: "0 \N{MICRO SIGN}s"}).items():
        assert wording.seconds(value) == words
    assert wording.seconds(math.inf) == "inf h"
    assert wording.seconds_interval(interval(0.02, 0.1)) == "20.0 ms (18.0 to 22.0)"
    assert wording.ratio_interval(interval(3.0, 0.1)) == f"3.00{TIMES} (2.70 to 3.30)"
    assert wording.measure(0.98123, share=True) == "98.12 %"
    assert wording.difference(-0.00123, share=True) == "\N{MINUS SIGN}0.12 points"
    assert wording.amount(0.005, share=True) == "0.5 points"
    assert wording.measure(12.3456, share=False) == "12.35"
    assert wording.difference(0.5, share=False) == "+0.5"
    assert wording.measure(math.nan, share=True) == wording.difference(math.nan, share=True) == "nan"
    assert [wording.count(n, "seed") for n in (1, 2000)] == ["1 seed", "2,000 seeds"]


def test_only_an_accuracy_is_a_share_and_a_metric_of_the_user_has_its_own_units() -> None:
    for final, more, share in ((0.9, {}, True), (7.0, {}, False), (0.9, {"metric": "metric"}, False)):
        assert wording.is_share(report(contestant("stock", "stock", 0.1, final), **more)) is share
    assert not wording.is_share(report(contestant("stock", "stock", 0.1, seeds=0)))
    assert wording.has_own_units("metric")
    assert not wording.has_own_units("accuracy")
