"""Forks, joins and calls of a small graph."""

from __future__ import annotations

from torch import nn

from torchboost.graph.flow import FlowBuilder


def test_branches_part_at_the_last_common_node():
    builder = FlowBuilder()
    x = builder.add("input", "x")
    stem = builder.add("other", "stem", [x])
    left = builder.add("other", "left", [stem])
    right = builder.add("other", "right", [stem])
    end = builder.add("other", "end", [right])
    join = builder.operation("add", [left, end], frozenset({"add"}))
    skip = builder.operation("add", [x, join], frozenset({"add"}))
    flow = builder.build("fx")
    assert flow.nodes[join].kind == "add"
    assert flow.branches(join) == (stem, (frozenset({left}), frozenset({right, end})))
    assert flow.branches(skip) == (x, (frozenset(), frozenset({stem, left, right, end, join})))
    assert flow.branches(left) is None
    assert flow.consumers[stem] == (left, right)


def test_no_branches_without_one_clean_fork():
    builder = FlowBuilder()
    a, b = builder.add("input", "a"), builder.add("input", "b")
    two_inputs = builder.add("add", "add", [a, b])
    left = builder.add("other", "left", [two_inputs])
    leak = builder.add("other", "leak", [left, a])
    late = builder.add("add", "add", [left, leak])
    shifted = builder.add("add", "add", [two_inputs, leak])
    flow = builder.build("fx")
    assert flow.branches(two_inputs) is None
    assert flow.branches(late) is None
    assert flow.branches(shifted) is None


def test_operations_with_one_activation_are_no_additions():
    builder = FlowBuilder()
    x = builder.add("input", "x")
    node = builder.operation("add", [x, x], frozenset({"add"}))
    only = builder.operation("add", [node], frozenset({"add"}))
    assert [n.kind for n in builder.build("fx").nodes][only] == "other"


def test_calls_and_instances():
    relu, builder = nn.ReLU(), FlowBuilder()
    x = builder.add("input", "x")
    first = builder.add("module", "relu", [x], relu)
    second = builder.add("module", "relu", [first], relu)
    flow = builder.build("run")
    assert flow.calls(relu) == [first, second]
    assert flow.calls(nn.ReLU()) == []
    assert [node.index for node in flow.instances(nn.ReLU)] == [first, second]
