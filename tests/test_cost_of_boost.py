"""What one line costs before the first step: files, calls, time and memory. Counted on a second boost."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchboost
from torchboost.workloads.models import Bottleneck, ResNet

PACKAGE = str(Path(torchboost.__file__).parent)


def five_convolutions() -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels, width in ((3, 8), (8, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def boosted(model: nn.Module, level: str = "O1") -> torchboost.Boosted:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torchboost.boost(model, optimizer, level=level, total_steps=10_000, calibrate=10.0)


def test_boost_enters_few_files_and_makes_few_calls():
    boosted(five_convolutions())
    files, calls = set[str](), 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.add(frame.f_code.co_filename)

    model = five_convolutions()
    sys.setprofile(count)
    try:
        boosted(model)
    finally:
        sys.setprofile(None)
    assert len(files) <= 20, sorted(files)
    assert calls <= 3_000


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that are made in a block, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(a.untyped_storage()) for a in args if isinstance(a, Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for tensor in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._note(tensor, before)
        return outputs

    def _note(self, tensor: Tensor, before: set[int]) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if id(storage) in before or address in self._known or not address:
            return
        size = storage.nbytes()
        self._known.add(address)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, address, size)

    def _gone(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


def test_boost_needs_no_more_memory_than_one_copy_of_the_parameters():
    model = ResNet(Bottleneck, [2, 2, 2], width=32)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    with Peak() as peak:
        made = boosted(model, "O2")
    gc.collect()
    assert "less_bn" in made.attached
    assert peak.most <= 1.1 * size
    assert peak.now <= 0.2 * size
