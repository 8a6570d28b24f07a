"""What a program sets before torch 2.12 to freeze parts of a model that it compiles itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.versions import flags_are_followed


@pytest.fixture
def followed_flags() -> Iterator[None]:
    with flags_are_followed():
        yield
