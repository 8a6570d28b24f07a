from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import ROOT
from torchboost.bench.workloads.data import Images, Text, augment, cifar10, digits, synthetic_images, text

SHARED = ROOT.parent / "shared" / "data"


def png(colour: tuple[int, int, int]) -> bytes:
    image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image.new("RGB", (32, 32), colour).save(stream, "PNG")
    return stream.getvalue()


def write(folder: Path, *, wrap: bool, columns: tuple[str, str] = ("img", "label")) -> Path:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for split, colours in {"train": [(255, 0, 0), (0, 255, 0), (0, 0, 255)], "test": [(9, 8, 7)]}.items():
        images = [{"bytes": png(c), "path": None} if wrap else png(c) for c in colours]
        table = {columns[0]: images, columns[1]: list(range(len(colours)))}
        parquet.write_table(pa.table(table), folder / f"{split}.parquet")
    return folder


def small_images(count: int = 12, **settings: Any) -> Images:
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(count, 3, 8, 8).contiguous()
    labels = torch.arange(count)
    return Images(
        train_images=images,
        train_labels=labels,
        test_images=images[:5],
        test_labels=labels[:5],
        classes=count,
        mean=(0.0,) * 3,
        std=(1 / 255,) * 3,
        **settings,
    )


def test_digits_are_split_alike_every_time() -> None:
    pytest.importorskip("sklearn")
    data = digits(16)
    assert data.train_images.shape == (899, 1, 16, 16)
    assert data.test_images.shape == (898, 1, 16, 16)
    assert data.train_images.dtype == torch.uint8
    assert data.train_images.max() == 255
    assert torch.equal(data.test_images, digits(16).test_images)
    assert data.train_labels.bincount().min() > 75
    assert data.test_labels.bincount().min() > 75
    inputs = torch.cat([x for x, _ in data.test(100)])
    assert abs(inputs.mean().item()) < 0.05
    assert abs(inputs.std().item() - 1) < 0.05


def test_digits_refuse_an_odd_size() -> None:
    with pytest.raises(ValueError, match=r"found 20.*multiples of 8"):
        digits(20)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"from the folder of the project: pip install '\.\[workloads\]'"):
        digits()


def test_an_epoch_is_a_permutation_that_seed_and_epoch_decide() -> None:
    data = small_images()

    def labels(seed: int, epoch: int) -> list[int]:
        return torch.cat([y for _, y in data.train(4, seed=seed, epoch=epoch)]).tolist()

    assert sorted(labels(0, 0)) == list(range(12))
    assert labels(0, 0) == labels(0, 0)
    assert labels(0, 0) != labels(0, 1)
    assert labels(0, 0) != labels(1, 0)


def test_images_follow_their_labels_and_short_last_batches_are_left_out_of_training_alone() -> None:
    data = small_images(shift=0, flip=True)
    batches = list(data.train(5, seed=0, epoch=0))
    assert len(batches) == data.steps(5) == 2
    for images, labels in batches:
        torch.testing.assert_close(images.mean((1, 2, 3)), labels.float())
    assert [len(y) for _, y in data.test(2)] == [2, 2, 1]


def test_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="found 13; allowed are 1 to 12"):
        next(small_images().train(13, seed=0, epoch=0))


def naive_shift(image: Tensor, row: int, column: int) -> Tensor:
    padded = torch.zeros(image.shape[0], image.shape[1] + 4, image.shape[2] + 4, dtype=image.dtype)
    padded[:, 2:-2, 2:-2] = image
    return padded[:, row : row + image.shape[1], column : column + image.shape[2]]


def test_augmentation_shifts_and_mirrors_each_image_on_its_own() -> None:
    images = torch.randint(256, (40, 3, 6, 5), dtype=torch.uint8)
    kept = images.clone()
    moved = augment(images, torch.Generator().manual_seed(0), shift=2, flip=True)
    assert torch.equal(images, kept)
    assert moved.is_contiguous()
    seen = set()
    for image, result in zip(images, moved, strict=True):
        ways = _ways(image, result)
        assert len(ways) == 1
        seen.add(ways[0])
    assert len(seen) > 15
    assert {mirrored for _, _, mirrored in seen} == {False, True}


def _ways(image: Tensor, result: Tensor) -> list[tuple[int, int, bool]]:
    found = []
    for row in range(5):
        for column in range(5):
            shifted = naive_shift(image, row, column)
            found += [(row, column, m) for m in (False, True) if torch.equal(result, shifted.flip(2) if m else shifted)]
    return found


