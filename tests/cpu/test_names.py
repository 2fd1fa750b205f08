"""What a graph names becomes a call only where it is an op of torch that stays with its tensors."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
import torch

from lowtide import kernels
from lowtide.device import CPU
from lowtide.errors import ProgramError
from lowtide.execute.source import generate
from lowtide.graph import Arg, Graph, Input, Op, Output, Read, Value, View
from lowtide.program import Free, Instruction, Program, Run

SIXTEEN = Value("x", 64, "batch", 0, shape=(16,), stride=(1,))


def call(target: str, *args: Arg, views: tuple[View, ...] = (), view: int | None = None, **kwargs: Arg) -> Graph:
    """A graph of one call on an input of 16 floats, of which a view may be asked for."""
    op = Op("call", target, (Read(0, view), *args), tuple(kwargs.items()), outputs=(1,))
    values = (SIXTEEN, Value("y", 64, "activation", 1))
    return Graph((op,), values, (Input(0, (0,)),), (Output(1, "result", ()),), views)


def run(graph: Graph, *inputs: torch.Tensor, instructions: tuple[Instruction, ...] = (Run(0),)) -> Any:
    """What the generated code returns."""
    function, _ = generate(graph, Program(graph.fingerprint, instructions), CPU)
    return function(list(inputs), torch.default_generator, None, array("q", [0]))


@pytest.mark.parametrize(
    "target",
    [
        *("aten.from_file.default", "aten.set_.source_Storage", "aten.resize_.default", "aten.save.default"),
        *("aten.warn.default", "aten.len.Tensor", "aten.no_such.default", "aten.mm.no_such", "aten.__class__.mro"),
        *("load_library.x.y", "aten.quantized_lstm.input", "operator.attrgetter", "aten.mm.name", "prim.Print.default"),
    ],
)
def test_only_ops_that_a_graph_may_call_are_found(target: str) -> None:
    with pytest.raises(ProgramError) as caught:
        kernels.kernel(target)
    assert caught.value.rule == "no such"
    with pytest.raises(ProgramError):
        run(call(target), torch.ones(16))


@pytest.mark.parametrize(
    ("family", "name"), [("dtype", "load"), ("os", "x"), ("device", "nowhere"), ("layout", "ones")]
)
def test_only_constants_of_the_library_are_found(family: str, name: str) -> None:
    with pytest.raises(ProgramError):
        kernels.constant(family, name)


def test_every_constant_and_dtype_of_the_table_is_torchs() -> None:
    from lowtide.graph.targets import CONSTANTS, DTYPES

    for family, names in CONSTANTS.items():
        assert {type(kernels.constant(family, name)).__name__ for name in names} == {family}
    assert {name: getattr(torch, name).itemsize for name in DTYPES} == dict(DTYPES)


def test_a_graph_made_by_hand_runs_no_code() -> None:
    item: Any = "0]; open('/nonexistent'); [0"
    graph = call("aten.neg.default", views=(View(None, "aten.split.Tensor", (8,), item=item),), view=0)
    with pytest.raises(ProgramError, match="view 0 takes item") as caught:
        run(graph, torch.ones(16))
    assert caught.value.rule == "unsound"


def test_a_program_made_by_hand_names_what_there_is() -> None:
    graph = call("aten.neg.default")
    place: Any = "x', print('here'), '"
    for row in (Run(1), Run(-1), Run(0, over=((9, 0),)), Free(0, place), Free(True), Free(9)):
        with pytest.raises(ProgramError) as caught:
            run(graph, torch.ones(16), instructions=(row,))
        assert (caught.value.rule, caught.value.instruction) == ("no such", 0)


def test_arguments_arrive_as_they_are() -> None:
    x = torch.arange(16.0)
    assert torch.equal(run(call("aten.div.Tensor_mode", 2.5, rounding_mode="floor"), x)[0], x // 2.5)
    assert torch.equal(run(call("aten.clamp.default", -math.inf, 3), x)[0], x.clamp(max=3))
    assert torch.equal(run(call("aten.mul.Scalar", 2 - 0j), x)[0], x * (2 - 0j))
    assert run(call("aten.fill.Scalar", math.nan), x)[0].isnan().all()


def test_equal_numbers_that_are_not_the_same_stay_apart() -> None:
    """`0j == -0j`, but their signs are seen."""
    first = Op("a", "aten.fill.Scalar", (Read(0), complex(0.0, 0.0)), outputs=(1,))
    second = Op("b", "aten.fill.Scalar", (Read(0), complex(0.0, -0.0)), outputs=(2,))
    values = (SIXTEEN, Value("y", 128, "activation", 1), Value("z", 128, "activation", 2))
    results = (Output(1, "result", (0,)), Output(2, "result", (1,)))
    graph = Graph((first, second), values, (Input(0, (0,)),), results)
    found = run(graph, torch.zeros(16, dtype=torch.complex64), instructions=(Run(0), Run(1)))
    assert [bool(torch.signbit(item.imag).any()) for item in found] == [False, True]


def test_views_may_be_thousands_deep() -> None:
    views = (View(None, "aten.neg.default"), *(View(n, "aten.alias.default") for n in range(3000)))
    assert torch.equal(run(call("aten.neg.default", views=views, view=3000), torch.ones(16))[0], torch.ones(16))
