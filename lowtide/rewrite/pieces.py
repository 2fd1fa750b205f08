"""Gradients of which each reader sees a piece, made as these pieces: what is done with ends before the rest.

The backward of a convolution over a concatenation makes one large tensor, of which each reader sees some channels; as
one, all of it is there until the last of them is done.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lowtide.graph import Arg, Constant, Graph, Op, Read, View
from lowtide.kernels import is_product
from lowtide.rewrite.editor import Editor

FORM = (("memory_format", Constant("memory_format", "contiguous_format")),)


def large_wholes(graph: Graph, least: float) -> frozenset[str]:
    """The names of products of the backward whose results of so many bytes are read in pieces."""
    return frozenset(
        graph.ops[index].name
        for index in graph.ordinary
        if graph.ops[index].phase == "backward"
        and is_product(graph.ops[index].target)
        and any(graph.values[value].nbytes > least and _roots(graph, value) for value in graph.makes[index])
    )


def in_pieces(graph: Graph, names: Collection[str]) -> Graph:
    """The graph in which what these ops make is copied to tensors of its pieces, which are read instead."""
    editor = Editor(graph)
    for index in graph.ordinary:
        if graph.ops[index].name in names:
            for value in graph.makes[index]:
                _write(editor, index, value, _roots(graph, value))
    return editor.reordered() if names else graph


def _roots(graph: Graph, value: int) -> tuple[int, ...]:
    """The views of a value that are its pieces; none where somebody sees more of it, or it must stay whole."""
    reads = [read for op in graph.readers[value] for read in graph.ops[op].arguments() if read.value == value]
    over = any(old == value for op in graph.readers[value] for _, old in graph.ops[op].updates)
    roots = [_root(graph, read.view) for read in reads if read.view is not None]
    if over or value in graph.required or len(roots) < len(reads):
        return ()
    found = tuple(dict.fromkeys(roots))
    shapes = Editor(graph).shapes
    elements = sum(shapes.tensor(Read(value, root)).numel() for root in found)
    return found if len(found) > 1 and elements <= shapes.tensor(Read(value)).numel() else ()


def _root(graph: Graph, view: int) -> int:
    """The view of a chain that sees the value itself."""
    while (parent := graph.views[view].parent) is not None:
        view = parent
    return view


def _write(editor: Editor, index: int, value: int, roots: tuple[int, ...]) -> None:
    graph, maker = editor.graph, editor.graph.ops[index]
    copies = {}
    for number, root in enumerate(roots):
        made = copies[root] = editor.value(graph.values[value])
        copy = Op(f"{maker.name}_piece{number}", "aten.clone.default", (Read(value, root),), FORM, (made,))
        editor.put(index, 1, index, replace(copy, phase=maker.phase, module=maker.module, source=maker.source))
    for reader in graph.readers[value] if roots else ():
        op = editor.placed[reader].op
        args = tuple(_pieced(editor, arg, value, copies) for arg in op.args)
        kwargs = tuple((key, _pieced(editor, arg, value, copies)) for key, arg in op.kwargs)
        editor.change(reader, replace(op, args=args, kwargs=kwargs))


def _pieced(editor: Editor, arg: Arg, value: int, copies: dict[int, int]) -> Arg:
    """An argument that reads the copy of a piece in the place of the value."""
    if isinstance(arg, tuple):
        return tuple(_pieced(editor, one, value, copies) for one in arg)
    if not isinstance(arg, Read) or arg.value != value or arg.view is None:
        return arg
    return Read(copies[_root(editor.graph, arg.view)], _without_root(editor, arg.view))


def _without_root(editor: Editor, view: int) -> int | None:
    """The same chain of views, of what its first view sees."""
    item = editor.graph.views[view]
    if item.parent is None:
        return None
    return editor.view(View(_without_root(editor, item.parent), item.target, item.args, item.item))
