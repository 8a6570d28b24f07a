"""Tests of a mean that may be looked at after every value, without an end that is fixed before."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["AnytimeTest", "ChangeTest"]

_EVERY = 25
"""Values between the beginnings of two tests."""
_MOST = 16
"""So many tests at a time; when they are reached, every second one ends, and new ones begin half as often."""


def _check(error: float) -> None:
    if not 0 < error < 1:
        raise ValueError(f"error: found {error!r}; give a number between 0 and 1.")


@dataclass
class AnytimeTest:
    """Evidence that the mean of normal values with an unknown spread is above 0.

    The evidence is a ratio of likelihoods: effects drawn from a normal distribution with the width of the spread,
    against none. If the mean is 0 or below, the probability that it ever exceeds ``1 / error``, at any of infinitely
    many looks, is at most ``error``.

    Source: H. Wang, A. Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
    variance", arXiv 2310.03722; T. L. Lai, "On Confidence Sequences", 1976.

    Args:
        error: Between 0 and 1.
        count: Number of values so far.
        total: Their sum.
        squares: The sum of their squares.

    Raises:
        ValueError: ``error`` is out of range.
    """

    error: float = 0.01
    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def __post_init__(self) -> None:
        _check(self.error)

    def add(self, value: float) -> bool:
        """Take a value, and return whether the evidence is now enough."""
        self.count += 1
        self.total += value
        self.squares += value * value
        return self.evidence >= 1 / self.error

    @property
    def evidence(self) -> float:
        """The ratio of likelihoods; 0 if the values are not above 0 on average, or too large to be squared."""
        n, whole = self.count, (self.count + 1) * self.squares
        if n < 2 or not self.total > 0 or not 0 < whole < math.inf:
            return 0.0
        explained = self.total * self.total
        exponent = 0.5 * n * (math.log(whole) - math.log(whole - explained)) - 0.5 * math.log(n + 1)
        return math.exp(min(exponent, 700.0))


@dataclass
class ChangeTest:
    """Evidence that the mean is above 0 now, even if it was below for long.

    A single test adds up everything, so values from before a change hide it. Here a further :class:`AnytimeTest` begins
    after every 25 values, and at most 16 run at a time. When there are as many, every second one ends, and new ones
    begin half as often; so the latest one began within the last eighth of the values. The k-th gets ``error / (k * (k +
    1))``. These add up to ``error``, so the probability that any of them ever gives a false alarm is at most ``error``.

    Args:
        error: Of all tests together; between 0 and 1.

    Raises:
        ValueError: ``error`` is out of range.

    Cost: at most 16 logarithms per value, and 64 numbers.
    """

    error: float = 0.01
    count: int = 0
    begun: int = 0
    every: int = _EVERY
    tests: list[AnytimeTest] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check(self.error)

    def add(self, value: float) -> bool:
        """Take a value, and return whether the evidence is now enough."""
        if self.count % self.every == 0:
            self._begin()
        self.count += 1
        found = [test.add(value) for test in self.tests]
        return any(found)

    @property
    def leading(self) -> AnytimeTest:
        """The test that is closest to an alarm."""
        return max(self.tests, key=lambda test: test.evidence * test.error, default=AnytimeTest(self.error))

    @property
    def evidence(self) -> float:
        """That of the leading test, by its share of the error; ``1 / error`` is an alarm."""
        return self.leading.evidence * (self.leading.error / self.error)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> ChangeTest:
        """Return the test of :meth:`state_dict`."""
        return cls(**{**state, "tests": [AnytimeTest(**one) for one in state["tests"]]})

    def _begin(self) -> None:
        if len(self.tests) == _MOST:
            self.tests, self.every = self.tests[::2], 2 * self.every
        self.begun += 1
        part = self.error / (self.begun * (self.begun + 1))
        self.tests.append(AnytimeTest(max(part, sys.float_info.min)))
