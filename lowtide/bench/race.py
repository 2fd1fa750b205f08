"""A race: each contestant in a process of its own, a turn of each in every round, and only one computes at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lowtide.bench.peers import Contestant
from lowtide.budget import free_memory
from lowtide.errors import LowtideError

PATIENCE = 900.0  # seconds for one answer; compilers take minutes for the first step
TURN = 0.1  # seconds that a turn takes at least, by several steps where one is quicker
MOST = 100  # steps of one turn
SETTLE = 0.02  # seconds between turns: the threads of a process spin a little before they sleep
PROCESS = 700 * 2**20  # bytes of a process beside its step: Python, torch and what capture or compilers leave behind
ROOM = 0.8  # of the memory that is available, for all processes of a race

Answer = dict[str, Any]
Say = Callable[[str], None]


class Retired(LowtideError):
    """A contestant that can't go on, and why."""

    def __init__(self, message: str, *, infeasible: bool = False) -> None:
        super().__init__(message)
        self.infeasible = infeasible  # because nothing fits its budget


class Racer:
    """The process of a contestant, started and prepared; `told` is what it answered to that."""

    def __init__(self, target: str, contestant: Contestant, *, time_limit: float, patience: float = PATIENCE) -> None:
        self.contestant = contestant
        self.patience = patience
        self._talk = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        with _interrupts_held() as release:
            self._process = _start(target, contestant, time_limit, self._talk)
            try:
                release()
                self.told = self._answer()
            except BaseException:
                self.end()
                raise

    def ask(self, command: str) -> Answer:
        """Send a command and wait for its answer; raises `Retired` where there is none."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """End the process and those that it started."""
        if self._process.returncode is not None:
            return
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._talk):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a command that was never read
                    pipe.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def _answer(self) -> Answer:
        assert self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._kill()

        guard = threading.Timer(self.patience, give_up)
        guard.start()
        try:
            line = self._process.stdout.readline()
        finally:
            guard.cancel()
        if late.is_set():
            raise Retired(f"no answer within {self.patience:,.0f} s")
        if not line:
            raise Retired(self._last_words())
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise Retired(answer["error"], infeasible=answer["infeasible"])
        return answer

    def _last_words(self) -> str:
        """Why a process ended that did not say so; it is left for `end`, which ends those that it started as well."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        how = "the process ended with code" if ended.si_code == os.CLD_EXITED else "the process was killed by signal"
        ending = f"{how} {ended.si_status}"
        self._talk.seek(0)
        words = self._talk.read().decode(errors="replace").strip().splitlines()
        return f"{ending}: {words[-1]}" if words else ending


@contextlib.contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold back interrupts until what is given is called: a process that is about to be born must be known first."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    caught: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))

    def release() -> None:
        signal.signal(signal.SIGINT, usual)
        if caught:
            raise KeyboardInterrupt

    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, usual)


def _start(target: str, contestant: Contestant, time_limit: float, talk: Any) -> subprocess.Popen[str]:
    """Start the process in a session of its own, so that an interrupt reaches only the one that ends it."""
    amount = contestant.budget if contestant.fraction is None else contestant.fraction
    command = [sys.executable, "-m", "lowtide.bench.racer", target, contestant.way, str(amount), str(time_limit)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=talk,
        text=True,
        env={**os.environ, **contestant.environment, "PYTHONPATH": path},
        start_new_session=True,
    )


@contextlib.contextmanager
def started(target: str, contestant: Contestant, *, time_limit: float) -> Iterator[Racer]:
    """A prepared contestant, whose process ends with the `with`."""
    racer = Racer(target, contestant, time_limit=time_limit)
    try:
        yield racer
    finally:
        racer.end()


def run_rounds(
    racers: Sequence[Racer], *, rounds: int, steps: int, say: Say
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The seconds of a step in each round by contestant, and why those that fell out did; the first must not.

    Each round begins with another contestant. One more round goes ahead, which no one counts.
    """
    seconds: dict[str, list[float]] = {racer.contestant.name: [] for racer in racers}
    reasons: dict[str, str] = {}
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "a round to warm up")
        first = number % len(racers)
        for racer in (*racers[first:], *racers[:first]):
            name = racer.contestant.name
            if name in reasons:
                continue
            time.sleep(SETTLE)
            try:
                answer = racer.ask(f"step {steps}")
            except Retired as error:
                if racer is racers[0]:
                    raise
                reasons[name] = error.message
                continue
            if number:
                seconds[name].append(answer["seconds"])
    return {name: found for name, found in seconds.items() if name not in reasons}, reasons


def steps_of_a_turn(seconds: float) -> int:
    """How many steps one turn has, where a step takes so long."""
    return max(1, min(MOST, math.ceil(TURN / seconds)))


def groups(contestants: Sequence[Contestant], *, eager_peak: int, room: int) -> list[list[Contestant]]:
    """The contestants that can race at once beside eager, in their order; one that is too large is tried alone."""

    def need(contestant: Contestant) -> int:
        return PROCESS + (eager_peak if contestant.budget is None else contestant.budget)

    found: list[list[Contestant]] = [[]]
    left = room - PROCESS - eager_peak
    for contestant in contestants:
        if need(contestant) > left and found[-1]:
            found.append([])
            left = room - PROCESS - eager_peak
        found[-1].append(contestant)
        left -= need(contestant)
    return found


def room() -> int:
    """The bytes that all processes of a race may take."""
    return int(ROOM * free_memory())


def survey(target: str) -> Answer:
    """What a process of its own finds out about the budgets of a target."""
    with started(target, Contestant("survey", "survey"), time_limit=0.0) as racer:
        return racer.told
