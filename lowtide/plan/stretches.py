"""Stretches: the step as a chain in which several segments in a row may run as one, with menus of what to keep of them.

The nearest classic (Rockmate, in `classics`) cuts a step once. Long segments have the better menus: a minimum cut
through twelve residual blocks keeps few of the states between them. Short ones fit into what is left where the backward
begins. Here the dynamic program chooses how many segments run as one, stretch by stretch. Deep nets repeat themselves:
stretches of identical segments are measured once, however often they occur.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from lowtide.plan.classics.find import Find, solve
from lowtide.plan.classics.measured import Menu, Meter
from lowtide.plan.classics.rotor import Chain, Way
from lowtide.plan.classics.segments import Menus, Segments, Values, segments
from lowtide.plan.problem import Ints, Problem
from lowtide.plan.settings import STRETCH_CLASSES, STRETCH_LENGTHS, STRETCH_OPS_A_SECOND, STRETCH_SEGMENTS


def stretches(problem: Problem, order: Ints, *, seconds: float) -> Find:
    """Sequences for any budget, from a chain that is measured with so many seconds' worth of work; none of other steps.

    A chain is one whose segments repeat each other.
    """
    chain = segments(problem, order, most=STRETCH_SEGMENTS)
    classes, _ = classed(Meter(chain), max(STRETCH_LENGTHS))
    if len(set(classes)) > STRETCH_CLASSES * len(classes):
        return lambda budget: order if budget is None else None
    sizes, menus = joined_chain(chain, int(STRETCH_OPS_A_SECOND * seconds))
    return lambda budget: order if budget is None else solve(problem, budget, chain, sizes, menus)


def joined_chain(chain: Segments, work: int) -> tuple[Chain, Menus]:
    """The chain with the ways of its stretches, and what each way keeps; so many ops of stretches are measured.

    Single segments always are; then come the stretches with the fewest ops for each place where they occur.
    """
    meter, count = Meter(chain), len(chain.parts)
    classes, tables = classed(meter, max(STRETCH_LENGTHS))
    places: dict[tuple[int, ...], list[int]] = {}  # stretch, by its classes -> where it begins
    for length in STRETCH_LENGTHS:
        for first in range(count - length + 1):
            places.setdefault(tuple(classes[first : first + length]), []).append(first)
    ops = [len(part.forward) + len(part.backward) for part in chain.parts]
    cost = {row: sum(ops[firsts[0] : firsts[0] + len(row)]) for row, firsts in places.items()}
    found: list[Menu] = [[] for _ in range(count)]
    for row in sorted(places, key=lambda row: (len(row) > 1, cost[row] / len(places[row]), len(row), places[row][0])):
        work -= cost[row]
        if len(row) > 1 and work < 0:
            break
        for first, menu in zip(places[row], _menus(meter, tables, places[row], len(row)), strict=True):
            found[first] += menu
    return meter.chain(found)


def classed(meter: Meter, far: int) -> tuple[list[int], list[list[int]]]:
    """For each segment its class, and its values in an order of their own.

    Two of a class are identical, and what they share with others they share with those at the same distance; with those
    that are far away it does not matter with which.
    """
    numbers: dict[Hashable, int] = {}
    seen: dict[int, tuple[int, int]] = {}  # value -> the segment where it is first met, its place there
    classes, tables = [], []
    for number in range(len(meter.parts)):
        signature, values = meter.signature(number)
        shared: list[Hashable] = []
        for index, value in enumerate(values):
            if meter.problem.nbytes[value]:
                at, place = seen.setdefault(value, (number, index))
                ends = min(far, number - meter.last.get(value, number))
                shared.append((number - at, place, ends) if number - at < far else ends)
        classes.append(numbers.setdefault((signature, tuple(shared)), len(numbers)))
        tables.append(values)
    return classes, tables


def _menus(meter: Meter, tables: list[list[int]], firsts: list[int], length: int) -> list[Menu]:
    """The menu of a stretch for each place where it occurs, measured at the first of them."""
    begin = firsts[0]
    place: dict[int, tuple[int, int]] = {}
    for step in range(length):
        for index, value in enumerate(tables[begin + step]):
            place.setdefault(value, (step, index))
    menu: list[tuple[Way, list[tuple[int, int]]]] = [
        (replace(way, stages=length), [place[value] for value in keep])
        for way, keep in meter.menu(begin, meter.segments.joined(begin, length))
    ]
    return [
        [(way, Values(tables[first + step][index] for step, index in keep)) for way, keep in menu] for first in firsts
    ]
