"""The fourteen names of MindSpore's Boost module, built on this package's own functions.

The names are listed in ``__init__.pyi`` and load on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
