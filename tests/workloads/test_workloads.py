"""The data sets, networks and named trainings of the command line."""

from __future__ import annotations

import importlib
import io
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost import boost
from torchboost.bench.factory import Factory, loop_body, made_by, one_epoch, score_of
from torchboost.workloads.data import Documents, Images, Text, as_text, augment, cifar10, digits, text, to_longest
from torchboost.workloads.docstrings import PACKAGES, docstrings
from torchboost.workloads.models import GPT, VGG, BasicBlock, Bottleneck, ResNet, TextClassifier
from torchboost.workloads.named import WORKLOADS, accuracy, bits_per_character, find_workload, one_cycle
from torchboost.workloads.pieces import _joined, pieces


def write(folder: Path, *, wrap: bool, columns: tuple[str, str] = ("img", "label")) -> Path:
    """Write three images and one image of one colour each as the two files of CIFAR-10."""
    image = pytest.importorskip("PIL.Image")
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for split, colours in {"train": [(255, 0, 0), (0, 255, 0), (0, 0, 255)], "test": [(9, 8, 7)]}.items():
        files = []
        for colour in colours:
            stream = io.BytesIO()
            image.new("RGB", (32, 32), colour).save(stream, "PNG")
            files.append({"bytes": stream.getvalue(), "path": None} if wrap else stream.getvalue())
        parquet.write_table(
            pa.table({columns[0]: files, columns[1]: list(range(len(files)))}), folder / f"{split}.parquet"
        )
    return folder


def small_images(count: int = 12, *, size: int = 8, classes: int = 12, **settings: Any) -> Images:
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(count, 3, size, size).contiguous()
    labels = torch.arange(count) % classes
    parts = {"train_inputs": images, "train_labels": labels, "test_inputs": images[:5], "test_labels": labels[:5]}
    return Images(**parts, classes=classes, mean=(0.0,) * 3, std=(1 / 255,) * 3, **settings)


