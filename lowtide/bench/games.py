"""Chains and pebble games whose best plans are known: published integers, closed forms, and what the planner finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.costs import Costs, declared
from lowtide.errors import BudgetError
from lowtide.game import binary_tree, caterpillar_needs
from lowtide.graph import Graph, Input, Op, Output, Phase, Read, Value
from lowtide.plan import TIME_LIMIT, plan
from lowtide.plan.classics.chain import Action, Backward, hidden, internal, revolve, revolve_forwards
from lowtide.plan.pebble import pebbles
from lowtide.plan.problem import Ints, problem
from lowtide.program import Run

STEPS = 1000
PUBLISHED = {10: (4636, 3640), 50: (2948, 1950), 100: (2898, 1900)}  # slots -> forwards, keeping states or internals
SHORT = {8: (345, 248)}  # the same for a hundred steps
CHAINS = 2 * (len(PUBLISHED) + len(SHORT))
LIMIT = 1.02  # of the published forwards, for the planner that knows nothing of chains
UNIT = 10**6  # bytes of a node
NODES, ROOM = 100, 20 * 10**6  # the tanh chain, and the bytes that it must do with


@dataclass(frozen=True)
class Chain:
    """A chain of equal steps within so many slots."""

    steps: int
    slots: int
    keeps: str  # "states" or "internals"
    published: int  # forwards
    by_table: int  # forwards of Gruslys' dynamic program
    by_revolve: int | None  # forwards of Revolve's closed form, and of its schedule
    planned: int | None  # forwards that the general planner runs, within the bytes of the chain's own schedule
    seconds: float | None  # of planning

    @property
    def ok(self) -> bool:
        """Whether the tables give the published integers, and the general planner is near them."""
        exact = self.by_table == self.published and self.by_revolve in (None, self.published)
        return exact and self.planned is not None and self.planned <= LIMIT * self.published


def chains(*, time_limit: float = TIME_LIMIT) -> Iterator[Chain]:
    """Every published case, one after another."""
    for steps, table in ((100, SHORT), (STEPS, PUBLISHED)):
        for slots, (states, internals) in table.items():
            yield _states(steps, slots, states, time_limit)
            yield _internals(steps, slots, internals, time_limit)


def _states(steps: int, slots: int, published: int, time_limit: float) -> Chain:
    """Slots hold states: the backward of a step first runs its forward, which is one op here."""
    graph, costs = training_chain(steps - 1)
    schedule = revolve(steps, slots)
    sequence = _sequence(schedule, steps - 1, ahead="internals")
    planned, seconds = _forwards(graph, costs, problem(graph, costs).peak(sequence), time_limit)
    return Chain(
        steps,
        slots,
        "states",
        published,
        int(hidden(steps, slots).forwards(slots)),
        revolve_forwards(steps, slots),
        None if planned is None else planned + steps,
        seconds,
    )


def _internals(steps: int, slots: int, published: int, time_limit: float) -> Chain:
    """Slots hold the internals of steps, each of which is one value here."""
    graph, costs = training_chain(steps)
    table = internal(steps, slots)
    schedule = table.schedule(slots)
    assert schedule is not None
    sequence = _sequence(schedule, steps, ahead=None)
    planned, seconds = _forwards(graph, costs, problem(graph, costs).peak(sequence), time_limit)
    return Chain(steps, slots, "internals", published, int(table.forwards(slots)), None, planned, seconds)


def _sequence(schedule: Sequence[Action], length: int, *, ahead: str | None) -> Ints:
    """A schedule as ops of `training_chain(length)`; forwards that keep `ahead` are part of the backward there."""
    last = max(action.step for action in schedule)
    ops = []
    for action in schedule:
        if isinstance(action, Backward):
            backward = length + last - action.step
            ops += (
                [backward] if backward < 2 * length else []
            )  # the first step's reads only the input, and is not there
        elif action.keep != ahead:
            ops.append(action.step)
    return np.array(ops, np.int64)


def _forwards(graph: Graph, costs: Costs, budget: int, time_limit: float) -> tuple[int | None, float | None]:
    """The forwards of the general planner's plan, and its seconds; None where it has no plan."""
    try:
        found = plan(graph, costs, budget, time_limit=time_limit)
    except BudgetError:
        return None, None
    runs = [graph.ops[item.op] for item in found.program.instructions if isinstance(item, Run)]
    return sum(op.phase == "forward" for op in runs), found.planning_seconds


def training_chain(length: int, *, nbytes: int = 64) -> tuple[Graph, Costs]:
    """A chain of `length` equal ops and its backward, which reads the chain's values in reverse."""
    values = [Value("x", 0, "batch", 0)]
    ops: list[Op] = []

    def add(name: str, reads: tuple[int, ...], phase: Phase) -> int:
        values.append(Value(name, nbytes, "activation", len(values), shape=(nbytes,), stride=(1,)))
        ops.append(Op(name, "made.up.op", tuple(map(Read, reads)), outputs=(len(values) - 1,), phase=phase))
        return len(values) - 1

    states = [0]
    for step in range(length):
        states.append(add(f"forward_{step}", (states[-1],), "forward"))
    gradient = add("loss", (states[-1],), "backward")
    for step in reversed(range(1, length)):
        gradient = add(f"backward_{step}", (gradient, states[step]), "backward")
    graph = Graph(tuple(ops), tuple(values), (Input(0, (0,)),), (Output(gradient, "result", ()),))
    return graph, declared(graph)


@dataclass(frozen=True)
class Game:
    """A question with a known answer."""

    name: str
    answer: float  # at most, for the chain; exactly, for the pebbles
    found: float | None
    exactly: bool

    @property
    def ok(self) -> bool:
        """Whether it was found."""
        return self.found is not None and (self.found == self.answer if self.exactly else self.found <= self.answer)


def games(*, time_limit: float = TIME_LIMIT) -> Iterator[Game]:
    """Every pebble game, and the chain of Chen et al."""
    for length in (10, 100, 1000):
        yield Game(f"pebbles of a caterpillar of {length:,}", 3, pebbles(caterpillar_needs(length)), True)
    for height in (4, 7, 10):
        yield Game(f"pebbles of a binary tree of height {height}", height + 2, pebbles(binary_tree(height)), True)
    graph, costs = training_chain(NODES, nbytes=UNIT)
    forwards, _ = _forwards(graph, costs, ROOM, time_limit)
    yield Game(f"forwards of a chain of {NODES} tanh of 1 MB within 20 MB", 2 * NODES, forwards, False)
