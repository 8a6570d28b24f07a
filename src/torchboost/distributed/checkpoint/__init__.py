"""Checkpoints of training on several ranks.

The names are listed in ``__init__.pyi`` and load on first use, because ``torch.distributed.checkpoint`` takes a second.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
