"""The judge refuses each kind of broken program by name, and agrees with brute force on thousands of random ones."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import brute
import pytest
from graphs import Case, captured, cases, make_case
from hypothesis import given, settings

from lowtide.check import UNREADABLE, check
from lowtide.costs import Costs, declared
from lowtide.errors import ProgramError
from lowtide.graph import Graph, Input, Kind, Op, Output, Place, Read, Value
from lowtide.program import Copy, Free, Instruction, Program, Run, Wait

# -------------------------------------------------------------------------------------- one step that a person can read

W, RUNNING, X, H, N, RUNNING2, R, D, E, LOSS, W2 = range(11)
LINEAR, NORM, RELU, DROP, NOISE, MEAN, STEP = range(7)


def _value(name: str, nbytes: int, kind: Kind, storage: int) -> Value:
    return Value(name, nbytes, kind, storage, shape=(nbytes // 4,), stride=(1,))


def _op(name: str, *reads: int, makes: int | None = None, **rest: object) -> Op:
    outputs = () if makes is None else (makes,)
    return Op(name, f"aten.{name}.default", tuple(map(Read, reads)), outputs=outputs, **rest)  # type: ignore[arg-type]


GRAPH = Graph(
    ops=(
        _op("linear", X, W, makes=H),
        _op("norm", H, RUNNING, makes=N, updates=((RUNNING2, RUNNING),), detachable=True),
        _op("relu", N, makes=R),
        _op("drop", R, makes=D, channels=("generator",)),
        _op("noise", D, makes=E, channels=("generator",)),
        _op("mean", E, makes=LOSS),
        _op("step", W, E, updates=((W2, W),)),
    ),
    values=(
        _value("w", 64, "parameter", 0),
        _value("running", 64, "buffer", 1),
        _value("x", 128, "batch", 2),
        _value("h", 128, "activation", 3),
        _value("n", 128, "activation", 4),
        _value("running2", 64, "buffer", 1),
        _value("r", 128, "activation", 5),
        _value("d", 128, "activation", 6),
        _value("e", 128, "activation", 7),
        _value("loss", 4, "activation", 8),
        _value("w2", 64, "parameter", 0),
    ),
    inputs=(Input(W, ("w",)), Input(RUNNING, ("running",)), Input(X, (0,))),
    outputs=(Output(LOSS, "result", ()), Output(W2, "input", ("w",)), Output(RUNNING2, "input", ("running",))),
    generator_bytes=40,
)
COSTS = dataclasses.replace(
    declared(GRAPH),
    arena_temporaries=(0, 64, 0, 0, 0, 0, 0),
    in_place=((), (), ((R, N),), ((D, R),), ((E, D),), (), ()),
)
UPDATE_RUNNING, UPDATE_W = ((RUNNING2, RUNNING),), ((W2, W),)
GOOD: list[Instruction] = [
    Run(LINEAR),
    Run(NORM, over=UPDATE_RUNNING),
    Free(H),
    Run(RELU),
    Free(N),
    Run(DROP),
    Free(R),
    Run(NOISE),
    Free(D),
    Run(MEAN),
    Run(STEP, over=UPDATE_W),
    Free(E),
]
PLACED: list[Instruction] = [
    Run(LINEAR, (0,)),
    Run(NORM, (128, -1, 256), UPDATE_RUNNING),
    Free(H),
    Run(RELU, (0,)),
    Free(N),
    Run(DROP, (128,)),
    Free(R),
    Run(NOISE, (0,)),
    Free(D),
    Run(MEAN, (-1,)),
    Run(STEP, (-1,), UPDATE_W),
    Free(E),
]
AWAY: list[Instruction] = [Copy(H, "host"), Wait(H, "host"), Free(H)]
BACK: list[Instruction] = [Copy(H, "device"), Wait(H, "device"), Free(H, "host")]


def _program(rows: list[Instruction], arena: int = 0) -> Program:
    return Program(GRAPH.fingerprint, tuple(rows), arena)


def _good(start: int, stop: int, *new: Instruction) -> list[Instruction]:
    return [*GOOD[:start], *new, *GOOD[stop:]]


def _placed(start: int, stop: int, *new: Instruction) -> list[Instruction]:
    return [*PLACED[:start], *new, *PLACED[stop:]]


# ------------------------------------------------------------------------------------------------------ valid by hand

INPUTS = 64 + 64 + 128  # w, running and x; h, n, r, d and e have 128 B each, norm has 64 B of temporaries
NO_TEMPORARIES = dataclasses.replace(COSTS, arena_temporaries=(0,) * 7)
NO_BYTES = dataclasses.replace(NO_TEMPORARIES, nbytes=(0,) * 11)


def test_peak() -> None:
    assert check(GRAPH, COSTS, _program(GOOD)) == INPUTS + 128 + 128 + 64
    assert check(GRAPH, COSTS, _program(GOOD), budget=576) == 576


def test_peak_with_an_arena_is_the_arena_and_the_most_outside_it() -> None:
    assert check(GRAPH, COSTS, _program(PLACED, 320)) == 320 + INPUTS + 4


def test_in_place_takes_no_bytes() -> None:
    costs = dataclasses.replace(NO_TEMPORARIES, nbytes=(64, 64, 128, 0, 128, 64, 128, 128, 128, 4, 64))
    over = [Run(RELU, over=((R, N),)), Run(DROP, over=((D, R),)), Run(NOISE, over=((E, D),))]
    assert check(GRAPH, costs, _program(GOOD)) == INPUTS + 128 + 128
    assert check(GRAPH, costs, _program(_good(3, 9, *over))) == INPUTS + 128 + 4


def test_in_place_in_the_arena() -> None:
    over = Run(RELU, (128,), ((R, N),))
    rows = [*PLACED[:3], over, Run(DROP, (0,)), Free(R), Run(NOISE, (128,)), *PLACED[8:]]
    assert check(GRAPH, COSTS, _program(rows, 320)) == 320 + INPUTS + 4


def test_a_repeated_random_op_holds_a_generator_state() -> None:
    assert check(GRAPH, NO_BYTES, _program(GOOD)) == 0
    rows = _good(6, 6, Free(D), Run(DROP, again=True))
    assert check(GRAPH, NO_BYTES, _program(rows)) == 40 + 40  # the old state, and the present one put aside
    assert check(GRAPH, NO_TEMPORARIES, _program(rows)) == INPUTS + 128 + 128 + 40 + 40


def test_a_generator_state_is_held_through_the_last_repeat_only() -> None:
    large = dataclasses.replace(NO_BYTES, arena_temporaries=(0, 0, 0, 0, 0, 100, 0))  # of mean, instruction 9
    before, after = Run(DROP, again=True), Free(D)
    assert check(GRAPH, large, _program(_good(6, 6, before))) == 100
    late = [*GOOD[:6], *GOOD[7:8], Free(D), Run(MEAN), before, after, Free(R), *GOOD[10:]]
    assert check(GRAPH, large, _program(late)) == 140


def test_a_duplicate_counts_while_it_is_made() -> None:
    rows = _good(2, 2, Run(LINEAR, again=True))
    assert check(GRAPH, COSTS, _program(rows)) == INPUTS + 3 * 128  # h, its duplicate, and n


def test_a_detached_repeat_leaves_the_update_alone() -> None:
    rows = _good(2, 3, Free(N), Run(NORM, again=True), Free(H))
    assert check(GRAPH, COSTS, _program(rows)) == 576


def test_a_copy_takes_bytes_from_its_start() -> None:
    back: list[Instruction] = [Run(RELU), Copy(H, "device"), Free(N), Wait(H, "device"), Free(H), Free(H, "host")]
    assert check(GRAPH, NO_TEMPORARIES, _program(_good(2, 5, *AWAY, *back))) == INPUTS + 3 * 128
    back = [Run(RELU), Free(N), Copy(H, "device"), Wait(H, "device"), Free(H), Free(H, "host")]
    assert check(GRAPH, NO_TEMPORARIES, _program(_good(2, 5, *AWAY, *back))) == INPUTS + 2 * 128


def test_a_copy_comes_from_the_host_or_else_from_the_disk() -> None:
    both: list[Instruction] = [
        Copy(H, "host"),
        Copy(H, "disk"),
        Wait(H, "disk"),
        Wait(H, "host"),
        Free(H),
        Copy(H, "device"),
    ]
    assert check(GRAPH, COSTS, _program(_good(1, 1, *both, Free(H, "disk"), *BACK[1:]))) == 576
    one: list[Instruction] = [Copy(H, "disk"), Wait(H, "disk"), Free(H), *BACK[:2], Free(H, "disk")]
    assert check(GRAPH, COSTS, _program(_good(1, 1, *one))) == 576


def _away(value: int, place: Place = "host") -> list[Instruction]:
    return [Copy(value, place), Wait(value, place), Free(value)]


def _back(value: int, place: Place = "host", at: int = -1) -> list[Instruction]:
    return [Copy(value, "device", at), Wait(value, "device"), Free(value, place)]


def test_an_input_can_be_away_for_a_while_but_the_caller_keeps_its_bytes() -> None:
    rows = [*GOOD[:1], *_away(X, "disk"), *GOOD[1:], *_back(X, "disk")]
    assert check(GRAPH, COSTS, _program(rows)) == 576


def test_an_input_that_the_step_uses_up_gives_its_bytes_back() -> None:
    graph = dataclasses.replace(GRAPH, inputs=(*GRAPH.inputs[:2], Input(X, (0,), persistent=False)))
    costs = dataclasses.replace(COSTS, graph=graph.fingerprint)
    for rows in ([*GOOD[:1], Free(X), *GOOD[1:]], [*GOOD[:1], *_away(X), *GOOD[1:], *_back(X)]):
        assert check(graph, costs, Program(graph.fingerprint, tuple(rows))) == 576 - 128


def test_an_update_runs_at_home_after_a_copy_back() -> None:
    for away in (_away(W), [*_away(W), Copy(W, "device"), Wait(W, "device"), Free(W)]):
        assert check(GRAPH, COSTS, _program([*GOOD[:10], *away, *_back(W), *GOOD[10:]])) == 576


def test_an_update_elsewhere_is_copied_home() -> None:
    elsewhere = [*PLACED[:10], *_away(W), *_back(W, at=192), Run(STEP, (192,), UPDATE_W)]
    rows = [*elsewhere, *_away(W2), *_back(W2), *PLACED[11:]]
    assert check(GRAPH, COSTS, _program(rows, 320)) == 320 + INPUTS + 4


def test_an_old_content_comes_back_beside_the_new_one() -> None:
    """But not to the same place: what is at home is in the caller's hands."""
    rows = [*PLACED[:10], *_away(W)[:2], PLACED[10], *_back(W, at=192), *PLACED[11:]]
    assert check(GRAPH, COSTS, _program(rows, 320)) == 320 + INPUTS + 4
    _refuses("overlap", 13, "where %10 w2", COSTS, [*GOOD[:10], *_away(W)[:2], GOOD[10], *_back(W), *GOOD[11:]])


