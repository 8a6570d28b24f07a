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
from torchboost.bench.report.figures import Scale, bars, chart, colours, spread, ticks
from torchboost.bench.report.template import bench_page, write_page
from torchboost.measure.evidence import AlgorithmRow, BenchReport, DroppedRow


def hostile_report() -> BenchReport:
    other = contestant("O1 " + HOSTILE, "level", 0.02, stock=0.05).model_copy(
        update={
            "algorithms": [AlgorithmRow(name=HOSTILE, settings=HOSTILE)],
            "dropped": [DroppedRow(name=HOSTILE, reason=HOSTILE)],
            "notes": [HOSTILE],
        }
    )
    whole = report(contestant(HOSTILE, "stock", 0.05), other, title=HOSTILE, metric=HOSTILE)
    names = ("torchboost", "torch", "processor", "platform", "device", "commit", "date")
    environment = whole.environment.model_copy(update=dict.fromkeys(names, HOSTILE))
    update = {"environment": environment, "notes": [HOSTILE], "workload": HOSTILE, "model": HOSTILE}
    return whole.model_copy(update=update)


def report_with(*values: float) -> BenchReport:
    """Return a report of a metric and losses that go through these values."""
    supply, made = itertools.cycle(values), winning_report()
    for each in made.contestants:
        for curve in each.curves:
            curve.metric[:] = curve.train_loss[:] = list(itertools.islice(supply, len(curve.metric)))
    return made.model_copy(update={"metric_name": "metric"})


def test_everything_is_on_the_page(tmp_path: Path) -> None:
    made = winning_report()
    content = bench_page(made)
    path = write_page(content, tmp_path / "a" / "b" / "report.html")
    assert path.read_text(encoding="utf-8") == content == bench_page(winning_report())
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    page, text = Page(content), html.unescape(content)
    assert page.is_safe()
    assert not re.findall(r"@import|url\((?!#)", content)
    for words in ("O2 trains", "ChannelsLast()", "not measured on this device", "272,474 parameters", "2026-01-02"):
        assert words in text
    for words in (
        "50.0 ms",
        "16.0 ms",
        "3.12\N{MULTIPLICATION SIGN}",
        "against best hand-tuned",
        "All training curves",
    ):
        assert words in text
    assert [len(page.of_class(name)) for name in ("chart", "track", "swatch")] == [3, 6, 3 * 6]
    assert len([tag for tag, attrs in page.tags if tag == "svg" and attrs["aria-label"]]) == 3
    assert "commit" in content.lower()
    assert content.startswith("<!doctype html>")
    environment = made.environment.model_copy(update={"commit": "", "instructions": ""})
    assert "<dt>Commit</dt><dd>not recorded</dd>" in bench_page(made.model_copy(update={"environment": environment}))


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
    bare = contestant("stock", "stock", 0.05).model_copy(update={"samples": []})
    assert "Step times of" not in bench_page(report(bare))


def test_the_margin_of_an_accuracy_is_not_stated_for_another_metric() -> None:
    assert "It must stay inside the margin: half a point" in bench_page(winning_report())
    own = bench_page(winning_report().model_copy(update={"metric_name": "metric"}))
    assert "half a point" not in own
    assert "torchboost tune --drop tests a limit of your own" in own


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_values_of_any_size_make_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    for values in (
        (1e308, -1e308, 1.0),
        (1e308,),
        (-1e308, 1e-9),
        (1e308, 5e-324, 1e140),
        (5e-324,),
        (math.inf, 1e308),
        (math.nan, 0.5),
    ):
        made = report_with(*values)
        assert "</html>" in bench_page(made)
        table.print_report(made)
        assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 860, 1280])
def test_no_sideways_scroll_and_no_console_errors(tmp_path: Path, width: int) -> None:
    for made in (winning_report(), hostile_report()):
        wanted, room, figures = looked_at(tmp_path, bench_page(made), width)
        assert wanted <= room
        assert figures == 4


