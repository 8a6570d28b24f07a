"""A test of a mean that may be looked at after every value, without an end that is fixed before."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AnytimeTest"]


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
        if not 0 < self.error < 1:
            raise ValueError(f"error: found {self.error!r}; give a number between 0 and 1.")

    def add(self, value: float) -> bool:
        """Take a value, and return whether the evidence is now enough."""
        self.count += 1
        self.total += value
        self.squares += value * value
        return self.evidence >= 1 / self.error

    @property
    def evidence(self) -> float:
        """The ratio of likelihoods; 0 if the values are not above 0 on average."""
        if self.count < 2 or not self.total > 0:
            return 0.0
        n, explained = self.count, self.total**2
        whole = (n + 1) * self.squares
        exponent = 0.5 * n * (math.log(whole) - math.log(whole - explained)) - 0.5 * math.log(n + 1)
        return math.exp(min(exponent, 700.0))
