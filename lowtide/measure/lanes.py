"""Device -> Lanes: what copies to another place and back cost here, past any cache, and what they take from compute."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import torch

from lowtide import device as devices
from lowtide import files
from lowtide.costs import LANE, Costs, Direction, Lane, Transfer
from lowtide.device import Device, Flight, Store, disk, refuse_place
from lowtide.device.mounts import file_system
from lowtide.files.cache import own_folder, read_own, trim
from lowtide.files.shapes import Misshapen, many, record, text
from lowtide.graph import Graph, Place

SIZES = tuple(2**power for power in (18, 20, 22, 24, 26))  # bytes: 256 KiB to 64 MiB
ROUNDS = 5  # of each size, fewer where they take long
SPENT = 0.2  # seconds after which a size is not tried again
BESIDE = 0.15  # seconds of computation without copies, and with
TURNS = 5  # of these
LEAST = 0.02  # of compute's speed: no copy is for nothing, whatever a busy machine makes of it
PIECE = 2**22  # bytes of a copy that runs beside computation
MOST = 0.95  # of compute's speed: no copy takes all of it
ENOUGH = 2**22  # bytes of a step's copies, from which they say how quick the place is
KEPT = record({"lanes": many(LANE), "sha256": text})


def measure_lanes(
    device: Device,
    place: Place,
    *,
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    cache: bool = True,
) -> tuple[Lane, ...]:
    """The lanes between a device and a place, out and in; for the disk, that of this folder. About 5 seconds."""
    refuse_place(device, place)
    path = _path(device, place, folder)
    found = _read(path) if cache else None
    if found is None:
        found = _measure(device, place, folder, progress)
        if cache:
            _write(path, found)
    return found


def with_lanes(
    graph: Graph,
    costs: Costs,
    *,
    folder: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Costs:
    """The costs with those of copies to the other places that the graph names; as they are where it names none.

    Estimated costs have estimated lanes already.
    """
    places = {row.place for row in graph.alternatives} | {item.home for item in graph.ends}
    device = devices.of(graph.device)
    there = [place for place in device.stores if place in places]
    if not there:
        return costs
    lanes = costs.lanes
    if costs.origin == "measured":
        lanes = tuple(
            lane for place in there for lane in measure_lanes(device, place, folder=folder, progress=progress)
        )
    return replace(costs, lanes=lanes, staging=device.staging)


def corrected(lanes: Sequence[Lane], steps: Sequence[Sequence[Transfer]]) -> tuple[Lane, ...]:
    """The lanes with the bytes a second that copies had in these steps; those that copied little stay as they are.

    What a byte takes from compute is the same at any rate, so that a slower copy takes a smaller part of it for longer.
    """
    rates = [_rate(lane, steps) or lane.rate for lane in lanes]
    return tuple(
        replace(lane, rate=rate, takes=lane.takes if rate == lane.rate else _part(lane.takes * rate / lane.rate))
        for lane, rate in zip(lanes, rates, strict=True)
    )


def correct_lanes(
    device: Device,
    place: Place,
    steps: Sequence[Sequence[Transfer]],
    *,
    folder: str | os.PathLike[str] | None = None,
) -> None:
    """Keep what copies took in real steps, for all that is planned from now on; only where lanes were measured."""
    path = _path(device, place, folder)
    known = _read(path)
    if known is not None and (found := corrected(known, steps)) != known:
        _write(path, found)


def _rate(lane: Lane, steps: Sequence[Sequence[Transfer]]) -> float | None:
    """Bytes a second in steps, the median of them; None where they copied too little to tell."""
    rates = []
    for step in steps:
        mine = [one for one in step if (one.place, one.direction) == (lane.place, lane.direction)]
        nbytes, seconds = sum(one.nbytes for one in mine), sum(one.seconds for one in mine)
        if nbytes >= ENOUGH and seconds > 0:
            # Of copies that are all short the latency is as likely wrong as the rate.
            rates.append(nbytes / max(seconds / 2, seconds - len(mine) * lane.latency))
    return median(rates) if rates else None


def fit(samples: list[tuple[int, float]]) -> tuple[float, float]:
    """Latency and bytes a second that come closest to (bytes, seconds), in parts of each; neither is below zero."""
    nbytes, seconds = (np.array(column, float) for column in zip(*samples, strict=True))
    rows = np.stack((1 / seconds, nbytes / seconds), axis=1)
    latency, slope = np.linalg.lstsq(rows, np.ones(len(samples)), rcond=None)[0]
    if latency < 0 or slope <= 0:
        latency, slope = 0.0, float(np.median(seconds / nbytes))
    return float(latency), float(1 / slope)


def _measure(
    device: Device, place: Place, folder: str | os.PathLike[str] | None, progress: Callable[[int, int], None] | None
) -> tuple[Lane, ...]:
    sizes = [size for size in SIZES if size <= device.free_bytes() // 4] or [SIZES[0]]
    store = device.stores[place](sizes[-1], folder)
    source = torch.ones(sizes[-1], dtype=torch.uint8)
    total, done = 2 * (len(sizes) + 1), 0

    def tell() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    try:
        store.write(0, source).wait()  # what is written for the first time takes longer
        found = []
        for direction in get_args(Direction):
            samples = []
            for size in sizes:
                samples.append((size, _seconds(device, _copy(store, direction, source[:size]))))
                tell()
            latency, rate = fit(samples)
            rate, takes = _beside(device, store, direction, source, (latency, rate))
            found.append(Lane(place, direction, latency, rate, takes))
            tell()
    finally:
        store.settle()
        store.close()
    return tuple(found)


def _copy(store: Store, direction: Direction, tensor: torch.Tensor, offset: int = 0) -> Callable[[], Flight]:
    return lambda: store.write(offset, tensor) if direction == "out" else store.read(offset, tensor)


def _seconds(device: Device, start: Callable[[], Flight]) -> float:
    """The median time of a copy."""
    times: list[float] = []
    while len(times) < ROUNDS and (len(times) < 2 or sum(times) < SPENT):
        device.synchronise()
        before = device.clock()
        start().wait()
        times.append(device.clock() - before)
    return median(times)


def _beside(
    device: Device, store: Store, direction: Direction, tensor: torch.Tensor, alone: tuple[float, float]
) -> tuple[float, float]:
    """Bytes a second beside computation, and the part of compute's speed that is gone meanwhile.

    Both belong together: beside compute a copy is slower than alone, by half where it is the processor that copies.
    Computed are a product and an op on each element; larger products and convolutions lose about as much (0062).
    """
    work, (latency, usual) = _work(), alone
    pieces = [(start, tensor[start : start + PIECE]) for start in range(0, len(tensor), PIECE)]  # not from the caches
    copies = max(2, round(1.5 * BESIDE * usual / len(pieces[0][1])))
    parts, rates = [], []
    for _ in range(TURNS):  # by turns: what else the machine does passes over both
        undisturbed = _speed(device, work, BESIDE)
        chosen = [pieces[number % len(pieces)] for number in range(copies)]
        flights = [_copy(store, direction, piece, start)() for start, piece in chosen]
        disturbed = _speed(device, work, BESIDE)
        # A copy that is not done yet has no seconds.
        done = [(len(piece), one.seconds) for one, (_, piece) in zip(flights, chosen, strict=True) if one.seconds]
        store.settle()  # what is still to come is not needed
        del flights
        parts.append(1 - disturbed / undisturbed)
        if seconds := sum(taken for _, taken in done):
            rates.append(sum(nbytes for nbytes, _ in done) / max(seconds / 2, seconds - len(done) * latency))
    return median(rates) if rates else usual, _part(median(parts))


def _part(takes: float) -> float:
    return min(MOST, max(LEAST, takes))


def _work() -> Callable[[], None]:
    matrix, many_elements, result = torch.ones(192, 192), torch.ones(2**18), torch.empty(2**18)
    product = torch.empty(192, 192)

    def work() -> None:
        torch.mm(matrix, matrix, out=product)
        torch.mul(many_elements, 0.5, out=result)

    return work


def _speed(device: Device, work: Callable[[], None], seconds: float) -> float:
    """Runs a second."""
    work()
    device.synchronise()
    start, runs = device.clock(), 0
    while device.clock() - start < seconds:
        work()
        device.synchronise()
        runs += 1
    return runs / (device.clock() - start)


# ----------------------------------------------------------------------------------------------------------- the cache


def _path(device: Device, place: Place, folder: str | os.PathLike[str] | None) -> Path:
    """The file of what was measured: of this machine and, for the disk, of the one that the folder is on."""
    where: list[Any] = [place]
    if place == "disk":
        chosen = disk.choose_folder(folder)
        where += [os.stat(chosen).st_dev, file_system(chosen)]
    how = [Path(file).read_text(encoding="utf-8") for file in (__file__, disk.__file__)]
    return own_folder() / f"lanes-{files.digest([device.name, device.model(), *where, *how])[:16]}.json"


def _read(path: Path) -> tuple[Lane, ...] | None:
    """What was measured before, if it is as it was written."""
    content = read_own(path)
    try:
        data: Any = files.parse(content.decode("utf-8")) if content is not None else None
        found: Any = KEPT(data)
    except (ValueError, Misshapen):
        return None
    if files.digest([path.name, data["lanes"]]) != found["sha256"]:
        return None
    return tuple(found["lanes"])


def _write(path: Path, lanes: tuple[Lane, ...]) -> None:
    """Keep it; a folder that cannot be written is no failure."""
    rows = [[lane.place, lane.direction, lane.latency, lane.rate, lane.takes] for lane in lanes]
    content = {"lanes": rows, "sha256": files.digest([path.name, rows])}
    try:
        files.write_atomically(path, json.dumps(content, allow_nan=False), mode=0o600)
        trim(path.parent, spare=path)
    except (OSError, ValueError):
        return