def test_the_start_counts() -> None:
    graph = Graph((), (_value("x", 128, "batch", 0),), (Input(0, ("x",), persistent=False),), ())
    for rows in ((), (Free(0),)):
        program = Program(graph.fingerprint, rows)
        assert check(graph, declared(graph), program) == 128
        with pytest.raises(ProgramError, match="128 B") as caught:
            check(graph, declared(graph), program, budget=127)
        assert (caught.value.rule, caught.value.instruction) == ("over budget", 0 if rows else None)


# ---------------------------------------------------------------------------------------------------- broken, by hand

X_AWAY: list[Instruction] = [Copy(X, "host"), Wait(X, "host"), Free(X)]
X_BACK: list[Instruction] = [Copy(X, "device", 0), Wait(X, "device"), Free(X, "host")]
RELU_OVER = Run(RELU, over=((R, N),))

# What is wrong, the rule, the instruction, the program, words of the message.
# fmt: off
BROKEN: list[tuple[str, str, int, list[Instruction], str]] = [
    ("reads freed", "read after free", 4, _good(2, 2, Free(N)), "%4 n (128 B) is gone since instruction 2"),
    ("reads overwritten", "read after free", 4, _good(3, 4, RELU_OVER, Run(RELU, again=True)), "%4 n"),
    ("reads too early", "read before made", 0, GOOD[1:], "%3 h"),
    ("copies too early", "read before made", 0, [Copy(H, "host"), *GOOD], "%3 h"),
    ("copies freed", "read after free", 3, _good(3, 3, Copy(H, "host")), "%3 h"),
    ("fetches from nowhere", "read before made", 3, _good(3, 3, Copy(H, "device")), "%3 h"),
    ("fetches freed", "read after free", 5, _good(1, 1, *AWAY, Free(H, "host"), Copy(H, "device")), "(host)"),
    ("reads in flight", "read before wait", 5, _good(1, 1, *AWAY, Copy(H, "device")), "%3 h"),
    ("copies in flight", "read before wait", 5, _good(1, 1, *AWAY, BACK[0], Copy(H, "disk")), "%3 h"),
    ("frees twice", "double free", 3, _good(2, 2, Free(H)), "%3 h"),
    ("frees twice, host", "double free", 5, _good(1, 1, *AWAY, Free(H, "host"), Free(H, "host")), "(host)"),
    ("frees overwritten", "double free", 4, _good(3, 4, RELU_OVER), "%4 n"),
    ("frees too early", "free before made", 0, [Free(H), *GOOD], "%3 h"),
    ("frees elsewhere", "free before made", 2, _good(2, 3, Free(H, "host")), "(host)"),
    ("frees source", "free during copy", 3, _good(2, 2, Copy(H, "host")), "%3 h"),
    ("frees target", "free during copy", 3, _good(2, 2, Copy(H, "host"), Free(H, "host")), "(host)"),
    ("frees host source", "free during copy", 5, _good(1, 1, *AWAY, BACK[0], Free(H, "host")), "(host)"),
    ("frees device target", "free during copy", 5, _good(1, 1, *AWAY, BACK[0], Free(H)), "%3 h"),
    ("overwrites source", "free during copy", 4, _good(3, 4, Copy(N, "host"), RELU_OVER), "%4 n"),
    ("copies twice", "copied twice", 2, _good(1, 1, Copy(H, "host"), Copy(H, "host")), "%3 h"),
    ("fetches too early", "copied twice", 3, _good(1, 1, *AWAY[:2], Copy(H, "device")), "%3 h"),
    ("waits for nothing", "wait without copy", 1, _good(1, 1, Wait(H, "host")), "%3 h"),
    ("waits twice", "wait without copy", 3, _good(1, 1, *AWAY[:2], Wait(H, "host")), "%3 h"),
    ("waits elsewhere", "wait without copy", 2, _good(1, 1, Copy(H, "host"), Wait(H, "disk")), "(disk)"),
    ("never waits", "copy never awaited", 12, [*GOOD, Copy(LOSS, "host")], "%9 loss"),
    ("repeats first", "repeat before first", 0, _good(0, 1, Run(LINEAR, again=True)), "op 0 linear"),
    ("repeats unmarked", "not marked as repeat", 1, _good(1, 1, Run(LINEAR)), "op 0 linear"),
    ("updates twice", "side effect twice", 2, _good(2, 2, Run(NORM, over=UPDATE_RUNNING)), "op 1 norm"),
    ("repeats an update", "side effect twice", 11, _good(11, 11, Run(STEP, again=True)), "op 6 step"),
    ("draws twice", "random replay", 6, _good(6, 6, Run(DROP)), "op 3 drop"),
    ("never draws", "random replay", 7, [*GOOD[:7], Free(D)], "op 4 noise"),
    ("over, uncertified", "illegal in-place", 1, _good(1, 2, Run(NORM, over=(*UPDATE_RUNNING, (N, H)))), "%4"),
    ("over, not made", "illegal in-place", 3, _good(3, 4, Run(RELU, over=((D, N),))), "%7"),
    ("over, not read", "illegal in-place", 3, _good(3, 4, Run(RELU, over=((R, X),))), "%2"),
    ("over, pair twice", "illegal in-place", 3, _good(3, 4, Run(RELU, over=((R, N), (R, N)))), "twice in"),
    ("over, there", "illegal in-place", 4, _good(4, 4, Run(RELU, over=((R, N),), again=True)), "there already"),
    ("updates beside", "illegal in-place", 1, _good(1, 2, Run(NORM)), "outlives the step"),
    ("updates again", "illegal in-place", 2, _good(2, 2, Run(NORM, over=UPDATE_RUNNING, again=True)), "%5"),
    ("frees the result", "missing output", 12, [*GOOD, Free(LOSS)], "%9 loss (4 B) must be there at the end"),
    ("makes no result", "missing output", 10, _good(9, 10), "must be there at the end, but is never made"),
    ("loses an input", "missing output", 14, [*GOOD, *X_AWAY, Free(X, "host")], "%2 x"),
    ("keeps an update away", "missing output", 14, [*GOOD, *_away(W2), Free(W2, "host")], "%10 w2"),
    ("leaves what was there", "missing output", 13,
     [*GOOD[:10], *_away(W)[:2], GOOD[10], Free(W2), *_back(W), GOOD[11]], "%10 w2"),
    ("comes home to another", "overlap", 13, [*GOOD[:10], *_away(W)[:2], GOOD[10], *_back(W), GOOD[11]], "%10 w2"),
    ("loses an update", "missing output", 12, [*GOOD, Free(W2)], "%10 w2"),
    ("leaves an activation", "never freed", 7, GOOD[:11], "%8 e"),
    ("leaves a copy", "never freed", 12, [*GOOD, *X_AWAY[:2]], "%2 x (128 B) (host)"),
    ("offsets, no arena", "misplaced", 0, _good(0, 1, Run(LINEAR, (0,))), "op 0 linear"),
    ("fetches, no arena", "misplaced", 4, _good(1, 1, *AWAY, Copy(H, "device", 0)), "%3 h"),
    ("no such op", "no such", 0, _good(0, 1, Run(7)), "7 ops"),
    ("negative op", "no such", 0, _good(0, 1, Run(-1)), "7 ops"),
    ("no such value", "no such", 2, _good(2, 3, Free(11)), "11 values"),
    ("no such pair", "no such", 3, _good(3, 4, Run(RELU, over=((R, 99),))), "99"),
    ("wrong far below", "no such", 11, [Free(H), *GOOD[1:11], Wait(-1, "host")], "-1"),
]
BROKEN_PLACED: list[tuple[str, str, int, list[Instruction], str]] = [
    ("too few offsets", "misplaced", 1, _placed(1, 2, Run(NORM, (128, -1), UPDATE_RUNNING)), "op 1 norm"),
    ("too many offsets", "misplaced", 0, _placed(0, 1, Run(LINEAR, (0, 128))), "op 0 linear"),
    ("no offsets", "misplaced", 0, _placed(0, 1, Run(LINEAR)), "op 0 linear"),
    ("off the grid", "misplaced", 0, _placed(0, 1, Run(LINEAR, (32,))), "%3 h"),
    ("below the arena", "misplaced", 0, _placed(0, 1, Run(LINEAR, (-64,))), "%3 h"),
    ("beyond the arena", "misplaced", 0, _placed(0, 1, Run(LINEAR, (256,))), "%3 h"),
    ("scratch beyond", "misplaced", 1, _placed(1, 2, Run(NORM, (128, -1, 320), UPDATE_RUNNING)), "temporaries of op 1"),
    ("result inside", "misplaced", 9, _placed(9, 10, Run(MEAN, (192,))), "%9 loss"),
    ("over elsewhere", "misplaced", 3, _placed(3, 4, Run(RELU, (0,), ((R, N),))), "%6 at 0, over %4 at 128"),
    ("update elsewhere", "misplaced", 10, _placed(10, 11, Run(STEP, (192,), UPDATE_W)), "%10"),
    ("host offset", "misplaced", 1, _placed(1, 1, Copy(H, "host", 0)), "(host)"),
    ("input ends inside", "misplaced", 15, [*PLACED, *X_AWAY, *X_BACK], "%2 x (128 B) outlives the step"),
    ("update ends inside", "misplaced", 16, [*PLACED[:10], *_away(W), *_back(W, at=192), Run(STEP, (192,), UPDATE_W),
     PLACED[11]], "%10 w2 (64 B) outlives the step"),
    ("meets a value", "overlap", 1, _placed(1, 2, Run(NORM, (64, -1, 256), UPDATE_RUNNING)), "%3 h"),
    ("meets what dies", "overlap", 3, _placed(3, 4, Run(RELU, (128,))), "%4 n"),
    ("scratch meets", "overlap", 1, _placed(1, 2, Run(NORM, (128, -1, 192), UPDATE_RUNNING)), "temporaries of op 1"),
    ("duplicate meets", "overlap", 1, _placed(1, 1, Run(LINEAR, (64,), again=True)), "(duplicate)"),
    ("copy meets", "overlap", 6, [*PLACED[:2], *AWAY, Run(RELU, (0,)), Copy(H, "device", 192)], "%4 n"),
]
# fmt: on


