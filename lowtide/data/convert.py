"""The files of a package -> arrays that can be mapped into memory.

Images are bytes, (number, channels, height, width). Words are numbered by how frequent they are, so that the most
frequent of any vocabulary are the numbers below its size; 0 is a word that the training part does not have.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.data.png import decode

# From the folders of a dataset's files and a folder for its arrays to what is to be known of them.
Convert = Callable[[Sequence[Path], Path], dict[str, Any]]

WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)*|[^\w\s]")  # a word with its apostrophes, or one mark of punctuation
HELD_OUT = 20  # one part in so many is kept for tests where the dataset itself keeps none
CIFAR_SIDE = 32


def words_of(text: str) -> list[str]:
    """The words and marks of a text, in small letters."""
    return WORD.findall(text.lower())


# ------------------------------------------------------------------------------------------------------------- images


def cifar10(folders: Sequence[Path], result: Path) -> dict[str, Any]:
    """Convert sheets in which each line of pixels is one image, in colour."""
    (folder,) = folders
    sheets = {"train": [f"data_batch_{number}.png" for number in range(1, 6)], "test": ["test_batch.png"]}
    for part, names in sheets.items():
        labels = np.array(json.loads((folder / f"{part}_lables.json").read_text()), np.uint8)
        shape = (len(labels), 3, CIFAR_SIDE, CIFAR_SIDE)
        images = np.lib.format.open_memmap(result / f"{part}_images.npy", "w+", np.uint8, shape)
        filled = 0
        for name in names:
            pixels = decode((folder / name).read_bytes()).reshape(-1, CIFAR_SIDE, CIFAR_SIDE, 3)
            images[filled : filled + len(pixels)] = pixels.transpose(0, 3, 1, 2)
            filled += len(pixels)
        if filled != len(labels):
            raise ValueError(f"there are {filled} images and {len(labels)} labels")
        images.flush()
        np.save(result / f"{part}_labels.npy", labels)
    return _about_images(result)


def idx_images(folders: Sequence[Path], result: Path) -> dict[str, Any]:
    """Convert grey images in the format of MNIST."""
    (folder,) = folders
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images = _read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        labels = _read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
        if len(images) != len(labels):
            raise ValueError(f"there are {len(images)} images and {len(labels)} labels")
        np.save(result / f"{part}_images.npy", images[:, None])
        np.save(result / f"{part}_labels.npy", labels)
    return _about_images(result)


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an array of bytes: a magic number that ends in the number of dimensions, their sizes, the bytes."""
    with gzip.open(path) as file:
        data = file.read()
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} has no bytes in it")
    shape = np.frombuffer(data, ">u4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def _about_images(result: Path) -> dict[str, Any]:
    """What is to be known of images: how many, how many labels, and mean and deviation of the channels, 0 to 1."""
    images = np.load(result / "train_images.npy", mmap_mode="r")
    labels = np.load(result / "train_labels.npy")
    counts = [np.bincount(images[:, channel].ravel(), minlength=256) for channel in range(images.shape[1])]
    shades = np.arange(256) / 255
    means = [float(np.average(shades, weights=count)) for count in counts]
    deviations = [
        float(np.sqrt(np.average((shades - mean) ** 2, weights=count)))
        for mean, count in zip(means, counts, strict=True)
    ]
    return {"classes": int(labels.max()) + 1, "mean": means, "deviation": deviations}


# ---------------------------------------------------------------------------------------------------------------- text


def books(folders: Sequence[Path], result: Path) -> dict[str, Any]:
    """Convert books, the end of each of which is held out."""
    (folder,) = folders
    train: list[str] = []
    test: list[str] = []
    for path in sorted(folder.iterdir()):
        words = words_of(_read_text(path))
        end = len(words) - len(words) // HELD_OUT
        train += words[:end]
        test += words[end:]
    if not train:
        raise ValueError("there is no text in it")
    ranks = _rank(train, result / "words.txt")
    for part, words in (("train", train), ("test", test)):
        np.save(result / f"{part}.npy", _numbers(words, ranks))
    return {"words": len(ranks)}


def german_english(folders: Sequence[Path], result: Path) -> dict[str, Any]:
    """Join German sentences, which come with the md5 of the English ones, with these."""
    german, english = folders
    by_hash = {hashlib.md5(text.encode()).hexdigest(): text for text in _documents(english)}
    pairs = [(words_of(text), words_of(by_hash[key])) for text, key in _documents(german) if key in by_hash]
    pairs = [pair for pair in pairs if all(pair)]
    parts = {
        "train": [pair for number, pair in enumerate(pairs) if number % HELD_OUT != HELD_OUT - 1],
        "test": pairs[HELD_OUT - 1 :: HELD_OUT],
    }
    if not parts["train"]:
        raise ValueError("no German sentence belongs to an English one")
    for side, language in enumerate(("german", "english")):
        train = (word for pair in parts["train"] for word in pair[side])
        ranks = _rank(train, result / f"{language}.txt")
        for part, chosen in parts.items():
            lengths = [len(pair[side]) for pair in chosen]
            numbers = _numbers((word for pair in chosen for word in pair[side]), ranks)
            np.save(result / f"{part}_{language}.npy", numbers)
            np.save(result / f"{part}_{language}_starts.npy", np.cumsum([0, *lengths], dtype=np.int64))
    return {"pairs": len(pairs)}


def _read_text(path: Path) -> str:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _documents(folder: Path) -> Iterator[Any]:
    """What is in the numbered JSON files of a folder, in the order of their numbers."""
    for path in sorted(folder.glob("doc-*.json"), key=lambda path: int(path.stem.partition("-")[2])):
        yield from json.loads(path.read_text(encoding="utf-8"))


def _rank(words: Iterable[str], path: Path) -> dict[str, int]:
    """Number the words from 1, the most frequent first and equals by alphabet, and write them down in that order."""
    counts = Counter(words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    path.write_text("".join(f"{word}\n" for word in ranked), encoding="utf-8")
    return {word: rank for rank, word in enumerate(ranked, 1)}


def _numbers(words: Iterable[str], ranks: dict[str, int]) -> NDArray[np.int32]:
    return np.fromiter((ranks.get(word, 0) for word in words), np.int32)
