"""A graph that does not hold together is refused, whether it comes from a file or was made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import FileError
from lowtide.graph import Arg, Constant, Graph, Input, Op, Output, Read, Value, View
from lowtide.graph.targets import refusal

ADD = "aten.add.Tensor"


def make(*args: Arg, target: str = ADD, views: tuple[View, ...] = (), view: int | None = None, **kwargs: Arg) -> Graph:
    """A graph of one call on one input of 16 floats."""
    values = (Value("x", 64, "batch", 0, shape=(16,), stride=(1,)), Value("y", 64, "activation", 1))
    op = Op("call", target, (Read(0, view), *args), tuple(kwargs.items()), outputs=(1,))
    return Graph((op,), values, (Input(0, (0,)),), (Output(1, "result", ()),), views)


class Text(str):
    """A text that writes itself as code."""

    def __repr__(self) -> str:
        return "__import__('os').abort()"


def broken(graph: Graph, words: str, folder: Path, *, in_file: bool = True) -> None:
    """Both doors refuse the graph in these words."""
    assert graph.fault is not None
    assert words in graph.fault
    if in_file:
        graph.save(folder / "graph", force=True)
        with pytest.raises(FileError, match="holds no valid graph"):
            Graph.load(folder / "graph")


def test_a_plain_graph_is_sound(tmp_path: Path) -> None:
    graph = make(1.5, Constant("dtype", "float32"), (1, (2, None)), "sum", 2j, float("nan"), scale=True)
    assert graph.fault is None
    graph.save(tmp_path / "graph")
    assert Graph.load(tmp_path / "graph").fingerprint == graph.fingerprint


@pytest.mark.parametrize("item", ["0]; __import__('os').abort(); [0", 1.0, True, (0,)])
def test_the_item_of_a_view_is_a_number_and_nothing_else(tmp_path: Path, item: Any) -> None:
    views = (View(None, "aten.split.Tensor", (1,), item=item),)
    broken(make(views=views, view=0), "view 0 takes item", tmp_path)


@pytest.mark.parametrize("name", ["x=1);__import__('os').abort(", "lambda", "", "a b", "ключ", "1"])
def test_the_name_of_an_argument_is_an_identifier(tmp_path: Path, name: str) -> None:
    broken(make(**{name: 1}), "names that can't be written", tmp_path)


def test_no_name_of_an_argument_comes_twice(tmp_path: Path) -> None:
    graph = make()
    op = dataclasses.replace(graph.ops[0], kwargs=(("a", 1), ("a", 2)))
    broken(dataclasses.replace(graph, ops=(op,)), "names that can't be written", tmp_path, in_file=False)


@pytest.mark.parametrize("arg", [Text("x"), [1], {"a": 1}, object(), range(3), 2**64, -(2**63) - 1])
def test_arguments_are_of_a_few_exact_types(tmp_path: Path, arg: Any) -> None:
    broken(make(arg), "op 0 call has", tmp_path, in_file=False)


def test_arguments_are_not_deep(tmp_path: Path) -> None:
    arg: Arg = 1
    for _ in range(9):
        arg = (arg,)
    broken(make(arg), "more than 8 deep", tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [("dtype", "load"), ("module", "os"), ("dtype", "float32; x"), ("device", "cpu')"), ("memory_format", "__class__")],
)
def test_constants_are_those_of_the_table(tmp_path: Path, family: str, name: str) -> None:
    broken(make(Constant(family, name)), "op 0 call: ", tmp_path)


@pytest.mark.parametrize(
    "target",
    [
        *("aten.from_file.default", "aten.set_.source_Tensor", "aten.resize_.default", "aten.set_data.default"),
        *("aten.data_ptr.default", "aten.save.default", "aten.record_stream.default", "prim.Print.default"),
        *("aten._sparse_coo_tensor_unsafe.default", "aten.sparse_resize_.default", "aten._resize_output_.default"),
        *("operator.attrgetter", "operator.__call__", "os.system.default", "aten.mm", "aten..mm", "aten.mm.default.x"),
        *("", "a.b.c\n", "inductor.resize_storage_bytes_.default"),
    ],
)
def test_what_reaches_beyond_its_tensors_is_not_called(tmp_path: Path, target: str) -> None:
    if target == "os.system.default":  # a namespace that some process could have; files may not call it
        make(target=target).save(tmp_path / "graph")
        with pytest.raises(FileError, match="not of a namespace"):
            Graph.load(tmp_path / "graph")
        return
    broken(make(target=target), "op 0 call: ", tmp_path)
    broken(make(views=(View(None, target),), view=0), "view 0: ", tmp_path)


def test_ops_of_ones_own_are_loaded_where_they_are_named(tmp_path: Path) -> None:
    graph = make(target="mine.op.default")
    graph.save(tmp_path / "graph")
    assert graph.fault is None
    with pytest.raises(FileError, match="aten, lowtide, prims"):
        Graph.load(tmp_path / "graph")
    assert Graph.load(tmp_path / "graph", own=("mine",)) == graph


def test_ops_that_steps_really_use_are_allowed() -> None:
    names = "native_batch_norm convolution_backward _unsafe_view as_strided index_put_ __and__ scatter_add data_loss"
    assert [name for name in names.split() if refusal(f"aten.{name}.default")] == []
    assert refusal("operator.mul") is None


STRIDED = "aten.as_strided.default"


@pytest.mark.parametrize(
    ("args", "fits"),
    [
        (((4, 4), (4, 1), 0), True),
        (((4, 4), (4, 1), 1), False),
        (((4, 4), (4, 1), None), True),
        (((2,), (15,)), True),
        (((2,), (16,)), False),
        (((0, 99), (99, 99), 99), True),
        (((), (), 15), True),
        (((), (), 16), False),
        (((1,), (-1,), 0), False),
        (((1,), (1, 1), 0), False),
        (((True,), (1,), 0), False),
        (((2**62,), (2**62,), 0), False),
    ],
)
def test_strided_views_end_where_their_storage_ends(tmp_path: Path, args: tuple[Arg, ...], fits: bool) -> None:
    call, view = make(*args, target=STRIDED), make(views=(View(None, STRIDED, args),), view=0)
    below = make(views=(View(None, STRIDED, args), View(0, "aten.t.default")), view=1)
    for graph in (call, view, below):
        if fits:
            assert graph.fault is None
        else:
            broken(graph, "", tmp_path)


def test_strided_views_count_in_bytes_once_the_elements_are_others() -> None:
    views = (
        View(None, "aten.view.dtype", (Constant("dtype", "uint8"),)),
        View(0, STRIDED, ((64,), (1,), 0)),
        View(0, STRIDED, ((65,), (1,), 0)),
    )
    assert make(views=views, view=1).fault is None
    assert make(views=views, view=2).fault is not None


CYCLES: list[Callable[[], tuple[View, ...]]] = [
    lambda: (View(0, "aten.t.default"),),
    lambda: (View(1, "aten.t.default"), View(0, "aten.t.default")),
    lambda: (View(-1, "aten.t.default"),),
    lambda: (View(None, "aten.t.default", (Read(0),)),),
]


@pytest.mark.parametrize("views", CYCLES)
def test_views_come_after_what_they_see(tmp_path: Path, views: Callable[[], tuple[View, ...]]) -> None:
    broken(make(views=views(), view=0), "view 0", tmp_path)


def test_sizes_are_those_of_tensors(tmp_path: Path) -> None:
    graph = make()
    for change in ({"nbytes": -1}, {"nbytes": True}, {"shape": (2**63,)}, {"dtype": "load"}, {"stride": (-1,)}):
        values = (graph.values[0], dataclasses.replace(graph.values[1], **change))  # type: ignore[arg-type]
        broken(dataclasses.replace(graph, values=values), "%1 has", tmp_path)
    broken(dataclasses.replace(graph, device="cpu; rm"), "is no device", tmp_path)
    late = (graph.values[0], dataclasses.replace(graph.values[1], eager_end=1))
    broken(dataclasses.replace(graph, values=late), "%1 ends after op 1, of 1", tmp_path)
