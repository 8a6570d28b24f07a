from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from torchboost.algorithms.dim_reduce.snapshots import (
    CheckpointFiles,
    Layout,
    SnapshotBuffer,
    checkpoint_files,
    layout_of_file,
)


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))


def save(path: Path, seed: int = 0, **extra: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = {name: value.clone() for name, value in model().state_dict().items()}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({"model": state, **extra} if extra else state, path)
    return state


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_parts_are_those_of_the_parameters(tmp_path: Path, suffix: str) -> None:
    states = [save(tmp_path / f"step-{i}{suffix}", seed=i) for i in range(3)]
    files = CheckpointFiles(checkpoint_files(tmp_path), Layout.of(model()))
    assert len(files) == 3
    for i, state in enumerate(states):
        for j, name in enumerate(files.layout.names):
            assert torch.equal(files.part(i, j, (slice(0, 1),)), state[name][0:1])
            assert torch.equal(files.part(i, j, ()), state[name])


def test_a_state_dict_may_lie_under_a_key(tmp_path: Path) -> None:
    state = save(tmp_path / "a.pt", epoch=3)
    files = CheckpointFiles([tmp_path / "a.pt"], Layout.of(model()))
    assert torch.equal(files.part(0, 0, ()), state["0.weight"])


def test_without_a_model_the_file_says_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save(path)
    everything = layout_of_file(path)
    assert "1.running_mean" in everything.names
    assert "1.num_batches_tracked" not in everything.names
    trained = layout_of_file(path, ["*running_*"])
    assert set(trained.names) == set(Layout.of(model()).names)
    assert trained != Layout.of(model()), "the file has an order of its own, so a model must be given to train one"
    with pytest.raises(ValueError, match=r"a\.safetensors: found no floating point entry that \* do not leave out"):
        layout_of_file(path, ["*"])


@pytest.mark.parametrize(("ours", "theirs"), [("", "module."), ("backbone.", ""), ("backbone.", "module.")])
def test_a_prefix_of_all_names_makes_no_difference(tmp_path: Path, ours: str, theirs: str) -> None:
    state = model().state_dict()
    torch.save({f"{theirs}{name}": value for name, value in state.items()}, tmp_path / "a.pt")
    plain = Layout.of(model())
    layout = Layout(tuple(f"{ours}{name}" for name in plain.names), plain.shapes)
    if ours and theirs:
        with pytest.raises(ValueError, match=r"missing backbone\.0\.weight"):
            CheckpointFiles(tmp_path, layout)
        return
    files = CheckpointFiles(tmp_path, layout)
    assert all(torch.equal(files.part(0, i, ()), state[name]) for i, name in enumerate(plain.names))


def test_a_model_or_its_layout_is_needed(tmp_path: Path) -> None:
    save(tmp_path / "a.pt")
    assert CheckpointFiles(tmp_path, model()).layout == Layout.of(model())
    with pytest.raises(TypeError, match="give the model whose checkpoints these are"):
        CheckpointFiles(tmp_path, 5)  # pyright: ignore[reportArgumentType]


def test_what_holds_no_weights_is_named(tmp_path: Path) -> None:
    torch.save({"net": {"a": torch.ones(2)}}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt: it belongs to another model: missing .* it holds no weights"):
        CheckpointFiles(tmp_path, model())


def test_numbers_in_names_count(tmp_path: Path) -> None:
    for name in ("step-10", "step-9", "step-100"):
        (tmp_path / f"{name}.pt").touch()
    (tmp_path / "notes.txt").touch()
    assert [path.stem for path in checkpoint_files(tmp_path)] == ["step-9", "step-10", "step-100"]


def test_another_model_is_named_entry_by_entry(tmp_path: Path) -> None:
    save(tmp_path / "a.pt")
    other = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"missing 1\.weight, 1\.bias.*|of another shape") as caught:
        CheckpointFiles([tmp_path / "a.pt"], Layout(("1.weight", "9.bias"), ((2, 3), (7,))))
    assert "missing 9.bias" in str(caught.value)
    assert "1.weight (3,) (wanted (2, 3))" in str(caught.value)
    with pytest.raises(ValueError, match=r"0\.weight \(3, 2, 3, 3\) \(wanted \(4, 2, 3, 3\)\)"):
        CheckpointFiles([tmp_path / "a.pt"], Layout.of(other))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_bomb_is_refused_and_does_not_go_off(tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    torch.save({"weight": Bomb(crater)}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"weight": Bomb(crater)}))
    for name in ("zip.pt", "plain.pt"):
        with pytest.raises(ValueError, match="refused: it is not a file of tensors only"):
            CheckpointFiles([tmp_path / name], model())
    assert not crater.exists()
    pickle.loads((tmp_path / "plain.pt").read_bytes())
    assert crater.exists(), "the bomb is a real one"


@pytest.mark.parametrize(
    ("name", "content", "error", "said"),
    [
        ("a.pt", b"", ValueError, "not a file of tensors only"),
        ("a.pt", b"not a checkpoint", ValueError, "not a file of tensors only"),
        ("a.safetensors", b"\x00" * 4, ValueError, "not a safetensors file"),
        ("a.bin", b"x", ValueError, "ends in '.bin'; allowed are .safetensors, .pt, .pth"),
        (None, b"", FileNotFoundError, "found no file"),
    ],
)
def test_what_is_no_checkpoint_is_refused(
    tmp_path: Path, name: str | None, content: bytes, error: type[Exception], said: str
) -> None:
    path = tmp_path / (name or "missing.pt")
    if name is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=said):
        CheckpointFiles([path], model())


def test_a_tensor_is_no_state_dict(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="found a Tensor; a checkpoint is a state dict"):
        CheckpointFiles([tmp_path / "a.pt"], model())


def test_no_folder_and_no_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="found no folder"):
        checkpoint_files(tmp_path / "missing")
    with pytest.raises(ValueError, match="found no checkpoints"):
        CheckpointFiles(tmp_path, model())


def test_the_buffer_keeps_copies_in_half_the_bytes() -> None:
    net = model()
    layout = Layout.of(net)
    parameters = list(net.parameters())
    buffer = SnapshotBuffer(layout)
    buffer.add(parameters)
    kept = parameters[0].detach().clone()
    with torch.no_grad():
        parameters[0].zero_()
    buffer.add(parameters)
    assert len(buffer) == 2
    assert torch.equal(buffer.part(0, 0, (slice(1, 3),)), kept[1:3].bfloat16())
    assert buffer.part(1, 0, ()).abs().max() == 0
    again = SnapshotBuffer(layout)
    again.load_state_dict(buffer.state_dict())
    assert torch.equal(again.part(0, 3, ()), buffer.part(0, 3, ()))
    buffer.clear()
    assert len(buffer) == 0
    with pytest.raises(ValueError, match="found shapes"):
        buffer.add(parameters[:2])


def test_a_layout_counts_a_shared_parameter_once_and_leaves_out_what_is_frozen() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net[1].bias.requires_grad_(False)
    layout = Layout.of(net)
    assert layout == Layout(("0.weight", "0.bias"), ((3, 3), (3,)))
    assert (layout.sizes, layout.length) == ((9, 3), 12)
