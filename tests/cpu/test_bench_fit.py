"""The race of `lowtide bench fit`: its processes, its peers, its bars and its verdicts."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from racing import Here
from typer.testing import CliRunner

from lowtide import meter
from lowtide.bench.fit import LEAST, Cell, judge, limit_of, missed_bars
from lowtide.bench.peers import EAGER, PEERS, Contestant, blocks, checkpoint_blocks, peers
from lowtide.bench.race import PROCESS, Racer, Retired, groups, run_rounds, started, steps_of_a_turn
from lowtide.bench.racer import digest
from lowtide.cli import app
from lowtide.errors import LowtideError, UsageError
from lowtide.models import SMALL, build
from lowtide.peaks import storage_bytes

MLP = SMALL["mlp"]
QUICK = 0.2  # seconds of planning
BLOCKS = {"resnet": 4, "wrn-28-2": 6, "unet": 5, "gpt": 2, "bert": 2, "deep-rnn": 4, "dynamicconv": 4}
BLOCKS |= {"hf-gpt2": 2, "hf-bert": 2, "lstm": 0, "gru": 0}
CHAIN = "tanh-chain:length=64,width=64,batch=64"


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that wait for each other are slow where others compute, too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------------- one process


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have computed."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def test_processes_from_one_seed_agree_and_rest_between_turns() -> None:
    malloc = peers(["malloc"])[0]
    with started(MLP, EAGER, time_limit=0) as one, started(MLP, malloc, time_limit=0) as other:
        first, second = one.ask("warm-up"), other.ask("warm-up")
        assert first["digest"] == second["digest"]
        settings = [Path(f"/proc/{racer.pid}/environ").read_bytes().split(b"\0") for racer in (one, other)]
        assert [b"MALLOC_MMAP_MAX_=0" in found for found in settings] == [False, True]
        assert len(first["warm_up_seconds"]) == 5
        seconds, reasons = run_rounds([one, other], rounds=2, steps=3, say=lambda _: None)
        assert {name: len(found) for name, found in seconds.items()} == {"eager": 2, "malloc": 2}
        assert not reasons
        time.sleep(0.1)
        before = cpu_seconds(one.pid)
        time.sleep(0.5)
        assert cpu_seconds(one.pid) - before < 0.05
        metered = one.ask("meter")
        _, model, _, example = build(MLP)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        assert metered["before"] == 2 * weights + sum(tensor.nbytes for tensor in example)  # with the momentum
        assert metered["metered_peak"] > metered["before"] + weights  # with the gradients
        assert metered["arena_bytes"] == 0
        pids = one.pid, other.pid
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


def test_lowtide_keeps_its_budget_in_a_process_of_its_own(one_thread: None) -> None:
    budget = 50_000
    expected = Here(MLP, EAGER, time_limit=0).ask("warm-up")["digest"]
    with started(MLP, Contestant("x", "lowtide", budget=budget), time_limit=QUICK) as racer:
        warm = racer.ask("warm-up")
        metered = racer.ask("meter")
    assert warm["digest"] == expected
    assert metered["arena_bytes"] > 0
    assert metered["metered_peak"] <= budget
    assert warm["predicted_peak"] == pytest.approx(metered["metered_peak"], rel=0.005)


def test_a_budget_that_nothing_fits_and_a_wrong_target_are_reasons() -> None:
    with pytest.raises(Retired, match="no plan found") as caught:
        Racer(MLP, Contestant("x", "lowtide", budget=1000), time_limit=QUICK)
    assert caught.value.infeasible
    with pytest.raises(Retired, match="no built-in model") as caught:
        Racer("no-such-model", EAGER, time_limit=0)
    assert not caught.value.infeasible


BAD = """
import os, time
import torch

def step(model, optimizer, x):
    {body}

