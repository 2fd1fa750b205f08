"""Steps in which the n-th allocation fails, in a process of their own with faults.cpp loaded before all else.

    LD_PRELOAD=faults.so python faulty.py faults.so WHOSE FIRST LAST

prints one line for each n, and ends with an error where something is not as it should be.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide import allocator
from lowtide.allocator.arena import POOL

LIBRARIES = {
    "torch": (r"/libc10\.so",),
    "ours": (r"/(allocator|own|search|layout|exact|watch)-[0-9a-f-]+\.so",),
}


class Faults:
    """The library that lets allocations fail."""

    def __init__(self, path: str, whose: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.faults_disarm.restype = ctypes.c_int64
        self.patterns = LIBRARIES[whose]

    def arm(self, n: int) -> None:
        found = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            if " r-xp " in line and any(re.search(pattern, line) for pattern in self.patterns):
                found.append([int(part, 16) for part in line.split()[0].split("-")])
        numbers = [(ctypes.c_uint64 * len(found))(*(row[column] for row in found)) for column in (0, 1)]
        self.library.faults_arm(ctypes.c_int64(n), ctypes.c_int64(len(found)), *numbers)

    def disarm(self) -> int:
        return int(self.library.faults_disarm())


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def recipe() -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(24, 64),
        nn.BatchNorm1d(64),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 5),
    )
    example = torch.randn(512, 24), torch.randint(5, (512,))
    return model, torch.optim.Adam(model.parameters(), lr=0.01), example


class Checkpoint:
    """All that a step changes."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.held = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        self.generator = torch.get_rng_state()

    def load(self) -> None:
        weights, state = copy.deepcopy(self.held)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        self.optimizer.zero_grad()
        torch.set_rng_state(self.generator)


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Every tensor of a training run, by the name of the parameter or buffer that it belongs to."""
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, item in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = item.clone()
        if parameter.grad is not None:
            found[f"{name}/grad"] = parameter.grad.clone()
    found["/generator"] = torch.get_rng_state()
    return found


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    """The names of what differs in a bit."""
    return {name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])}


class Trial:
    """A step that is tried again and again from one state, with eager's answer to it."""

    def __init__(self, faults: Faults, doors: str) -> None:
        self.faults, self.doors = faults, doors
        self.model, self.optimizer, self.example = recipe()
        twin, twins_optimizer, _ = recipe()
        if doors == "fit":
            self.train: Any = lowtide.fit(
                step, self.model, self.optimizer, example=self.example, budget="3MiB", time_limit=0.2, costs="roofline"
            )
        else:
            net = lowtide.wrap(self.model, example=self.example[:1], budget="3MiB", time_limit=0.2)
            self.train = lambda *batch: step(net, self.optimizer, *batch)
        for run in (lambda *batch: step(twin, twins_optimizer, *batch), self.train, self.train, self.train):
            torch.manual_seed(1)
            run(*self.example)
        self.start = Checkpoint(twin, twins_optimizer)
        self.start.model, self.start.optimizer = self.model, self.optimizer
        self.loss = step(twin, twins_optimizer, *self.example).detach()
        self.expected = everything(twin, twins_optimizer)
        self.fitted = self.train if doors == "fit" else net.fitted
        self.start.load()
        self.before = everything(self.model, self.optimizer)

    def learn_again(self) -> None:
        for fit in self.fitted._fits:
            fit.runner.lessons.forget()

    def run(self, n: int) -> str:
        """What came of a step whose n-th allocation fails."""
        self.start.load()
        error = None
        self.faults.arm(n)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", lowtide.LowtideWarning)
                loss = self.train(*self.example)
        except Exception as caught:
            error = caught
        asked = self.faults.disarm()
        after = everything(self.model, self.optimizer)
        if error is None:
            assert torch.equal(loss.detach(), self.loss)
            assert differing(after, self.expected) == set(), f"n = {n}"
            outcome = "past the end" if asked >= 0 else "equal"
        else:
            outcome = self.told(n, error, differing(after, self.before))
        del error
        if allocator.installed():
            gc.collect()
        assert all(arena.blocks == 0 for arena in POOL._idle), f"n = {n}: something is left in an arena"
        POOL.empty()
        assert not allocator.installed(), f"n = {n}: our allocator is still in place"
        self.usable(n)
        return outcome

    def told(self, n: int, error: Exception, changed: set[str]) -> str:
        """The kind of error, if it says what was changed."""
        if not isinstance(error, lowtide.LowtideError):
            # In a loop of the user's own, what is between the halves is the user's; so is the optimizer.
            assert self.doors == "wrap", f"n = {n}: {type(error).__name__}: {error}"
            assert "alloc" in str(error), f"n = {n}: {type(error).__name__}: {error}"
            return type(error).__name__
        named: set[str] = set()
        if isinstance(error, lowtide.StepError):
            named = {*error.parameters, *error.buffers}
            assert ("can be repeated" in str(error.hint)) == (not named), str(error)
        if self.doors == "wrap" or (isinstance(error, lowtide.StepError) and error.parameters):
            changed -= {"/generator"}  # the loop's own draws come between the halves
        assert {name.partition("/")[0] for name in changed} <= named, f"n = {n}: {changed} changed: {error}"
        return type(error).__name__

    def usable(self, n: int) -> None:
        self.start.load()
        loss = self.train(*self.example)
        assert torch.equal(loss.detach(), self.loss), f"n = {n}: the next step"
        assert differing(everything(self.model, self.optimizer), self.expected) == set(), f"n = {n}: the next step"


def planned(faults: Faults, n: int) -> str:
    """What came of a plan whose n-th allocation fails."""
    model, optimizer, example = recipe()
    before = copy.deepcopy(model.state_dict())
    outcome, failure = "equal", None
    faults.arm(n)
    try:
        train = lowtide.fit(step, model, optimizer, example=example, budget="60%", time_limit=0.1, costs="roofline")
    except Exception as error:
        outcome, failure = type(error).__name__, error
    asked = faults.disarm()
    # Nothing has begun yet: torch's own words for a lack of memory are as clear.
    fine = failure is None or isinstance(failure, lowtide.LowtideError) or "alloc" in str(failure)
    assert fine, f"n = {n}: {failure!r}"
    POOL.empty()
    assert not allocator.installed(), f"n = {n}"
    assert differing(before, dict(model.state_dict())) == set(), f"n = {n}"
    if outcome == "equal":
        twin, twins_optimizer, _ = recipe()
        torch.manual_seed(1)
        expected = step(twin, twins_optimizer, *example).detach()
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lowtide.LowtideWarning)
            assert torch.equal(train(*example).detach(), expected), f"n = {n}"
    return "past the end" if asked >= 0 and outcome == "equal" else outcome


def main(path: str, whose: str, first: int, last: int) -> None:
    """Let each of these allocations fail, in steps of both doors, in the arena and while they learn, and in plans."""
    faults = Faults(path, whose)
    works: dict[str, Callable[[int], str]] = {}
    for doors in ("fit", "wrap"):
        trial = Trial(faults, doors)
        works[f"{doors}, in the arena"] = trial.run

        def learning(n: int, trial: Trial = trial) -> str:
            trial.learn_again()
            return trial.run(n)

        works[f"{doors}, learning"] = learning
    works["plan"] = lambda n: planned(faults, n)
    for name, work in works.items():
        outcomes: Counter[str] = Counter()
        for n in range(first, last):
            outcomes[work(n)] += 1
            if outcomes["past the end"] > 1:
                break
        print(f"{whose}, {name}: " + ", ".join(f"{number} {what}" for what, number in outcomes.items()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