@pytest.mark.parametrize(
    ("rule", "at", "rows", "words", "arena"),
    [
        pytest.param(rule, at, rows, words, arena, id=what)
        for table, arena in ((BROKEN, 0), (BROKEN_PLACED, 320))
        for what, rule, at, rows, words in table
    ],
)
def test_refuses(rule: str, at: int, rows: list[Instruction], words: str, arena: int) -> None:
    program = _program(rows, arena)
    with pytest.raises(ProgramError) as caught:
        check(GRAPH, COSTS, program)
    _names(caught.value, rule, at, words)
    assert rule in brute.faults(GRAPH, COSTS, program)[1]
    if rule != "no such":
        assert program.show(GRAPH, around=at) in str(caught.value)


def _names(error: ProgramError, rule: str, at: int, words: str) -> None:
    assert (error.rule, error.instruction) == (rule, at), str(error)
    assert f"{rule} at instruction {at}: " in str(error)
    assert words in str(error)


def _refuses(rule: str, at: int, words: str, costs: Costs, rows: list[Instruction], graph: Graph = GRAPH) -> None:
    with pytest.raises(ProgramError) as caught:
        check(graph, costs, Program(graph.fingerprint, tuple(rows)))
    _names(caught.value, rule, at, words)


def test_refuses_another_place() -> None:
    _refuses("no such", 2, "moon", COSTS, _good(2, 3, Free(H, "moon")))  # type: ignore[arg-type]


