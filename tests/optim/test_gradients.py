"""Names of transforms in memory and checkpoints."""

from __future__ import annotations

import pytest

from torchboost.optim.pipeline import by_namespace, check_transforms, namespaces
from torchboost.optim.transforms import Centralize, ClipNorm


def test_transforms_of_one_class_are_numbered():
    assert namespaces([Centralize(), ClipNorm(1.0), Centralize(), Centralize()]) == [
        "Centralize",
        "ClipNorm",
        "Centralize#2",
        "Centralize#3",
    ]


def test_entries_without_a_name_belong_to_every_transform():
    assert by_namespace({"A.x": 1, "B#2.y": 2, "z": 3}, ["A", "B#2"]) == {
        "A": {"x": 1, "z": 3},
        "B#2": {"y": 2, "z": 3},
    }


@pytest.mark.parametrize("bad", [Centralize, 3, lambda gradients: None])
def test_what_is_no_transform_is_refused(bad):
    with pytest.raises(TypeError, match=r"transform|give an instance"):
        check_transforms([bad])