def test_bars_are_proportional_to_time_and_stock_is_marked() -> None:
    drawn, stock = bars(winning_report())
    assert drawn[0].mid / drawn[1].mid == pytest.approx(0.05 / 0.02)
    assert drawn[0].mid == stock
    assert max(bar.high for bar in drawn) == pytest.approx(100.0)
    assert all(bar.low < bar.mid < bar.high for bar in drawn)
    assert bars(report(contestant("hand", "hand", 0.05)))[1] is None


def test_stock_is_grey_and_the_others_differ() -> None:
    classes = colours(winning_report())
    assert classes["stock"] == "k0"
    assert len(set(classes.values())) == 6


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
        heights = sorted(line.label for line in drawn.lines)
        assert all(high - low > 6.9 for low, high in itertools.pairwise(heights))
        assert (drawn.target is not None) is (quantity == "metric")
        assert ("axis starts at" in drawn.title) is (quantity == "metric")  # a cut axis says so
        assert ("logarithmic" in drawn.title) is (quantity == "train_loss")
    single = chart(report(contestant("stock", "stock", 0.05, seeds=1)), "metric", "seconds")
    assert single is not None
    assert single.lines[0].seeds == []
    assert chart(report(contestant("stock", "stock", 0.05, seeds=0)), "metric", "seconds") is None


def test_long_runs_are_thinned_and_keep_their_end() -> None:
    stock = contestant("stock", "stock", 0.05, seeds=1)
    steps = [float(k) for k in range(5000)]
    update = {"epochs": steps, "seconds": steps, "train_loss": steps, "metric": [k / 5000 for k in steps]}
    long = stock.model_copy(update={"curves": [stock.curves[0].model_copy(update=update)]})
    drawn = chart(report(long), "train_loss", "seconds")
    assert drawn is not None
    assert len(coordinates(drawn.lines[0].mean)) < 500
    assert coordinates(drawn.lines[0].mean)[-2] == drawn.lines[0].end[0] == pytest.approx(100.0)  # type: ignore[index]


def test_divergence_and_flat_lines_can_be_drawn() -> None:
    made = report(contestant("stock", "stock", 0.05), contestant("O1", "level", 0.02, math.nan))
    drawn = chart(made, "metric", "seconds")
    assert drawn is not None
    assert (drawn.lines[1].end, drawn.lines[1].mean) == (None, "")
    flat = contestant("stock", "stock", 0.05, seeds=1)
    still = flat.curves[0].model_copy(update={"metric": [0.1] * 8, "train_loss": [0.0] * 8})
    for quantity in ("metric", "train_loss"):
        drawn = chart(report(flat.model_copy(update={"curves": [still]})), quantity, "seconds")
        assert drawn is not None
        assert all(map(math.isfinite, coordinates(drawn.lines[0].mean)))
    gap = flat.curves[0].model_copy(update={"metric": [0.1, math.nan, *[0.2] * 6]})
    drawn = chart(report(flat.model_copy(update={"curves": [gap]})), "metric", "seconds")
    assert drawn is not None
    assert drawn.lines[0].mean.count("M") == 2


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
    logarithmic = ticks(span, 30 * span, most=most, log=True)
    assert 2 <= len(logarithmic) <= most + 2


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_labels_move_apart(positions: list[float]) -> None:
    places = spread(positions, 10.0)
    assert all(b - a >= 10.0 - 1e-6 for a, b in itertools.pairwise(sorted(places)))
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in places)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_follow_the_report_without_empty_columns() -> None:
    made = table.result_table(winning_report())
    assert made.headings[:4] == ("contestant", "time per step", "against stock", "against best hand")
    assert [row[0] for row in made.rows] == ["stock", "hand", "O1", "O2", "freeze", "compile"]
    assert made.rows[2][2] == "3.12\N{MULTIPLICATION SIGN} (3.06 to 3.19)"
    assert (made.headings[-1], made.rows[0][-1]) == ("memory", "102 MiB")
    alone = table.result_table(report(contestant("stock", "stock", 0.1, seeds=0)))
    assert alone.headings == ("contestant", "time per step", "set-up")
    lines = table.plain(table.Table(("a", "long"), (("x", "1"), ("wide", "2")))).splitlines()
    assert lines == ["a     long", "----  ----", "x     1", "wide  2"]


