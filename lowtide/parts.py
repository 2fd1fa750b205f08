"""A model that can't be captured as a whole: its largest parts that can be, each planned by itself, in one budget.

A part waits between its forward and its backward while others run. What they need then counts at its handover, as if
that had temporaries of so many bytes: so each plan keeps little while it waits, and has room where it runs. Budgets in
bytes are divided once all parts of a forward are known: until then each holds the least that it can.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from lowtide import allocator, kernels
from lowtide.budget import LEAST, read_budget
from lowtide.capture.door import MODULES
from lowtide.captured import Captured
from lowtide.costs import Costs
from lowtide.errors import BudgetError, CaptureError, LowtideWarning
from lowtide.fit import Fit, Fitted, Manner, Request
from lowtide.graph import Graph
from lowtide.guards import Place
from lowtide.lifetimes import lifetimes
from lowtide.plan import as_eager
from lowtide.program import Program, Run
from lowtide.report import show_bytes
from lowtide.simulate import simulate

WORTH = 0.05  # of what eager keeps: for a smaller part of it nothing is planned again
LOOKS = 4  # forwards in which parts are looked for that were not called before
NAMED = 8  # parts that a message names


class Idle(CaptureError):
    """A part for which a plan could do nothing."""


class Attached(Protocol):
    """What stands before the forward of the model, or of a part of it."""

    calls: Counter[str]  # how many went which way

    @property
    def fitted(self) -> Fitted | None:
        """What runs it; None: it has not been planned."""

    @property
    def outstanding(self) -> tuple[int, int]:
        """How many of its forwards wait for their backward, and the bytes that they need."""

    @property
    def held(self) -> int:
        """The bytes that these hold now."""

    def begin_again(self, request: Request) -> None:
        """Be planned anew at the next call."""

    def end(self) -> None:
        """Put everything back."""


@dataclass(frozen=True)
class Share:
    """What one part does to memory."""

    persistent: int  # bytes: its parameters, buffers and inputs
    held: int  # bytes that it keeps from its forward to its backward
    eager: int  # bytes that eager keeps of it
    works: int  # bytes that it needs beside what it keeps, where it runs


class Piece:
    """One part of the model, among the others."""

    def __init__(self, parts: Parts, name: str, module: nn.Module, budget: int | str | None) -> None:
        self.parts, self.name, self.module = parts, name, module
        self.budget = budget  # as it is asked for now
        self.attached: Attached  # what stands before its forward
        self.called = False
        self.least: Share | None = None  # by its first plan; None: it has none yet
        self.waiting: int | None = None  # bytes that others need while it waits; None: as many as eager adds for it

    def runs(self) -> None:
        """It runs now."""
        self.parts.note(self)

    def beyond(self, error: BudgetError) -> BudgetError:
        """What is said where a batch needs more than the share of this part."""
        if not self.parts.settled or error.least is None or error.budget is None:
            return error
        more = error.least - error.budget
        return BudgetError(
            f"{self.name} needs {more:,} bytes more for this batch than its share of the budget, which was divided for "
            "the first one.",
            hint=f"give a budget of {more:,} bytes more, or let the largest batch come first.",
            least=error.least,
            budget=error.budget,
        )

    def manner(self, usual: Manner) -> Manner:
        """How it is captured, and what others need while it waits."""

        def capture(request: Request, batch: tuple[Any, ...], numbers: tuple[Place, ...]) -> Captured:
            captured = usual.capture(request, batch, numbers)
            if self.least is None:
                _refuse_idle(captured.graph)
            return captured

        def priced(graph: Graph, costs: Costs) -> Costs:
            return _waiting(graph, costs, self.waiting) if self.parts.together else costs

        return replace(usual, capture=capture, priced=priced, known=self.parts.plans.setdefault(self.budget, []))


class Parts:
    """The parts of one model. They stand before the forwards of its modules from the first call that needs them on."""

    def __init__(self, request: Request, attach: Callable[[Request, Piece], Attached]) -> None:
        self.pieces: dict[int, Piece] = {}  # by the module
        self.plain: dict[str, str] = {}  # the modules that run as ever, and why
        self._request, self._attach = request, attach
        self._names = {id(module): name for name, module in request.model.named_modules()}
        self.plans: dict[int | str | None, list[Fit]] = {}  # for parts that are alike, by what they may hold
        self._looks = LOOKS
        self._new = False  # a part has run for the first time
        self._shared: frozenset[int] = frozenset()  # the parts among which the budget is divided
        self._beside = 0  # bytes that the rest of a forward keeps, metered
        self._said = 0  # bytes that forwards held together when it was said that they are too many

    @property
    def planned(self) -> dict[str, Fitted]:
        """What runs each part that goes by a plan."""
        found = ((piece.name, piece.attached.fitted) for piece in self.pieces.values())
        return {name: fitted for name, fitted in found if fitted is not None and name not in self.plain}

    @property
    def settled(self) -> bool:
        """Whether some part has been planned, and the budget has room for all of them."""
        return bool(self._shared)

    def open(self, model: nn.Module, error: CaptureError) -> None:
        """Let a module run as ever, and its parts by plans from their next calls on."""
        self.plain[self._names[id(model)]] = error.message.splitlines()[0]
        if isinstance(error, Idle) or any(cls.__name__ in MODULES for cls in type(model).__mro__):
            return
        budget = LEAST if self.together else self._request.budget
        for child in _below(model):
            if id(child) in self._names and id(child) not in self.pieces and next(child.parameters(), None) is not None:
                piece = Piece(self, self._names[id(child)], child, budget)
                request = replace(self._request, step=child, model=child, budget=budget, beside=0)
                piece.attached = self._attach(request, piece)
                self.pieces[id(child)] = piece

    def note(self, piece: Piece) -> None:
        """A part runs now, maybe for the first time."""
        if not piece.called or piece.name in self.plain:
            piece.called = self._new = True
            self.plain.pop(piece.name, None)  # it was missed, and comes later

    @property
    def outstanding(self) -> tuple[int, int]:
        """How many forwards wait for their backward, by the part of which there are most; the bytes that all hold."""
        found = [piece.attached for piece in self.pieces.values()]
        return max((one.outstanding[0] for one in found), default=0), sum(one.held for one in found)

    def run(self, forward: Callable[[], Any]) -> Any:
        """One forward of the whole model."""
        result = self._run(forward)
        if self.together and self._request.budget != LEAST:
            self._count()
        return result

    def _run(self, forward: Callable[[], Any]) -> Any:
        if not self._looks:
            result = forward()
            if self._new:
                self._settle()
            return result
        self._looks -= 1
        with allocator.meter() if self.together and allocator.available() else nullcontext() as meter:
            result = forward()
            self._beside = 0 if meter is None else meter.current
        while missed := [piece for piece in self.pieces.values() if not piece.called and piece.name not in self.plain]:
            for piece in missed:
                piece.called = True
                if piece.attached.calls:
                    self.plain[piece.name] = f"it was called {' and '.join(piece.attached.calls)} only."
                else:
                    self.open(piece.module, CaptureError("its own forward was not called."))
        self._settle()
        return result

    def end(self) -> None:
        """Let every part be as it was."""
        for piece in self.pieces.values():
            piece.attached.end()
        self.pieces.clear()
        self.plans.clear()

    @property
    def together(self) -> bool:
        """Whether parts are to keep little while they wait: where the budget is of all together."""
        budget = self._request.budget
        return budget is not None and not str(budget).strip().endswith("%")

    def _settle(self) -> None:
        """After a forward with new parts: say which there are, and divide the budget among them."""
        self._new = False
        planned = {key: piece for key, piece in self.pieces.items() if piece.name in self.planned}
        if not planned:
            why = self.plain[""]
            raise CaptureError(
                f"{why} And no part of the model can be planned by itself.",
                hint="move what can't be captured out of the forward, or give the whole step to lowtide.fit.",
            )
        if planned.keys() == self._shared:
            return
        for piece in planned.values():
            if piece.least is None and piece.attached.fitted is not None:
                piece.least = _share(piece.attached.fitted)
        shares = {key: piece.least for key, piece in planned.items() if piece.least is not None}
        needed = self._needed(shares) if self.together else None
        self._tell(needed)
        if needed is not None and self._request.budget != LEAST:
            self._divide(planned, shares, needed)
        self._shared = frozenset(planned)

    def _count(self) -> None:
        """Say what forwards hold together that wait for their backward, where that is more than the budget."""
        count, nbytes = self.outstanding
        works = max((piece.least.works for piece in self.pieces.values() if piece.least is not None), default=0)
        if self._persistent + nbytes + works > self._budget and nbytes > 2 * self._said:
            self._said = nbytes
            warnings.warn(
                f"{count} forwards of the model wait for their backward and hold {nbytes:,} bytes together, beside "
                f"{self._persistent:,} that persist; the budget of {self._budget:,} counts one forward at a time.\n"
                "hint: call backward() after each forward, or call the model under torch.no_grad() where none comes.",
                LowtideWarning,
                stacklevel=6,
            )

    def _needed(self, shares: dict[int, Share]) -> int:
        """The bytes of the whole model as its parts are planned."""
        held = sum(one.held for one in shares.values())
        return self._persistent + max(self._beside, held) + max(one.works for one in shares.values())

    @property
    def _persistent(self) -> int:
        """The bytes of parameters, buffers and gradients."""
        model = self._request.model
        gradients = [one for one in model.parameters() if one.requires_grad]
        return sum(int(one.nbytes) for one in (*gradients, *model.parameters(), *model.buffers()))

    @property
    def _budget(self) -> int:
        """The bytes that there are for the model, without its optimizer."""
        assert self._request.budget is not None
        return read_budget(self._request.budget, persistent=0, eager_peak=0) - self._request.beside

    def _divide(self, planned: dict[int, Piece], shares: dict[int, Share], needed: int) -> None:
        """Let each part keep more in proportion to what eager keeps of it, as far as the budget has room."""
        budget = self._budget
        if needed > budget:
            raise BudgetError(
                f"the parts of the model that can be planned need {needed:,} bytes with what the rest keeps, "
                f"{needed - budget:,} more than the budget.",
                hint=f"budget={needed + self._request.beside} is the least that is known for them.",
                least=needed + self._request.beside,
                budget=budget,
            )
        wanted = sum(max(0, one.eager - one.held) for one in shares.values())
        part = min(1.0, (budget - needed) / max(1, wanted))
        if part * wanted <= WORTH * sum(one.eager for one in shares.values()):
            return
        self.plans.clear()
        works = max(one.works for one in shares.values())
        for key, piece in planned.items():
            one = shares[key]
            keeps = one.held + int(part * max(0, one.eager - one.held))
            piece.waiting = works
            model, most = piece.module, one.persistent + keeps + works
            piece.attached.begin_again(replace(self._request, step=model, model=model, budget=most, beside=0))

    def _tell(self, needed: int | None) -> None:
        """Say which parts are planned and which are not."""
        lines = [f"the model can't be captured as a whole: {self.plain['']}"]
        lines.append(f"{len(self.planned)} parts go by plans of their own: {', '.join(_some(self.planned))}")
        lines += _some([f"{name} runs as ever: {why}" for name, why in self.plain.items() if name])
        if needed is None:
            lines.append("the budget is of each part by itself; what the rest of a forward makes is beside it.")
        else:
            need = f"together they need {show_bytes(needed)} at least, with what the rest of a forward keeps"
            lines.append(f"{need}; what it makes for a moment is beside the budget.")
        if self._request.tell is None:
            warnings.warn("\n".join(lines), LowtideWarning, stacklevel=8)
            return
        for line in lines:
            self._request.tell(line)

    def report(self) -> list[str]:
        """Every part and how it runs, for a person."""
        rows = [f"{name}: by a plan of {show_bytes(fitted.plan.peak)}" for name, fitted in self.planned.items()]
        return [*rows, *(f"{name or 'the whole model'}: as ever, for {why}" for name, why in self.plain.items())]


def _some(lines: Collection[str]) -> list[str]:
    """The first of many."""
    shown = list(lines)[:NAMED]
    return shown if len(lines) == len(shown) else [*shown, f"and {len(lines) - NAMED} more (attached.report())"]


def _below(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in this one, and those in containers that are never called themselves."""
    for child in module.children():
        if getattr(type(child), "forward", None) is nn.Module.forward:
            yield from _below(child)
        else:
            yield child


