"""A plugin of pytest: ``cuda`` is the pretend device, whose library ``TORCHBOOST_PRETEND_DEVICE`` names.

The library must be loaded before torch, so the plugin is named at the start: ``pytest -p
tests.support.pretend_device.plugin``. ``python -m tests.support.pretend_device`` runs a script with it. What
``torch.cuda`` reads from the driver is replaced by plain functions.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.pretend_device.build import folder_of_torch

if "torch" in sys.modules:
    raise ImportError("the pretend device must be loaded before torch; name this plugin with -p")
for _name in ("libc10.so", "libtorch_cpu.so", "libtorch_cuda.so"):  # the last one in builds with CUDA
    if (folder_of_torch() / "lib" / _name).exists():
        ctypes.CDLL(str(folder_of_torch() / "lib" / _name), mode=ctypes.RTLD_GLOBAL)
_LIBRARY = ctypes.CDLL(os.environ["TORCHBOOST_PRETEND_DEVICE"], mode=ctypes.RTLD_GLOBAL)
_LIBRARY.pretend_allocated.restype = ctypes.c_int64
_LIBRARY.pretend_state_size.restype = ctypes.c_int64

import torch  # noqa: E402  (after the library)

_GIB = 2**30


class _Event:
    """A point in time of a stream that does everything at once."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other._at - self._at)


class _Stream:
    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_event(self, event: _Event) -> None: ...

    def wait_stream(self, stream: _Stream) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event


class _Generator:
    """The default generator of the device. That of torch cannot be asked for without CUDA."""

    def manual_seed(self, seed: int) -> _Generator:
        _LIBRARY.pretend_seed(ctypes.c_uint64(seed % 2**64))
        return self

    def seed(self) -> int:
        seed = int.from_bytes(os.urandom(7), "little")
        self.manual_seed(seed)
        return seed

    def get_state(self) -> torch.Tensor:
        state = torch.empty(_LIBRARY.pretend_state_size(), dtype=torch.uint8, device="cpu")
        _LIBRARY.pretend_get_state(ctypes.c_void_p(state.data_ptr()))
        return state

    def set_state(self, state: torch.Tensor) -> None:
        assert state.device.type == "cpu", f"RNG state must be a torch.ByteTensor of the CPU, found {state.device}"
        _LIBRARY.pretend_set_state(ctypes.c_void_p(state.contiguous().data_ptr()))


class _Device:
    """The context of ``torch.cuda.device``."""

    def __init__(self, device: Any) -> None: ...

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def _stream(stream: _Stream | None) -> Iterator[_Stream | None]:
    yield stream


def _replace_driver() -> None:
    """Let ``torch.cuda`` speak of one device of 80 GiB that computes at once."""
    generator, current = _Generator(), _Stream()
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "pretend device",
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "mem_get_info": (60 * _GIB, 80 * _GIB),
        "current_stream": current,
        "default_stream": current,
    }
    done = ("_lazy_init", "init", "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats")
    done = (*done, "set_sync_debug_mode")
    for name, answer in {**answers, **dict.fromkeys(done)}.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(torch.cuda, name, lambda device=None: _LIBRARY.pretend_allocated())
    replaced = {
        "Event": _Event,
        "Stream": _Stream,
        "stream": _stream,
        "device": _Device,
        "_device": _Device,
        "default_generators": (generator,),
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        "seed_all": generator.seed,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    for kind in ("flash", "mem_efficient", "cudnn"):  # in a build with CUDA, torch 2.9 asks the driver which one to use
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    torch.backends.cudnn.version.__globals__["_init"] = lambda: False  # in a build with CUDA it asks the driver


def _moved(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Copy a storage to the device."""
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cuda")
    made.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    return made.untyped_storage()


def _replace_storages() -> None:
    """Let storages be copied, saved and loaded, for which torch calls the driver."""
    clone = torch.UntypedStorage.clone
    torch.UntypedStorage.clone = lambda self: _moved(self) if self.device.type == "cuda" else clone(self)
    torch.UntypedStorage.cuda = lambda self, device=None, non_blocking=False: _moved(self)
    torch.serialization.register_package(
        1,
        lambda storage: "cuda:0" if storage.device.type == "cuda" else None,
        lambda storage, location: _moved(storage) if location.startswith("cuda") else None,
    )


_replace_driver()
_replace_storages()
torch.manual_seed(0)
