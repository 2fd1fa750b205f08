"""The campaign: every program at both doors, each pair in a process of its own, and what came of the edits in all."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import Queue
from threading import Lock
from typing import get_args

from lowtide.bench.trust.life import WRONG, Outcome, Verdict
from lowtide.bench.trust.order import Order
from lowtide.bench.trust.twins import DOORS, PROGRAMS
from lowtide.bench.trust.worker import Worker
from lowtide.models import SMALL

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
ROUNDS = 4  # in which the edits of programs that are refused go to the others
HEAVY = ("densenet121", "wrn-28-2", "resnet", "dynamicconv", "lstm-cell", "unet")
WEIGHTS = {**dict.fromkeys(SMALL, 3), **dict.fromkeys(HEAVY, 1), **dict.fromkeys(PROGRAMS, 10)}
LIVES = 100_000  # of one seed
FAIR = 0.5  # the share of edited values that must not be refused

Progress = Callable[[int, int], None]


@dataclass
class Campaign:
    """What came of a campaign."""

    outcomes: list[Outcome] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of the campaign itself

    @property
    def edits(self) -> list[Outcome]:
        """The outcomes of edits, without those of programs as they are."""
        return [outcome for outcome in self.outcomes if outcome.kind != "start"]

    @property
    def wrong(self) -> list[Outcome]:
        """What must not be."""
        return [outcome for outcome in self.outcomes if outcome.verdict in WRONG]

    @property
    def closed(self) -> list[Outcome]:
        """The programs that were refused as they are."""
        return [outcome for outcome in self.outcomes if outcome.kind == "start" and outcome.verdict == "refused"]

    @property
    def share(self) -> float:
        """Of the edited values with which eager goes on: how many ended equal to it."""
        values = [outcome for outcome in self.edits if outcome.value and outcome.verdict != "raises"]
        kept = [outcome for outcome in values if outcome.verdict in ("equal", "anew")]
        return len(kept) / len(values) if values else 1.0

    def table(self) -> dict[str, Counter[str]]:
        """How the edits of each kind ended."""
        found: dict[str, Counter[str]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.kind, Counter())[outcome.verdict] += 1
        return dict(sorted(found.items()))

    @property
    def ok(self) -> bool:
        """Whether all is as it must be."""
        return not self.wrong and not self.failures and self.share >= FAIR


def run(orders: Sequence[Order], edits: int, jobs: int, progress: Progress) -> Campaign:
    """Give edits to all orders by their weights until there were enough."""
    found = Campaign()
    lock = Lock()
    active = list(orders)
    total = sum(order.edits for order in orders) if orders[0].texts else edits

    def listen(outcome: Outcome) -> None:
        with lock:
            found.outcomes.append(outcome)
            progress(min(len(found.edits), total), total)

    crew = [Worker() for _ in range(min(jobs, len(orders)))]
    try:
        for _ in range(1 if orders[0].texts else ROUNDS):
            missing = total - len(found.edits)
            if missing <= 0 or not active or found.failures:
                break
            active = _round(shares(active, missing), crew, found, listen)
    except KeyboardInterrupt:
        found.failures = [f"interrupted after {len(found.edits):,} of {total:,} edits."]
    finally:
        for worker in crew:
            worker.end()
    return found


def _round(
    given: Sequence[Order], crew: Sequence[Worker], found: Campaign, listen: Callable[[Outcome], None]
) -> list[Order]:
    """Have orders done; those to go on with."""
    free: Queue[Worker] = Queue()
    for worker in crew:
        free.put(worker)
    pool = ThreadPoolExecutor(len(crew))
    futures = [pool.submit(_lead, order, free, listen) for order in given]
    try:
        ended = [future.result() for future in futures]
    except KeyboardInterrupt:
        for worker in crew:
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    found.failures += [failure for _, failure in ended if failure]
    shut = {(outcome.program, outcome.door) for outcome in found.outcomes if _ends(outcome)}
    return [order for order, _ in ended if (order.program, order.door) not in shut]


def _ends(outcome: Outcome) -> bool:
    return outcome.kind == "start" and outcome.verdict not in ("equal", "anew")


def orders(seed: int, names: Sequence[tuple[str, str]], kind: str | None) -> list[Order]:
    """Programs at doors, in turns from the cheap to the dear."""
    dear = sorted(names, key=lambda pair: -WEIGHTS[pair[0]])
    return [Order(program, door, seed * LIVES, 0, kind) for program, door in dear]  # type: ignore[arg-type]


def pairs() -> list[tuple[str, str]]:
    """Every program at every door."""
    return [(program, door) for program in WEIGHTS for door in DOORS]


def shares(active: Sequence[Order], edits: int) -> list[Order]:
    """The orders with their part of so many edits."""
    whole = sum(WEIGHTS[order.program] for order in active)
    given, begun = [], 0
    for number, order in enumerate(active):
        before = sum(WEIGHTS[one.program] for one in active[: number + 1])
        upto = round(edits * before / whole)
        if upto > begun or order.texts:
            given.append(replace(order, edits=max(upto - begun, 1)))
        begun = upto
    return given


def _lead(order: Order, workers: Queue[Worker], listen: Callable[[Outcome], None]) -> tuple[Order, str | None]:
    """Have an order done, by another process where one dies; the next order, and what failed here."""
    worker = workers.get()
    try:
        while order.edits > 0:
            for found in worker.outcomes(order):
                if isinstance(found, Outcome):
                    listen(found)
                elif isinstance(found, Order):
                    order = found
                else:
                    return order, found
        return order, None
    finally:
        workers.put(worker)


def command(outcome: Outcome) -> str:
    """What shows one outcome again."""
    edits = [] if outcome.kind == "start" else [*outcome.before, f"{outcome.kind} {outcome.where} {outcome.how}"]
    words = ["lowtide", "bench", "trust", f"--only={outcome.program}/{outcome.door}", f"--life={outcome.life}"]
    return shlex.join([*words, *(f"--edit={edit}" for edit in edits)])
