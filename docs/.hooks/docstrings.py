"""Give the API pages what torch's docstrings look like there: examples as code, references as links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
ROLE = re.compile(r":(?:func|class|meth|attr|mod|data):`(~?)([^`]+)`")


class Docstrings(griffe.Extension):
    """Rewrite what griffe would show as quoted text: sections ``Example:``, and the roles of reStructuredText."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called by griffe with each package that it has loaded."""
        for each in _all_of(pkg):
            if each.docstring is not None:
                each.docstring.value = rewritten(each.docstring.value, each)


def _all_of(each: griffe.Object) -> Iterator[griffe.Object]:
    yield each
    for member in each.members.values():
        if isinstance(member, griffe.Object):
            yield from _all_of(member)


def rewritten(text: str, owner: griffe.Object) -> str:
    """Return a docstring whose examples are a section of griffe's, and whose references are links if they can be."""

    def link(role: re.Match[str]) -> str:
        short, name = role.groups()
        shown = name.rpartition(".")[2] if short else name
        return f'<autoref identifier="{_path(name, owner)}" optional><code>{shown}</code></autoref>'

    return ROLE.sub(link, EXAMPLE.sub("Examples:", text))


def _path(name: str, owner: griffe.Object) -> str:
    """Return the whole name of what a docstring names, as seen from the object that has the docstring."""
    first, dot, rest = name.partition(".")
    try:
        return owner.resolve(first) + dot + rest
    except griffe.NameResolutionError:
        return name
