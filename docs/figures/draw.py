"""Draws the figures of the docs from steps that lowtide plans: `python docs/figures/draw.py` writes them anew.

Costs are estimated (roofline), so every machine draws the same figures; tests/golden/test_docs.py compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from html import escape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lowtide
from lowtide import report
from lowtide.lifetimes import BEFORE, lifetimes
from lowtide.models import build
from lowtide.plan import curve, layout, pebble, planning, recompute
from lowtide.program import Run
from lowtide.report import curve as curves
from lowtide.rewrite import with_narrow

FOLDER = Path(__file__).parent
TARGET = "gpt:layers=4,width=64,context=64,vocabulary=512,batch=8"
BUDGET = 0.3  # of what eager adds to what persists
SEARCH = 0.2  # seconds' worth of search for each plan
WIDTH, HEIGHT = 760, 300  # pixels
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 44, 40  # margins, in pixels
EAGER, PLAN, PERSISTS, LINE = "#8c959f", "#0969da", "#d0d7de", "#cf222e"
INK, FAINT = "#24292f", "#57606a"
COLOURS = {"forward": "#0969da", "backward": "#bf8700", "update": "#1a7f37"}


class Picture:
    """An SVG file that grows shape by shape, with bytes upwards and seconds or bytes to the right."""

    def __init__(self, title: str, right: float, top: float, *, height: int = HEIGHT) -> None:
        self.right, self.top, self.height = right, top, height
        self.parts = [f'<text x="{LEFT}" y="20" fill="{INK}" font-weight="bold">{escape(title)}</text>']

    def x(self, value: float) -> float:
        """The column of a value, in pixels."""
        return LEFT + value / self.right * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """The row of a value, in pixels."""
        return self.height - BOTTOM - value / self.top * (self.height - TOP - BOTTOM)

    def area(self, points: Sequence[tuple[float, float]], colour: str, opacity: float = 1.0) -> None:
        """What is below steps that begin at these points."""
        corners = [(points[0][0], 0.0)]
        for (start, level), (end, _) in pairwise((*points, (points[-1][0], 0.0))):
            corners += [(start, level), (end, level)]
        corners.append((points[-1][0], 0.0))
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in corners)
        self.parts.append(f'<polygon points="{path}" fill="{colour}" fill-opacity="{opacity}"/>')

    def line(self, points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> None:
        """A line through points."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')

    def box(self, left: float, right: float, low: float, high: float, colour: str, name: str) -> None:
        """A box that says its name when it is pointed at."""
        x, y, width = self.x(left), self.y(high), max(self.x(right) - self.x(left), 0.6)
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{self.y(low) - y:.1f}" fill="{colour}" '
            f'fill-opacity="0.75" stroke="white" stroke-width="0.4"><title>{escape(name)}</title></rect>'
        )

    def words(self, x: float, y: float, text: str, colour: str = FAINT, anchor: str = "start") -> None:
        """Text at a place in pixels."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>')

    def save(self, name: str) -> None:
        """Write the file."""
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
        text = "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *self.parts, "</svg>", ""])
        (FOLDER / name).write_text(text, encoding="utf-8")


class Planned:
    """The step of the figures, its costs, and the plan within the budget."""

    def __init__(self) -> None:
        captured = lowtide.capture(*build(TARGET))
        self.graph = with_narrow(captured.graph)
        self.costs = lowtide.roofline(self.graph)
        self.persistent = self.costs.persistent(self.graph)
        self.eager = lowtide.as_eager(self.graph)
        self.eager_peak = lowtide.simulate(self.graph, self.costs, self.eager).peak
        self.budget = self.persistent + round(BUDGET * (self.eager_peak - self.persistent))
        self.plan = lowtide.plan(self.graph, self.costs, self.budget, time_limit=SEARCH)

    def over_time(self, program: lowtide.Program) -> tuple[list[tuple[float, float]], curves.Curve]:
        """The bytes in use from each instruction on."""
        live = lowtide.simulate(self.graph, self.costs, program).live
        found = curves.curve(self.graph, self.costs, program, live)
        return [*zip(found.starts, map(float, live), strict=True), (found.seconds, 0.0)], found


def draw_memory(step: Planned) -> None:
    """Memory over one step, in eager and by the plan."""
    eager, _ = step.over_time(step.eager)
    planned, found = step.over_time(step.plan.program)
    title = f"Memory over one training step of {TARGET.split(':')[0]}: eager, and planned within 30% of its own part"
    picture = Picture(title, planned[-1][0], step.eager_peak * 1.08)
    picture.area(eager, EAGER, 0.45)
    picture.area(planned, PLAN, 0.75)
    picture.area([(0.0, float(step.persistent)), (planned[-1][0], 0.0)], PERSISTS)
    picture.line([(0.0, step.budget), (planned[-1][0], step.budget)], LINE, "6 4")
    for level, name in ((step.persistent, "persists"), (step.budget, "budget"), (step.eager_peak, "eager")):
        picture.words(LEFT - 6, picture.y(level) + 4, report.show_bytes(level), anchor="end")
        picture.words(LEFT - 6, picture.y(level) - 9, name, anchor="end")
    at = max(eager, key=lambda point: point[1])
    picture.words(picture.x(at[0]) + 10, picture.y(at[1]) + 4, "eager PyTorch", INK)
    picture.words(picture.x(planned[-1][0]) - 6, picture.y(step.budget) - 6, "the plan, same bits", PLAN, "end")
    for phase in ("forward", "backward"):
        first = next(found.starts[stretch.start] for stretch in found.phases if stretch.phase == phase)
        picture.words(picture.x(first), picture.height - 22, phase)
    more = report.show_overhead(step.plan.overhead)
    picture.words(
        WIDTH - RIGHT, picture.height - 6, f"time; the plan takes {more} more by estimated costs", anchor="end"
    )
    picture.save("memory.svg")


def draw_arena(step: Planned) -> None:
    """Where each value is in the arena, over the step."""
    graph, program = step.graph, step.plan.program
    _, found = step.over_time(program)
    ends = (*found.starts, found.seconds)
    picture = Picture("The arena of the same plan: each box is a value, at its address", found.seconds, program.arena)
    for block in lifetimes(graph, program, step.costs.nbytes).blocks:
        if block.offset < 0 or block.first == BEFORE:
            continue
        instruction = program.instructions[block.first]
        assert isinstance(instruction, Run)
        op = graph.ops[instruction.op]
        again = ", made again" if instruction.again else ""
        names = " → ".join(graph.show(held.value) for held in block.holds)
        colour = LINE if instruction.again else COLOURS[op.phase]
        high = block.offset + block.nbytes
        picture.box(ends[block.first], ends[block.last], block.offset, high, colour, f"{names}{again}")
    picture.words(LEFT - 6, picture.y(program.arena) + 10, report.show_bytes(program.arena), anchor="end")
    picture.words(LEFT - 6, picture.y(0), "0 B", anchor="end")
    left = LEFT
    for name, colour in (*COLOURS.items(), ("made again", LINE)):
        picture.words(left, picture.height - 12, f"■ {name}", colour)
        left += 110
    picture.words(WIDTH - RIGHT, picture.height - 12, "time", anchor="end")
    picture.save("arena.svg")


def draw_frontier(step: Planned) -> None:
    """The least time for each peak, and what no plan can reach."""
    plans = curve(step.graph, step.costs, points=10, time_limit=SEARCH)
    worst = max(plan.overhead for plan in plans) * 1.08
    picture = Picture("What each budget costs: extra time against the peak", step.eager_peak * 1.02, worst)
    points = [(float(plan.peak), plan.overhead) for plan in plans]
    bounds = [(float(plan.budget or 0), plan.bound) for plan in plans]
    corner = [(bounds[0][0], 0.0), *bounds, (bounds[-1][0], 0.0)]
    path = " ".join(f"{picture.x(x):.1f},{picture.y(y):.1f}" for x, y in corner)
    picture.parts.append(f'<polygon points="{path}" fill="{LINE}" fill-opacity="0.12"/>')
    picture.line(points, PLAN)
    for x, y in points:
        picture.parts.append(f'<circle cx="{picture.x(x):.1f}" cy="{picture.y(y):.1f}" r="3" fill="{PLAN}"/>')
    eager = picture.x(step.eager_peak)
    picture.parts.append(f'<circle cx="{eager:.1f}" cy="{picture.y(0):.1f}" r="5" fill="{EAGER}"/>')
    picture.words(eager - 8, picture.y(0) - 10, "eager", INK, "end")
    picture.words(picture.x(points[1][0]) + 12, picture.y(points[1][1]) - 4, "plans that were found", PLAN)
    picture.words(picture.x(bounds[0][0]) + 24, picture.y(0) - 10, "no plan can be here", LINE)
    picture.words(LEFT - 6, picture.y(worst / 1.08) + 4, report.show_overhead(worst / 1.08), anchor="end")
    picture.words(LEFT - 6, picture.y(0) + 4, "0%", anchor="end")
    for level in (step.persistent, plans[0].peak, step.eager_peak):
        picture.words(picture.x(level), picture.height - 22, report.show_bytes(level), anchor="middle")
    picture.words(WIDTH - RIGHT, picture.height - 6, "peak of the whole step", anchor="end")
    picture.save("frontier.svg")


def draw_all() -> None:
    """Write every figure; the planner's clock stands still, so that a busy machine draws the same."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    with ExitStack() as stack:
        for room in (layout, pebble, planning, recompute):
            stack.enter_context(mock.patch.object(room, "time", clock))
        step = Planned()
        draw_memory(step)
        draw_arena(step)
        draw_frontier(step)


if __name__ == "__main__":
    draw_all()
