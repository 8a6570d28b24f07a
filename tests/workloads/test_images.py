"""Images from a folder of classes, and from the batches of CIFAR-10."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from torchboost.workloads.data import Images, cifar10

COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


def batches(folder: Path, *, binary: bool) -> np.ndarray:
    """Write five batches for training and one for tests with three images each, and return their pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(256, size=(18, 3072), dtype=np.uint8)
    for number, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        rows = pixels[3 * number : 3 * number + 3]
        if binary:
            labels = np.arange(3, dtype=np.uint8)[:, None]
            (folder / f"{name}.bin").write_bytes(np.concatenate([labels, rows], axis=1).tobytes())
        else:
            (folder / name).write_bytes(pickle.dumps({b"data": rows, b"labels": [0, 1, 2]}, protocol=2))
    return pixels


def classes(root: Path, *splits: str, count: int = 12, names: tuple[str, ...] = ("blue", "red")) -> Path:
    image = pytest.importorskip("PIL.Image")
    for split in splits:
        for name in names:
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                ending = "png" if number % 2 else "JPG"
                image.new("RGB", (40, 30), COLOURS[name]).save(root / split / name / f"{number}.{ending}")
    return root


@pytest.mark.parametrize(
    ("folder", "binary"), [("cifar-10-batches-py", False), ("cifar-10-batches-bin", True), ("", True)]
)
def test_batches_of_cifar10(tmp_path: Path, folder: str, binary: bool) -> None:
    pixels = batches(tmp_path / folder, binary=binary)
    data = cifar10(tmp_path, train_limit=4)
    assert (data.samples, data.classes, len(data.test_images)) == (4, 10, 3)
    assert torch.equal(data.train_images.flatten(1), torch.from_numpy(pixels[:4]))
    assert torch.equal(data.test_images.flatten(1), torch.from_numpy(pixels[15:]))
    assert data.train_labels.tolist() == [0, 1, 2, 0]


def test_a_folder_of_classes_is_mixed_and_has_its_own_mean(tmp_path: Path) -> None:
    data: Images = cifar10(classes(tmp_path, "train", "val"))
    assert (data.samples, data.classes, data.train_images.shape[1:]) == (24, 2, (3, 32, 32))
    assert set(data.train_labels[:8].tolist()) == set(data.held_out().train_labels[-8:].tolist()) == {0, 1}
    for picture, label in zip(data.train_images, data.train_labels, strict=True):
        assert int(picture.float().mean((1, 2)).argmax()) == (2, 0)[int(label)]
    assert data.mean == pytest.approx((0.5, 0.0, 0.5), abs=0.02)
    images, _ = data.picked(torch.arange(24))
    assert images.isfinite().all()


def test_what_is_not_such_a_folder_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(FileNotFoundError, match="or with train and test of a folder per class"):
        cifar10(tmp_path)
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="found no PNG or JPEG file"):
        cifar10(tmp_path / "empty")
    other = classes(classes(tmp_path / "other", "train", count=1), "test", count=1, names=("red",))
    with pytest.raises(ValueError, match=r"found the classes \['blue'\] in one of training and test only"):
        cifar10(other)
    batches(tmp_path, binary=True)
    (tmp_path / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match="found 3 bytes; needed: a multiple of 3073"):
        cifar10(tmp_path)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("touched"),)


def test_a_batch_that_names_a_function_is_refused_and_nothing_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    batches(tmp_path, binary=False)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({b"data": Evil(), b"labels": [0]}))
    with pytest.raises(ValueError, match=r"found pathlib\S* in a batch of CIFAR-10; allowed: arrays of numbers"):
        cifar10(tmp_path)
    assert not Path("touched").exists()
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({b"data": 3}))
    with pytest.raises(ValueError, match="found no batch of CIFAR-10"):
        cifar10(tmp_path)
