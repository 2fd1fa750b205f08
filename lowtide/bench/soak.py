"""A long run under adverse conditions: many shapes, other threads that allocate, workers that are forked and spawned.

The run is made of parts; in each one the batches come from workers of a DataLoader, forked and spawned by turns. After
the first two parts a run has all that it needs: every shape was planned, and both kinds of workers were there.
"""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from time import sleep
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lowtide.cli.target import build
from lowtide.errors import UsageError
from lowtide.fit import fit
from lowtide.peaks import resident
from lowtide.plan import TIME_LIMIT
from lowtide.verify.compare import digest
from lowtide.verify.copies import lasting_tensors

THREADS, HELD = 3, 8  # that allocate beside the steps, and how many tensors each holds
LARGEST = 2**18  # elements of such a tensor: 1 MiB
WORKERS = 2  # of each DataLoader
PARTS, WARM = 4, 2  # of a run, and how many of them are its warm-up
CHECKPOINTS = 8  # in each part
# What may be resident more in the end, in bytes. The heap of a steady run moves by 8 MiB (`bench steady`); the freed
# blocks of each other thread, in a heap of its own, may lie otherwise than before by one of their largest.
GROWTH = 8 * 2**20 + THREADS * 4 * LARGEST

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Soaked:
    """What a long run held after its warm-up and in the end, and whether its bits were eager's."""

    steps: int
    shapes: int  # of batches, each with a plan of its own
    budget: int  # bytes
    peak: int | None  # bytes, metered
    resident: tuple[int, ...]  # bytes, after each part, with the other threads at rest
    files: tuple[int, ...]  # open files, after each part
    mismatches: int  # allocations that did not come as planned
    checkpoints: int  # at which everything was compared with eager
    differing: tuple[int, ...]  # steps: checkpoints at which it was not the same
    beside: int  # bytes that other threads allocated meanwhile
    spoilt: int  # of their tensors, that held something else than they had written

    @property
    def growth(self) -> int:
        """Resident bytes that came after the warm-up."""
        return self.resident[-1] - self.resident[WARM - 1]

    @property
    def ok(self) -> bool:
        """Whether nothing grew, strayed, differed or was spoilt."""
        grown = self.growth > GROWTH or self.files[-1] > self.files[WARM - 1]
        within = self.peak is None or self.peak <= self.budget
        return within and not (grown or self.mismatches or self.differing or self.spoilt)


class Cuts(Dataset[tuple[torch.Tensor, ...]]):
    """Batches of several shapes, cut out of one: the same for the same step, whoever asks."""

    def __init__(self, example: Sequence[torch.Tensor], shapes: int, first: int, last: int) -> None:
        rows, columns = example[0].shape[:2]
        every = [(row, column) for row in range(rows, 0, -1) for column in range(columns, 0, -max(1, columns // 8))]
        if shapes > len(every):
            raise UsageError(f"{shapes} shapes can't be cut out of {rows} x {columns}.", hint="take a larger batch.")
        self._example, self._shapes = tuple(example), every[:shapes]
        self._first, self._last = first, last

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, place: int) -> tuple[torch.Tensor, ...]:
        number = self._first + place
        lap, place = divmod(number, len(self._shapes))
        rows, columns = Random(lap).sample(self._shapes, len(self._shapes))[place]
        return tuple(leaf.roll(number, 0)[:rows, :columns].contiguous() for leaf in self._example)


class Neighbours:
    """Threads that allocate, write and look at what they wrote, until they are told to rest."""

    def __init__(self) -> None:
        self.nbytes = self.spoilt = 0
        self._go, self._end = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._resting = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._live, args=(number,), daemon=True) for number in range(THREADS)]

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Let them live."""
        self._go.set()
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._go.set()
            for thread in self._threads:
                thread.join()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Let them drop everything and wait."""
        self._go.clear()
        for _ in self._threads:
            self._resting.acquire()
        try:
            yield
        finally:
            self._go.set()

    def _live(self, number: int) -> None:
        draw, held = Random(number), list[tuple[int, torch.Tensor]]()
        while not self._end.is_set():
            if not self._go.is_set():
                held.clear()
                self._resting.release()
                self._go.wait()
                continue
            mark = draw.randrange(1, 2**20)
            held.append((mark, torch.full((draw.randrange(1, LARGEST),), mark, dtype=torch.int32)))
            spoilt, nbytes = 0, held[-1][1].nbytes
            if len(held) > HELD:
                mark, tensor = held.pop(draw.randrange(HELD))
                spoilt = int(bool((tensor != mark).any()))
                del tensor
            with self._lock:
                self.nbytes += nbytes
                self.spoilt += spoilt
            sleep(0.005)


