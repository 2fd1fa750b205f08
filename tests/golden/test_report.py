"""The parts of a report, each on data made by hand."""

import io
import random

import pytest
from rich.console import Console

from lowtide.costs import declared
from lowtide.graph import Graph, Input, Op, Output, Read, Value
from lowtide.program import Free, Program, Run
from lowtide.report.bytes import bar, show_bytes, show_difference, show_seconds, show_share
from lowtide.report.curve import Curve, Stretch
from lowtide.report.modules import fold, fold_names, fold_paths, lines
from lowtide.report.plot import plot
from lowtide.report.profile import profile
from lowtide.report.table import Table, shorten


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (999 * 1024**2, "999.00 MiB"),
        (1000 * 1024**2, "0.98 GiB"),
        (5 * 1024**4, "5.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes(nbytes: int, shown: str) -> None:
    assert show_bytes(nbytes) == shown


def test_seconds_shares_and_differences() -> None:
    assert [show_seconds(seconds) for seconds in (120, 1.5, 0.0413, 5e-6)] == ["120 s", "1.50 s", "41.3 ms", "5 µs"]
    assert [show_share(part, 1000) for part in (0, 0.1, 25, 1000)] == ["0.0%", "<0.1%", "2.5%", "100.0%"]
    assert show_difference(200, 201) == "+0.50%"
    assert show_difference(0, 1) == "n/a"


def test_a_bar_is_as_long_as_its_part_and_never_nothing() -> None:
    assert bar(10, 10, 5) == "█████"
    assert bar(5, 10, 5) == "██▌"
    assert bar(1, 10**6, 5) == "▏"
    assert bar(0, 10, 5) == ""


def test_names_fold_into_ranges() -> None:
    assert fold_names(["7"]) == "7"
    assert fold_names([str(number) for number in range(12)]) == "{0..11}"
    assert fold_names(["0", "1", "4", "5", "6", "9"]) == "{0,1,4..6,9}"
    assert fold_names(["key", "query"]) == "{key,query}"


def test_paths_fold_where_they_form_a_grid() -> None:
    assert fold_paths(["a.0.b", "a.1.b", "a.1.b"]) == "a.{0,1}.b"
    assert fold_paths(["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"]) == "a.{0,1}.b.{0,1}"
    assert fold_paths(["a.0.b.0", "a.1.b.1"]) == "a.0.b.0 and 1 more"


def test_identical_layers_are_one_row_and_the_sum_is_kept() -> None:
    weights = [(f"blocks.{number}.attention.{part}", "parameters", 10) for number in range(12) for part in "qkv"]
    weights += [("blocks.3.attention.q", "activations", 5), ("", "batch", 7), ("head", "parameters", 1)]
    branches = fold(weights, top="(top)")
    assert [(branch.path, branch.count, branch.nbytes) for branch in branches] == [
        ("blocks", 1, 365),
        ("head", 1, 1),
        ("(top)", 1, 7),
    ]
    blocks = branches[0].parts
    assert [(branch.path, branch.count, branch.nbytes) for branch in blocks] == [
        ("blocks.{0..2,4..11}.attention.{q,k,v}", 33, 330),
        ("blocks.3.attention", 1, 35),
    ]
    assert sum(branch.nbytes for branch in branches) == sum(nbytes for _, _, nbytes in weights)


def test_a_row_per_layer_where_all_differ_stays_short() -> None:
    weights = [(f"{number}.{part}", "parameters", 100 + number) for number in range(60) for part in "ab"]
    shown = lines(fold(weights, top="(top)"), limit=18)
    assert len(shown) == 18
    assert shown[-1].label == "(86 smaller ones)"
    assert sum(sum(line.categories.values()) for line in shown) == sum(nbytes for _, _, nbytes in weights)


def curve_of(nbytes: list[int]) -> Curve:
    half = len(nbytes) // 2
    stretches = (Stretch("forward", 0, half), Stretch("backward", half, len(nbytes)))
    return Curve(tuple(nbytes), tuple(map(float, range(len(nbytes)))), float(len(nbytes)), stretches)


def test_the_plot_reaches_the_top_only_at_the_peak() -> None:
    picture = plot(curve_of([10, 20, 80, 40, 20, 10]), 10, width=40, height=8)
    top = picture[1].partition("┤")[2]
    assert picture[0].index("▼") - picture[1].index("┤") - 1 == top.index("█")
    assert top.strip("█ ▁▂▃▄▅▆▇") == ""
    assert "80 B" in picture[1]
    assert picture[8].partition("┤")[2] == "░" * (40 - len("80 B ┤"))
    assert picture[-1].split() == ["forward", "backward"]
    assert max(map(len, picture)) <= 40


def test_a_plot_of_any_curve_has_its_size() -> None:
    numbers = random.Random(0)
    for length in (1, 2, 3, 700):
        nbytes = [numbers.randrange(1, 10**9) for _ in range(length)]
        picture = plot(curve_of(nbytes), min(nbytes), width=60, height=10)
        assert len(picture) == 13
        assert max(map(len, picture)) <= 60


def test_points_of_a_long_curve_are_few_and_hold_the_peak() -> None:
    nbytes = [1] * 5000
    nbytes[3333] = 9
    data = curve_of(nbytes).to_json()
    assert len(data["bytes"]) == len(data["at"]) == 512
    assert max(data["bytes"]) == 9
    assert [phase["end"] for phase in data["phases"]] == [2500, 5000]


def test_only_the_columns_that_may_shrink_are_cut() -> None:
    table = Table("sr", [("a_very_long_module_path.weight", "123.45 MiB")], ("name", "bytes"), indent=2)
    console = Console(width=30, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "  name                   bytes\n  a_very_l….weight  123.45 MiB\n"
    assert table.markdown().splitlines()[1] == "| --- | ---: |"
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 5) == "ab…fg"


def test_words_wrap_and_are_never_cut() -> None:
    rows = [("peak", "65.07 MiB", "13.07 MiB persists + 52.00 MiB is the step's own"), ("gap", "0.00", "")]
    console = Console(width=46, file=io.StringIO())
    console.print(Table("lrw", rows))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "peak  65.07 MiB  13.07 MiB persists + 52.00",
        "                 MiB is the step's own",
        "gap        0.00",
    ]


