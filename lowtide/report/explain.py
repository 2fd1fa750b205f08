"""Why a plan keeps a value, makes it again, offloads it, keeps it narrow or lets it go: its program in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from textwrap import fill
from typing import Any, Literal, get_args

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lowtide.costs import Direction
from lowtide.errors import UsageError
from lowtide.graph import Graph
from lowtide.report.bytes import show_bytes, show_seconds
from lowtide.report.show import WIDEST
from lowtide.report.story import Gap, Presence, Story

Verdict = Literal["an input", "not made", "a result", "made again", "offloaded", "kept narrow", "kept", "let go"]
NAMES = 4  # that a sentence lists
VALUES = 3  # that one name explains


def find_values(graph: Graph, name: str) -> list[int]:
    """The values that a person means by `%12`, the name of an op or a value, or the path of a module.

    The largest come first, and of those the ones that the backward reads.
    """
    digits = name.removeprefix("%")
    if digits.isdecimal():
        if int(digits) >= len(graph.values):
            raise UsageError(f"there is no value %{digits}.", hint=f"they are %0 to %{len(graph.values) - 1}.")
        return [int(digits)]
    ops = [op for op in graph.ops if op.name == name]
    ordinary = [op for op in graph.ops if op.phase == "forward" and not op.optional]
    ops = ops or [op for op in ordinary if op.module == name]
    ops = ops or [op for op in ordinary if op.module.startswith(f"{name}.")]
    found = [made for op in ops for made in op.makes]
    found = found or [number for number, value in enumerate(graph.values) if value.name == name]
    if not found:
        known = [*(op.name for op in graph.ops), *(op.module for op in graph.ops), *(v.name for v in graph.values)]
        near = get_close_matches(name, dict.fromkeys(known), n=3)
        modules = ", ".join(list(dict.fromkeys(op.module for op in ordinary if op.module))[:4])
        hint = f"write a number (%12), an op ({graph.ops[0].name}) or a module ({modules}, ...)."
        hint = f"did you mean {' or '.join(near)}?" if near else hint
        raise UsageError(f"the step has no value, op or module {name!r}.", hint=hint)
    saved = {value for op in graph.ordinary if graph.ops[op].phase == "backward" for value in graph.reads[op]}
    return sorted(dict.fromkeys(found), key=lambda value: (-graph.values[value].nbytes, value not in saved))


@dataclass(frozen=True)
class Explanation:
    """One value in one plan."""

    value: int
    title: str
    verdict: Verdict
    sentences: tuple[str, ...]
    bytes: int
    made: tuple[int, ...]  # runs
    read: tuple[int, ...]  # runs
    wait_runs: int  # the longest wait between two uses, whether the value is there then or not
    wait_seconds: float
    again: tuple[str, ...]  # the ops that make it after that wait, or would if it were not held
    again_seconds: float | None  # None: it waits for nothing, or cannot be made again
    dearest_seconds_a_byte: float | None  # of the recomputations in the plan; None: there are none
    at_peak: bool  # whether it is there when the most bytes are in use

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        yield Text(fill(self.title, width), style="bold")
        for sentence in (f"It is {self.verdict}.", *self.sentences):
            yield Text(fill(sentence, width, initial_indent="  ", subsequent_indent="    "))


def explain(story: Story, name: str) -> list[Explanation]:
    """What the program does with the values of this name, and at most three."""
    return [explain_value(story, value) for value in find_values(story.graph, name)[:VALUES]]


def explain_value(story: Story, value: int) -> Explanation:
    """What the program does with a value, and what else it could do."""
    presences = story.presences(value)
    verdict = _verdict(story, value, presences)
    gap = story.longest(presences) if verdict in ("kept", "made again") else None
    ops = None if gap is None else _to_have(story, value, presences, gap)
    at_peak = any(presence.start <= story.peak_run <= presence.end for presence in presences)
    sentences = [*_life(story, value, presences, verdict)]
    if gap is not None and ops is not None:
        sentences += _price(story, value, gap, ops)
        sentences += _reasons(story, value, gap, ops, at_peak)
    elif verdict not in ("an input", "not made"):
        sentences.append(_peak(story, at_peak))
    return Explanation(
        value=value,
        title=_title(story, value),
        verdict=verdict,
        sentences=tuple(sentences),
        bytes=story.costs.nbytes[value],
        made=tuple(
            presence.start for presence in presences if presence.start >= 0 and value in story.makes[presence.start]
        ),
        read=tuple(place for presence in presences for place in presence.reads),
        wait_runs=gap.end - gap.start if gap else 0,
        wait_seconds=story.starts[gap.end] - story.starts[gap.start] if gap else 0.0,
        again=tuple(story.graph.ops[op].name for op in ops) if isinstance(ops, list) else (),
        again_seconds=_seconds(story, ops) if isinstance(ops, list) else None,
        dearest_seconds_a_byte=story.dearest.price if story.dearest else None,
        at_peak=at_peak,
    )


def _verdict(story: Story, value: int, presences: Sequence[Presence]) -> Verdict:
    if value in story.inputs:
        return "an input"
    if not presences:
        return "not made"
    if story.stored(value) is not None:
        return "kept narrow"
    if story.trips(value):
        return "a result" if value in story.graph.required else "offloaded"
    if len(presences) > 1:
        return "made again"
    if presences[0].end == len(story.runs):
        return "a result"
    waits = presences[0].start < story.backward_start <= max(presences[0].reads, default=-1)
    return "kept" if waits else "let go"


def _to_have(story: Story, value: int, presences: Sequence[Presence], gap: Gap) -> list[int] | str:
    """The ops that make a value after a wait, or would if it were not held; or why that cannot be."""
    if gap.held:
        return story.closure(value, gap.end)
    made = max(presence.start for presence in presences if presence.start <= gap.end)
    return [story.runs[place].op for place in story.led_to(made)]


# ---------------------------------------------------------------------------------------------------------- sentences


def _title(story: Story, value: int) -> str:
    graph, item = story.graph, story.graph.values[value]
    shape = "" if item.kind == "scalar" else f" {item.dtype}[{'x'.join(map(str, item.shape))}]"
    title = f"%{value} {item.name}: {item.kind}{shape}, {show_bytes(story.costs.nbytes[value])}"
    if graph.maker[value] >= 0:
        op = graph.ops[graph.maker[value]]
        title += ", ".join(["", *filter(None, (op.target.removesuffix(".default"), op.module, op.source))])
    return title


def _life(story: Story, value: int, presences: Sequence[Presence], verdict: Verdict) -> Iterator[str]:
    """When it is made, read and gone."""
    graph = story.graph
    if verdict == "not made":
        optional = graph.maker[value] >= 0 and graph.ops[graph.maker[value]].optional
        yield "A plan may keep this narrow copy; this plan does not." if optional else "No run makes it."
        return
    reads = [place for presence in presences for place in presence.reads]
    readers = f"read by {_listed([_run(story, place) for place in reads])}" if reads else "read by no run"
    if verdict == "an input":
        yield from _input(story, value, readers)
        return
    yield f"It is made by {_run(story, presences[0].start)} and {readers}."
    if presences[0].over is not None:
        yield f"It takes the bytes of %{presences[0].over}, which ends there: making it adds none."
    if presences[-1].under is not None:
        yield f"%{presences[-1].under} takes its bytes at its end."
    for output in graph.outputs:
        if output.value == value:
            path = " ".join(map(str, output.path))
            yield f"It must be there when the step ends: {output.role}{f' {path}' if path else ''}."
    if verdict == "made again" and all(story.runs[place].again for place in presences[-1].reads):
        yield "When it is made again only repeated runs read it: it is on the way to others."
    if verdict == "let go":
        yield f"It is there for {_span(story, presences[0].start, presences[0].end)}; nothing asks for it after that."
    if verdict == "kept narrow":
        yield from _narrow(story, value)
    yield from _trips(story, value)


def _input(story: Story, value: int, readers: str) -> Iterator[str]:
    item = next(item for item in story.graph.inputs if item.value == value)
    if item.home == "device":
        yield f"It is there before the step begins, and {readers}."
    else:
        yield f"It lives on the {item.home} between steps, is copied to the device when it is needed, and {readers}."
    for place, run in enumerate(story.runs):
        for made, old in run.over:
            if old == value:
                yield f"{_run(story, place)} writes %{made} over it; what needs it must run before that."
    if item.persistent and item.home != "device":
        yield "Its bytes are no part of what persists on the device."
    elif item.persistent:
        yield "The caller holds it between steps, so its bytes are persistent, which no plan can lower."
    else:
        yield "The step uses it up: its bytes are free after that."


def _trips(story: Story, value: int) -> Iterator[str]:
    """Where it goes meanwhile, and what that takes."""
    lanes = {(lane.place, lane.direction): lane for lane in story.costs.lanes}
    nbytes, last = story.costs.nbytes[value], len(story.runs)
    for trip in story.trips(value):
        start = f"After {_run(story, trip.start)}" if trip.start >= 0 else "At the start"
        ways = [lanes[trip.place, way] for way in get_args(Direction) if (trip.place, way) in lanes]
        taken = " and ".join(show_seconds(lane.latency + nbytes / lane.rate) for lane in ways[: 1 + (trip.end < last)])
        beside = f" A copy takes {taken} beside the computation." if taken else ""
        if trip.end == last:
            yield f"{start} it is copied to the {trip.place}, where it is at the end.{beside}"
        else:
            yield (
                f"{start} it is copied to the {trip.place}, and back before {_run(story, trip.end)}: away for "
                f"{_span(story, max(trip.start, 0), trip.end)}.{beside}"
            )


def _narrow(story: Story, value: int) -> Iterator[str]:
    """What stands for it, and what that takes."""
    place, nbytes = story.stored(value), story.costs.nbytes
    assert place is not None
    keeper = story.makes[place][0]
    users = [number for number, reads in enumerate(story.reads) if keeper in reads]
    seconds = _seconds(story, [story.runs[number].op for number in (place, *users)])
    saved = nbytes[value] - nbytes[keeper]
    yield (
        f"From {_run(story, place)} on, %{keeper} stands for it, as {story.graph.values[keeper].dtype}: "
        f"{show_bytes(nbytes[keeper])} in place of {show_bytes(nbytes[value])}."
    )
    yield (
        f"{_listed([_run(story, number) for number in users])} read{'s' if len(users) == 1 else ''} that. Packing and "
        f"these runs take {show_seconds(seconds)}, {_price_of(seconds, saved)} saved."
    )


def _price(story: Story, value: int, gap: Gap, ops: list[int] | str) -> Iterator[str]:
    """What it takes to hold it, and what it takes to make it again."""
    nbytes = story.costs.nbytes[value]
    yield (
        f"To hold it from {_run(story, gap.start)} to {_run(story, gap.end)} {'takes' if gap.held else 'would take'} "
        f"{show_bytes(nbytes)} for {_span(story, gap.start, gap.end)}."
    )
    if isinstance(ops, str):
        yield f"It cannot be made again: {ops}."
        return
    seconds = _seconds(story, ops)
    names = [story.graph.ops[op].name for op in ops]
    yield (
        f"To make it again {'would take' if gap.held else 'takes'} {_many(len(ops), 'run')} ({_listed(names)}) and "
        f"{show_seconds(seconds)}: {_price_of(seconds, nbytes)}."
    )


def _reasons(story: Story, value: int, gap: Gap, ops: list[int] | str, at_peak: bool) -> Iterator[str]:
    """The price beside those that the plan pays elsewhere, and the room that there is."""
    nbytes, dearest = story.costs.nbytes[value], story.dearest
    if dearest is None:
        yield "This plan makes nothing again that is read for the first time later: no bytes are bought with time."
    elif gap.held and isinstance(ops, list):
        price = _seconds(story, ops) / nbytes if nbytes else float("inf")
        most = _price_of(dearest.seconds, dearest.nbytes)
        if price >= dearest.price:
            yield f"That is dearer than all that this plan makes again; of that, the dearest costs {most}."
        else:
            yield f"The dearest that this plan makes again costs {most}: the price alone is no reason to hold it."
            made = sum(story.costs.nbytes[v] for op in ops for v in story.graph.makes_of(op, again=True))
            yield (
                f"Made again, it and what leads to it would take up to {show_bytes(made)} before "
                f"{_run(story, gap.end)}, when {show_bytes(_left(story, gap.end, gap.end))} are left."
            )
    elif not gap.held:
        place = max(n for n, makes in enumerate(story.makes) if n <= gap.end and value in makes)
        group = next((item for item in story.recomputations if place in item.runs), None)
        if group is not None:
            most = f"; the most that this plan pays is {_price_of(dearest.seconds, dearest.nbytes)}"
            yield (
                f"With what hangs together with it, {_many(len(group.runs), 'repeated run')} take "
                f"{show_seconds(group.seconds)} and spare {show_bytes(group.nbytes)}: "
                f"{_price_of(group.seconds, group.nbytes)}"
                f"{', the most that this plan pays' if group == dearest else most}."
            )
    left = _left(story, gap.start, gap.end)
    fits = f": {show_bytes(nbytes)} more would not fit" if not gap.held and left < nbytes else ""
    yield f"At the fullest point in between, {show_bytes(left)} of the {_limit(story)[0]} are left{fits}."
    yield _peak(story, at_peak)


def _peak(story: Story, at_peak: bool) -> str:
    return f"When the most bytes are in use, in {_run(story, story.peak_run)}, it is {'' if at_peak else 'not '}there."


def _limit(story: Story) -> tuple[str, int]:
    """What the plan keeps within."""
    return ("peak", story.plan.peak) if story.plan.budget is None else ("budget", story.plan.budget)


def _left(story: Story, start: int, end: int) -> int:
    """The bytes that are never in use between two runs."""
    return max(0, _limit(story)[1] - max(story.live[start : end + 1]))


def _run(story: Story, place: int) -> str:
    """A run as a person finds it."""
    op = story.graph.ops[story.runs[place].op]
    again = "again, " if story.runs[place].again else ""
    return f"{op.name} ({again}{op.phase}, run {place + 1:,} at {show_seconds(story.starts[place])})"


def _span(story: Story, start: int, end: int) -> str:
    return f"{_many(end - start, 'run')} and {show_seconds(story.starts[end] - story.starts[start])}"


def _seconds(story: Story, ops: Sequence[int]) -> float:
    return sum(story.costs.seconds[op] for op in ops)


def _price_of(seconds: float, nbytes: int) -> str:
    return f"{show_seconds(seconds / nbytes * 2**20)} for each MiB" if nbytes else "for no bytes"


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`, or `a, b, c, d and 5 more`."""
    shown = list(names[:NAMES])
    if len(names) > NAMES:
        shown.append(f"{len(names) - NAMES} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