def make():
    return step, torch.nn.Linear(2, 2), None, (torch.ones(1, 2),)
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("print('help', flush=True); os._exit(7)", "the process ended with code 7: help"),
        ("os.kill(os.getpid(), 9)", "the process was killed by signal 9"),
        ("raise ValueError('no good\\nat all')", "ValueError: no good"),
        ("time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_a_process_that_ends_badly_says_why(tmp_path: Path, body: str, reason: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(BAD.format(body=body))
    racer = Racer(f"{file}:make", EAGER, time_limit=0)
    if "sleep" in body:
        racer.patience = 1.0
    with pytest.raises(Retired) as caught:
        racer.ask("warm-up")
    racer.end()
    racer.end()
    assert caught.value.message == reason
    assert not alive(racer.pid)


def test_an_interrupt_leaves_no_process_behind() -> None:
    command = [sys.executable, "-m", "lowtide.cli", "bench", "fit", "densenet121", "--peers", "none"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # who runs in the background is deaf to it
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    children: list[int] = []
    file = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
    while not children and bench.poll() is None:
        children = [int(word) for word in file.read_text().split()]
    assert children
    bench.send_signal(signal.SIGINT)
    output, talk = bench.communicate(timeout=60)
    assert bench.returncode == 130, talk
    assert output == ""
    assert not any(map(alive, children))


def test_a_digest_sees_a_bit_and_bytes_are_counted_once() -> None:
    tensor = torch.ones(3, 2)
    other = tensor.clone()
    assert digest([tensor, None, 1]) == digest([other, None, 1])
    other[1, 1] = torch.nextafter(other[1, 1], torch.tensor(2.0))
    assert digest([tensor]) != digest([other])
    assert digest([torch.zeros(1)]) != digest([-torch.zeros(1)])
    assert digest([tensor]) != digest([tensor.flatten()])
    assert digest([torch.tensor(1.0).to(torch.bfloat16)]) != digest([torch.tensor(1.0)])
    assert storage_bytes([tensor, tensor[1:], None, 3, other]) == tensor.nbytes + other.nbytes


# -------------------------------------------------------------------------------------------------------------- peers


def after_a_step(target: str, *, by_hand: bool) -> tuple[Any, list[torch.Tensor], int]:
    """The loss, the parameters and the peak of a second step."""
    step, model, optimizer, example = build(target)
    if by_hand:
        checkpoint_blocks(target.partition(":")[0], model)
    torch.manual_seed(0)
    step(model, optimizer, *example)
    with meter() as running:
        loss = step(model, optimizer, *example).detach()
    return loss, [parameter.detach() for parameter in model.parameters()], running.peak


@pytest.mark.parametrize("name", [name for name in SMALL if BLOCKS.get(name) != 0])
def test_checkpoints_around_blocks_change_no_result(name: str, one_thread: None) -> None:
    loss, parameters, _ = after_a_step(SMALL[name], by_hand=False)
    again, found, _ = after_a_step(SMALL[name], by_hand=True)
    assert torch.equal(loss, again)
    assert all(torch.equal(one, other) for one, other in zip(parameters, found, strict=True))


@pytest.mark.parametrize("target", [SMALL["densenet121"], SMALL["unet"], CHAIN, "lstm-cell:length=20,width=64"])
def test_checkpoints_around_blocks_need_less(target: str, one_thread: None) -> None:
    assert after_a_step(target, by_hand=True)[2] < 0.9 * after_a_step(target, by_hand=False)[2]


def test_the_blocks_of_every_model_are_known() -> None:
    for name, count in BLOCKS.items():
        if name in SMALL:
            assert len(list(blocks(build(SMALL[name])[1]))) == count, name
    with pytest.raises(LowtideError, match="no list of blocks"):
        checkpoint_blocks("lstm", build(SMALL["lstm"])[1])


def test_a_compiler_keeps_a_fraction_of_the_activations(one_thread: None) -> None:
    own = []
    eager = Here(SMALL["unet"], EAGER, time_limit=0)
    with started(SMALL["unet"], Contestant("x", "aot_eager", fraction=0.2), time_limit=0) as compiled:
        for racer in (eager, compiled):
            racer.ask("warm-up")
            metered = racer.ask("meter")
            own.append(metered["metered_peak"] - metered["before"])
    assert own[1] < 0.9 * own[0]


def test_each_compiler_races_more_than_once_and_a_wrong_name_is_refused() -> None:
    inductors = ["inductor 1", "inductor 0.5", "inductor 0.2"]
    assert [peer.name for peer in peers(["inductor", "malloc"])] == ["malloc", *inductors]
    assert [peer.fraction for peer in peers(["inductor 1", "checkpoint"])] == [None, 1.0]
    assert len(peers(PEERS)) == 7
    assert peers([]) == []
    with pytest.raises(UsageError, match="'jax'"):
        peers(["jax"])


def test_contestants_that_do_not_fit_together_race_in_groups() -> None:
    big = [Contestant(str(number), "lowtide", budget=10 * PROCESS) for number in range(3)]
    small = Contestant("small", "malloc")

    def names(room: int) -> list[list[str]]:
        found = groups([*big, small], eager_peak=PROCESS, room=room)
        return [[contestant.name for contestant in group] for group in found]

    assert names(100 * PROCESS) == [["0", "1", "2", "small"]]
    assert names(24 * PROCESS) == [["0", "1"], ["2", "small"]]
    assert names(PROCESS) == [["0"], ["1"], ["2"], ["small"]]
    assert groups([], eager_peak=1, room=1) == [[]]


def test_a_turn_of_quick_steps_has_several() -> None:
    assert [steps_of_a_turn(seconds) for seconds in (2.0, 0.1, 0.04, 1e-6)] == [1, 1, 3, 100]


# ------------------------------------------------------------------------------------------------------ bars, verdicts


GOOD = Cell(
    *("resnet", "lowtide 50%", "lowtide"),
    percent=50.0,
    budget=1000,
    predicted_peak=998,
    metered_peak=999,
    own=0.5,
    seconds=1.0,
    time_ratio=1.0,
    equal=True,
    limit=1.02,
)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"metered_peak": 1001}, ["1 bytes over the budget"]),
        ({"predicted_peak": 990}, ["prediction -0.90% off"]),
        ({"equal": False}, ["differs from eager"]),
        ({"time_ratio": 1.03}, ["time over 1.02"]),
        ({"time_ratio": 1.03, "limit": None}, []),
        ({"way": "malloc", "equal": False, "time_ratio": 9.0}, []),
    ],
)
def test_a_cell_says_which_bars_it_misses(change: dict[str, Any], missed: list[str]) -> None:
    assert list(missed_bars(dataclasses.replace(GOOD, **change))) == missed