def test_refuses_another_graph() -> None:
    other = dataclasses.replace(COSTS, graph="f" * 64)
    for costs, program in ((other, _program(GOOD)), (COSTS, Program("f" * 64, tuple(GOOD)))):
        with pytest.raises(ProgramError, match="ffffffffffff.*" + GRAPH.fingerprint[:12]) as caught:
            check(GRAPH, costs, program)
        assert (caught.value.rule, caught.value.instruction) == ("wrong graph", None)
    with pytest.raises(ProgramError, match="10, 7, 7"):
        check(GRAPH, dataclasses.replace(COSTS, nbytes=COSTS.nbytes[1:]), _program(GOOD))
    with pytest.raises(ProgramError, match="-64 B"):
        check(GRAPH, COSTS, _program(GOOD, -64))


def test_refuses_random_ops_in_another_order() -> None:
    values = (_value("a", 4, "activation", 0), _value("b", 4, "activation", 1))
    ops = (_op("first", makes=0, channels=("generator",)), _op("second", makes=1, channels=("generator",)))
    graph = Graph(ops, values, (), (Output(0, "result", ()), Output(1, "result", ())))
    program = Program(graph.fingerprint, (Run(1), Run(0)))
    with pytest.raises(ProgramError) as caught:
        check(graph, declared(graph), program)
    _names(caught.value, "random replay", 1, "op 0 first")
    assert check(graph, declared(graph), Program(graph.fingerprint, (Run(0), Run(1)))) == 8


