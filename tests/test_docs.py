"""The documentation tells the truth: its code runs, and every algorithm has its card."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tests.conftest import ROOT
from torchboost.registry import REGISTRY

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def snippets(page: Path) -> str:
    """Return the Python of a page as one program that keeps the page's line numbers."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in SNIPPET.finditer(text):
        first = text.count("\n", 0, match.start(1))
        code = match.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page).strip()], ids=named)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippets(page), str(page), "exec"), {"__name__": "__page__"})


def test_the_readme_has_a_snippet_that_trains():
    assert "loss.backward()" in snippets(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_between_pages_lead_somewhere(page):
    broken = [
        target for target in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("name", REGISTRY)
def test_every_algorithm_has_a_card_that_names_its_settings(name):
    card = DOCS / "algorithms" / f"{name}.md"
    assert card.is_file(), f"write {named(card)}: what, when it pays, when not, cost, settings, evidence, reference"
    text = card.read_text(encoding="utf-8")
    settings = [field.name for field in fields(REGISTRY[name].algorithm) if field.init]
    assert [setting for setting in settings if f"`{setting}" not in text and f"{setting}=" not in text] == []


def test_every_card_belongs_to_an_algorithm():
    cards = {card.stem for card in (DOCS / "algorithms").glob("*.md")} - {"index"}
    assert cards <= set(REGISTRY)


def test_the_tables_show_the_results():
    command = [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