def test_time_is_claimed_of_built_in_models_as_they_are() -> None:
    assert [limit_of("gpt", percent) for percent in (100, 70, 50, 30, 20, LEAST)] == [
        0.97,
        None,
        1.02,
        1.08,
        None,
        None,
    ]
    assert limit_of("resnet:depth=50,batch=16,size=128", 100) == 0.97
    assert limit_of("unet", 50) == 1.05
    assert limit_of("unet", 100) is None
    assert limit_of("resnet:batch=8", 50) is None
    assert limit_of("bad.py:make", 50) is None


def test_a_verdict_needs_a_faster_cell_within_the_peak_and_a_smaller_one_within_the_time() -> None:
    def mine(peak: int, ratio: float, **change: Any) -> Cell:
        return dataclasses.replace(GOOD, metered_peak=peak, own=peak / 1000, time_ratio=ratio, **change)

    peer = dataclasses.replace(GOOD, way="inductor", contestant="inductor 0.5", metered_peak=700, own=0.7)
    assert judge(peer, [mine(700, 0.99)]).faster
    assert not judge(peer, [mine(700, 0.99)]).smaller
    assert judge(peer, [mine(699, 0.99)]).ok
    assert judge(peer, [mine(699, 1.0)]).smaller
    assert not judge(peer, [mine(699, 1.0)]).faster
    assert not judge(peer, [mine(701, 0.5), mine(300, 1.2)]).ok
    assert not judge(peer, [mine(300, 0.5, equal=False), peer]).ok
    verdict = judge(peer, [mine(650, 0.9), mine(600, 0.95), mine(900, 0.8), mine(500, 1.1)])
    assert (verdict.quickest_ratio, verdict.smallest_own) == (0.9, 0.6)
    assert not judge(peer, []).ok


# ------------------------------------------------------------------------------------------------------- command line


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "fit", *arguments], env={"COLUMNS": "200"})


def here_or_apart(target: str, contestant: Contestant, **options: Any) -> Any:
    """A process of its own for all but the survey and the budgets of the table."""
    here = contestant.name in ("survey", "lowtide 100%", "lowtide 1%")
    return (Here if here else Racer)(target, contestant, **options)


