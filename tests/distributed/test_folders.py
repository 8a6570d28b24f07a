from __future__ import annotations

from pathlib import Path

from torchboost.distributed import folders


def written(folder: Path, number: int, keep: int) -> Path:
    path, unfinished = folders.places(folder, number)
    folders.clear(folder)
    unfinished.mkdir()
    (unfinished / "content").write_text(str(number))
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
