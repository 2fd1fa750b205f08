"""One life of a pair of twins: born equal, edited alike, and compared after each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from lowtide.bench.trust.compare import differences, state
from lowtide.bench.trust.draw import draw, every_edit
from lowtide.bench.trust.edits import Edit, Undo
from lowtide.bench.trust.order import Door, Order
from lowtide.bench.trust.twins import Twin, call_of, enter, generators, make, restore
from lowtide.errors import LowtideError, UsageError

Verdict = Literal["equal", "anew", "refused", "raises", "different", "crash"]

LENGTH = 10  # edits of a life at most
AGAIN, BACK = 0.15, 0.12  # how often the same place is edited again, and how often the last edit is undone
WRONG: tuple[Verdict, ...] = ("different", "crash")
START = Edit("start", "program", "as it is", lambda _: lambda: None)


@dataclass(frozen=True)
class Judgement:
    """How one step ended."""

    verdict: Verdict
    detail: str = ""
    halfway: bool = False  # a refused step that had changed something


@dataclass(frozen=True)
class Outcome:
    """What became of one edit."""

    program: str
    door: str
    life: int
    kind: str
    where: str
    how: str
    value: bool  # whether it is the edit of a value
    verdict: Verdict
    detail: str
    halfway: bool
    before: tuple[str, ...]  # the edits that were in force, oldest first
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)


Emit = Callable[[Outcome], None]
Begin = Callable[[Edit, Sequence[str]], None]


@dataclass
class Done:
    """An edit in force, and what undoes it in each twin."""

    edit: Edit
    undos: list[Undo]


class Refusal(Exception):
    """A program that is not let in at the door."""

    def __init__(self, judgement: Judgement) -> None:
        super().__init__(judgement.detail)
        self.judgement = judgement


class Life:
    """A pair of twins and the edits in force."""

    def __init__(self, program: str, door: Door, number: int, folder: Path) -> None:
        self.program, self.door, self.number, self._folder = program, door, number, folder
        self.done: list[Done] = []
        call = call_of(make(program, "again", folder, seed=number))
        self.left, self.right = (make(program, side, folder, seed=number, door=door) for side in ("eager", "lowtide"))
        try:
            enter(self.right, door, call=call, seed=number)
        except LowtideError as error:
            raise Refusal(Judgement("refused", _shown(error))) from error
        except Exception as error:
            raise Refusal(Judgement("crash", f"at the door: {_shown(error)}")) from error

    def edit(self, edit: Edit) -> Judgement | None:
        """Do an edit to both twins and judge a step; None where the edit itself is not possible."""
        before = generators()
        try:
            undos = [edit.apply(self.left)]
        except Exception:
            restore(before)
            return None
        if not edit.shared:
            restore(before)
            try:
                undos.append(edit.apply(self.right))
            except LowtideError as error:
                return Judgement("refused", _shown(error), halfway=True)
            except Exception as error:
                return Judgement("crash", f"the edit itself: {_shown(error)}")
        self.done.append(Done(edit, undos))
        return self.step()

    def undo(self) -> Judgement:
        """Put back what the last edit in force changed, and judge a step."""
        for undo in reversed(self.done.pop().undos):
            undo()
        return self.step()

    def end(self) -> None:
        """Undo what outlives the twins."""
        while self.done:
            last = self.done.pop()
            if last.edit.shared or last.edit.kind == "hook":
                for undo in reversed(last.undos):
                    undo()

    def step(self) -> Judgement:
        """One step of both twins, lowtide's first."""
        before, start, told = state(self.right, copied=True), generators(), len(self.right.told)
        found, error = _attempt(self.right)
        after = generators()
        restore(start)
        if isinstance(error, LowtideError):
            changed = differences(before, state(self.right))
            if self._eager_raises():
                return Judgement("raises", _shown(error), bool(changed))
            return Judgement("refused", _shown(error), bool(changed))
        expected, wanted = _attempt(self.left)
        ended = generators()
        if error is not None or wanted is not None:
            return _judge_errors(error, wanted)
        wrong = differences(state(self.left, expected), state(self.right, found))
        wrong += _strayed(ended, after)
        if wrong:
            return Judgement("different", f"{len(wrong)} differ: {'; '.join(wrong[:3])}")
        return Judgement("anew" if len(self.right.told) > told else "equal")

    def _eager_raises(self) -> bool:
        """Whether eager would raise as well: tried on a third twin, so that these two stay as they are."""
        start = generators()
        try:
            twin = make(self.program, "again", self._folder, seed=self.number, door=self.door)
            for one in self.done:
                _attempt(twin)
                if not one.edit.shared:
                    one.edit.apply(twin)
            return _attempt(twin)[1] is not None
        except Exception:
            return False
        finally:
            restore(start)


def _attempt(twin: Twin) -> tuple[Any, BaseException | None]:
    try:
        return twin.go(), None
    except Exception as error:
        return None, error


def _judge_errors(error: BaseException | None, wanted: BaseException | None) -> Judgement:
    if error is None:
        return Judgement("different", f"eager raises {_shown(wanted)}; lowtide goes on")
    if wanted is None:
        return Judgement("crash", f"only lowtide raises {_shown(error)}")
    if type(error) is not type(wanted):
        return Judgement("crash", f"{_shown(error)} in place of {_shown(wanted)}")
    return Judgement("raises", _shown(error))


def _shown(error: BaseException | None) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line[:160]}"