def test_refuses_another_size_in_place() -> None:
    nbytes = (*COSTS.nbytes[:R], 192, *COSTS.nbytes[R + 1 :])
    costs = dataclasses.replace(COSTS, nbytes=nbytes)
    _refuses("illegal in-place", 3, "192 B", costs, _good(3, 4, RELU_OVER))


def test_refuses_to_overwrite_an_input() -> None:
    costs = dataclasses.replace(COSTS, in_place=(((H, X),), *COSTS.in_place[1:]))
    _refuses("illegal in-place", 0, "input", costs, _good(0, 1, Run(LINEAR, over=((H, X),))))
    for persistent in (True, False):
        inputs = (*GRAPH.inputs[:2], Input(X, (0,), persistent))
        graph = dataclasses.replace(GRAPH, inputs=inputs)
        costs = dataclasses.replace(costs, graph=graph.fingerprint)
        _refuses("illegal in-place", 0, "input", costs, _good(0, 1, Run(LINEAR, over=((H, X),))), graph)


def test_refuses_pairs_that_are_not_of_this_run() -> None:
    """Also where the costs would allow them, or the graph did in the first run."""
    for pair in ((D, N), (R, H)):
        costs = dataclasses.replace(COSTS, in_place=((), (), (pair,), (), (), (), ()))
        _refuses("illegal in-place", 2, "it makes", costs, _good(2, 4, Run(RELU, over=(pair,))))
    away: list[Instruction] = [Copy(RUNNING, "host"), Wait(RUNNING, "host")]
    swap: list[Instruction] = [
        Copy(RUNNING2, "disk"),
        Wait(RUNNING2, "disk"),
        Free(RUNNING2),
        Copy(RUNNING, "device"),
        Wait(RUNNING, "device"),
    ]
    rows = [GOOD[0], *away, GOOD[1], *swap, Run(NORM, over=UPDATE_RUNNING, again=True)]
    _refuses("illegal in-place", 9, "it makes", COSTS, rows)


