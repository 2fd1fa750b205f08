"""What the process of one program is asked to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

Door = Literal["fit", "wrap"]


@dataclass(frozen=True)
class Order:
    """Edits of one program at one door."""

    program: str
    door: Door
    first: int  # the number of the first life, from which all that is random follows
    edits: int
    kind: str | None = None  # only edits of this kind
    texts: tuple[str, ...] = ()  # these edits, in one life, and no random ones

    def text(self) -> str:
        """For the command line of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Order:
        """From the command line of the process."""
        data = json.loads(text)
        return cls(**{**data, "texts": tuple(data["texts"])})
