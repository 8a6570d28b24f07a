"""The frame of a page and its building blocks: sections, tables, figures. All text is escaped."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from torchboost.bench.report import wording
from torchboost.measure.evidence import Environment

__all__ = ["environment_section", "figure", "page", "section", "table", "write_whole_page"]


def page(title: str, sections: Iterable[str], footer: str) -> str:
    """Return a complete page without scripts and external files.

    Args:
        title: Text.
        sections: Markup; empty ones are left out.
        footer: Markup.
    """
    style = importlib.resources.files("torchboost.bench.report").joinpath("report.css").read_text(encoding="utf-8")
    body = "\n".join(one for one in sections if one)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f"<footer>{footer}</footer>\n</main>\n</body>\n</html>\n"
    )


def write_whole_page(content: str, path: str | Path) -> Path:
    """Write a page, completely or not at all, and return its path. Missing folders are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(content, encoding="utf-8")
    return partial.replace(path)


def section(title: str, *content: str, lead: str = "", class_: str = "") -> str:
    """Return a section with a heading; ``content`` and ``lead`` are markup."""
    head = f'<section class="{class_}">' if class_ else "<section>"
    shown = f'<p class="lead">{lead}</p>' if lead else ""
    return f"{head}\n<h2>{escape(title)}</h2>\n{shown}{''.join(content)}\n</section>"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "") -> str:
    """Return a table that scrolls by itself; the cells are markup with their tags."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in headings)
    body = "".join(f"<tr>{''.join(row)}</tr>\n" for row in rows)
    opening = f'<table class="{class_}">' if class_ else "<table>"
    shown = f"{opening}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(headings[0])} table">{shown}</div>'


def figure(large: str, small: str, caption: str) -> str:
    """Return a drawing for large and one for small screens with a caption."""
    return f"<figure>{large}\n{small}\n<figcaption>{escape(caption)}</figcaption></figure>"


def environment_section(env: Environment) -> str:
    """Return the section about machine and versions."""
    entries = [
        ("Processor", f"{env.processor}, {wording.count(env.cores, 'core')}"),
        ("Vector instructions", env.instructions or "not recorded"),
        ("Threads used", str(env.threads)),
        ("Device", env.device),
        ("System", env.platform),
        ("Versions", f"torch {env.torch}, torchboost {env.torchboost}, Python {env.python}"),
        ("Commit", env.commit or "not recorded"),
        ("Date", env.date),
    ]
    shown = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>\n" for name, value in entries)
    return section("Environment", f"<dl>{shown}</dl>")