def soak(
    target: str,
    *,
    budget: str = "60%",
    steps: int = 1000,
    shapes: int = 20,
    time_limit: float = TIME_LIMIT,
    progress: Progress = lambda done, total: None,
) -> Soaked:
    """Train in eager and note what it makes; then train within a budget beside all that disturbs, and compare."""
    if steps < PARTS * max(CHECKPOINTS, shapes // WARM):
        raise UsageError(f"{steps} steps are too few to see {shapes} shapes in the warm-up.", hint="take more steps.")
    ends = [steps * (part + 1) // PARTS for part in range(PARTS)]
    marks = {begin + (end - begin) * (n + 1) // CHECKPOINTS for begin, end in _spans(ends) for n in range(CHECKPOINTS)}
    expected = _eager(target, shapes, steps, marks)
    torch.manual_seed(0)
    step, model, optimizer, example = build(target)
    train = fit(step, model, optimizer, example=example, budget=budget, time_limit=time_limit)
    neighbours, held, files, differing = Neighbours(), list[int](), list[int](), list[int]()
    torch.manual_seed(1)
    with neighbours.alive():
        for part, (begin, end) in enumerate(_spans(ends)):
            for number, batch in _batches(Cuts(example, shapes, begin, end), "spawn" if part % 2 else "fork"):
                progress(number, steps)
                result = train(*batch)
                if number + 1 in marks and _state(model, optimizer, result) != expected[number + 1]:
                    differing.append(number + 1)
                del batch, result
            with neighbours.resting():
                gc.collect()
                held.append(resident.now() or 0)
                files.append(len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0)
    return Soaked(
        steps=steps,
        shapes=shapes,
        budget=train.plan.budget or 0,
        peak=train.peak,
        resident=tuple(held),
        files=tuple(files),
        mismatches=train.mismatches,
        checkpoints=len(marks),
        differing=tuple(differing),
        beside=neighbours.nbytes,
        spoilt=neighbours.spoilt,
    )


def _spans(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _batches(cuts: Cuts, start: str) -> Iterator[tuple[int, Any]]:
    """The batches of one part from workers, with the number of each step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        loader = DataLoader(
            cuts,
            batch_size=None,
            num_workers=WORKERS,
            multiprocessing_context=start,
            generator=torch.Generator().manual_seed(0),  # else it draws from the one that the steps draw from
        )
        batches = iter(loader)
    for place, batch in enumerate(batches):
        yield cuts._first + place, batch


def _eager(target: str, shapes: int, steps: int, marks: set[int]) -> dict[int, bytes]:
    """Digests of all that eager's run has made by these steps."""
    torch.manual_seed(0)
    step, model, optimizer, example = build(target)
    cuts = Cuts(example, shapes, 0, steps)
    torch.manual_seed(1)
    found: dict[int, bytes] = {}
    for number in range(steps):
        result = step(model, optimizer, *cuts[number])
        if number + 1 in marks:
            found[number + 1] = _state(model, optimizer, result)
    return found


def _state(model: torch.nn.Module, optimizer: Any, result: torch.Tensor) -> bytes:
    """A digest of model, optimizer, result and generator."""
    tensors = [*lasting_tensors(model, optimizer, ()), result, torch.default_generator.get_state()]
    return hashlib.blake2b(b"".join(map(digest, tensors)), digest_size=8).digest()
