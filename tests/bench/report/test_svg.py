from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchboost.bench.report import svg


def test_text_and_attributes_are_escaped():
    hostile = '<script>"&'
    made = svg.element("g", svg.text(1, 2, hostile), aria_label=hostile)
    tree = ET.fromstring(made)
    assert tree.get("aria-label") == hostile
    assert tree[0].text == hostile
    assert "<script>" not in made


def test_numbers_are_short():
    assert [svg.number(v) for v in (1.0, 0.04, -0.04, 12.345)] == ["1", "0", "0", "12.3"]


def test_path_leaves_gaps_where_values_are_missing():
    made = ET.fromstring(svg.path([(0, 0), (1, 1), (2, math.nan), (3, 3), (4, 4)]))
    assert made.get("d") == "M0 0L1 1M3 3L4 4"


def test_scales():
    linear = svg.Scale(0.0, 10.0, 100.0, 200.0)
    assert [linear(v) for v in (0.0, 5.0, 10.0)] == [100.0, 150.0, 200.0]
    log = svg.Scale(0.01, 1.0, 100.0, 0.0, log=True)
    assert log(0.1) == pytest.approx(50.0)
    assert math.isnan(log(0.0))
    assert math.isnan(linear(math.inf))
    assert math.isnan(linear(1e308))
    tiny = svg.Scale(5e-324, 1e150, 100.0, 0.0, log=True)
    assert tiny(1e150) == pytest.approx(0.0)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 10))
def test_ticks_are_few_and_inside(low, span, most):
    found = svg.ticks(low, low + span, most=most)
    slack = 1e-6 * (span + abs(low))
    assert len(found) <= most + 1
    assert all(low - slack <= v <= low + span + slack for v in found)
    assert found == sorted(found)


def test_ticks_of_logarithms_and_of_whole_numbers():
    assert svg.ticks(0.05, 3.0, log=True) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1.0, 2.0])
    assert svg.ticks(0, 3, most=8, whole=True) == [0, 1, 2, 3]
    assert 2 <= len(svg.ticks(5e-324, 1e150, log=True)) <= 7


@given(st.lists(st.floats(0, 300), min_size=1, max_size=10))
def test_spread_keeps_order_and_distance(wanted):
    placed = svg.spread(wanted, 17.0, 0.0, 300.0)
    assert min(placed) >= -1e-9
    assert max(placed) <= 300.0 + 1e-9
    ordered = sorted(placed)
    assert all(b - a >= 17.0 - 1e-9 for a, b in itertools.pairwise(ordered))
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    assert [placed[k] for k in order] == ordered


def test_fit_shortens_with_an_ellipsis():
    assert svg.fit("short", 200) == "short"
    cut = svg.fit("a very long name of a contestant", 80)
    assert cut.endswith("\N{HORIZONTAL ELLIPSIS}")
    assert svg.text_width(cut) <= 80