def small_graph() -> Graph:
    values = (
        Value("layer.weight", 100, "parameter", 0, shape=(25,)),
        Value("batch 0", 40, "batch", 1, shape=(10,)),
        Value("mm", 200, "activation", 2, shape=(50,)),
        Value("mm_backward", 100, "gradient", 3, shape=(25,)),
        Value("layer.weight", 100, "parameter", 0, shape=(25,)),
    )
    ops = (
        Op("mm_0", "aten.mm", (Read(0), Read(1)), outputs=(2,), module="layer", source="train.py:3"),
        Op("mmb_0", "aten.mmb", (Read(2),), outputs=(3,), phase="backward", module="layer", source="train.py:3"),
        Op("sub_0", "aten.sub_", (Read(0), Read(3)), updates=((4, 0),), phase="update", source="train.py:5"),
    )
    inputs = (Input(0, ("layer.weight",)), Input(1, (0,)))
    return Graph(ops, values, inputs, (Output(4, "input", ("layer.weight",)),))


def test_a_profile_adds_up() -> None:
    graph = small_graph()
    program = Program(graph.fingerprint, (Run(0), Run(1), Free(2), Run(2, over=((4, 0),)), Free(3)))
    found = profile(graph, declared(graph), program)
    assert (found.peak, found.persistent, found.own) == (440, 140, 300)
    assert found.peak_op.op == "mmb_0"
    held = {name: nbytes for name, nbytes in found.categories.items() if nbytes}
    assert held == {"parameters": 100, "gradients": 100, "batch": 40, "activations": 200}
    assert [(branch.path, branch.nbytes) for branch in found.modules] == [("layer", 400), ("(top level)", 40)]
    assert [(item.name, item.nbytes, item.source) for item in found.largest] == [
        ("mm", 200, "train.py:3"),
        ("mm_backward", 100, "train.py:3"),
        ("weight", 100, ""),
        ("batch 0", 40, ""),
    ]
    assert [stretch.phase for stretch in found.curve.phases] == ["forward", "backward", "update"]
    assert found.parameters == 25


def test_a_profile_with_an_arena_counts_its_gaps() -> None:
    graph = small_graph()
    runs = (Run(0, at=(0, -1)), Run(1, at=(256, -1)), Free(2), Run(2, at=(-1, -1), over=((4, 0),)), Free(3))
    found = profile(graph, declared(graph), Program(graph.fingerprint, runs, arena=512))
    assert found.peak == 512 + 140
    assert found.categories["gaps in the arena"] == 512 - 300
    assert sum(found.categories.values()) == found.peak == sum(branch.nbytes for branch in found.modules)
