"""Ranks that train together. ``checkpoint`` loads on first use, because ``torch.distributed.checkpoint`` is slow."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["checkpoint"])
