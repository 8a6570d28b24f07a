"""torchboost: faster training of PyTorch models within a stated accuracy budget, measured on the user's own model.

The names are listed in ``__init__.pyi`` and load on first use, so importing the package adds little to the import of
torch.
"""

from __future__ import annotations

from typing import Any

import lazy_loader

__version__ = "0.7.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Load a name on first use. The error for a name of MindSpore says what takes its place."""
    try:
        return _load(name)
    except AttributeError:
        if name.startswith("__"):
            raise
        from torchboost.compat.elsewhere import counterpart

        if (text := counterpart("torchboost", name)) is None:
            raise
        raise AttributeError(text) from None