def test_a_race_from_end_to_end_with_a_duel(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.bench.race.Racer", here_or_apart)
    call = (CHAIN, "--rounds", "2", "--budgets", "100,1", "--peers", "checkpoint", "--time-limit", str(QUICK))
    result = run(*call, "--json")
    found = json.loads(result.stdout)
    (survey,) = found["targets"]
    rows = {row["contestant"]: row for row in found["rows"]}
    assert list(rows) == ["eager", "lowtide 100%", "lowtide 1%", "lowtide for checkpoint", "checkpoint"]
    assert rows["eager"]["metered_peak"] == rows["eager"]["predicted_peak"] == survey["eager_peak"]
    assert rows["eager"]["time_ratio"] == rows["eager"]["own"] == 1.0
    assert rows["lowtide 100%"]["budget"] == survey["eager_peak"]
    assert rows["lowtide for checkpoint"]["budget"] == rows["checkpoint"]["metered_peak"] - 1
    for name in ("lowtide 100%", "lowtide for checkpoint"):
        row = rows[name]
        assert row["ok"], row
        assert row["equal"]
        assert row["metered_peak"] <= row["budget"]
        assert row["own"] == pytest.approx(
            (row["metered_peak"] - survey["persistent"]) / (survey["eager_peak"] - survey["persistent"])
        )
        assert row["time_ratio"] == median(row["ratios"]) > 0
        assert len(row["ratios"]) == 2
        assert row["planning_seconds"] <= row["prepare_seconds"]
    assert rows["lowtide 1%"]["infeasible"]
    assert rows["lowtide 1%"]["ok"]
    assert rows["checkpoint"]["equal"]
    assert rows["checkpoint"]["own"] < 0.5
    (verdict,) = found["peers"]
    assert verdict["duel"]
    assert verdict["quickest"] == "lowtide for checkpoint"
    assert verdict["ok"] == (verdict["quickest_ratio"] < verdict["peer_ratio"])
    better = [word for word, good in (("time", verdict["faster"]), ("peak", verdict["smaller"])) if not good]
    assert survey["better_peers"] == ([] if verdict["ok"] else [["checkpoint", better]])
    assert result.exit_code == (0 if verdict["ok"] else 1)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown and kept of a race is the same where contestants have no process of their own."""
    monkeypatch.setattr("lowtide.bench.race.Racer", Here)


@pytest.mark.usefixtures("in_this_process")
def test_a_person_reads_tables_and_reasons(one_thread: None) -> None:
    result = run(MLP, "--rounds", "1", "--budgets", "least,1", "--peers", "none", "--time-limit", "0", "--markdown")
    assert result.exit_code == 0, result.output
    assert "| least | 1% |" in result.stdout
    assert "| lowtide least |" in result.stdout
    assert "nothing fits" in result.stdout
    result = run("no-such-model", "--peers", "none")
    assert result.exit_code == 1
    assert "no-such-model failed: there is no built-in model" in result.stdout


@pytest.mark.usefixtures("in_this_process")
def test_races_that_are_kept_are_not_run_again(
    one_thread: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = tmp_path / "races"
    call = (MLP, "--budgets", "least", "--peers", "none", "--time-limit", "0", "--json", "--keep", str(kept))
    first = run(*call, "--rounds", "1")
    assert first.exit_code == 0, first.output

    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("raced again")

    monkeypatch.setattr("lowtide.bench.fit.race_target", again)
    second = run(*call, "--rounds", "1")
    assert second.exit_code == 0, second.output
    assert json.loads(second.stdout)["rows"] == json.loads(first.stdout)["rows"]
    assert json.loads(second.stdout)["targets"] == json.loads(first.stdout)["targets"]

    before = kept.read_bytes()
    other = run(*call, "--rounds", "2")
    assert other.exit_code == 1
    assert "keeps races with rounds 1, not 2" in other.stderr
    assert kept.read_bytes() == before
    nowhere = run(*call[:-1], str(kept / "inside"), "--rounds", "1")
    assert nowhere.exit_code == 1
    assert str(kept / "inside") in nowhere.stderr


@pytest.mark.parametrize("call", [("--budgets", "half"), ("--budgets", "0"), ("--budgets", "-5"), ("--peers", "jax")])
def test_a_wrong_call_is_refused_before_anything_is_built(call: tuple[str, str]) -> None:
    result = run("no-such-model", *call)
    assert result.exit_code == 2
    assert "no-such-model" not in result.stderr
    assert os.fspath(call[1]) in result.stderr
