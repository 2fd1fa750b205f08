"""A process that does orders, seen from outside: what it says, until it dies or is silent for too long."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowtide.bench.trust.life import Outcome
from lowtide.bench.trust.order import Order

PATIENCE = 180.0  # seconds without a word before an edit is given up


class Worker:
    """A process of `python -m lowtide.bench.trust`."""

    def __init__(self) -> None:
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines announce an AMX that they lack
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lowtide.bench.trust"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._heard = b""
        self._child = 0  # the fork that does the order

    def end(self) -> None:
        """Let it go home."""
        self._process.communicate()

    def kill(self) -> None:
        """End it, and the edit that it is at."""
        self._end_child()
        self._process.kill()

    def _end_child(self) -> None:
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)

    def outcomes(self, order: Order) -> Iterator[Outcome | Order | str]:
        """What comes of an order; at the end the order to go on with, or what failed in the campaign itself."""
        assert self._process.stdin is not None
        self._process.stdin.write(order.text().encode() + b"\n")
        self._process.stdin.flush()
        pending: dict[str, Any] = {}
        done, failure = 0, ""
        for line in self._lines():
            if "begin" in line:
                pending = line["begin"]
            elif "outcome" in line:
                outcome = Outcome(**{**line["outcome"], "before": tuple(line["outcome"]["before"])})
                done, pending = done + (outcome.kind != "start"), {}
                yield outcome
            elif "end" in line:
                yield replace(order, first=line["end"], edits=0)
            elif "failure" in line:
                failure = line["failure"]
            elif line.get("code"):
                if failure or not pending:
                    yield f"{order.program}/{order.door} with {pending}: {failure or line['code']}"
                    return
                yield _death(order, pending, line["code"])
                yield replace(order, first=pending["life"] + 1, edits=order.edits - done - 1)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """What it says until an order is done."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while True:
            if not select.select([descriptor], [], [], PATIENCE)[0]:
                self._end_child() if self._child else self.kill()
            text = os.read(descriptor, 65536)
            *lines, self._heard = (self._heard + text).split(b"\n")
            for line in map(json.loads, lines):
                self._child = line.get("process", 0 if "code" in line else self._child)
                yield line
                if "code" in line:
                    return
            if not text:
                yield {"failure": "the process ended"}
                yield {"code": 1}
                return


def _death(order: Order, pending: dict[str, Any], code: int) -> Outcome:
    """The outcome of an edit with which the process died."""
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    detail = f"the process died ({name})" if name != "SIGKILL" else f"killed after {PATIENCE:.0f} s of silence"
    what = {**pending, "before": tuple(pending["before"])}
    return Outcome(order.program, order.door, **what, verdict="crash", detail=detail, halfway=False, seconds=0.0)
