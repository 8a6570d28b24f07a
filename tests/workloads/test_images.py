"""Images from a folder of classes, and from the batches of CIFAR-10."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from torchboost.workloads.data import Images, cifar10

COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


def batches(folder: Path) -> np.ndarray:
    """Write five batches for training and one for tests with three images each, and return their pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(256, size=(18, 3072), dtype=np.uint8)
    labels = np.array([[0], [1], [9]], dtype=np.uint8)
    for number, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        rows = pixels[3 * number : 3 * number + 3]
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels, rows], axis=1).tobytes())
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


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", ""])
def test_batches_of_cifar10(tmp_path: Path, folder: str) -> None:
    pixels = batches(tmp_path / folder)
    data = cifar10(tmp_path, train_limit=4)
    assert (data.samples, data.classes, len(data.test_inputs)) == (4, 10, 3)
    assert torch.equal(data.train_inputs.flatten(1), torch.from_numpy(pixels[:4]))
    assert torch.equal(data.test_inputs.flatten(1), torch.from_numpy(pixels[15:]))
    assert data.train_labels.tolist() == [0, 1, 9, 0]


def test_a_folder_of_classes_is_mixed_and_has_its_own_mean(tmp_path: Path) -> None:
    data: Images = cifar10(classes(tmp_path, "train", "val"))
    assert (data.samples, data.classes, data.train_inputs.shape[1:]) == (24, 2, (3, 32, 32))
    assert set(data.train_labels[:8].tolist()) == set(data.held_out().train_labels[-8:].tolist()) == {0, 1}
    for picture, label in zip(data.train_inputs, data.train_labels, strict=True):
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"123", "found 3 bytes; needed: a multiple of 3073"),
        (b"", "found 0 bytes"),
        (bytes(3073) + bytes([10]) + bytes(3072), "found the label 10; allowed: 0 to 9"),
    ],
)
def test_a_binary_file_of_another_content_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    batches(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(ValueError, match=rf"data_batch_3\.bin: {message}"):
        cifar10(tmp_path)


def test_pickled_batches_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(b"crafted")
    for given in (tmp_path, folder):
        with pytest.raises(ValueError, match=r"can run code.*binary version.*parquet.*folder per class"):
            cifar10(given)
    batches(tmp_path / "cifar-10-batches-bin")
    assert cifar10(tmp_path).samples == 15


def test_what_is_hidden_or_no_file_is_no_image_and_no_class(tmp_path: Path) -> None:
    train = classes(tmp_path, "train", "test", count=1) / "train"
    for hidden in (train / ".cache", train / "red" / ".cache"):
        hidden.mkdir()
        (hidden / "0.png").write_bytes(b"hidden")
    (train / "red" / "._0.png").write_bytes(b"hidden")
    (train / "red" / "folder.png").mkdir()
    data = cifar10(tmp_path)
    assert (data.samples, data.classes) == (2, 2)


def test_an_image_that_does_not_fit_into_8_bits_is_refused_by_name(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    file = classes(tmp_path, "train", "test", count=1) / "train" / "red" / "deep.png"
    image.fromarray(np.full((40, 30), 30_000, np.uint16)).save(file)
    with pytest.raises(ValueError, match=r"deep\.png: found .* mode .*needed: 8 bits"):
        cifar10(tmp_path)


def test_an_image_that_pillow_cannot_read_is_refused_by_name(tmp_path: Path) -> None:
    red = classes(tmp_path, "train", "test", count=2) / "train" / "red"
    for content in (b"junk", (red / "1.png").read_bytes()[:60]):
        (red / "broken.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.png: found no PNG or JPEG that Pillow can read"):
            cifar10(tmp_path)


@pytest.mark.parametrize("other", ["GIF", "TIFF", "BMP"])
def test_an_image_of_another_format_is_refused_whatever_it_is_called(tmp_path: Path, other: str) -> None:
    image = pytest.importorskip("PIL.Image")
    file = classes(tmp_path, "train", "test", count=1) / "train" / "red" / "other.png"
    image.new("RGB", (40, 30)).save(file, format=other)
    with pytest.raises(ValueError, match=r"other\.png: found no PNG or JPEG that Pillow can read"):
        cifar10(tmp_path)
