"""Outputs compared as text with the files of this folder; `pytest tests/golden --update-golden` writes them anew."""

from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing them")


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine commands say in lines what takes long; that is no part of what is compared."""
    monkeypatch.setattr("lowtide.progress.SILENCE", 1e6)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the golden file of this name."""

    def compare(name: str, text: str) -> None:
        path = FOLDER / f"{name}.txt"
        if request.config.getoption("--update-golden", default=False):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing; run: pytest tests/golden --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return compare
