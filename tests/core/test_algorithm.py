"""Attachments, attaching together, conflicts and undoing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from torchboost import IncompatibleError, Target
from torchboost.core import Algorithm, Attachment, Traits, attach_all


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
        self.steps = -1
        self.steps = int(state["steps"])


@dataclass(frozen=True, kw_only=True)
class Count(Algorithm):
    name: ClassVar[str] = "count"
    traits: ClassVar[Traits] = Traits(order=60)

    def attach(self, target: Target) -> Attachment:
        return Counting(target)


class Second(Count):
    name: ClassVar[str] = "second"
    traits: ClassVar[Traits] = Traits(order=61)


@dataclass(frozen=True, kw_only=True)
class Widen(Algorithm):
    """Adds a module once."""

    name: ClassVar[str] = "widen"
    traits: ClassVar[Traits] = Traits(order=10)

    def needs_transform(self, model):
        return not hasattr(model, "wide")

    def transform(self, model, optimizer=None):
        model.add_module("wide", nn.Identity())


class Plain(Algorithm):
    """Does nothing but undo, and has the name and the traits that it is given."""

    def __init__(self, name: str, *, undone: list[str] | None = None, **traits: Any) -> None:
        self.name, self.traits = name, Traits(**traits)  # pyright: ignore
        self._undone = [] if undone is None else undone

    def attach(self, target: Target) -> Attachment:
        return Attachment(undo=lambda: self._undone.append(self.name))


class Refuse(Plain):
    def attach(self, target: Target) -> Attachment:
        raise IncompatibleError("refuses")


class Check(Refuse):
    def check(self, target: Target) -> None:
        raise IncompatibleError("checked")


class Around(torch.optim.Optimizer):
    """An optimizer by class only, as those of Accelerate and timm."""

    def __init__(self, *inside: torch.optim.Optimizer) -> None:
        self.inside, self.param_groups = dict(enumerate(inside)), []
        if inside:
            self.optimizer, self.param_groups = inside[0], inside[0].param_groups


def make_target() -> Target:
    model = nn.Sequential(nn.Linear(3, 2))
    return Target(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(target: Target) -> None:
    target.model(torch.ones(1, 3)).sum().backward()
    target.optimizer.step()


def test_attach_sorts_by_order_and_transforms_first_and_the_state_returns():
    target = make_target()
    attached = attach_all(target, [Count(), Widen()])
    assert list(attached) == ["widen", "count"]
    assert hasattr(target.model, "wide")
    train(target)
    saved = attached.state_dict()
    assert saved["count"] == {"steps": 1}
    assert list(attached) == ["widen", "count"]
    attached.remove()
    again = attach_all(target, [Count()])
    again.load_state_dict(saved)
    train(target)
    assert again.state_dict() == {"count": {"steps": 2}}


def test_state_of_other_algorithms_is_refused_unless_they_keep_none():
    attached = attach_all(make_target(), [Count(), Plain("narrow")])
    for state, message in (
        ({}, "no state of count, attached here"),
        ({"count": {"steps": 1}, "other": {"x": 1}}, "the state of other, not attached here;"),
        ({"other": {"x": 1}}, "the state of other, not attached here and no state of count"),
        ({"count": {"steps": 1}, "narrow": {"x": 1}}, "keeps no state"),
    ):
        with pytest.raises(ValueError, match=message):
            attached.load_state_dict(state)
        assert attached.state_dict()["count"] == {"steps": 0}
    attached.load_state_dict({"count": {"steps": 3}, "widen": {}})
    assert attached.state_dict() == {"count": {"steps": 3}, "narrow": {}}


def test_a_damaged_state_is_one_kind_of_error_and_changes_nothing() -> None:
    attached = attach_all(make_target(), [Count(), Second()])
    saved = attached.state_dict()
    for damaged in (3, "text", [1], {}, {"steps": None, "more": 1}):
        with pytest.raises(ValueError, match="the state of second is damaged"):
            attached.load_state_dict({"count": {"steps": 7}, "second": damaged})
        assert attached.state_dict() == saved
        with pytest.raises(ValueError, match="not a dictionary"):
            attached.load_state_dict(damaged if not isinstance(damaged, dict) else [])


def test_what_cannot_be_attached_is_refused_before_anything_changes():
    for algorithms, message in (
        ([Plain("replace", replaces_optimizer=True)], "the optimizer is a Around around a SGD"),
        ([Widen(), Check("check", order=90)], "checked"),
        ([Widen(), Plain("lonely", replaces_optimizer=True)], "'lonely' cannot work together with widen"),
        ([Widen(), Count(), Count()], "given 2 times"),
    ):
        target = make_target()
        inner = target.optimizer
        target.optimizer = Around(inner)
        with pytest.raises(IncompatibleError, match=message):
            attach_all(target, algorithms)
        assert not hasattr(target.model, "wide")
        assert target.optimizer is not inner
        assert not inner._optimizer_step_post_hooks
    with pytest.raises(IncompatibleError, match="Around does not call the hooks"):
        Target(nn.Linear(1, 1), Around())


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


def test_remove_is_complete_and_idempotent_and_a_refusal_removes_what_was_attached_before():
    target = make_target()
    attached = attach_all(target, [Count()])
    attached.remove()
    attached.remove()
    assert not target.optimizer._optimizer_step_post_hooks
    assert len(attached) == 0
    attached.load_state_dict({})
    assert attached.state_dict() == {}
    with attach_all(target, [Count()]) as attached:
        assert "count" in attached
    assert not target.optimizer._optimizer_step_post_hooks
    with pytest.raises(IncompatibleError, match="refuses"):
        attach_all(target, [Count(), Refuse("refuse", order=90)])
    assert not target.optimizer._optimizer_step_post_hooks


def test_attachment_removes_last_first_and_undoes_once():
    calls: list[str] = []
    handles = [Attachment(undo=lambda name=name: calls.append(name)) for name in ("a", "b")]
    attachment = Attachment(*handles, undo=lambda: calls.append("undo")).with_undo(lambda: calls.append("first"))
    with attachment:
        pass
    attachment.remove()
    assert calls == ["first", "b", "a", "undo"]


def test_attachments_are_detached_and_adopted_one_by_one():
    undone: list[str] = []
    first, second, third = (
        Plain(name, order=at, undone=undone) for at, name in enumerate(("first", "second", "third"))
    )
    target = make_target()
    attached = attach_all(target, [first, third])
    attached.with_undo(lambda: undone.append("all"))
    attached.detach("third")
    attached.detach("unknown")
    assert undone == ["third"]
    others = attach_all(target, [second, third])
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
