from __future__ import annotations

import io

from torchboost.cli.progress import display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(shown):
    for done in range(101):
        shown("timing", done, 100)
    shown("training", 0, 4, "O1 [seed 0]")
    shown("training", 4, 4)


def test_few_lines_where_there_is_no_terminal():
    out = io.StringIO()
    with display(out) as shown:
        work(shown)
    lines = out.getvalue().splitlines()
    assert lines[0] == "timing: 0 of 100"
    assert lines[10] == "timing: 100 of 100"
    assert lines[11:] == ["training: 0 of 4 (O1 [seed 0])", "training: 4 of 4"]
    assert shown.phase == "training"


def test_bars_on_a_terminal():
    out = Terminal()
    with display(out) as shown:
        work(shown)
    assert shown.phase == "training"
    assert "timing" in out.getvalue()


def test_nothing_to_do_is_no_division_by_zero():
    with display(io.StringIO()) as shown:
        shown("data", 0, 0)
    assert shown.phase == "data"
