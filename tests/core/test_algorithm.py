"""Attachments, attaching together, conflicts and undoing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits, attach_all
from torchboost.errors import IncompatibleError


class Counting(Attachment):
    """Counts optimizer steps through a post-hook."""

    def __init__(self, target: Target) -> None:
        self.steps = 0
        super().__init__(target.optimizer.register_step_post_hook(self._after))

    def _after(self, *_: object) -> None:
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@dataclass(frozen=True, kw_only=True)
class Count(Algorithm):
    name: ClassVar[str] = "count"
    traits: ClassVar[Traits] = Traits(order=60)

    def attach(self, target: Target) -> Attachment:
        return Counting(target)


@dataclass(frozen=True, kw_only=True)
class Widen(Algorithm):
    """Adds a module once."""

    name: ClassVar[str] = "widen"
    traits: ClassVar[Traits] = Traits(order=10)

    def needs_transform(self, model):
        return not hasattr(model, "wide")

    def transform(self, model, optimizer=None):
        model.add_module("wide", nn.Identity())


@dataclass(frozen=True, kw_only=True)
class Narrow(Algorithm):
    name: ClassVar[str] = "narrow"


@dataclass(frozen=True, kw_only=True)
class Lonely(Algorithm):
    name: ClassVar[str] = "lonely"
    traits: ClassVar[Traits] = Traits(alone=True)


@dataclass(frozen=True, kw_only=True)
class Refuse(Algorithm):
    name: ClassVar[str] = "refuse"
    traits: ClassVar[Traits] = Traits(order=90)

    def attach(self, target: Target) -> Attachment:
        raise IncompatibleError("refuses")


@dataclass(frozen=True, kw_only=True)
class Stateless(Algorithm):
    name: ClassVar[str] = "stateless"
    traits: ClassVar[Traits] = Traits(order=95)


@dataclass(frozen=True, kw_only=True)
class Check(Refuse):
    def check(self, target: Target) -> None:
        raise IncompatibleError("checked")


def make_target() -> Target:
    model = nn.Sequential(nn.Linear(3, 2))
    return Target(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(target: Target) -> None:
    target.model(torch.ones(1, 3)).sum().backward()
    target.optimizer.step()


def test_attach_sorts_by_order_and_transforms_first():
    target = make_target()
    attached = attach_all(target, [Count(), Widen()])
    assert list(attached) == ["widen", "count"]
    assert hasattr(target.model, "wide")
    train(target)
    assert attached["count"].state_dict() == {"steps": 1}
    assert attached.describe() == "1. Widen()\n2. Count()"


def test_state_round_trip():
    target = make_target()
    attached = attach_all(target, [Count()])
    train(target)
    saved = attached.state_dict()
    attached.remove()
    again = attach_all(target, [Count()])
    again.load_state_dict(saved)
    train(target)
    assert again.state_dict() == {"count": {"steps": 2}}


def test_state_of_other_algorithms_is_refused_unless_they_keep_none():
    attached = attach_all(make_target(), [Count(), Narrow()])
    for state, message in (
        ({}, "no state of count, attached here"),
        ({"count": {"steps": 1}, "other": {"x": 1}}, "the state of other, not attached here;"),
        ({"other": {"x": 1}}, "the state of other, not attached here and no state of count"),
    ):
        with pytest.raises(ValueError, match=message):
            attached.load_state_dict(state)
        assert attached.state_dict()["count"] == {"steps": 0}
    attached.load_state_dict({"count": {"steps": 3}, "widen": {}})
    assert attached.state_dict() == {"count": {"steps": 3}, "narrow": {}}


def test_a_state_that_is_refused_leaves_the_others_as_they_were():
    attached = attach_all(make_target(), [Count(), Stateless()])
    with pytest.raises(ValueError, match="keeps no state"):
        attached.load_state_dict({"count": {"steps": 3}, "stateless": {"x": 1}})
    assert attached["count"].state_dict() == {"steps": 0}


class Around(torch.optim.Optimizer):
    """An optimizer by class only, as those of Accelerate and timm."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups


class Replace(Narrow):
    name: ClassVar[str] = "replace"
    traits: ClassVar[Traits] = Traits(replaces_optimizer=True)


def test_an_optimizer_inside_another_is_not_replaced():
    target = make_target()
    target.optimizer = Around(target.optimizer)
    with pytest.raises(IncompatibleError, match="the optimizer is a Around around a SGD"):
        attach_all(target, [Widen(), Replace()])
    assert not hasattr(target.model, "wide")