def small_documents(count: int, *, width: int = 16, words: int = 40) -> Documents:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, words, (count, width), generator=generator)
    ids[torch.arange(width) >= torch.randint(1, width // 2, (count, 1), generator=generator)] = 0
    labels = ids[:, 0] % len(PACKAGES)
    names = tuple(map(str, range(words)))
    parts = {"train_inputs": ids, "train_labels": labels, "test_inputs": ids[:5], "test_labels": labels[:5]}
    return Documents(**parts, words=names, classes=PACKAGES)


def test_digits_are_split_alike_every_time() -> None:
    pytest.importorskip("sklearn")
    data = digits(16)
    assert data.train_inputs.shape == (899, 1, 16, 16)
    assert data.test_inputs.shape == (898, 1, 16, 16)
    assert (data.train_inputs.dtype, int(data.train_inputs.max())) == (torch.uint8, 255)
    assert torch.equal(data.test_inputs, digits(16).test_inputs)
    assert min(data.train_labels.bincount().min(), data.test_labels.bincount().min()) > 75
    inputs = torch.cat([x for x, _ in data.test(100)])
    assert abs(inputs.mean().item()) < 0.05
    assert abs(inputs.std().item() - 1) < 0.05
    with pytest.raises(ValueError, match=r"found 20.*multiples of 8"):
        digits(20)


def test_a_package_that_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("sklearn.datasets", "datasets", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("train", "test"):
        (tmp_path / f"{name}.parquet").touch()
    for load, message in (
        (digits, r"from the folder of the project: pip install '\.\[workloads\]'"),
        (cifar10, r"pip install datasets; or give the path of a folder"),
        (lambda: cifar10(tmp_path), "reading a parquet file needs pyarrow"),
    ):
        with pytest.raises(ImportError, match=message):
            load()


def test_an_epoch_is_a_permutation_that_seed_and_epoch_decide() -> None:
    data = small_images(flip=True)

    def labels(seed: int, epoch: int) -> list[int]:
        return torch.cat([y for _, y in data.train(4, seed=seed, epoch=epoch)]).tolist()

    assert sorted(labels(0, 0)) == list(range(12))
    assert labels(0, 0) == labels(0, 0)
    assert labels(0, 0) not in (labels(0, 1), labels(1, 0))
    batches = list(data.train(5, seed=0, epoch=0))  # the short last batch is for tests alone
    assert len(batches) == data.steps(5) == 2
    for images, targets in batches:
        torch.testing.assert_close(images.mean((1, 2, 3)), targets.float())
    assert [len(y) for _, y in data.test(2)] == [2, 2, 1]
    with pytest.raises(ValueError, match="found 13; allowed are 1 to 12"):
        next(data.train(13, seed=0, epoch=0))


def test_augmentation_shifts_and_mirrors_each_image_on_its_own() -> None:
    images = torch.randint(256, (40, 3, 6, 5), dtype=torch.uint8)
    before = images.clone()
    moved = augment(images, torch.Generator().manual_seed(0), shift=2, flip=True)
    assert torch.equal(images, before)
    assert moved.is_contiguous()
    padded, ways = F.pad(images, (2, 2, 2, 2)), set()
    for image, result in zip(padded, moved, strict=True):
        grid = itertools.product(range(5), range(5), (False, True))
        views = ((row, column, m, image[:, row : row + 6, column : column + 5]) for row, column, m in grid)
        (way,) = [(r, c, m) for r, c, m, view in views if torch.equal(result, view.flip(2) if m else view)]
        ways.add(way)
    assert len(ways) > 15
    assert {mirrored for _, _, mirrored in ways} == {False, True}
    assert torch.equal(augment(images, torch.Generator(), shift=0, flip=False), images)


def test_samples_can_be_picked_without_augmentation_and_limited() -> None:
    data = small_images(shift=2, flip=True)
    images, labels = data.picked(torch.tensor([3, 1]))
    assert labels.tolist() == [3, 1]
    assert torch.equal(images, data.picked(torch.tensor([1, 3]))[0].flip(0))
    assert data.limited(5).train_labels.tolist() == [0, 1, 2, 3, 4]
    assert (len(data.limited(5).test_labels), data.limited(None).samples) == (5, 12)
    assert data.to("meta").test_inputs.device.type == "meta"
    words = text(context=16)
    assert (words.limited(7).samples, words.limited(None).samples) == (7, words.samples)


def test_the_last_tenth_of_the_training_data_is_held_out_for_validation() -> None:
    images = small_images(25).held_out()
    documents = small_documents(25).held_out()
    for data, every in ((images, small_images(25).train_inputs), (documents, small_documents(25).train_inputs)):
        assert data.validation is not None
        assert torch.equal(data.train_inputs, every[:22])
        assert torch.equal(data.validation.test_inputs, every[22:])
        assert len(data.validation.test_labels) == 3
        assert data.held_out() is data
        limited, moved = data.limited(5).validation, data.to("meta").validation
        assert limited is not None
        assert len(limited.test_inputs) == 3  # a limit is one of training
        assert moved is not None
        assert moved.test_inputs.device.type == "meta"
    words = text(context=16)
    held = words.held_out()
    assert held.validation is not None
    assert torch.equal(torch.cat([held.train_tokens, held.validation.test_tokens]), words.train_tokens)
    assert len(held.train_tokens) == len(words.train_tokens) * 9 // 10
    assert torch.equal(held.test_tokens, words.test_tokens)
    few = words.limited(3).held_out()  # a tenth is no window
    assert few.validation is not None
    assert (few.samples, len(list(few.validation.test(1)))) == (1, 1)
    for least, message in (
        (words.limited(1), "17 tokens; 34 are needed"),
        (small_images(1), "1 training samples; at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            least.held_out()


def test_cifar10_from_parquet_with_dicts_or_bytes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train\.parquet; give the path of a folder"):
        cifar10(tmp_path)
    for wrap in (True, False):
        data = cifar10(write(tmp_path, wrap=wrap))
        assert data.train_inputs.shape == (3, 3, 32, 32)
        assert data.train_inputs[1, :, 0, 0].tolist() == [0, 255, 0]
        assert data.train_labels.tolist() == [0, 1, 2]
        assert data.test_inputs[0, :, 31, 31].tolist() == [9, 8, 7]
    assert cifar10(tmp_path / "train.parquet", train_limit=2).samples == 2
    write(tmp_path, wrap=False, columns=("image", "fine_label"))
    with pytest.raises(ValueError, match=r"found columns \['image', 'fine_label'\]; needed are \['img', 'label'\]"):
        cifar10(tmp_path)


def test_text_windows_are_one_character_apart(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("abcdefghij" * 100, encoding="utf-8")
    data = text(file, context=8)
    assert (data.characters, len(data.train_tokens), data.samples) == ("abcdefghij", 900, 899 // 8)
    batches = list(data.train(4, seed=0, epoch=0))
    assert len(batches) == data.steps(4)
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (4, 8)
        assert torch.equal((inputs + 1) % 10, targets)
    read = torch.cat([x for x, _ in data.test(5)])
    assert torch.equal(read.flatten(), data.test_tokens[:96])
    standard = text()  # needs no network
    assert len(standard.train_tokens) > 100_000
    assert 50 < len(standard.characters) < 500
    with pytest.raises(FileNotFoundError, match="UTF-8 text file"):
        text(tmp_path / "missing.txt")
    file.write_text("too short", encoding="utf-8")
    with pytest.raises(ValueError, match="found a text of 9 characters"):
        text(file)


def test_a_text_is_cut_into_frequent_pieces_of_words(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    content = "the cat and the hat, the bat:\n\n    that is all; " * 60
    file.write_text(content, encoding="utf-8")
    data = pieces(file, context=8, vocabulary=25)
    names = data.characters
    train, test = ("".join(names[token] for token in part) for part in (data.train_tokens, data.test_tokens))
    assert train + test == content
    assert len(train) == len(content) * 9 // 10
    assert len(names) <= 25
    assert any(len(name) > 1 for name in names)
    assert not any(" " in name.strip() for name in names)
    assert torch.equal(data.train_tokens, pieces(file, context=8, vocabulary=25).train_tokens)
    whole = pieces(file, context=8)  # pairs that are there once only are not joined
    assert len(whole.train_tokens) < len(data.train_tokens)
    assert " the" in whole.characters
    assert len(pieces(file, context=8, vocabulary=1).train_tokens) == len(train)
    inputs, targets = next(data.train(4, seed=0, epoch=0))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    file.write_text("too short", encoding="utf-8")
    with pytest.raises(ValueError, match="word pieces; a context of 128 needs 2580"):
        pieces(file)
    assert _joined(["a", "a", "a", "b", "a", "a"], ("a", "a")) == ["aa", "a", "b", "aa"]


def test_docstrings_are_real_texts_of_equal_classes_without_the_names_of_the_packages() -> None:
    pytest.importorskip("sklearn")
    data = docstrings()
    assert data.train_inputs.shape == (5000, 128)
    assert data.test_labels.bincount().tolist() == [350] * len(PACKAGES)
    assert data.train_labels.bincount().tolist() == [1250] * len(PACKAGES)
    assert 0.6 < data.padding < 0.8
    assert not {*PACKAGES, "pytorch"} & set(data.words)
    assert {"the", ".", "[name]"} < set(data.words[:50])
    assert 5_000 < int(data.train_inputs.max()) < len(data.words) <= 8_000
    rows = torch.cat([data.train_inputs, data.test_inputs]).tolist()
    assert len({tuple(row) for row in rows}) > 0.98 * len(rows)  # texts differ, but some only in unknown words
    assert len(set(data.limited(100).train_labels.tolist())) == len(PACKAGES)
    assert torch.equal(data.train_inputs, docstrings().train_inputs)
    epoch = torch.cat([ids for ids, _ in data.train(16, seed=0, epoch=0)])
    assert len(epoch) == data.steps(16) * 16
    assert not torch.equal(epoch, torch.cat([ids for ids, _ in data.train(16, seed=0, epoch=1)]))
    assert torch.equal(torch.cat([ids for ids, _ in data.test(100)]), data.test_inputs)


def test_docstrings_of_a_package_that_is_missing_or_has_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("torchboost.workloads.docstrings.PACKAGES", ("fewdocs",))
    with pytest.raises(ImportError, match=r"need fewdocs.*pip install '\.\[workloads\]'"):
        docstrings()
    (tmp_path / "fewdocs").mkdir()
    (tmp_path / "fewdocs" / "__init__.py").write_text('def f():\n    """One two three four five six seven eight."""\n')
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match="found 1 docstrings in the source files of fewdocs; 1600 are needed"):
        docstrings()


def test_rows_are_cut_to_their_longest() -> None:
    ids = torch.tensor([[4, 5, 0, 0], [6, 0, 0, 0]])
    assert to_longest(ids).tolist() == [[4, 5], [6, 0]]
    assert to_longest(torch.ones(2, 3)).shape == (2, 3)


def test_a_text_classifier_does_not_see_padding_and_is_boosted_without_it() -> None:
    data = small_documents(16)
    torch.manual_seed(0)
    model = TextClassifier(40, len(PACKAGES), context=16, layers=2, heads=2, width=16)
    torch.testing.assert_close(model(data.train_inputs), model(to_longest(data.train_inputs)))
    optimizer = torch.optim.AdamW(model.parameters())
    boosted = boost(model, optimizer, total_steps=100)  # no trial: the rules and the check decide
    for _ in range(2):
        F.cross_entropy(model(data.train_inputs), data.train_labels).backward()
        optimizer.step()
    assert "exact here" in boosted.checks["unpad"], boosted.explain()
    assert boosted.attached["unpad"].calls > 0, boosted.explain()  # type: ignore[attr-defined]


def test_networks_have_the_published_sizes() -> None:
    """The counts are those of torchvision's tables, and of OpenAI's checkpoint."""
    with torch.device("meta"):
        networks = {
            25_557_032: ResNet(Bottleneck, [3, 4, 6, 3], classes=1000, stem="imagenet"),
            11_689_512: ResNet(BasicBlock, [2, 2, 2, 2], classes=1000, stem="imagenet"),
            124_439_808: GPT(50257),
            9_225_984 - 2_752: VGG().features,  # without the biases of torchvision's convolutions
        }
    assert [sum(p.numel() for p in network.parameters()) for network in networks.values()] == list(networks)


def test_images_become_scores_and_every_weight_gets_a_gradient() -> None:
    for model, shape in (
        (ResNet(Bottleneck, [1, 1], width=4, classes=7), (2, 3, 16, 16)),
        (ResNet(BasicBlock, [1, 1], width=4, classes=7, in_channels=1), (2, 1, 16, 16)),
        (ResNet(Bottleneck, [1, 1], width=4, classes=7, stem="imagenet"), (2, 3, 32, 32)),
        (VGG((1, 1), width=4, classes=7), (2, 3, 16, 16)),
    ):
        scores = model(torch.randn(shape))
        assert scores.shape == (2, 7)
        F.cross_entropy(scores, torch.tensor([1, 2])).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_gpt_sees_only_the_past_and_starts_near_the_uniform_loss() -> None:
    torch.manual_seed(0)
    model = GPT(50, context=16, layers=2, heads=2, width=32)
    tokens = torch.randint(50, (3, 16))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 50
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 16, 50)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])
    loss = F.cross_entropy(before.flatten(0, 1), tokens.roll(1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(50), abs=0.2)
    with pytest.raises(ValueError, match=r"found 30.*heads, 4"):
        GPT(10, heads=4, width=30)


def test_every_workload_trains_and_is_decided_by_its_seed() -> None:
    sets = {
        "text": as_text([0, 1] * 5000, [1, 0] * 200, ["a", "b"], context=128, unit="").held_out().limited(64),
        "pieces": as_text([0, 1, 2] * 4000, [2, 1, 0] * 200, ["a", "b", "ab"], context=128, unit="").limited(72),
        "docstrings": small_documents(72),
    }
    for workload in WORKLOADS:
        data = sets.get(workload.name.partition("-")[0], small_images(72, size=32, classes=10))
        factory = workload.factory(data)

        def first_losses(seed: int, factory: Factory = factory) -> list[float]:
            parts = factory.build(seed)
            step = loop_body(parts, parts.model, parts.optimizer, 10)
            pairs = one_epoch(parts.batches, seed=0, epoch=0, device=torch.device("cpu"))
            return [step(inputs[:8], targets[:8]).item() for inputs, targets in itertools.islice(pairs, 2)]

        assert first_losses(0) == first_losses(0) != first_losses(1)
        before = torch.random.get_rng_state()
        parts = made_by(factory.make, 0)
        assert torch.equal(before, torch.random.get_rng_state())
        assert len(list(parts.batches)) == len(parts.batches) == 64 // workload.batch  # type: ignore[arg-type]
        assert parts.evaluate is not None
        held = data.held_out().validation
        assert held is not None
        score = score_of(parts, parts.model)
        assert score == workload.evaluate(parts.model.eval(), held) == workload.validate(parts.model, data)
        assert torch.equal(next(parts.model.parameters()), next(workload.model(data, 0).parameters()))


def test_the_batches_of_a_factory_are_those_of_the_next_epoch_in_each_pass() -> None:
    data = small_images(150, classes=10, shift=1)
    parts = find_workload("cifar10-vgg").factory(data).build(3)
    data = data.limited(135)
    for epoch in range(2):
        ours, own = list(parts.batches), list(data.train(64, seed=3, epoch=epoch))
        assert all(
            torch.equal(a, b) for one, other in zip(ours, own, strict=True) for a, b in zip(one, other, strict=True)
        )


def test_names_are_unique_and_found_by_their_start_and_load_their_data(tmp_path: Path) -> None:
    names = [workload.name for workload in WORKLOADS]
    assert len(set(names)) == len(names)
    for name, full in (
        ("digits", "digits-resnet"),
        ("cifar10", "cifar10-resnet-bottleneck"),
        ("cifar10-resnet-bottleneck-small", "cifar10-resnet-bottleneck-small"),
    ):
        assert find_workload(name).name == full
    for name, message in (("digitz", r"no workload 'digitz'.*Did you mean 'digits-resnet'"), ("", "no workload ''")):
        with pytest.raises(ValueError, match=message):
            find_workload(name)
    pytest.importorskip("sklearn")
    assert find_workload("digits-resnet").load(None, 100).samples == 100
    with pytest.raises(ValueError, match="leave it out"):
        find_workload("digits-resnet").load(tmp_path, None)
    words = find_workload("docstrings").load(None, 100)
    assert isinstance(words, Documents)
    assert words.samples == 100
    with pytest.raises(ValueError, match="leave it out"):
        find_workload("docstrings").load(tmp_path, None)
    file = tmp_path / "text.txt"
    file.write_text("the cat and the hat, the bat: that is all; " * 1000, encoding="utf-8")
    for name, path in (("text-gpt", None), ("pieces-gpt", file)):  # pieces of the standard text take seconds
        data = find_workload(name).load(path, 20)
        assert isinstance(data, Text)
        assert data.samples == 20
    assert find_workload("cifar10-vgg").load(write(tmp_path, wrap=True), 2).samples == 2


def test_the_schedule_rises_to_one_and_falls_to_zero() -> None:
    factors = [one_cycle(step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.05)
    assert max(factors) == factors[19] == factors[20] == 1.0
    assert factors[60] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0) == pytest.approx(one_cycle(500, 100))
    assert all(a > b for a, b in itertools.pairwise(factors[20:]))
    assert one_cycle(0, 1) == 1.0


def test_metrics_by_hand() -> None:
    def always_zero(inputs: Tensor) -> Tensor:
        return torch.tensor([1.0, 0.0, 0.0]).expand(len(inputs), 3)

    assert accuracy(always_zero, small_images(5, classes=3), batch=2) == pytest.approx(0.4)
    data = text(context=16)

    def uniform(inputs: Tensor) -> Tensor:
        return torch.zeros(*inputs.shape, len(data.characters))

    long = as_text([0, 1] * 200, [1] * 200, ["a", "bcd"], context=8, unit="")
    even = bits_per_character(lambda inputs: torch.zeros(*inputs.shape, 2), long)
    assert even == pytest.approx(1 / 3)  # a bit for three characters
    bits = math.log2(len(data.characters))
    assert bits_per_character(uniform, data, batch=1000) == pytest.approx(bits)
    factory = find_workload("text-gpt").factory(data)
    parts = made_by(factory.make, 0)._replace(evaluate=lambda model: find_workload("text-gpt").evaluate(uniform, data))
    assert not factory.higher_is_better
    assert factory.evaluate(parts, nn.Identity()) == pytest.approx(bits)  # a report has it without the sign
