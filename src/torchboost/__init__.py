"""torchboost: faster training of PyTorch models within a stated accuracy budget, measured on the user's own model.

The names are listed in ``__init__.pyi`` and load on first use, so importing the package adds little to the import of
torch.
"""

from __future__ import annotations

import lazy_loader

__version__ = "0.7.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
