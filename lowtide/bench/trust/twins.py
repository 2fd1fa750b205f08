"""Twins: two copies of one program with nothing in common, one for eager and one for lowtide."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

import lowtide
from lowtide import models
from lowtide.bench.trust.order import Door
from lowtide.errors import BudgetError
from lowtide.models import SMALL

Side = Literal["eager", "lowtide", "again"]
Mode = Callable[[], AbstractContextManager[Any]]

FOLDER = Path(__file__).parent / "programs"
PROGRAMS = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")))
DOORS: tuple[Door, ...] = ("fit", "wrap")
OPTIMIZERS = ("sgd", "nesterov", "adam", "adamw", "rmsprop", "adagrad")  # of the built-in models, by turns
TIGHT = 5  # one life in so many has a budget that makes it recompute
BUDGETS = ("70%", "90%", None)  # the first that a program can then be planned with
TIME_LIMIT = 0.05  # seconds
FOREIGN = ("torch", "numpy", "typing", "builtins", "collections")


@dataclass
class Twin:
    """One copy of a program."""

    step: Callable[..., Any]
    model: nn.Module
    optimizer: Any
    batch: tuple[Any, ...]
    modules: dict[str, ModuleType]  # whose globals are the program's, by name
    shared: bool  # whether the other twin has the same modules
    wrapped: bool  # whether the program's loop has a wrapped model, or would in the other twin
    handle: nn.Module  # what the program's loop has as its model: the model, or the wrapped one
    take: Callable[..., Any]  # one step, given a batch
    around: dict[str, Mode] = field(default_factory=dict)  # what each step is taken in, by name
    notes: list[Any] = field(default_factory=list)  # what hooks wrote down
    told: list[str] = field(default_factory=list)  # by lowtide

    def go(self) -> Any:
        """Take one step."""
        with ExitStack() as stack:
            for mode in self.around.values():
                stack.enter_context(mode())
            return self.take(*self.batch)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that lowtide is handed, or that the step has as an object's attribute."""
        found = self.optimizer if self.optimizer is not None else getattr(self.step, "__self__", None)
        found = getattr(found, "optimizer", found)
        return [one for one in (found if isinstance(found, tuple) else (found,)) if isinstance(one, Optimizer)]

    @property
    def own(self) -> dict[str, ModuleType]:
        """The modules that no other twin has."""
        return {} if self.shared else self.modules


def make(program: str, side: Side, folder: Path, *, seed: int = 0, door: Door = "fit") -> Twin:
    """A twin that trains in eager, equal each time; `folder` is where its source is put."""
    with _seeded(seed):
        if program in PROGRAMS:
            module = _load(program, side, folder)
            step, model, optimizer, batch = module.make()
            modules, shared = {"program": module}, False
        else:
            rule = OPTIMIZERS[seed % len(OPTIMIZERS)]
            step, model, optimizer, batch = models.build(f"{SMALL[program]},optimizer={rule}")
            modules, shared = _modules(step, model), True
    twin = Twin(step, model, optimizer, batch, modules, shared, door == "wrap", model, step)
    twin.take = lambda *given: step(model, optimizer, *given)
    return twin


def enter(twin: Twin, door: Door, *, call: Any, seed: int = 0) -> None:
    """Let a twin go through one of lowtide's doors; `call` are the model's own arguments in a step."""
    for budget in BUDGETS if seed % TIGHT == 0 else (None,):
        try:
            _enter(twin, door, call, budget)
        except BudgetError:
            if budget is None:
                raise
            continue
        return


def _enter(twin: Twin, door: Door, call: Any, budget: str | None) -> None:
    step, optimizer = twin.step, twin.optimizer
    if door == "fit":
        fitted = lowtide.fit(
            step,
            twin.model,
            optimizer,
            example=twin.batch,
            budget=budget,
            costs="roofline",
            time_limit=TIME_LIMIT,
            tell=twin.told.append,
        )
        twin.take = lambda *given: fitted(*given)
        return
    net = lowtide.wrap(
        twin.model, example=call, budget=budget, costs="roofline", time_limit=TIME_LIMIT, tell=twin.told.append
    )
    twin.handle = net
    twin.take = lambda *given: step(net, optimizer, *given)


def call_of(twin: Twin) -> Any:
    """The arguments of the model in one step, which is taken."""
    seen: list[Any] = []
    handle = twin.model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs or args), with_kwargs=True)
    try:
        twin.take(*twin.batch)
    finally:
        handle.remove()
    return seen[0]


def _load(program: str, side: Side, folder: Path) -> ModuleType:
    """A program as a module of its own, from a file outside of lowtide, as a user's would be."""
    path = folder / side / f"{program}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((FOLDER / f"{program}.py").read_text(encoding="utf-8"), encoding="utf-8")
    name = f"{program}_of_{side}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _modules(step: Callable[..., Any], model: nn.Module) -> dict[str, ModuleType]:
    """The modules that a built-in model is written in."""
    names = dict.fromkeys([step.__module__, *(type(part).__module__ for part in model.modules())])
    for name in list(names):
        for thing in vars(sys.modules[name]).values():
            where = getattr(thing, "__module__", None)
            if isinstance(where, str) and where.startswith("lowtide.models"):
                names[where] = None
    return {name: sys.modules[name] for name in names if name.partition(".")[0] not in FOREIGN}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    before = generators()
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    yield
    restore(before)


def generators() -> tuple[Any, ...]:
    """The states of the three generators."""
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def restore(states: tuple[Any, ...]) -> None:
    """Set the three generators."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