def test_a_report_is_plain_text_or_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    drawn = Terminal()
    table.print_report(winning_report("[bold]not markup[/bold]"), drawn)
    assert "[bold]not markup[/bold]" in drawn.getvalue()
    assert "(3.06 to 3.19)" in drawn.getvalue()
    plain = io.StringIO()
    table.print_report(winning_report(), plain)
    assert "O1 promises to be no slower than stock and to lose at most 0.5 points: kept here." in plain.getvalue()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # without the extra
    without = Terminal()
    table.print_report(winning_report(), without)
    assert "\x1b" not in without.getvalue()
    assert "time per step" in without.getvalue()


def test_markdown_is_one_table_with_marked_sentences() -> None:
    lines = [line for line in table.markdown(winning_report()).splitlines() if line.startswith("- ")]
    assert all(line[2:].startswith(("**+** ", "**-** ", "**?** ")) for line in lines)
    assert len({line[:7] for line in lines}) > 1
    odd = contestant("a|b <b>`*", "level", 0.02, stock=0.05)
    text = table.markdown(report(contestant("stock", "stock", 0.05), odd, title="x\n# y <script>"))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(row.replace("\\|", "").count("|") == rows[0].count("|") for row in rows)
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert "\n# y" not in text
    made = winning_report()
    assert "torchboost 0.1.0 (abcdef), 2026" in table.markdown(made)
    environment = made.environment.model_copy(update={"commit": ""})
    assert "torchboost 0.1.0, 2026" in table.markdown(made.model_copy(update={"environment": environment}))


def test_times_ratios_and_metrics_read_well() -> None:
    for value, words in {
        0.0000123: "12.3 \N{MICRO SIGN}s",
        0.01234: "12.3 ms",
        0.5: "500 ms",
        58.04: "58.0 s",
        600.0: "10.0 min",
        36_000.0: "10.0 h",
        0.0: "0 \N{MICRO SIGN}s",
        math.inf: "inf h",
    }.items():
        assert wording.seconds(value) == words
    assert wording.seconds_interval(interval(0.02, 0.1)) == "20.0 ms (18.0 to 22.0)"
    assert wording.ratio_interval(interval(3.0, 0.1)) == "3.00\N{MULTIPLICATION SIGN} (2.70 to 3.30)"
    assert wording.measure(0.98123, share=True) == "98.12 %"
    assert wording.difference(-0.00123, share=True) == "\N{MINUS SIGN}0.12 points"
    assert wording.amount(0.005, share=True) == "0.5 points"
    assert wording.measure(12.3456, share=False) == "12.35"
    assert wording.difference(0.5, share=False) == "+0.5"
    assert wording.measure(math.nan, share=True) == wording.difference(math.nan, share=True) == "nan"
    assert [wording.count(n, "seed") for n in (1, 2000)] == ["1 seed", "2,000 seeds"]


def test_only_an_accuracy_is_a_share_and_a_metric_of_the_user_has_its_own_units() -> None:
    assert wording.is_share(report(contestant("stock", "stock", 0.1, 0.9)))
    assert not wording.is_share(report(contestant("stock", "stock", 0.1, 7.0)))
    assert not wording.is_share(report(contestant("stock", "stock", 0.1, seeds=0)))
    assert not wording.is_share(report(contestant("stock", "stock", 0.1, 0.9), metric="metric"))
    assert wording.has_own_units("metric")
    assert not wording.has_own_units("accuracy")
