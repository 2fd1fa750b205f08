"""The n-th write, rename or sync of a checkpoint or of the book of costs fails: what was there is there still."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import failing, outcome

from lowtide.cli import checkpoint
from lowtide.errors import FileError
from lowtide.measure.book import Book

FEW, MANY = range(1, 25), range(1, 201)
places = pytest.mark.parametrize(
    "nths", [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.long)]
)


def take(loss: float, width: int = 4) -> checkpoint.Checkpoint:
    """A run of one step with this loss; many tensors, so that there are many writes."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 3) for _ in range(width)]
    model = torch.nn.Sequential(*layers)
    return checkpoint.take("mlp", None, 3, [loss], model, torch.optim.SGD(model.parameters()))


class Disk:
    """A file whose n-th write fails."""

    def __init__(self, file: Any, nth: int) -> None:
        self.file, self.left = file, nth

    def write(self, content: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


@places
def test_a_checkpoint_whose_nth_write_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nths: range
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    path = tmp_path / "checkpoint"
    take(1.0).write(path)
    failed = 0
    for nth in nths:
        monkeypatch.setattr(checkpoint, "open", lambda path, mode, n=nth: Disk(path.open(mode), n), raising=False)
        error = outcome(lambda n=nth: take(2.0, 4 + n // 2).write(path), FileError)
        failed += error is not None
        assert error is None or (str(path) in str(error) and "No space left on device" in str(error))
        assert checkpoint.read(path).losses == ([1.0] if error is not None else [2.0])
        assert [found.name for found in tmp_path.iterdir()] == ["checkpoint"]
        monkeypatch.delattr(checkpoint, "open")
        take(1.0).write(path)
    assert failed == len(nths)


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_checkpoint_that_cannot_be_put_in_place_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "checkpoint"
    take(1.0).write(path)
    with failing(os, name, 1), pytest.raises(FileError, match="No space left on device") as caught:
        take(2.0).write(path)
    assert "free some room" in str(caught.value.hint)
    assert checkpoint.read(path).losses == [1.0]
    assert [found.name for found in tmp_path.iterdir()] == ["checkpoint"]


@places
@pytest.mark.parametrize("name", ["write", "replace", "open", "fsync"])
def test_a_book_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nths: range
) -> None:
    if name != "fsync":
        monkeypatch.setattr(os, "fsync", lambda file: None)
    answer = {
        "seconds": 0.25,
        "disturbed": False,
        "arena_temporaries": 64,
        "apart_temporaries": 64,
        "heap_temporaries": 64,
        "outputs": [128],
        "in_place": [],
        "code": 0,
    }
    for nth in nths:
        monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / str(nth)))
        number = 0
        with failing(os, name, nth) as count:
            while count.calls < nth:
                number += 1
                book = Book([])
                book.add({f"{number}": {**answer, "arena_temporaries": number}})
                assert number <= nth
        found = Book([]).answers
        assert all(found[key]["arena_temporaries"] == int(key) for key in found)
        assert found.keys() >= {str(earlier) for earlier in range(1, number)}
        assert [path.name for path in (tmp_path / str(nth)).iterdir()] == [book.path.name] * bool(found)
