"""torch's learning-rate schedulers under torch's module name, and :class:`ScheduleLR`.

With ``from torchboost import optim`` in place of ``from torch import optim``, ``optim.lr_scheduler.OneCycleLR`` still
resolves. These are torch's own classes, which work with the optimizers of both packages.
The schedules of this package are in ``schedules.py``.
"""

from __future__ import annotations

from torch.optim import lr_scheduler as _torchs
from torch.optim.lr_scheduler import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from torchboost.optim.learning_rates import ScheduleLR

__all__ = ["ScheduleLR"]
__all__ += _torchs.__all__
