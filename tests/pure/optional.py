"""Random graphs with optional ops, and programs that run them."""

from __future__ import annotations

import dataclasses
from random import Random

from graphs import Case, lay_out, make_costs, make_graph, make_program

from lowtide.costs import Costs
from lowtide.graph import Alternative, Graph, Op, Read, Value
from lowtide.program import Copy, Free, Instruction, Program, Run


def make_optional_case(size: int, seed: int) -> Case:
    """A random step, to whose graph and program packs and unpacks of random values were added."""
    random = Random(seed)
    graph = make_graph(random, size)
    costs = make_costs(random, graph)
    rows = list(make_program(random, graph, costs, wild=random.choice((0.0, 0.3))).instructions)
    away = {row.value for row in rows if isinstance(row, Copy)}
    made = [value for value, maker in enumerate(graph.maker) if maker >= 0 and value not in away | graph.required]
    for value in random.sample(made, min(len(made), 2)):
        graph, costs = _with_pack(random, graph, costs, value)
        pack, narrow = len(graph.ops) - 2, len(graph.values) - 1
        lasting = graph.values[value].storage in graph.lasting_storages
        if not lasting and (idle := _idle(graph, rows, value)):
            start = random.choice(idle)
            end = next(number for number in range(start, len(rows) + 1) if number not in idle)
            rows[end:end] = [Run(pack + 1), Free(narrow)]
            rows[start:start] = [Run(pack), Free(value)]
    program = Program(graph.fingerprint, tuple(rows))
    if random.random() < 0.5:
        program = lay_out(random, graph, costs, program)
    return Case(size, seed, graph, costs, program)


def _with_pack(random: Random, graph: Graph, costs: Costs, value: int) -> tuple[Graph, Costs]:
    """One value more, and the two optional ops that make it of this one and this one of it."""
    narrow = len(graph.values)
    small = Value(f"narrow{narrow}", random.choice((0, 1, 64)), "activation", 1000 + narrow)
    pack = Op("pack", "made.up.pack", (Read(value),), outputs=(narrow,), optional=True)
    unpack = Op("unpack", "made.up.unpack", (Read(narrow),), outputs=(value,), optional=True)
    row = Alternative(value, narrow, store=len(graph.ops), restore=(len(graph.ops) + 1,))
    graph = dataclasses.replace(
        graph,
        ops=(*graph.ops, pack, unpack),
        values=(*graph.values, small),
        alternatives=(*graph.alternatives, row),
    )
    costs = dataclasses.replace(
        costs,
        graph=graph.fingerprint,
        seconds=(*costs.seconds, 0.1, 0.1),
        arena_temporaries=(*costs.arena_temporaries, random.choice((0, 64)), 0),
        nbytes=(*costs.nbytes, small.nbytes),
        in_place=(*costs.in_place, (), ()),
    )
    return graph, costs


def _idle(graph: Graph, rows: list[Instruction], value: int) -> list[int]:
    """The rows before which the value is there, and which have nothing to do with it."""
    there, found = False, []
    for number, row in enumerate(rows):
        if isinstance(row, Run):
            reads, makes = graph.reads_of(row.op, again=row.again), graph.makes_of(row.op, again=row.again)
            named = value in reads or value in makes
            after = (there or value in makes) and all(value != read for _, read in row.over)
        else:
            named, after = row.value == value, there and row != Free(value)
        if there and not named:
            found.append(number)
        there = after
    return found
