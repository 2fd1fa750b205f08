"""The rows of the table: what is allowed, and what else is changed; passes that are not there are left out by name."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.rewrite import named
from lowtide.rewrites import read_allow

EAGER = "eager"


@dataclass(frozen=True)
class Way:
    """One way to train: by techniques, by a budget, or with another optimizer."""

    name: str
    allow: str = ""  # techniques, with their settings: all of them are applied
    budget: str = ""  # in place of that: what `fit` is given, with allow
    optimizer: str = ""  # in place of the task's
    headline: bool = False  # trained with all seeds, others with the first


def _alone(*names: str) -> tuple[Way, ...]:
    return tuple(Way(name, name) for name in names)


LOW = "input8,activations16:products,weights16,state8"
IMAGES = (
    Way(EAGER, headline=True),
    Way("exact"),
    *_alone("split", "input8", "activations16:products", "activations8:products", "activations4:products"),
    *_alone("weights16", "state8", "sparse:0.3"),
    Way("microbatches of 5", "microbatch:20,batch-statistics:5", headline=True),
    Way("microbatches of 2", "microbatch:50,batch-statistics:2"),
    Way("microbatches of 1", "microbatch:100,batch-statistics:1"),
    Way("low precision", LOW),
    Way("low precision, microbatches of 5", f"{LOW},microbatch:20,batch-statistics:5"),
    Way(
        "sparse, low precision, microbatches of 5", f"{LOW},sparse:0.3,microbatch:20,batch-statistics:5", headline=True
    ),
    Way("within 6.57MB (60.7 times less)", "lossy", "6.57MB", headline=True),
    Way("within 4.0MB (100 times less)", "lossy", "4.0MB"),
)
PAIRS = (
    Way(EAGER, headline=True),
    Way("exact"),
    *_alone("chunked-loss", "microbatch:8", "activations16:products", "activations8:products"),
    *_alone("weights16", "state8", "sparse:0.3"),
    Way("chunked-loss, 8-bit state, 16-bit weights", "chunked-loss,weights16,state8,activations16:products"),
    Way("microbatches, 8-bit state, 16-bit weights", "microbatch:16,weights16,state8,activations16:products"),
    Way("within 325MB (8.7 times less)", "lossy", "325MB", headline=True),
    Way("within 236MB (12 times less)", "lossy", "236MB"),
    *(Way(name, optimizer=name) for name in ("adafactor", "galore", "adam-mini", "lora")),
)


def ways_of(kind: str) -> tuple[Way, ...]:
    """The rows for images, or for sentence pairs."""
    return IMAGES if kind == "images" else PAIRS


def missing(way: Way) -> list[str]:
    """The techniques of a way that are not there."""
    return [name for name, _ in read_allow(way.allow or None).named if named(name) is None]
