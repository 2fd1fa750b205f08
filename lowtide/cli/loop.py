"""Training steps one after another: timed, metered, shown, and stopped only between two of them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lowtide import device, tree
from lowtide.cli.checkpoint import Checkpoint
from lowtide.cli.talk import talk
from lowtide.cli.target import Built
from lowtide.peaks import storage_bytes
from lowtide.report import show_bytes

BETWEEN = 60.0  # seconds from one checkpoint to the next, where it is not given in steps


class Step(Protocol):
    """A training step that is metered, where that can be done."""

    @property
    def peak(self) -> int | None: ...
    def __call__(self, *batch: Any) -> Any: ...


class Eager:
    """A step in eager PyTorch, with the same instruments as a fitted one; the meter must run around all steps."""

    plan = None
    arena_bytes = mismatches = 0

    def __init__(self, built: Built) -> None:
        self.built = built
        self.peak: int | None = None  # bytes of the whole step, the largest so far
        on_cpu = all(parameter.device.type == device.CPU.name for parameter in built.model.parameters())
        self.metered = on_cpu and device.CPU.missing() is None

    def __call__(self, *batch: Any) -> Any:
        """One training step."""
        step, model, optimizer, _ = self.built
        if not self.metered:
            return step(model, optimizer, *batch)
        gradients = [parameter.grad for parameter in model.parameters()]
        before = storage_bytes([*what_persists(self.built, batch), *gradients])
        del gradients
        with device.CPU.meter() as meter:
            result = step(model, optimizer, *batch)
        self.peak = max(self.peak or 0, before + meter.peak)
        return result


def what_persists(built: Built, batch: tuple[Any, ...]) -> list[Any]:
    """Parameters, buffers, optimizer state and the batch, with what else is found beside them."""
    states = [] if built.optimizer is None else [*built.optimizer.state.values()]
    return [*built.model.parameters(), *built.model.buffers(), *tree.flatten((states, batch))[0]]


@dataclass
class Log:
    """What the steps did."""

    losses: list[float | None]  # of each step, those before a resume too
    taken: int = 0  # steps of this process
    seconds: float = 0.0  # of those but the first, with their batches

    @property
    def rate(self) -> float | None:
        """Steps a second, without the first."""
        return (self.taken - 1) / self.seconds if self.taken > 1 else None

    def add(self, loss: float | None, seconds: float) -> None:
        """Note one more step."""
        self.losses.append(loss)
        self.seconds += seconds if self.taken else 0.0
        self.taken += 1


@dataclass
class Keeper:
    """Keeps the file of a run up to date."""

    path: Path
    every: int | None  # steps; None: once in a while
    take: Callable[[], Checkpoint]  # the run as it is
    held: int | None = None  # steps that the file holds
    when: float = 0.0  # it was written

    def keep(self) -> None:
        """Write a checkpoint now."""
        taken = self.take()
        taken.write(self.path)
        self.held, self.when = taken.step, perf_counter()

    def due(self, step: int) -> bool:
        """Whether it is time for a checkpoint."""
        if self.every is not None:
            return step % self.every == 0
        return perf_counter() - self.when >= BETWEEN


def run(
    step: Step,
    batch: Callable[[int], tuple[Any, ...]],
    steps: int,
    log: Log,
    *,
    limit: int | None,
    keeper: Keeper | None,
) -> int:
    """Take the steps that are missing, up to `steps`; returns the signal that ended the run before, or 0."""
    with redirect_stdout(sys.stderr), _bar(steps) as say, _between_steps(keeper, say) as asked:
        while (number := len(log.losses)) < steps and not asked():
            start = perf_counter()
            loss = find_loss(step(*batch(number)))
            log.add(loss, perf_counter() - start)
            say(_news(log, step.peak, limit), number + 1)
            if keeper is not None and keeper.due(number + 1):
                keeper.keep()
        if keeper is not None and keeper.held != len(log.losses):
            keeper.keep()
        return asked() if len(log.losses) < steps else 0


@contextmanager
def _between_steps(keeper: Keeper | None, say: Callable[[str], None]) -> Iterator[Callable[[], int]]:
    """Where a run is kept, let the first signal to stop wait until the step is complete and saved, not the second."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(number, before[number])
        say("stopping after this step; Ctrl-C again stops at once")

    stops = (signal.SIGINT, signal.SIGTERM) if keeper is not None else ()
    before: dict[int, Any] = {number: signal.signal(number, ask) for number in stops}
    try:
        yield lambda: asked[0] if asked else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Say(Protocol):
    def __call__(self, text: str, done: int | None = None) -> None: ...


@contextmanager
def _bar(steps: int) -> Iterator[_Say]:
    """A progress bar in a terminal, with some words beside it."""
    console = talk()
    columns = (BarColumn(None), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps)

        def say(text: str, done: int | None = None) -> None:
            progress.update(task, description=text, completed=done)

        yield say


def _news(log: Log, peak: int | None, limit: int | None) -> str:
    """The loss, the speed, and the peak against the budget."""
    words = [f"loss {show_number(log.losses[-1])}"]
    if log.rate is not None:
        words.append(f"{show_rate(log.rate)} steps/s")
    if peak is not None:
        words.append(f"peak {show_bytes(peak)}" + (f" of {show_bytes(limit)}" if limit is not None else ""))
    return "  ".join(words)


def find_loss(result: Any) -> float | None:
    """The first number among the results of a step."""
    for leaf in tree.flatten(result)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1:
            return float(leaf.detach())
    return None


def show_rate(rate: float | None) -> str:
    """Steps a second as people read them."""
    return "-" if rate is None else f"{rate:,.1f}" if rate >= 10 else f"{rate:.3g}"


def show_number(number: float | None) -> str:
    """A loss as people read it."""
    return "-" if number is None else f"{number:#.4g}".rstrip(".")