def test_refuses_what_is_not_in_the_callers_own_storage() -> None:
    """What the step uses up has no home to come back to; and a second maker makes a new tensor."""
    outputs = (*GRAPH.outputs, Output(X, "result", (1,)))
    graph = dataclasses.replace(GRAPH, inputs=(*GRAPH.inputs[:2], Input(X, (0,), persistent=False)), outputs=outputs)
    costs = dataclasses.replace(COSTS, graph=graph.fingerprint)
    _refuses("away from home", 4, "%2 x", costs, [*GOOD[:1], *_away(X), *_back(X), *GOOD[1:]], graph)
    graph = dataclasses.replace(GRAPH, ops=(*GRAPH.ops, _op("add", W, E, makes=W2, optional=True)))
    costs = dataclasses.replace(
        COSTS,
        graph=graph.fingerprint,
        seconds=(1.0,) * 8,
        arena_temporaries=(*COSTS.arena_temporaries, 0),
        in_place=(*COSTS.in_place, ()),
    )
    _refuses("away from home", 10, "%10 w2", costs, _good(10, 11, Run(7)), graph)
    rows = [*_good(10, 11, Run(7)), *_away(W2), Free(W), *_back(W2)]
    assert check(graph, costs, Program(graph.fingerprint, tuple(rows))) == 576