def test_an_optimizer_without_hooks_is_refused_at_once():
    class Empty(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups = []

    with pytest.raises(IncompatibleError, match="Empty does not call the hooks"):
        Target(nn.Linear(1, 1), Empty())


def test_remove_is_complete_and_idempotent():
    target = make_target()
    attached = attach_all(target, [Count()])
    attached.remove()
    attached.remove()
    assert not target.optimizer._optimizer_step_post_hooks
    assert len(attached) == 0
    assert attached.describe() == "nothing attached"
    attached.load_state_dict({})
    assert attached.state_dict() == {}
    with attach_all(target, [Count()]) as attached:
        assert "count" in attached
    assert not target.optimizer._optimizer_step_post_hooks


def test_refusal_removes_what_was_attached_before():
    target = make_target()
    with pytest.raises(IncompatibleError, match="refuses"):
        attach_all(target, [Count(), Refuse()])
    assert not target.optimizer._optimizer_step_post_hooks


def test_what_can_be_checked_is_refused_before_a_transform():
    target = make_target()
    with pytest.raises(IncompatibleError, match="checked"):
        attach_all(target, [Widen(), Check()])
    assert not hasattr(target.model, "wide")


def test_conflicts_are_refused_before_anything_changes():
    target = make_target()
    with pytest.raises(IncompatibleError, match="'lonely' cannot work together with widen"):
        attach_all(target, [Widen(), Lonely()])
    assert not hasattr(target.model, "wide")
    with pytest.raises(IncompatibleError, match="given 2 times"):
        attach_all(target, [Count(), Count()])


def test_wrapped_model_that_needs_a_transform_is_refused():
    target = make_target()
    target.model.compile(backend="eager")
    with pytest.raises(IncompatibleError, match=r"nn\.Module\.compile.*boost on the bare.*plan\.transform\(model\)"):
        attach_all(target, [Widen()])
    assert not hasattr(target.model, "wide")
    target = make_target()
    Widen().transform(target.model)
    target.model.compile(backend="eager")
    assert list(attach_all(target, [Widen()])) == ["widen"]


def test_attachment_removes_last_first_and_undoes_once():
    calls: list[str] = []

    class Handle:
        def __init__(self, name: str) -> None:
            self.name = name

        def remove(self) -> None:
            calls.append(self.name)

    attachment = Attachment(Handle("a"), Handle("b"), undo=lambda: calls.append("undo"))
    attachment = attachment.with_undo(lambda: calls.append("first"))
    with attachment:
        pass
    attachment.remove()
    assert calls == ["first", "b", "a", "undo"]


class Counted(Algorithm):
    def __init__(self, name: str, order: int, undone: list[str]) -> None:
        self.name, self.traits, self._undone = name, Traits(order=order), undone  # pyright: ignore

    def attach(self, target: Target) -> Attachment:
        return Attachment(undo=lambda: self._undone.append(self.name))


def test_attachments_are_detached_and_adopted_one_by_one():
    undone: list[str] = []
    target = Target(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1))
    attached = attach_all(target, [Counted("first", 1, undone), Counted("third", 3, undone)])
    attached.with_undo(lambda: undone.append("all"))
    attached.detach("third")
    attached.detach("unknown")
    assert undone == ["third"]
    others = attach_all(target, [Counted("second", 2, undone), Counted("third", 3, undone)])
    attached.adopt(others)
    assert list(attached) == ["first", "second", "third"]
    others.remove()
    attached.remove()
    assert undone == ["third", "all", "third", "second", "first"]


def test_the_state_says_which_levers_were_chosen():
    loaded: list[object] = []
    attached = attach_all(make_target(), [Count()]).with_levers(lambda: {"fast": True}, loaded.append)
    state = attached.state_dict()
    assert state == {"count": {"steps": 0}, "levers": {"fast": True}}
    attached.load_state_dict(state)
    assert loaded == [{"fast": True}]
    attach_all(make_target(), [Count()]).load_state_dict(state)  # it chooses nothing
    attached.load_state_dict({"count": {"steps": 1}})  # one of an older version
    assert len(loaded) == 1

    def refuses(levers: object) -> None:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        attached.with_levers(dict, refuses).load_state_dict(state)
    assert attached.state_dict() == {"count": {"steps": 1}}


@pytest.mark.parametrize("damaged", [3, "text", [1], {}, {"steps": None, "more": 1}])
def test_a_damaged_state_is_one_kind_of_error_and_changes_nothing(damaged: object) -> None:
    target = make_target()
    attached = attach_all(target, [Count(), Second()])
    saved = attached.state_dict()
    with pytest.raises(ValueError, match="the state of second is damaged"):
        attached.load_state_dict({"count": {"steps": 7}, "second": damaged})
    assert attached.state_dict() == saved
    with pytest.raises(ValueError, match="not a dictionary"):
        attached.load_state_dict(damaged if not isinstance(damaged, dict) else [])


class Picky(Counting):
    def load_state_dict(self, state):
        self.steps = -1
        self.steps = int(state["steps"])


@dataclass(frozen=True, kw_only=True)
class Second(Algorithm):
    name: ClassVar[str] = "second"
    traits: ClassVar[Traits] = Traits(order=61)

    def attach(self, target: Target) -> Attachment:
        return Picky(target)