def test_no_augmentation_changes_nothing() -> None:
    images = torch.randint(256, (4, 1, 6, 6), dtype=torch.uint8)
    assert torch.equal(augment(images, torch.Generator(), shift=0, flip=False), images)


@pytest.mark.parametrize("wrap", [True, False])
def test_parquet_with_dicts_or_bytes(tmp_path: Path, wrap: bool) -> None:
    data = cifar10(write(tmp_path, wrap=wrap))
    assert data.train_images.shape == (3, 3, 32, 32)
    assert data.train_images[1, :, 0, 0].tolist() == [0, 255, 0]
    assert data.train_labels.tolist() == [0, 1, 2]
    assert data.test_images[0, :, 31, 31].tolist() == [9, 8, 7]
    assert cifar10(tmp_path / "train.parquet", train_limit=2).samples == 2


def test_missing_files_and_wrong_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train\.parquet; give the path of a folder"):
        cifar10(tmp_path)
    write(tmp_path, wrap=False, columns=("image", "fine_label"))
    with pytest.raises(ValueError, match=r"found columns \['image', 'fine_label'\]; needed are \['img', 'label'\]"):
        cifar10(tmp_path)


def test_the_hub_needs_datasets_and_says_what_else_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install datasets; or give the path of a folder"):
        cifar10()


@pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason="no CIFAR-10 files beside the repository")
def test_real_cifar10() -> None:
    data = cifar10(SHARED / "cifar10", train_limit=64)
    assert data.train_images.shape == (64, 3, 32, 32)
    assert data.test_images.shape == (10_000, 3, 32, 32)
    assert data.test_labels.bincount().tolist() == [1000] * 10


def test_text_windows_are_one_character_apart(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    content = "abcdefghij" * 100
    file.write_text(content, encoding="utf-8")
    data = text(file, context=8)
    assert data.characters == "abcdefghij"
    assert len(data.train_tokens) == 900
    assert data.samples == 899 // 8
    batches = list(data.train(4, seed=0, epoch=0))
    assert len(batches) == data.steps(4)
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (4, 8)
        assert torch.equal((inputs + 1) % 10, targets)
    tested = torch.cat([x for x, _ in data.test(5)])
    assert torch.equal(tested.flatten(), data.test_tokens[: tested.numel()])
    assert tested.numel() == 96


def test_limited_data_keep_the_test_set_and_the_first_samples() -> None:
    images = small_images()
    assert images.limited(5).train_labels.tolist() == [0, 1, 2, 3, 4]
    assert len(images.limited(5).test_labels) == 5
    assert images.limited(None).samples == 12
    words = text(context=16)
    assert words.limited(7).samples == 7
    assert words.limited(None).samples == words.samples


def test_text_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="UTF-8 text file"):
        text(tmp_path / "missing.txt")
    short = tmp_path / "short.txt"
    short.write_text("too short", encoding="utf-8")
    with pytest.raises(ValueError, match="found a text of 9 characters"):
        text(short)


def test_default_text_needs_no_network() -> None:
    data = text()
    assert isinstance(data, Text)
    assert len(data.train_tokens) > 100_000
    assert 50 < len(data.characters) < 500


def test_synthetic_images_are_the_same_every_time_and_move_to_a_device() -> None:
    data = synthetic_images(4, size=8, classes=5).to("cpu")
    assert torch.equal(data.train_images, synthetic_images(4, size=8, classes=5).train_images)
    inputs, labels = next(data.train(4, seed=0, epoch=0))
    assert inputs.shape == (4, 3, 8, 8)
    assert inputs.dtype == torch.float32
    assert labels.max() < 5


def test_picked_samples_are_not_augmented() -> None:
    data = small_images(shift=2, flip=True)
    images, labels = data.picked(torch.tensor([3, 1]))
    assert labels.tolist() == [3, 1]
    again, _ = data.picked(torch.tensor([1, 3]))
    assert torch.equal(images, again.flip(0))


def test_classes_can_be_picked_and_are_renumbered() -> None:
    data = small_images().of_classes(3, 4)
    assert data.train_labels.tolist() == [0, 1, 2, 3]
    assert data.test_labels.tolist() == [0, 1]
    assert data.classes == 4
    assert data.train_images[:, 0, 0, 0].tolist() == [3, 4, 5, 6]
