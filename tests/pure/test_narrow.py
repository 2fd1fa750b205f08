"""Optional ops to the judge, the simulator and the files; and which values the rules keep narrow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optional import make_optional_case
from test_check import _agree

from lowtide.check import check
from lowtide.costs import declared
from lowtide.errors import FileError, ProgramError
from lowtide.graph import Alternative, Arg, Graph, Input, Op, Output, Phase, Read, Value, View
from lowtide.plan import as_eager, keep_everything, plan
from lowtide.plan.narrow import sizes_only, with_narrow
from lowtide.plan.order import captured_order, early_updates
from lowtide.program import Free, Instruction, Program, Run
from lowtide.simulate import simulate

# -------------------------------------------------------------------------------------- a step that a person can read

X, H, POOLED, INDICES, LOSS, GRADIENT, DH, NARROW = range(8)
RELU, POOL, MEAN, ONES, POOL_BACKWARD, PACK, UNPACK = range(7)
POOL_TARGET = "aten.max_pool2d_with_indices"


def _value(name: str, shape: tuple[int, ...], dtype: str = "float32", size: int = 4) -> Value:
    stride = tuple(_count(shape[place + 1 :]) for place in range(len(shape)))
    return Value(name, size * _count(shape), "activation", -1, dtype, shape, stride)


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] * _count(shape[1:]) if shape else 1


def _op(target: str, *args: Arg, makes: tuple[int | None, ...], phase: Phase = "forward", **rest: object) -> Op:
    return Op(target.split(".")[1], f"{target}", args, outputs=makes, phase=phase, **rest)  # type: ignore[arg-type]


def _graph(ops: list[Op], values: list[Value], outputs: list[int], views: tuple[View, ...] = ()) -> Graph:
    """A step whose input is value 0; each value has a storage of its own, unless an op updates another value to it."""
    storage = list(range(len(values)))
    for op in ops:
        for new, old in op.updates:
            storage[new] = storage[old]
    return Graph(
        ops=tuple(ops),
        values=tuple(dataclasses.replace(v, storage=s) for v, s in zip(values, storage, strict=True)),
        inputs=(Input(0, (0,)),),
        outputs=tuple(Output(value, "result", (number,)) for number, value in enumerate(outputs)),
        views=views,
        generator_bytes=40,
    )


def _pooling(height: int = 16, width: int = 16) -> Graph:
    """A ReLU, a pool of 2 x 2, and the backward of the pool."""
    small = (2, height // 2, width // 2)
    return _graph(
        [
            _op("aten.relu.default", Read(X), makes=(H,)),
            _op(f"{POOL_TARGET}.default", Read(H), (2, 2), makes=(POOLED, INDICES)),
            _op("aten.mean.default", Read(POOLED), makes=(LOSS,)),
            _op("aten.ones_like.default", Read(POOLED), makes=(GRADIENT,), phase="backward"),
            _op(
                f"{POOL_TARGET}_backward.default",
                *(Read(GRADIENT), Read(H), (2, 2), Read(INDICES)),
                makes=(DH,),
                phase="backward",
            ),
        ],
        [
            _value("x", (2, height, width)),
            _value("h", (2, height, width)),
            _value("pooled", small),
            _value("indices", small, "int64", 8),
            _value("loss", ()),
            _value("gradient", small),
            _value("dh", (2, height, width)),
        ],
        [LOSS, DH],
    )


GRAPH = with_narrow(_pooling())
COSTS = declared(GRAPH)
IMAGE, SMALL, WIDE, TINY = 2 * 256 * 4, 2 * 64 * 4, 2 * 64 * 8, 2 * 64  # bytes of x, pooled, indices, narrow indices
KEPT: list[Instruction] = [
    Run(RELU),
    Run(POOL),
    Free(H),
    Run(PACK),
    Free(INDICES),
    Run(MEAN),
    Run(ONES),
    Free(POOLED),
    Run(UNPACK),
    Free(NARROW),
    Run(POOL_BACKWARD),
    Free(GRADIENT),
    Free(INDICES),
]


def _program(rows: list[Instruction], graph: Graph = GRAPH) -> Program:
    return Program(graph.fingerprint, tuple(rows))


def _peak(rows: list[Instruction]) -> int:
    """The peak, on which the judge and the simulator agree."""
    found = check(GRAPH, COSTS, _program(rows))
    assert simulate(GRAPH, COSTS, _program(rows)).peak == found
    return found


# ------------------------------------------------------------------------------------------ the judge and the simulator


def test_what_is_packed_takes_only_its_own_bytes() -> None:
    while_mean = [*KEPT[:5], Run(MEAN)]
    live = simulate(GRAPH, COSTS, _program(while_mean)).live
    assert live[-1] == IMAGE + SMALL + TINY + 4
    assert live[3] == IMAGE + SMALL + WIDE + TINY  # while it is packed both are there
    assert _peak(KEPT) == 2 * IMAGE + SMALL + WIDE + 4  # h in the forward, or dh in the backward


def test_a_program_may_leave_optional_ops_out() -> None:
    rows = [row for row in KEPT if row not in (Run(PACK), Run(UNPACK), Free(NARROW))]
    rows.remove(Free(INDICES))
    assert _peak(rows) == 2 * IMAGE + SMALL + WIDE + 4


def test_a_second_maker_may_be_the_only_one() -> None:
    other = dataclasses.replace(GRAPH.ops[MEAN], name="mean_too", optional=True)
    graph = dataclasses.replace(GRAPH, ops=(*GRAPH.ops, other))
    rows = [Run(7) if row == Run(MEAN) else row for row in KEPT]
    assert check(graph, declared(graph), _program(rows, graph)) == check(GRAPH, COSTS, _program(KEPT))


def test_what_is_unpacked_beside_itself_is_a_duplicate() -> None:
    there = [row for row in KEPT[:-1] if row != Free(INDICES)] + [Free(INDICES)]
    assert simulate(GRAPH, COSTS, _program(there)).live[7] == IMAGE + SMALL + 2 * WIDE + TINY + 4
    check(GRAPH, COSTS, _program(there))


@pytest.mark.parametrize(
    ("rule", "at", "rows"),
    [
        pytest.param("read before made", 0, [Run(PACK)], id="packs nothing"),
        pytest.param("read before made", 2, [*KEPT[:2], Run(UNPACK)], id="unpacks nothing"),
        pytest.param("read after free", 4, [*KEPT[:3], Free(INDICES), Run(PACK)], id="packs too late"),
        pytest.param("read after free", 6, [*KEPT[:5], Free(NARROW), Run(UNPACK)], id="unpacks too late"),
        pytest.param("read after free", 8, [*KEPT[:8], Run(POOL_BACKWARD)], id="forgets to unpack"),
        pytest.param("not marked as repeat", 4, [*KEPT[:4], Run(PACK)], id="packs twice unmarked"),
        pytest.param("repeat before first", 3, [*KEPT[:3], Run(PACK, again=True)], id="packs again first"),
        pytest.param("never freed", 3, [row for row in KEPT if row != Free(NARROW)], id="leaves the narrow value"),
    ],
)
def test_refuses(rule: str, at: int, rows: list[Instruction]) -> None:
    with pytest.raises(ProgramError) as caught:
        check(GRAPH, COSTS, _program(rows))
    assert (caught.value.rule, caught.value.instruction) == (rule, at), str(caught.value)


def test_packs_again() -> None:
    assert _peak([*KEPT[:9], Free(NARROW), Run(PACK, again=True), *KEPT[9:]]) == _peak(KEPT)


# ------------------------------------------------------------------------------------------------- against brute force


@given(st.integers(1, 10), st.integers(0, 2**32 - 1))
@settings(max_examples=600, derandomize=True, deadline=None, database=None)
def test_agrees_with_brute_force(size: int, seed: int) -> None:
    """600 random graphs with optional ops: a valid program each, and 5 broken ones of each."""
    case = make_optional_case(size, seed)
    assert simulate(case.graph, case.costs, case.program).peak == check(case.graph, case.costs, case.program)
    for program in (case.program, *case.broken(5)):
        _agree(case, program)


def test_random_programs_use_optional_ops() -> None:
    cases = [make_optional_case(1 + seed % 10, seed) for seed in range(100)]
    rows = [(case.graph, row) for case in cases for row in case.program.instructions]
    assert sum(isinstance(row, Run) and graph.ops[row.op].optional for graph, row in rows) > 100


# ------------------------------------------------------------------------------------------------------------ the files


def test_a_graph_with_optional_ops_survives_its_file(tmp_path: Path) -> None:
    GRAPH.save(tmp_path / "graph")
    _program(KEPT).save(tmp_path / "program")
    loaded = Graph.load(tmp_path / "graph")
    assert loaded == GRAPH
    assert loaded.fingerprint == GRAPH.fingerprint
    assert [op.optional for op in loaded.ops] == [False] * 5 + [True] * 2
    assert Program.load(tmp_path / "program", loaded) == _program(KEPT)


def test_that_an_op_is_optional_is_in_the_fingerprint_and_in_its_line() -> None:
    ordinary = dataclasses.replace(GRAPH.ops[PACK], optional=False)
    graph = dataclasses.replace(GRAPH, ops=(*GRAPH.ops[:PACK], ordinary, *GRAPH.ops[PACK + 1 :]))
    assert graph.fingerprint != GRAPH.fingerprint
    assert " optional  #" in GRAPH.show_op(PACK)
    assert " optional" not in GRAPH.show_op(POOL)


def test_files_from_before_there_were_optional_ops(tmp_path: Path) -> None:
    _pooling().save(tmp_path / "graph")
    assert "optional" not in (tmp_path / "graph").read_text(encoding="utf-8")
    assert Graph.load(tmp_path / "graph") == _pooling()


def test_refuses_optional_ops_that_are_not(tmp_path: Path) -> None:
    pack = GRAPH.ops[PACK]
    broken = {
        "comes after ops that are": (pack, GRAPH.ops[MEAN]),
        "draws from the generator": (dataclasses.replace(pack, channels=("generator",)),),
        "updates values": (dataclasses.replace(pack, updates=((DH, INDICES),)),),
        "exists already": (dataclasses.replace(pack, outputs=(X,)),),
    }
    for words, ops in broken.items():
        graph = dataclasses.replace(GRAPH, ops=(*GRAPH.ops[:PACK], *ops))
        graph.save(tmp_path / "graph", force=True)
        with pytest.raises(FileError, match=words):
            Graph.load(tmp_path / "graph")


def test_rows_of_alternatives_are_in_the_file_and_not_in_the_fingerprint(tmp_path: Path) -> None:
    bare = dataclasses.replace(GRAPH, alternatives=())
    assert bare.fingerprint == GRAPH.fingerprint
    rows = (*GRAPH.alternatives, Alternative(H, H, "host"), Alternative(H, H, "disk"))
    graph = dataclasses.replace(GRAPH, alternatives=rows)
    graph.save(tmp_path / "graph")
    assert Graph.load(tmp_path / "graph") == graph
    bare.save(tmp_path / "bare")
    assert "alternatives" not in (tmp_path / "bare").read_text(encoding="utf-8")
    assert Graph.load(tmp_path / "bare") == bare


MASKED = Op("masked", "aten.relu.default", (Read(NARROW),), outputs=(DH,), optional=True)
BOTH = Op("both", "aten.relu.default", (Read(NARROW), Read(INDICES)), outputs=(DH,), optional=True)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Alternative(99, NARROW, store=PACK, restore=(UNPACK,)), "is of 99, 7"),
        (Alternative(INDICES, 99, store=PACK, restore=(UNPACK,)), "is of 3, 99"),
        (Alternative(INDICES, INDICES, "attic"), "'attic'"),  # type: ignore[arg-type]
        (Alternative(INDICES, NARROW, store=99, restore=(UNPACK,)), "names ops"),
        (Alternative(INDICES, NARROW, store=PACK, restore=(99,)), "names ops"),
        (Alternative(INDICES, INDICES), "in another place and takes no ops"),
        (Alternative(INDICES, INDICES, "disk", store=PACK), "in another place and takes no ops"),
        (Alternative(INDICES, NARROW, store=PACK), "no way back from %7"),
        (Alternative(INDICES, NARROW, restore=(UNPACK,)), "which no ordinary op makes"),
        (Alternative(INDICES, NARROW, store=UNPACK, restore=(UNPACK,)), "stored by op 6"),
        (Alternative(INDICES, NARROW, store=POOL, restore=(UNPACK,)), "stored by op 1"),
        (Alternative(INDICES, NARROW, store=PACK, restore=(PACK,)), "restored by ops"),
        (Alternative(INDICES, NARROW, store=PACK, restore=(POOL,)), "restored by ops"),
        (Alternative(INDICES, NARROW, store=PACK, instead=((MEAN, 7),)), "stand in"),
        (Alternative(INDICES, NARROW, store=PACK, instead=((POOL_BACKWARD, POOL_BACKWARD),)), "stand in"),
        (Alternative(INDICES, NARROW, store=PACK, instead=((POOL_BACKWARD, UNPACK),)), "stand in"),
        (Alternative(INDICES, NARROW, store=PACK, instead=((POOL_BACKWARD, 8),)), "alone"),
    ],
)
def test_refuses_rows_that_lead_nowhere(row: Alternative, words: str) -> None:
    graph = dataclasses.replace(GRAPH, ops=(*GRAPH.ops, MASKED, BOTH))
    fine = Alternative(INDICES, NARROW, store=PACK, instead=((POOL_BACKWARD, 7),))
    assert dataclasses.replace(graph, alternatives=(*GRAPH.alternatives, fine)).fault is None
    fault = dataclasses.replace(graph, alternatives=(fine, row)).fault
    assert fault is not None
    assert fault.startswith("alternative 1")
    assert words in fault


# ------------------------------------------------------------------------------------------------------------ the plans


def test_only_ordinary_ops_are_in_the_orders_and_in_eagers_programs() -> None:
    assert GRAPH.ordinary == range(5)
    for order in (captured_order(GRAPH), early_updates(GRAPH)):
        assert sorted(order) == list(GRAPH.ordinary)
    for program in (keep_everything(GRAPH), as_eager(GRAPH), plan(GRAPH, COSTS).program):
        assert [row.op for row in program.instructions if isinstance(row, Run)] == list(GRAPH.ordinary)
        check(GRAPH, COSTS, program)


def test_makers_and_readers_are_ordinary() -> None:
    assert GRAPH.maker[INDICES] == POOL
    assert GRAPH.maker[NARROW] == PACK
    assert GRAPH.readers[INDICES] == (POOL_BACKWARD,)
    assert GRAPH.readers[NARROW] == ()


# ------------------------------------------------------------------------------------------------------------ the rules


@pytest.mark.parametrize(
    ("height", "width", "dtype", "nbytes"),
    [(16, 16, "uint8", 1), (16, 18, "int16", 2), (128, 256, "int16", 2), (256, 256, "int32", 4)],
)
def test_indices_are_kept_in_what_holds_their_plane(height: int, width: int, dtype: str, nbytes: int) -> None:
    graph = with_narrow(_pooling(height, width))
    assert graph.alternatives == (Alternative(INDICES, NARROW, store=PACK, restore=(UNPACK,)),)
    wide, narrow = graph.values[INDICES], graph.values[NARROW]
    assert (narrow.dtype, narrow.nbytes) == (dtype, wide.nbytes // 8 * nbytes)
    assert (narrow.shape, narrow.stride) == (wide.shape, wide.stride)


def test_what_is_read_for_its_sizes_is_not_read() -> None:
    graph = sizes_only(_pooling())
    assert graph.reads[POOL_BACKWARD] == (GRADIENT, INDICES)
    assert graph.views == (View(None, "aten.as_strided.default", ((2, 16, 16), (0, 0, 0), 0)),)
    assert graph.values == _pooling().values  # where eager lets go of them, too
    assert sizes_only(dataclasses.replace(_pooling(), device="cuda")).reads[POOL_BACKWARD] == (GRADIENT, H, INDICES)
    strange = dataclasses.replace(graph.values[DH], stride=(1, 32, 2))
    strange_graph = dataclasses.replace(_pooling(), values=(*graph.values[:DH], strange))
    assert sizes_only(strange_graph) == strange_graph


def _dropout(draw: str = "aten.bernoulli_.float", scale: Arg = 0.9, dtype: str = "float32", size: int = 4) -> Graph:
    """x times noise, where the noise is 0 and 1 over 0.9: values x, empty, drawn, noise, y, dx."""
    value = _value("noise", (4, 4), dtype, size)
    return _graph(
        [
            _op("aten.empty_like.default", Read(0), makes=(1,)),
            _op(draw, Read(1), 0.9, makes=(None,), updates=((2, 1),), channels=("generator",)),
            _op("aten.div_.Scalar", Read(2), scale, makes=(None,), updates=((3, 2),)),
            _op("aten.mul.Tensor", Read(0), Read(3), makes=(4,)),
            _op("aten.mul.Tensor", Read(4), Read(3), makes=(5,), phase="backward"),
        ],
        [_value("x", (4, 4)), value, value, value, _value("y", (4, 4)), _value("dx", (4, 4))],
        [5],
    )


def test_noise_is_kept_as_its_mask_and_scaled_again() -> None:
    graph = with_narrow(_dropout())
    assert graph.alternatives == (Alternative(3, 6, store=5, restore=(6, 2)),)
    assert graph.makes[6] == (2,)
    assert (graph.values[6].dtype, graph.values[6].nbytes) == ("bool", 16)
    rows: list[Instruction] = [
        *(Run(0), Run(1, over=((2, 1),)), Run(2, over=((3, 2),)), Run(3), Run(5), Free(3)),
        *(Run(6), Run(2, over=((3, 2),), again=True), Free(6), Run(4), Free(3), Free(4)),
    ]
    assert check(graph, declared(graph), _program(rows, graph)) == 4 * 64


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(_dropout(draw="aten.normal_.default"), id="not 0 and 1"),
        pytest.param(_dropout(scale=0.0), id="divided by zero"),
        pytest.param(_dropout(scale=1e300), id="rounded to zero"),
        pytest.param(_dropout(scale=Read(0)), id="divided by a number that the graph does not know"),
        pytest.param(_dropout(dtype="complex32"), id="a dtype without a rule"),
    ],
)
def test_other_noise_is_left_alone(graph: Graph) -> None:
    assert with_narrow(graph) == graph


def _relu(*, itself: bool = False, written: int | None = None, seen: int | None = None, threshold: Arg = 0) -> Graph:
    """The gradient of x through a ReLU: values x, h, result, gradient, dx."""
    value = _value("h", (4, 4))
    relu = (
        _op("aten.relu_.default", Read(1, written), makes=(None,), updates=((2, 1),))
        if itself
        else _op("aten.relu.default", Read(1, written), makes=(2,))
    )
    return _graph(
        [
            _op("aten.mm.default", Read(0), Read(0), makes=(1,)),
            relu,
            _op("aten.ones_like.default", Read(2), makes=(3,), phase="backward"),
            _op("aten.threshold_backward.default", Read(3), Read(2, seen), threshold, makes=(4,), phase="backward"),
        ],
        [value] * 5,
        [4],
        (View(None, "aten.t.default"), View(0, "aten.view.dtype"), View(None, "aten.view.default", (16,))),
    )


def _without_ones(graph: Graph) -> Graph:
    """The gradient comes from x instead of the result's sizes, so that only the ReLU's backward reads the result."""
    ones = dataclasses.replace(graph.ops[2], args=(Read(0),))
    return dataclasses.replace(graph, ops=(*graph.ops[:2], ones, *graph.ops[3:]))


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("view", [None, 0, 2])
def test_a_relu_is_kept_as_its_mask(itself: bool, view: int | None) -> None:
    graph = with_narrow(_without_ones(_relu(itself=itself, written=view if itself else None, seen=view)))
    assert graph.alternatives == (Alternative(2, 5, store=4, instead=((3, 5),)),)
    assert graph.ops[5].args == (Read(3), Read(5, view), 0)
    assert graph.makes[5] == graph.makes[3]
    assert graph.values[5].dtype == "bool"


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(_relu(), id="somebody else reads the result"),
        pytest.param(_without_ones(_relu(threshold=0.5)), id="another threshold"),
        pytest.param(_without_ones(_relu(seen=1)), id="other numbers in the same bytes"),
        pytest.param(_without_ones(_relu(itself=True, written=0, seen=2)), id="another part than the ReLU wrote"),
        pytest.param(_without_ones(_relu(itself=True, written=0)), id="more than the ReLU wrote"),
        pytest.param(dataclasses.replace(_without_ones(_relu()), outputs=(Output(2, "result", ()),)), id="required"),
    ],
)
def test_other_relus_are_left_alone(graph: Graph) -> None:
    assert with_narrow(graph) == graph
