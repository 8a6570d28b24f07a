from __future__ import annotations

import html
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.reports import contestant, report, winning_report
from torchboost.bench.report.page import html_page
from torchboost.measure.evidence import AlgorithmRow, DroppedRow

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&lt;"
VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """Checks that tags are balanced and collects what is there."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def hostile_report():
    made = contestant(HOSTILE, "stock", 0.05)
    other = contestant("O1 " + HOSTILE, "level", 0.02).model_copy(
        update={
            "algorithms": [AlgorithmRow(name=HOSTILE, settings=HOSTILE)],
            "dropped": [DroppedRow(name=HOSTILE, reason=HOSTILE)],
            "notes": [HOSTILE],
        }
    )
    whole = report(made, other, title=HOSTILE, metric=HOSTILE)
    environment = whole.environment.model_copy(
        update=dict.fromkeys(("torchboost", "torch", "processor", "platform", "device", "commit", "date"), HOSTILE)
    )
    update = {"environment": environment, "notes": [HOSTILE], "workload": HOSTILE, "model": HOSTILE}
    return whole.model_copy(update=update)


def test_everything_is_on_the_page():
    text = html.unescape(html_page(winning_report()))
    for said in ("O2 trains", "ChannelsLast()", "not measured on this device", "272,474 parameters", "2026-01-02"):
        assert said in text
    assert text.count("<svg") == 8


def test_the_margin_of_an_accuracy_is_not_stated_for_another_metric():
    assert "It must stay inside the margin: half a point" in html_page(winning_report())
    own = html_page(winning_report().model_copy(update={"metric_name": "metric"}))
    assert "half a point" not in own
    assert "torchboost tune --drop tests a limit of your own" in own


def test_no_text_of_a_report_becomes_markup():
    page = Page(html_page(hostile_report()))
    tags = {tag for tag, _ in page.seen}
    assert not tags & {"script", "img"}
    assert not [name for _, attrs in page.seen for name in attrs if name.startswith("on")]
    assert not page.open


def test_nothing_is_loaded_from_elsewhere():
    text = html_page(winning_report())
    page = Page(text)
    links = [v for _, attrs in page.seen for k, v in attrs.items() if k in ("href", "src", "xlink:href")]
    assert links == ["data:,"]
    assert not re.findall(r"@import|url\((?!#)", text)


def test_same_report_same_bytes():
    assert html_page(winning_report()) == html_page(winning_report())


def test_identifiers_are_unique():
    ids = [attrs["id"] for _, attrs in Page(html_page(winning_report())).seen if "id" in attrs]
    assert len(ids) == len(set(ids)) == 6


def test_timing_alone_makes_a_page_without_training():
    text = html_page(report(contestant("stock", "stock", 0.05, seeds=0)))
    assert "<h2>Training</h2>" not in text
    assert "<h2>Time per step</h2>" in text


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs Chromium or Chrome to load the page")
    return found


PROBE = """<!doctype html><body style="margin:0">
<iframe id="page" src="report.html" style="width:{width}px;height:900px;border:0"></iframe><pre id="found"></pre>
<script>
const frame = document.getElementById('page');
frame.onload = () => {{
  const root = frame.contentDocument.documentElement;
  document.getElementById('found').textContent = 'width ' + root.scrollWidth + ' of ' + root.clientWidth + ' figures ' +
    [...frame.contentDocument.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width > 0).length;
}};
</script></body>"""


def looked_at(tmp_path: Path, content: str, width: int) -> tuple[int, int, int]:
    """Return the widths that a page wants and has in a browser, and the number of figures that are seen."""
    program = chromium()
    (tmp_path / "report.html").write_text(content, encoding="utf-8")
    (tmp_path / "probe.html").write_text(PROBE.format(width=width), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1400,1000",
        "--dump-dom",
    ]
    command = [program, *options, (tmp_path / "probe.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"width (\d+) of (\d+) figures (\d+)", done.stdout)
    assert found is not None, done.stderr
    assert "CONSOLE" not in done.stderr
    return int(found[1]), int(found[2]), int(found[3])


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 860, 1280])
@pytest.mark.parametrize("make", [winning_report, hostile_report])
def test_no_sideways_scroll_and_no_console_errors(tmp_path: Path, width: int, make):
    wanted, room, figures = looked_at(tmp_path, html_page(make()), width)
    assert wanted <= room
    assert figures == 4
