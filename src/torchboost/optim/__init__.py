"""Optimizers with a gradient pipeline, schedules of the learning rate, and parameter groups.

The names are listed in ``__init__.pyi`` and load on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
