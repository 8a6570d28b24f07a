"""Expand ``folder/*`` in the navigation to every page of the folder, so that a new card needs no edit of mkdocs.yml."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def expand(nav: Any, docs: Path) -> Any:
    """Return a navigation with each ``folder/*`` replaced by the folder's pages: the index first, then by name."""
    if isinstance(nav, list):
        found = [expand(entry, docs) for entry in nav]
        return [page for entry in found for page in (entry if isinstance(entry, list) else [entry])]
    if isinstance(nav, dict):
        return {title: expand(entry, docs) for title, entry in nav.items()}
    folder, star, rest = nav.partition("/*")
    if not star or rest:
        return nav
    pages = sorted((docs / folder).glob("*.md"), key=lambda page: (page.stem != "index", page.name))
    return [page.relative_to(docs).as_posix() for page in pages]


def on_config(config: Any) -> Any:
    """Called by MkDocs with its configuration."""
    config.nav = expand(config.nav, Path(config.docs_dir))
    return config