def test_refuses_the_caller_s_last_content_to_be_left_out() -> None:
    """Also where the graph does not list it as an output."""
    graph = dataclasses.replace(GRAPH, outputs=GRAPH.outputs[:1])
    costs = dataclasses.replace(COSTS, graph=graph.fingerprint)
    assert check(graph, costs, Program(graph.fingerprint, tuple(GOOD))) == 576
    _refuses("missing output", 10, "%10 w2", costs, _good(10, 11), graph)


def test_refuses_to_copy_a_number() -> None:
    values = (*GRAPH.values[:X], dataclasses.replace(GRAPH.values[X], kind="scalar", nbytes=0), *GRAPH.values[X + 1 :])
    graph = dataclasses.replace(GRAPH, values=values)
    _refuses("no such", 0, "number", dataclasses.replace(COSTS, graph=graph.fingerprint), [*_away(X), *GOOD], graph)


def test_refuses_a_result_over_a_number() -> None:
    values = (*GRAPH.values[:N], dataclasses.replace(GRAPH.values[N], kind="scalar", nbytes=0), *GRAPH.values[N + 1 :])
    graph = dataclasses.replace(GRAPH, values=values)
    costs = dataclasses.replace(NO_BYTES, graph=graph.fingerprint)
    _refuses("illegal in-place", 3, "number", costs, _good(3, 5, RELU_OVER), graph)


def test_refuses_an_update_over_another_value() -> None:
    costs = dataclasses.replace(COSTS, nbytes=(*COSTS.nbytes[:-1], 128), in_place=(*COSTS.in_place[:-1], ((W2, E),)))
    _refuses("illegal in-place", 10, "update of another", costs, _good(10, 12, Run(STEP, over=((W2, E),))))


def test_refuses_two_inputs_of_one_storage() -> None:
    values = (*GRAPH.values[:X], dataclasses.replace(GRAPH.values[X], storage=0), *GRAPH.values[X + 1 :])
    graph = dataclasses.replace(GRAPH, values=values)
    with pytest.raises(ProgramError, match="%0 and %2 are inputs of one storage"):
        check(graph, dataclasses.replace(COSTS, graph=graph.fingerprint), Program(graph.fingerprint, tuple(GOOD)))


def test_refuses_two_values_on_one() -> None:
    values = tuple(_value(name, 64, "activation", n) for n, name in enumerate("xhab"))
    ops = (_op("double", 0, makes=1), Op("halves", "aten.halves.default", (Read(1),), outputs=(2, 3)))
    graph = Graph(ops, values, (Input(0, ("x",)),), (Output(2, "result", ()), Output(3, "result", ())))
    costs = dataclasses.replace(declared(graph), in_place=((), ((2, 1), (3, 1))))
    _refuses("illegal in-place", 1, "twice in", costs, [Run(0), Run(1, over=((2, 1), (3, 1)))], graph)
    assert check(graph, costs, Program(graph.fingerprint, (Run(0), Run(1, over=((3, 1),))))) == 3 * 64


def test_refuses_an_offset_where_there_is_no_arena_even_of_nothing() -> None:
    _refuses("misplaced", 4, "%3 h", NO_BYTES, _good(1, 1, *AWAY, Copy(H, "device", 0), *BACK[1:]))


def test_refuses_more_than_the_budget() -> None:
    with pytest.raises(ProgramError) as caught:
        check(GRAPH, COSTS, _program(GOOD), budget=575)
    _names(caught.value, "over budget", 1, "576 B")
    assert "575 B" in str(caught.value)
    with pytest.raises(ProgramError) as caught:
        check(GRAPH, COSTS, _program(GOOD), budget=383)  # the first above it is not the peak
    _names(caught.value, "over budget", 0, "384 B")
    with pytest.raises(ProgramError) as caught:
        check(GRAPH, COSTS, _program(GOOD), budget=384)
    _names(caught.value, "over budget", 1, "576 B")
    rows = _good(2, 5, *AWAY, Run(RELU), Copy(H, "device"), Free(N), Wait(H, "device"), Free(H), Free(H, "host"))
    with pytest.raises(ProgramError) as caught:
        check(GRAPH, NO_TEMPORARIES, _program(rows), budget=INPUTS + 2 * 128)
    _names(caught.value, "over budget", 6, f"{INPUTS + 3 * 128} B")
    with pytest.raises(ProgramError) as caught:
        check(GRAPH, COSTS, _program(PLACED, 320), budget=500)
    _names(caught.value, "over budget", 9, "580 B (320 B of arena)")


