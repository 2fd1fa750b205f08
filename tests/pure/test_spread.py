"""The interval of a paired difference against a table of Student's t, and rows that outlive an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.bench.low_memory.spread import difference
from lowtide.bench.low_memory.store import Store
from lowtide.errors import FileError

ROW = {"task": "wrn-28-2", "way": "eager", "part": "0", "steps": 5, "target": "wrn-28-2"}


def test_the_interval_is_student_s() -> None:
    """Three differences 1, 2, 3: mean 2, deviation 1, and t of two degrees of freedom is 4.3027 at 97.5%."""
    found = difference({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0, 3: 7.0})
    assert found is not None
    assert (found.mean, found.pairs) == (2.0, 3)
    assert found.low == pytest.approx(2 - 4.302653 / 3**0.5, abs=1e-5)
    assert found.high == pytest.approx(2 + 4.302653 / 3**0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("off", "resolved"),
    [((0.0, 0.01, -0.01), True), ((-2.0, -2.1, -1.9), True), ((-0.5, 0.5, 0.0), False), ((0.5, 0.0, 0.4), False)],
)
def test_an_interval_with_nothing_and_the_goal_in_it_answers_nothing(off: tuple[float, ...], resolved: bool) -> None:
    found = difference(dict(enumerate(off)), dict.fromkeys(range(3), 0.0))
    assert found is not None
    assert found.resolved is resolved
    assert ("not resolved" in str(found)) is not resolved


def test_one_pair_has_no_interval_and_none_no_difference() -> None:
    found = difference({0: 1.0, 1: 3.0}, {1: 2.5})
    assert found is not None
    assert (found.mean, found.low, found.resolved) == (0.5, None, False)
    assert difference({0: 1.0}, {1: 1.0}) is None


def test_rows_are_there_again_after_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Store(path).add({**ROW, "score": 50.0})
    with path.open("a") as file:
        file.write('{"task": "wrn-28-2", "way"')  # cut off
    store = Store(path)
    assert store.find(ROW) == {**ROW, "score": 50.0}
    assert store.find({**ROW, "steps": 6}) is None
    store.add({**ROW, "part": "1", "score": 51.0})
    assert [row["score"] for row in Store(path).rows] == [50.0, 51.0]


def test_a_row_that_failed_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows.jsonl")
    store.add({**ROW, "failure": "killed"})
    assert store.find(ROW) is None
    store.add({**ROW, "score": 1.0})
    assert Store(tmp_path / "rows.jsonl").find(ROW) == {**ROW, "score": 1.0}


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"kind": "plan"}\n')
    with pytest.raises(FileError, match="no row of this table"):
        Store(path)
