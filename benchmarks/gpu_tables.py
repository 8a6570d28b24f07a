"""What came back from a GPU, as tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchboost.bench.report import wording
from torchboost.bench.report.table import NOTHING, Table
from torchboost.measure.evidence import Interval

STOCK = "stock"
Row = Mapping[str, Any]
Rows = Mapping[str, Row]


def table(path: Path) -> tuple[Table, str]:
    """Return the table of a result file, and what the levels chose, what failed, and where it was measured."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    rows: Rows = saved["rows"]
    good = {name: row for name, row in rows.items() if "error" not in row}
    told = [f"- {name}: {chosen(row['choice'])}" for name, row in good.items() if row.get("choice")]
    told += [f"- {name}: {row['error'].splitlines()[0]}" for name, row in rows.items() if "error" in row]
    env = saved["environment"]
    machine = f"{env['device']}, {env['processor']}, {env['cores']} cores, torch {env['torch']}, Python {env['python']}"
    when = f"commit {env['commit'] or 'unknown'}, {env['date']}"
    origin = f"{machine}, {when}. Raw samples: `benchmarks/results/{path.name}`."
    return MAKERS[saved["kind"]](good), "\n".join([*told, *([""] if told else []), origin])


def chosen(choice: Row) -> str:
    """Return what a trial turned on, with the gain of each switch if it says one."""
    gains = {v["lever"]: re.search(r"a step is ([\d.]+) times", v["reason"]) for v in choice["verdicts"] if v["kept"]}
    on = [f"`{name}`{f' {wording.ratio(float(gain[1]))}' if gain else ''}" for name, gain in gains.items()]
    return f"on after {wording.seconds(choice['seconds'])} of measuring: {', '.join(on) or 'nothing'}."


def step(row: Row) -> str:
    return wording.seconds_interval(Interval(**row["seconds"]))


def against(row: Row, base: str) -> str:
    found = row["ratios"].get(base)
    return NOTHING if found is None else wording.ratio_interval(Interval(**found["interval"]))


def shown(row: Row, key: str, form: Callable[[Any], str]) -> str:
    return NOTHING if row.get(key) is None else form(row[key])


def spaced(loop: str) -> str:
    """Return the name of a loop, which may be long, so that a narrow column can break it."""
    return loop.replace("+", "+<wbr>")


def loops(rows: Rows) -> Table:
    def line(name: str, row: Row) -> tuple[str, ...]:
        others = [f"{against(row, base)}, {spaced(base)}" for base in row["ratios"] if base != STOCK]
        return (
            *(spaced(name), step(row), against(row, STOCK), "; ".join(others) or NOTHING),
            shown(row, "setup_seconds", wording.seconds),
            shown(row, "host_seconds", wording.seconds),
            shown(row, "waits", str),
            shown(row, "peak_bytes", wording.size),
            shown(row, "losses_apart", "{:.1e}".format),
        )

    head = (
        "loop",
        "a step",
        "against stock",
        "against others",
        "set-up",
        "host",
        "waits",
        "memory",
        "losses differ by",
    )
    return Table(headings=head, rows=tuple(line(*item) for item in rows.items()))


def rules(rows: Rows) -> Table:
    def line(name: str, row: Row) -> tuple[str, ...]:
        best = min(row["peers"], key=lambda way: row["peers"][way]["seconds"]["mid"], default=None)
        others = (NOTHING,) * 3
        if best is not None:
            peer = row["peers"][best]
            others = (
                f"{against(row, best)}, {best}",
                wording.seconds(peer["host_seconds"]),
                wording.size(peer["peak_bytes"]),
            )
        own = (step(row), wording.seconds(row["host_seconds"]), str(row["waits"]), wording.size(row["peak_bytes"]))
        return (name, *own, *others)

    head = ("rule", "a step", "host", "waits", "memory", "against the best of the others", "its host", "its memory")
    return Table(headings=head, rows=tuple(line(*item) for item in rows.items()))


def tests(rows: Rows) -> Table:
    def line(name: str, row: Row) -> tuple[str, ...]:
        return (name, str(row["passed"]), str(len(row["failed"])), str(len(row["two_devices"])), str(row["skipped"]))

    head = ("tests", "passed", "failed", "name two devices", "skipped")
    return Table(headings=head, rows=tuple(line(*item) for item in rows.items()))


def machine(rows: Rows) -> Table:
    device, speed = rows.get("device", {}), rows.get("speed", {})
    found = {
        **device.get("nvidia", {}),
        **{key: device.get(key) for key in ("cuda", "cudnn", "capability")},
        "packages": ", ".join(f"{name} {version}" for name, version in device.get("packages", {}).items()),
        "bfloat16": speed.get("said"),
        "copy, bytes per second": shown(speed, "copied_bytes_per_second", "{:.3g}".format),
    }
    return Table(headings=("what", "found"), rows=tuple((key, str(value)) for key, value in found.items() if value))


MAKERS: Mapping[str, Callable[[Rows], Table]] = {
    "machine": machine,
    "tests": tests,
    "rules": rules,
    "levels": loops,
    "padding": loops,
    "freezing": loops,
    "offload": loops,
}
