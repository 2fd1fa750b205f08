"""Graph -> Costs: each distinct op once, as a step would find it, in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from lowtide import child, device, files, kernels
from lowtide.allocator import scratch
from lowtide.costs import Costs
from lowtide.device import Device
from lowtide.graph import Graph, Op
from lowtide.kernels import collectives, forms, own, sparse
from lowtide.limits import Limits
from lowtide.measure.book import Book, kept_open
from lowtide.measure.lanes import correct_lanes, corrected, measure_lanes, with_lanes
from lowtide.measure.limits import limits_of, probes, work
from lowtide.measure.roofline import roofline
from lowtide.measure.specimen import read_order, specimen
from lowtide.measure.surroundings import surroundings
from lowtide.private import usual_arithmetic

__all__ = [
    "correct",
    "correct_lanes",
    "corrected",
    "differing",
    "kept_open",
    "limits",
    "measure",
    "measure_lanes",
    "roofline",
    "with_lanes",
    "work",
]

PATIENCE = 300  # seconds after which a call is given up
KILLS = 2  # processes in a row that are killed before their first answer; then there is no memory for one
NO_MEMORY = "the system has no memory for the process that measures"
PROBE, GLANCE = 2**18, 0.05  # numbers that all threads work on, and for how many seconds, to see if they have cores
TELLING = ("ATEN_CPU_", "DNNL_", "MKL_", "ONEDNN_")  # variables that tell libraries which kernels to choose
RIGHT = 0.01  # of a step: prices that are off by less are not corrected

_again: set[tuple[Path | None, str]] = set()  # disturbed prices that this process has asked again: once is enough


def measure(
    graph: Graph,
    *,
    progress: Callable[[int, int], None] | None = None,
    cache: bool = True,
    corrected: bool = True,
    hurried: bool = False,
) -> Costs:
    """Measure every distinct op of the graph; what cannot be measured is estimated, and noted.

    Where steps have corrected a price (see `correct`), that is the one, unless it is not wanted. `hurried`, for a graph
    that may not be planned at all, runs ops that are new just once; their seconds are measured when they are asked for.
    """
    keys, specimens = _specimens(graph)
    where = device.of(graph.device)
    metered = where.missing() is None
    book = _book(graph) if cache else None
    answers = {key: book.answers[key] for key in specimens if book is not None and key in book.answers}
    path = None if book is None else book.path
    disturbed = [key for key, answer in answers.items() if answer["disturbed"] and (path, key) not in _again]
    again = set(disturbed) if disturbed and not hurried and _is_calm(where, graph.device) else set()
    once = set() if hurried else {key for key, answer in answers.items() if answer.get("hurried", False)}
    missing = [key for key in specimens if key not in answers or key in again or key in once]
    _again.update((path, key) for key in again)
    asked = _ask([{**specimens[key], "hurried": True} if hurried else specimens[key] for key in missing])
    for done, (key, answer) in enumerate(zip(missing, asked, strict=True)):
        known = {name: told for name, told in answers.get(key, {}).items() if name != "hurried"}
        answers[key] = {**known, **answer}  # what steps say of it stays
        if progress is not None:
            progress(done + 1, len(missing))
    if book is not None and missing:
        book.add({key: answers[key] for key in missing if "error" not in answers[key]})
    costs = _costs(graph, where, keys, answers, corrected=corrected)
    if metered:
        return costs
    note = "temporaries inside ops are not in these costs: lowtide's meter could not be built here."
    return dataclasses.replace(costs, notes=(note, *costs.notes))


def differing(graph: Graph) -> tuple[int, ...]:
    """The ops of ours that stand for torch's and have other bits than torch's here; nothing else is measured."""
    keys, specimens = _specimens(graph)
    ours = [index for index, op in enumerate(graph.ops) if op.target in kernels.TRIED]
    if not usual_arithmetic():
        return tuple(ours)
    book = _book(graph)
    wanted = dict.fromkeys(key for index in ours if (key := keys[index]) is not None)
    answers = {key: book.answers[key] for key in wanted if key in book.answers}
    missing = [key for key in wanted if key not in answers]
    answers |= dict(zip(missing, _ask([specimens[key] for key in missing]), strict=True))
    book.add({key: answers[key] for key in missing if "error" not in answers[key]})
    return tuple(index for index in ours if not answers[str(keys[index])].get("exact", False))


def limits(graph: Graph, *, progress: Callable[[int, int], None] | None = None) -> Limits:
    """Measure what this machine can do at most of what a step is made of."""
    needed = {item.dtype for item in work(graph) if item.operations}
    probed = probes(graph.device, sorted(needed))
    return limits_of(probed, measure(probed, progress=progress, corrected=False))


def correct(graph: Graph, costs: Costs, seconds: Mapping[int, float]) -> None:
    """Keep what ops took in real steps, for all that is measured from now on; `costs` are the prices that they had."""
    total = sum(seconds.values())
    if abs(sum(costs.seconds[op] for op in seconds) - total) <= RIGHT * total:
        return
    keys, _ = _specimens(graph)
    seen: defaultdict[str, list[float]] = defaultdict(list)
    for op, taken in seconds.items():
        if (key := keys[op]) is not None:
            seen[key].append(taken)
    book = _book(graph)
    known = {key: book.answers[key] for key in seen if key in book.answers}
    book.add({key: {**answer, "in_step": fmean(seen[key])} for key, answer in known.items()})


def _is_calm(where: Device, name: str) -> bool:
    """Whether other processes leave this one its cores just now."""
    numbers = torch.zeros(PROBE, device=name)
    begun, delay = where.clock(), where.delay()
    while where.clock() - begun < GLANCE:
        numbers.add_(1)
        where.synchronise()
    return where.calm(GLANCE, where.delay() - delay)


def _specimens(graph: Graph) -> tuple[list[str | None], dict[str, dict[str, Any]]]:
    """For each op the key of its specimen, None where there is nothing to measure; and the specimens."""
    specimens: dict[str, dict[str, Any]] = {}
    keys: list[str | None] = []
    around = surroundings(graph)
    for index, op in enumerate(graph.ops):
        if op.target.startswith("operator.") or op.target in kernels.UNMEASURED:
            keys.append(None)
            continue
        cut = {**specimen(graph, index), **around[index]}
        made_of = kernels.made_of(op.target)
        key = files.digest(cut if made_of is None else [cut, made_of])
        specimens[key] = cut
        keys.append(key)
    return keys, specimens


def _book(graph: Graph) -> Book:
    where = device.of(graph.device)
    told = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(TELLING)]
    return Book([where.model(), graph.device, where.missing() is None, *told, *_how()])


def _costs(
    graph: Graph, where: Device, keys: list[str | None], answers: dict[str, dict[str, Any]], *, corrected: bool
) -> Costs:
    """Put the answers where their ops and values are."""
    estimate = roofline(graph)
    seconds, nbytes = list(estimate.seconds), list(estimate.nbytes)
    in_arena, in_heap = [0] * len(graph.ops), [0] * len(graph.ops)
    in_place: list[tuple[tuple[int, int], ...]] = [()] * len(graph.ops)
    failures: dict[str, str] = {}
    others: list[int] = []
    for index, (op, key) in enumerate(zip(graph.ops, keys, strict=True)):
        if key is None:
            if op.target not in collectives.COLLECTIVES:
                seconds[index] = 1e-7
            in_arena[index] = in_heap[index] = _held_inside(graph, op, where.alignment)
            continue
        answer = answers[key]
        if op.target in kernels.TRIED and not answer.get("exact", False):
            others.append(index)
        if "error" in answer:
            failures[op.target] = answer["error"]
            continue
        in_step = answer.get("in_step") if corrected else None
        seconds[index] = answer["seconds"] if in_step is None else in_step
        apart = not graph.outliving.isdisjoint(graph.makes[index])  # what the caller keeps is not in the arena
        in_arena[index] = answer["apart_temporaries" if apart else "arena_temporaries"]
        in_heap[index] = answer["heap_temporaries"]
        for value, size in zip(op.outputs, answer["outputs"], strict=True):
            if value is not None and size is not None and graph.maker[value] == index:
                nbytes[value] = size
        order = read_order(op)
        in_place[index] = tuple(
            (made, order[place]) for output, place in answer["in_place"] if (made := op.outputs[output]) is not None
        )
    for op in graph.ops:
        for new, old in op.updates:
            nbytes[new] = nbytes[old]
    notes = tuple(f"{target} could not be measured and is estimated: {why}" for target, why in failures.items())
    return dataclasses.replace(
        estimate,
        seconds=tuple(seconds),
        arena_temporaries=tuple(in_arena),
        heap_temporaries=tuple(in_heap),
        nbytes=tuple(nbytes),
        in_place=tuple(in_place),
        origin="measured",
        machine=where.model(),
        alignment=where.alignment,
        code=sum(answers[key].get("code", 0) for key in {key for key in keys if key is not None}),
        notes=notes,
        differing=tuple(others) if usual_arithmetic() else None,  # for the process that measures is told nothing
    )


def _held_inside(graph: Graph, op: Op, alignment: int) -> int:
    """The bytes that an op holds inside that can't be measured alone: of a broadcast, buffers of one type at a time."""
    if op.target != collectives.BROADCAST:
        return 0
    sizes: defaultdict[str, int] = defaultdict(int)
    for read in op.arguments():
        sizes[graph.values[read.value].dtype] += graph.values[read.value].nbytes
    return max(-(-size // alignment) * alignment for size in sizes.values())


def _ask(specimens: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The costs of each specimen, from a process that is started again when a call kills it.

    One that the system kills again and again before its first answer has no memory here: nothing more is asked.
    """
    process: subprocess.Popen[str] | None = None
    killed = answered = 0  # processes in a row that the system killed at once; answers of this one
    try:
        for cut in specimens:
            if killed >= KILLS:
                yield {"error": NO_MEMORY}
                continue
            if process is None:
                process, answered = _start(), 0
            answer = _answer(process, cut)
            if answer is None:
                code = _end(process)
                process, killed = None, killed + 1 if code == -signal.SIGKILL and not answered else 0
                answer = {"error": NO_MEMORY if killed else f"the process ended with code {code}"}
            else:
                answered, killed = answered + 1, 0
            yield answer
    finally:
        if process is not None:
            _end(process)


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "lowtide.measure.worker", str(torch.get_num_threads())]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return child.start(command, env=environment, **pipes)


def _answer(process: subprocess.Popen[str], cut: dict[str, Any]) -> dict[str, Any] | None:
    """One question and its answer; None where the process died of it."""
    assert process.stdin is not None
    assert process.stdout is not None
    guard = threading.Timer(PATIENCE, process.kill)
    guard.start()
    try:
        process.stdin.write(json.dumps(cut) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer
    except (BrokenPipeError, ValueError):
        process.kill()
        return None
    finally:
        guard.cancel()


def _end(process: subprocess.Popen[str]) -> int:
    """End the process, if it still runs, and let go of its pipes; its exit code."""
    process.kill()
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # a question that was never read
                pipe.close()
    return code


def _how() -> list[str]:
    """What the answers depend on besides the machine: the code that measures, and our own kernels."""
    here = [Path(__file__).with_name(name) for name in ("bench_call.py", "specimen.py", "surroundings.py", "trial.py")]
    sources = (own.SOURCE, forms.SOURCE, sparse.SOURCE)
    modules = (scratch, own, forms, sparse)
    return [
        path.read_text(encoding="utf-8")
        for path in (*here, *(Path(str(module.__file__)) for module in modules), *sources)
    ]
