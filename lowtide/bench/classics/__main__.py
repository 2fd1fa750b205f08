"""The process of one claim: `python -m lowtide.bench.classics NAME [small]` ends with a line of JSON."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from lowtide.bench.classics import CLAIMS
from lowtide.errors import LowtideError


def main(name: str, *words: str) -> None:
    """Show one claim; whatever else is printed is talk."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        print(json.dumps(answer(name, small="small" in words)), file=answers, flush=True)


def answer(name: str, *, small: bool) -> dict[str, Any]:
    """The figures and data of a claim, or why it failed."""
    try:
        return asdict(CLAIMS[name].run(small))
    except LowtideError as error:
        return {"failure": error.message}
    except Exception as error:
        return {"failure": " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])}


if __name__ == "__main__":
    main(*sys.argv[1:])
