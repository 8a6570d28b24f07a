from __future__ import annotations

import io

from tests.support.reports import contestant, report, winning_report
from torchboost.bench.report import table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_follow_the_report():
    made = table.result_table(winning_report())
    assert made.headings[:4] == ("contestant", "time per step", "against stock", "against best hand")
    assert [row[0] for row in made.rows] == ["stock", "hand", "O1", "O2", "freeze", "compile"]
    assert made.rows[2][2] == "3.12\N{MULTIPLICATION SIGN} (3.06 to 3.19)"


def test_columns_without_entries_are_left_out():
    made = table.result_table(report(contestant("stock", "stock", 0.1, seeds=0)))
    assert made.headings == ("contestant", "time per step", "set-up")


def test_plain_columns_line_up():
    lines = table.plain(table.Table(("a", "long"), (("x", "1"), ("wide", "2")))).splitlines()
    assert lines == ["a     long", "----  ----", "x     1", "wide  2"]


def test_plain_text_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr("torchboost.bench.report.table._print_rich", None)
    out = io.StringIO()
    table.print_report(winning_report(), out)
    assert "O1 promises to be no slower than stock and to lose at most 0.5 points: kept here." in out.getvalue()


def test_plain_text_without_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out = Terminal()
    table.print_report(winning_report(), out)
    assert "\x1b" not in out.getvalue()
    assert "time per step" in out.getvalue()


def test_drawn_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = Terminal()
    table.print_report(winning_report("[bold]not markup[/bold]"), out)
    assert "[bold]not markup[/bold]" in out.getvalue()
    assert "(3.06 to 3.19)" in out.getvalue()


def test_markdown_keeps_the_marks():
    lines = [line for line in table.markdown(winning_report()).splitlines() if line.startswith("- ")]
    assert lines
    assert all(line[2:].startswith(("**+** ", "**-** ", "**?** ")) for line in lines)
    assert len({line[:7] for line in lines}) > 1


def test_markdown_escapes_and_stays_a_table():
    made = report(
        contestant("stock", "stock", 0.05), contestant("a|b <b>`*", "level", 0.02, stock=0.05), title="x\n# y <script>"
    )
    text = table.markdown(made)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(row.replace("\\|", "").count("|") == rows[0].count("|") for row in rows)
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert "\n# y" not in text


def test_a_commit_that_is_not_known_leaves_no_parentheses():
    made = winning_report()
    assert "torchboost 0.1.0 (abcdef), 2026" in table.markdown(made)
    environment = made.environment.model_copy(update={"commit": ""})
    assert "torchboost 0.1.0, 2026" in table.markdown(made.model_copy(update={"environment": environment}))


def test_the_memory_of_a_run_is_shown_if_it_is_known():
    made = table.result_table(winning_report())
    assert made.headings[-1] == "memory"
    assert made.rows[0][-1] == "102 MiB"