def _refuse_idle(graph: Graph) -> None:
    """Raise where eager keeps next to nothing from forward to backward that is not handed over anyway."""
    op, nbytes = _handover(graph), [value.nbytes for value in graph.values]
    handed = {graph.values[value].storage: nbytes[value] for value in graph.reads_of(op, again=False)}
    if 2 * _kept(graph, as_eager(graph), nbytes, but=handed) < sum(handed.values()):
        raise Idle("it keeps next to nothing between forward and backward, so there is nothing to plan.")


def _handover(graph: Graph) -> int:
    """The op at which the caller's code goes on."""
    return next(number for number, op in enumerate(graph.ops) if op.target == kernels.HANDOVER)


def _kept(graph: Graph, program: Program, nbytes: Sequence[int], *, but: Iterable[int] = ()) -> int:
    """The bytes beside the inputs that a program holds at the handover, of other storages than these."""
    op = _handover(graph)
    at = next(number for number, one in enumerate(program.instructions) if isinstance(one, Run) and one.op == op)
    given = {*but, *(graph.values[item.value].storage for item in graph.inputs)}
    there = lifetimes(graph, program, nbytes).at(at - 1)
    found = {graph.values[value].storage: nbytes[value] for value in there}
    return sum(size for storage, size in found.items() if storage not in given)


def _share(fitted: Fitted) -> Share:
    """What a planned part does to memory."""
    graph, costs = fitted.captured.graph, fitted.costs
    persistent = costs.persistent(graph)
    held = _kept(graph, fitted.program, costs.nbytes)
    eager = _kept(graph, as_eager(graph), costs.nbytes)
    return Share(persistent, held, max(held, eager), max(0, fitted.plan.peak - persistent - held))


def _waiting(graph: Graph, costs: Costs, nbytes: int | None) -> Costs:
    """The costs with what others need while the step waits at its handover; None: as much as eager adds for it."""
    if nbytes is None:
        nbytes = simulate(graph, costs, as_eager(graph)).peak - costs.persistent(graph)
    op = _handover(graph)
    in_arena = list(costs.arena_temporaries)
    in_heap = list(costs.heap_temporaries or costs.arena_temporaries)
    in_arena[op] = in_heap[op] = max(in_arena[op], nbytes)
    return replace(costs, arena_temporaries=tuple(in_arena), heap_temporaries=tuple(in_heap))
