from __future__ import annotations

from pathlib import Path

from torchboost.distributed.checkpoint import folders


def written(folder: Path, number: int, keep: int) -> Path:
    path, unfinished = folders.places(folder, number)
    folders.clear(folder)
    unfinished.mkdir()
    (unfinished / "content").write_text(str(number))
    (unfinished / folders.METADATA).touch()
    assert path not in folders.complete(folder)
    folders.finish(unfinished, path, keep)
    return path


def test_a_checkpoint_appears_under_its_name_when_it_is_complete_and_the_oldest_go(tmp_path):
    paths = [written(tmp_path / "run", number, keep=2) for number in (5, 20, 100_000_000)]
    assert [path.name for path in paths] == ["00000005", "00000020", "100000000"]
    assert folders.complete(tmp_path / "run") == paths[1:]
    assert sorted((tmp_path / "run").iterdir()) == sorted(paths[1:])
    assert (paths[-1] / "content").read_text() == "100000000"


def test_what_an_interrupted_job_left_is_cleared_and_never_counts(tmp_path):
    path = written(tmp_path, 1, keep=1)
    _, unfinished = folders.places(tmp_path, 2)
    unfinished.mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert folders.complete(tmp_path) == [path]
    folders.clear(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["00000001", "notes.txt"]


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert folders.complete(tmp_path / "nothing") == []


def test_what_is_no_checkpoint_of_ours_neither_counts_nor_goes(tmp_path):
    (tmp_path / "2024").write_text("notes")
    (tmp_path / "00002024").write_text("notes")
    foreign = [tmp_path / name for name in ("7", "00000008", "\N{ARABIC-INDIC DIGIT THREE}" * 8)]
    for folder in foreign:
        folder.mkdir()
    path = written(tmp_path, 9, keep=1)
    assert folders.complete(tmp_path) == [path]
    assert all(folder.is_dir() for folder in foreign)


def test_a_link_to_a_checkpoint_counts_and_is_never_removed(tmp_path):
    moved = written(tmp_path / "a", 1, keep=1)
    run = tmp_path / "run"
    run.mkdir()
    link = run / "00000001"
    link.symlink_to(moved)
    assert folders.complete(run) == [link]
    path = written(run, 2, keep=1)
    path = written(run, 3, keep=1)
    assert folders.complete(run) == [link, path]
    assert (moved / "content").read_text() == "1"


def test_links_and_files_that_lie_in_the_way_are_removed_and_not_followed(tmp_path):
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (outside / "precious").touch()
    run.mkdir()
    (run / ".unfinished-00000009").symlink_to(outside)
    (run / ".unfinished-00000010").touch()
    folders.clear(run)
    assert list(run.iterdir()) == []
    assert (outside / "precious").exists()
