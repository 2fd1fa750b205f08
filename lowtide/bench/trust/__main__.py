"""The process that lives lives: it reads orders, and prints what it tries and what came of it as lines of JSON.

Each order is done by a fork, so that an edit that kills its process ends one order and not the campaign.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lowtide.bench.trust.edits import Edit
from lowtide.bench.trust.life import Outcome, live, relive
from lowtide.bench.trust.order import Order
from lowtide.errors import UsageError

Say = Callable[[dict[str, Any]], None]


def main() -> None:
    """Do the orders one after another; whatever else is printed is talk."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def say(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=answers, flush=True)

        for text in sys.stdin:
            child = os.fork()
            if child == 0:
                os._exit(attempt(Order.read(text), say))
            say({"process": child})
            _, status = os.waitpid(child, 0)
            say({"code": os.waitstatus_to_exitcode(status)})


def attempt(order: Order, say: Say) -> int:
    """Do one order; the exit code."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            do(order, Path(folder), say)
    except UsageError as error:
        say({"failure": error.message})
        return 1
    except BaseException as error:
        say({"failure": " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])})
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def do(order: Order, folder: Path, say: Say) -> None:
    """Live lives until there were enough edits."""
    done, number = 0, order.first

    def begin(edit: Edit, before: Sequence[str]) -> None:
        what = {"kind": edit.kind, "where": edit.where, "how": edit.how, "value": edit.value}
        say({"begin": {"life": number, **what, "before": list(before)}})

    def emit(outcome: Outcome) -> None:
        say({"outcome": outcome.as_json()})

    if order.texts:
        relive(order, folder, begin=begin, emit=emit)
    while done < order.edits and not order.texts:
        found = live(order, number, folder, edits=order.edits - done, begin=begin, emit=emit)
        if found is None:
            break
        done, number = done + found, number + 1
        gc.collect()
    say({"end": number})


if __name__ == "__main__":
    main()
