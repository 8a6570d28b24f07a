"""Tell the API pages which names a package exports: those of its ``__init__.pyi``, which griffe takes for imports."""

from __future__ import annotations

from typing import Any

import griffe


class StubExports(griffe.Extension):
    """Make public what a stub file re-exports as ``from .module import name as name``."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called by griffe with each package that it has loaded."""
        for module in (pkg, *(member for member in pkg.modules.values() if not member.is_alias)):
            stub = module.filepath.with_suffix(".pyi") if not isinstance(module.filepath, list) else None
            if stub is not None and stub.is_file():
                names = [name for name, member in module.members.items() if member.is_alias and not member.is_public]
                module.exports = [name for name in names if name not in ("annotations", "lazy_loader")]
