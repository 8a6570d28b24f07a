"""What the tests of the trainers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_accelerator() -> Iterator[None]:
    """Forget the settings of an ``Accelerator``, which all of a process share."""
    from accelerate.state import AcceleratorState, GradientState

    def forget() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    forget()
    yield
    forget()
