"""What is alive in this process."""

from __future__ import annotations

import gc

from torch import Tensor

__all__ = ["live_tensors"]


def live_tensors() -> tuple[int, int]:
    """Return the number of tensors and the bytes behind them.

    Other tests of the process may have left some that go meanwhile: ask for no more, not for as many.
    """
    for _ in range(2):  # what a finaliser frees goes with the second pass
        gc.collect()
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return len(alive), sum(_nbytes(tensor) for tensor in alive)


def _nbytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, fake, sharded and lazy ones have none
        return 0
