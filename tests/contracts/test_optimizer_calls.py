"""No rule makes more than a few kernel calls per tensor, whatever the size of the tensors."""

from __future__ import annotations

from typing import Any

from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.optimizers import CASES, give_grads, parameters, train

TENSORS = 6
CALLS = 20
"""From Python per tensor."""

KERNELS = 75
"""Per tensor with all that runs inside of a call: foreach on the CPU is a loop, which converts its numbers."""


class Calls(TorchDispatchMode):
    """Counts what reaches the dispatcher from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted(name: str, shape: tuple[int, ...], **options: Any) -> tuple[int, int]:
    params = parameters([shape] * TENSORS)
    optimizer = CASES[name](params, **options)
    train(optimizer, params, range(1))
    give_grads(params, 1)
    with Calls() as calls:
        optimizer.step()
    give_grads(params, 1)  # the first step may have clipped them
    with profile(use_kineto=False) as trace:
        optimizer.step()
    return calls.count, len(trace.function_events or ())


def test_few_kernel_calls_per_tensor():
    for name in CASES:
        calls, kernels = counted(name, (3, 2))
        assert calls <= CALLS * TENSORS
        assert 0 < kernels <= KERNELS * TENSORS * (2 if name.startswith(("Muon", "Mixed")) else 1)
        # Muon takes another form of its iteration if one side is at least twice as long as the other.
        assert counted(name, (60, 40) if name.startswith(("Muon", "Mixed")) else (60, 5)) == (calls, kernels)
