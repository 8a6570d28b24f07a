"""What a rank does in an update grows with the logarithm of the number of ranks."""

from __future__ import annotations

import math

import pytest
import ranks


@pytest.mark.parametrize("part", [ranks.agreeing, ranks.adding, ranks.accumulating, ranks.reducing, ranks.saving])
def test_calls_grow_no_faster_than_the_logarithm(part):
    found = {}
    for count in (8, 1024):
        with ranks.faked(count) as counts:
            found[count] = part(counts, count)
    for name, (calls, _, requests) in found[1024].items():
        before, _, asked = found[8][name]
        if name != "AdaSum, set-up":  # torch lets all ranks make all groups
            assert calls <= before * math.log2(1024) / math.log2(8)
            assert requests <= asked * math.log2(1024) / math.log2(8)