def _strayed(expected: tuple[Any, ...], found: tuple[Any, ...]) -> list[str]:
    """The generators that are not where they should be."""
    names = ("torch", "random", "numpy")
    pairs = zip(names, expected, found, strict=True)
    return [f"the generator of {name}" for name, one, other in pairs if _digest(one) != _digest(other)]


def _digest(generator: Any) -> str:
    if isinstance(generator, tuple):
        return str([part.tolist() if hasattr(part, "tolist") else part for part in generator])
    return str(generator.tolist())


def live(order: Order, number: int, folder: Path, *, edits: int, begin: Begin, emit: Emit) -> int | None:
    """Live one life of random edits; how many there were, or None if the program is not let in."""
    dice = random.Random(f"{order.program} {order.door} {number}")
    teller = _Teller(order, number, begin, emit)
    life = teller.birth(folder)
    if life is None:
        return None
    try:
        count, wrong = _edit(life, dice, teller, min(edits, LENGTH), order.kind)
    finally:
        life.end()
    if wrong is not None:
        emit(_shrunk(order, wrong, number, folder))
    return count


def _edit(
    life: Life, dice: random.Random, teller: _Teller, edits: int, kind: str | None
) -> tuple[int, tuple[Edit, Outcome] | None]:
    """Random edits until one ends the life; how many there were, and the last one if it ended wrong."""
    verdict: Verdict = "equal"
    last: Edit | None = None
    count = 0
    while count < edits:
        if life.done and (verdict == "refused" or dice.random() < BACK):
            edit = _back(life.done[-1].edit)
            texts = teller.about(edit, life.done)
            judgement: Judgement | None = life.undo()
        else:
            where = last.where if last is not None and dice.random() < AGAIN else None
            found = draw(life.left, dice, kind=kind, where=where)
            if found is None:
                break
            edit = found
            texts = teller.about(edit, life.done)
            judgement = life.edit(edit)
        if judgement is None:
            break  # the edit itself is not possible, and may be half-done
        outcome = teller.outcome(edit, judgement, texts)
        count, last, verdict = count + 1, edit, outcome.verdict
        if verdict in WRONG:
            return count, (edit, outcome)
        teller.emit(outcome)
        if verdict == "raises" or (verdict == "refused" and (outcome.halfway or edit.kind == "undo" or not life.done)):
            break  # the twins are no longer alike, or nothing can be undone
    return count, None


def _shrunk(order: Order, wrong: tuple[Edit, Outcome], number: int, folder: Path) -> Outcome:
    """The outcome, without the edits before it if it comes without them."""
    edit, outcome = wrong
    if not outcome.before or edit.kind == "undo":
        return outcome
    try:
        life = Life(order.program, order.door, number, folder)
    except Refusal:
        return outcome
    try:
        if life.step().verdict in WRONG:
            return outcome
        judgement = life.edit(edit)
    finally:
        life.end()
    if judgement is None or judgement.verdict != outcome.verdict:
        return outcome
    return replace(outcome, before=(), detail=judgement.detail)


def relive(order: Order, folder: Path, *, begin: Begin, emit: Emit) -> None:
    """Live one life with the edits that the order names."""
    teller = _Teller(order, order.first, begin, emit)
    life = teller.birth(folder)
    if life is None:
        return
    try:
        for text in order.texts:
            if text.startswith("undo ") and life.done:
                edit = _back(life.done[-1].edit)
                texts = teller.about(edit, life.done)
                judgement: Judgement | None = life.undo()
            else:
                edit = _named(text, life.left)
                texts = teller.about(edit, life.done)
                judgement = life.edit(edit)
            if judgement is None:
                raise UsageError(f"the edit {text!r} is not possible.")
            emit(teller.outcome(edit, judgement, texts))
    finally:
        life.end()


def _named(text: str, twin: Twin) -> Edit:
    for edit in every_edit(twin):
        if str(edit) == text:
            return edit
    raise UsageError(f"there is no edit {text!r} here.", hint="copy it from the report of a campaign.")


def _back(edit: Edit) -> Edit:
    """The edit that undoes another."""
    return Edit("undo", edit.where, f"not {edit.how}", edit.apply, edit.value)


class _Teller:
    """Says what is tried, and what came of it."""

    def __init__(self, order: Order, number: int, begin: Begin, emit: Emit) -> None:
        self._order, self._number, self._begin, self.emit = order, number, begin, emit
        self._since = monotonic()

    def birth(self, folder: Path) -> Life | None:
        """A pair of twins after their first step, or None where that is not possible."""
        self.about(START, ())
        try:
            life = Life(self._order.program, self._order.door, self._number, folder)
        except Refusal as refusal:
            self.emit(self.outcome(START, refusal.judgement, ()))
            return None
        judgement = life.step()
        self.emit(self.outcome(START, judgement, ()))
        return life if judgement.verdict in ("equal", "anew") else None

    def about(self, edit: Edit, done: Sequence[Done]) -> tuple[str, ...]:
        """Say that an edit comes, given those in force."""
        before = tuple(str(one.edit) for one in done)
        self._begin(edit, before)
        self._since = monotonic()
        return before

    def outcome(self, edit: Edit, judgement: Judgement, before: tuple[str, ...]) -> Outcome:
        """What came of an edit."""
        order = self._order
        what = (edit.kind, edit.where, edit.how, edit.value)
        how = (judgement.verdict, judgement.detail, judgement.halfway)
        return Outcome(order.program, order.door, self._number, *what, *how, before, monotonic() - self._since)
