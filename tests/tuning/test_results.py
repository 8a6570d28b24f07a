"""Reports of tunings side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tuning.test_report import tuned
from torchboost.tuning.report import Rate
from torchboost.tuning.results import RESULTS, data_of_results, machines, recipe_rows, result_rows, results_in


def test_reports_are_found_and_compared(tmp_path: Path) -> None:
    first, second = tmp_path / "a.report.json", tmp_path / "below" / "b.report.json"
    made = tuned()
    made.save(first)
    stock, *others = made.findings
    named = stock.candidate.model_copy(update={"name": "switches: autocast"})
    now = {"whole": [], "state": "interrupted", "rate": None, "fingerprint": "1234567"}
    now["findings"] = [stock.model_copy(update={"candidate": named}), *others]
    made.model_copy(update=now).save(second)
    edited = tmp_path / "c.report.json"
    edited.write_text(first.read_text().replace('"budget_seconds": 3000.0', '"budget_seconds": 9.0'), encoding="utf-8")
    other, old = tmp_path / "boost.json", tmp_path / "old.json"
    other.write_text("{}", encoding="utf-8")
    old.write_text(made.model_dump_json(), encoding="utf-8")  # without a seal, and with a name of its own
    results = results_in([tmp_path, other, old, first])
    lines = {row[1]: row[2:] for row in result_rows(results)}
    assert set(lines) == {str(first), str(second), str(edited), str(other), f"{old} (no seal)"}
    assert lines[str(first)][3] == "Muon at 0.04, 50 % of the steps, with autocast"
    assert lines[str(first)][6] == "best at 0.5\N{MULTIPLICATION SIGN}"
    assert (lines[str(second)][0], lines[str(second)][3]) == ("1234-?-101", "not finished")
    assert lines[str(edited)][3] == "changed after it was written: its seal does not fit"
    assert lines[str(other)][3] == "not a report of torchboost tune"
    assert {len(row) for row in result_rows(results)} == {len(RESULTS)}
    head, *rows = recipe_rows(results)
    assert head == ["recipe", "1", "2", "3"]
    assert [row[0] for row in rows] == ["switches", "Muon", "less_bn as in O2", "Muon with less_bn as in O2"]
    assert rows[0][1:] == [rows[0][1]] * 3  # one line, whatever a version called them
    assert rows[1][1].startswith("kept, ")
    assert rows[1][1].endswith(" in 50 % of the steps")
    (machine,) = machines(results)
    assert machine.startswith("1, 2, 3: torchboost ")
    data = json.loads(json.dumps(data_of_results(results)))
    assert [(one["sealed"], bool(one["fault"]), "runs" in one) for one in data].count((True, False, False)) == 2
    kept = {"whole": [], "extra": {}, "rate": Rate(best=0.5, change=0.02, seeds=4, fresh=True, kept=True)}
    made.model_copy(update=kept).save(second)
    assert result_rows(results_in([second]))[0][RESULTS.index("turned on")] == "0.5 times your rate"
    with pytest.raises(FileNotFoundError):
        results_in([tmp_path / "none.json"])