def test_every_rule_is_tested() -> None:
    source = Path(check.__code__.co_filename).read_text(encoding="utf-8")
    rules = set(re.findall(r'(?:fail|ProgramError)\(\s*"([a-z -]+)"', source)) | set(UNREADABLE) - {None}
    tested = {row[1] for row in BROKEN + BROKEN_PLACED} | {"wrong graph", "over budget", "away from home"}
    tested |= {"out of order"}  # by test_channels
    assert rules == tested


def test_the_judge_shares_no_eyes() -> None:
    source = Path(check.__code__.co_filename).read_text(encoding="utf-8")
    imports = set(re.findall(r"^\s*(?:from|import) ([\w.]+)", source, re.MULTILINE))
    nouns = {f"lowtide.{noun}" for noun in ("graph", "costs", "program", "errors")}
    assert imports == nouns | {"__future__", "bisect", "typing"}


# ------------------------------------------------------------------------------------------------- against brute force

EXAMPLES, BROKEN_EACH = 3000, 5


@given(cases())
@settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None)
def test_agrees_with_brute_force(case: Case) -> None:
    """3000 random graphs with a valid program each, and 5 broken ones of each: 18,000 programs."""
    check(case.graph, case.costs, case.program)
    check(case.graph, case.costs, captured(case.graph))
    for program in (case.program, *case.broken(BROKEN_EACH)):
        _agree(case, program)


def _agree(case: Case, program: Program) -> None:
    """The judge and both oracles say the same of this program, down to the rule, the instruction and the byte."""
    found = brute.execute(case.graph, case.costs, program)
    first, broken = brute.faults(case.graph, case.costs, program)
    if not broken:
        assert check(case.graph, case.costs, program) == found
        _budget_is_sharp(case, program, found)
        return
    with pytest.raises(ProgramError) as caught:
        check(case.graph, case.costs, program)
    assert caught.value.rule in broken
    assert first in (None, caught.value.instruction)
    assert found is None or caught.value.rule in brute.LAX


def _budget_is_sharp(case: Case, program: Program, peak: int | None) -> None:
    assert peak is not None
    assert check(case.graph, case.costs, program, budget=peak) == peak
    with pytest.raises(ProgramError) as caught:
        check(case.graph, case.costs, program, budget=peak - 1)
    assert caught.value.rule == "over budget"


def test_random_programs_use_everything() -> None:
    """What is compared above is not all alike: every rule is broken and every technique used."""
    rules: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for seed in range(800):
        case = make_case(1 + seed % 10, seed)
        used["arena"] += case.program.arena > 0
        for row in case.program.instructions:
            used[type(row).__name__] += 1
            if isinstance(row, Run):
                used["in place"] += len(row.over)
                used["again"] += row.again
                used["random again"] += row.again and case.graph.ops[row.op].random
                used["detached"] += row.again and bool(case.graph.effects[row.op])
        for program in case.broken(5):
            try:
                check(case.graph, case.costs, program)
                rules["valid"] += 1
            except ProgramError as error:
                rules[error.rule] += 1
    tested = {row[1] for row in BROKEN + BROKEN_PLACED}
    assert set(rules) == tested | {"valid"}
    assert rules["valid"] < 0.25 * sum(rules.values())
    assert min(used.values()) > 20
    assert len(used) == 9


def test_thirty_thousand_instructions() -> None:
    """A chain that keeps everything until its end, in an arena: the size of the largest graphs we plan."""
    count = 10_000
    values = tuple(_value(f"v{n}", 128, "activation", n) for n in range(count + 1))
    ops = tuple(_op("next", n, makes=n + 1) for n in range(count))
    graph = Graph(ops, values, (Input(0, ("x",)),), (Output(count, "result", ()),))
    rows: list[Instruction] = [Run(n, (128 * n if n < count - 1 else -1,)) for n in range(count)]
    rows += [Free(n) for n in range(1, count)]
    rows[count:count] = [Run(n, (128 * count,), again=True) for n in range(count - 1)]
    program = Program(graph.fingerprint, tuple(rows), 128 * (count + 1))
    assert check(graph, declared(graph), program) == 128 * (count + 3)
