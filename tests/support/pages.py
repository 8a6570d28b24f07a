"""Pages as a browser takes them: balanced tags, and the room that they need."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest

__all__ = ["HOSTILE", "Look", "Page", "looked_at"]

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>&lt;{{ 7 * 7 }}"
VOID = {"meta", "link", "br", "img"}
PROBE = """<!doctype html><body style="margin:0">
<iframe id="page" src="report.html" style="width:{width}px;height:900px;border:0"></iframe><pre id="found"></pre>
<script>
const frame = document.getElementById('page');
frame.onload = () => {{
  const page = frame.contentDocument, root = page.documentElement;
  const count = (named, told) => [...page.querySelectorAll(named)].filter(told).length;
  const wider = s => s.scrollWidth > s.clientWidth;
  document.getElementById('found').textContent = 'width ' + root.scrollWidth + ' of ' + root.clientWidth + ' figures ' +
    count('figure', s => s.getBoundingClientRect().width > 0) +
    ' cut ' + count('.row > *, .scale', s => wider(s) && getComputedStyle(s).overflowX == 'hidden') +
    ' scrolled ' + count('.scroll', wider);
}};
</script></body>"""


class Page(HTMLParser):
    """Checks that tags are balanced and collects what is there."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += [data.strip()] if data.strip() else []

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if name in (attrs.get("class") or "").split()]

    def is_safe(self) -> bool:
        """Whether no text of a report became markup, and nothing is loaded from elsewhere."""
        links = [v for _, attrs in self.tags for k, v in attrs.items() if k in ("href", "src", "xlink:href")]
        events = [name for _, attrs in self.tags for name in attrs if name.startswith("on")]
        return not {tag for tag, _ in self.tags} & {"script", "img"} and not events and links == ["data:,"]


class Look(NamedTuple):
    """A page in a browser: the width that it wants and has, and how many figures, cut texts and scrolled tables."""

    wanted: int
    room: int
    figures: int
    cut: int
    scrolled: int


def looked_at(folder: Path, content: str, width: int) -> Look:
    """Return what a browser shows of a page."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium or Chrome to load the page")
    (folder / "report.html").write_text(content, encoding="utf-8")
    (folder / "probe.html").write_text(PROBE.format(width=width), encoding="utf-8")
    options = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --allow-file-access-from-files --enable-logging=stderr --dump-dom"""
    window = [f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", (folder / "probe.html").as_uri()]
    command = [program, *options.split(), *window]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    sizes = re.search(r"width (\d+) of (\d+) figures (\d+) cut (\d+) scrolled (\d+)", process.stdout)
    assert sizes is not None, process.stderr
    assert "CONSOLE" not in process.stderr
    return Look(*map(int, sizes.groups()))
