"""What copies cost: fitted to a closed form, measured on a place whose speed is known, and kept."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide import models
from lowtide.costs import Lane, Transfer
from lowtide.device import CPU
from lowtide.device.disk import Disk
from lowtide.errors import UsageError
from lowtide.measure import lanes
from lowtide.measure.lanes import SIZES, corrected, fit, measure_lanes


@pytest.mark.parametrize(("latency", "rate"), [(1e-4, 1e9), (0.0, 5e8), (3e-3, 2e9)])
def test_the_fit_finds_latency_and_rate(latency: float, rate: float) -> None:
    found = fit([(size, latency + size / rate) for size in SIZES])
    assert found == pytest.approx((latency, rate), rel=1e-6, abs=1e-9)


def test_a_fit_is_never_below_zero() -> None:
    latency, rate = fit([(2**18, 1e-5), (2**26, 1.0)])
    assert latency == 0
    assert rate > 0


class Timed:
    """A copy that takes so long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wait(self) -> None:
        time.sleep(self.seconds)


class Throttled:
    """A place with known latencies and speeds."""

    staging = 0

    def __init__(self, nbytes: int, _: Any) -> None:
        self.nbytes = nbytes

    def grow(self, nbytes: int) -> None: ...

    def write(self, offset: int, source: torch.Tensor) -> Timed:
        return Timed(0.002 + len(source) / 2e9)

    def read(self, offset: int, target: torch.Tensor) -> Timed:
        return Timed(0.001 + len(target) / 4e9)

    def settle(self) -> None: ...

    def resident(self) -> int:
        return 0

    def close(self) -> None: ...


def test_a_place_of_known_speed_is_measured() -> None:
    device = dataclasses.replace(CPU, stores={"host": Throttled})
    seen: list[tuple[int, int]] = []
    out, into = measure_lanes(device, "host", cache=False, progress=lambda done, total: seen.append((done, total)))
    assert (out.place, out.direction, into.direction) == ("host", "out", "in")
    assert out.latency == pytest.approx(0.002, rel=0.6)  # sleeping takes a little longer, on a busy machine more
    assert out.rate == pytest.approx(2e9, rel=0.4)
    assert into.rate == pytest.approx(4e9, rel=0.4)
    assert seen[-1][0] == seen[-1][1] == len(seen)


def test_the_disk_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    opened: list[Disk] = []

    class Noted(Disk):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

    device = dataclasses.replace(CPU, stores={"disk": Noted})
    start = time.perf_counter()
    found = measure_lanes(device, "disk", folder=tmp_path)
    took = time.perf_counter() - start
    print(found, took)
    assert took < 30  # about 3 seconds where nobody else is at work
    assert all(lane.latency >= 0 and 1e6 < lane.rate < 1e11 and 0 <= lane.takes < 1 for lane in found)
    assert measure_lanes(device, "disk", folder=tmp_path) == found
    assert len(opened) == 1
    (kept,) = (tmp_path / "cache").glob("lanes-*.json")
    kept.write_text(kept.read_text().replace("disk", "host"))
    again = measure_lanes(device, "disk", folder=tmp_path)
    assert len(opened) == 2
    assert [lane.place for lane in again] == ["disk", "disk"]


def test_the_host_is_refused_on_the_cpu() -> None:
    with pytest.raises(UsageError, match="host"):
        measure_lanes(CPU, "host")


def test_copies_beside_compute_take_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = (100.0, 80.0, 100.0, 80.0, 20.0, 80.0, 100.0, 80.0, 100.0, 10.0)  # a machine with other work now and then
    speeds = iter((*loaded, *(100.0, 130.0) * 5))
    monkeypatch.setattr(lanes, "_speed", lambda *_: next(speeds))
    device = dataclasses.replace(CPU, stores={"host": Throttled})
    out, into = measure_lanes(device, "host", cache=False)
    assert out.takes == pytest.approx(0.2)
    assert into.takes == lanes.LEAST  # no copy is for nothing


def test_the_rate_is_that_beside_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that take 2 ms and go at 2 GB/s, where alone they were twice as quick."""
    monkeypatch.setattr(lanes, "_speed", lambda *_: 1.0)
    store, source = Throttled(2**24, None), torch.ones(2**24, dtype=torch.uint8)
    rate, takes = lanes._beside(CPU, store, "out", source, (0.002, 4e9))
    assert (rate, takes) == (pytest.approx(2e9), lanes.LEAST)


def test_steps_correct_the_rates_of_lanes() -> None:
    """64 MB go out in 20 ms each, and come back at 1 GB/s; a place that nothing was copied to stays as it was."""
    known = (Lane("disk", "out", 1e-3, 1e9, 0.2), Lane("disk", "in", 1e-3, 5e9, 0.1), Lane("host", "in", 0.0, 7e9))
    step = [
        Transfer("disk", "out", 64 * 10**6, 0.021),
        Transfer("disk", "out", 64 * 10**6, 0.021),
        Transfer("disk", "in", 128 * 10**6, 0.129),
    ]
    disturbed = [Transfer("disk", "in", 128 * 10**6, 3.0)]
    out, into, other = corrected(known, [step, step, disturbed])
    assert (out.rate, into.rate) == pytest.approx((3.2e9, 1e9))
    assert (out.latency, other) == (1e-3, known[2])
    assert (out.takes / out.rate, into.takes / into.rate) == pytest.approx((0.2 / 1e9, 0.1 / 5e9)), "of each byte"
    assert corrected(known, [[Transfer("disk", "out", 1000, 1.0)]]) == known  # too little to tell
    assert corrected(known, [[Transfer("disk", "out", 10**7, 1e-4)]])[0].rate <= 2e11  # quicker than its latency


def test_fitted_steps_correct_lanes_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned after them goes by what their copies took."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    wrong = (Lane("disk", "out", 0.0, 1e13, 0.02), Lane("disk", "in", 0.0, 1e13, 0.02))  # no disk is so quick
    lanes._write(lanes._path(CPU, "disk", None), wrong)
    step, model, optimizer, example = models.build("gpt:layers=4,width=256,context=64,batch=2,optimizer=adam")
    train = lowtide.fit(step, model, optimizer, example=example, budget="30MB", time_limit=0.3, offload="disk")
    assert train.program.copies
    for _ in range(4):
        train(*example)
    copied = [one for step in train._fits[0].runner.away.transfers for one in step]
    assert {one.direction for one in copied} == {"out", "in"}
    assert all(one.place == "disk" and one.nbytes > 0 and one.seconds > 0 for one in copied)
    assert all(lane.rate < 1e11 and lane.takes == lanes.LEAST for lane in measure_lanes(CPU, "disk"))
