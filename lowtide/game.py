"""The pebble game: a node takes a pebble while all that it needs have one; the least pebbles or moves win.

Nodes are computations, pebbles are the memory of their results. In the *one-shot* game no node takes a pebble twice; in
the *multi-shot* game it may, which is recomputation. Sinks keep their pebbles. A node of a folded step weighs its
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import signature

from lowtide.costs import Costs
from lowtide.errors import UsageError
from lowtide.graph import Graph

LARGEST = 64  # nodes of a game that is drawn and solved
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Game:
    """A graph to pebble."""

    name: str
    needs: tuple[tuple[int, ...], ...]  # for each node those that must have a pebble when it takes one; all before it
    labels: tuple[str, ...]
    rows: tuple[str, ...]  # for each node the row in which it is drawn: "forward", "backward", "nodes"
    columns: tuple[int, ...]  # for each node its place in the row
    weights: tuple[int, ...]  # for each node what its pebble takes of the budget: 1, or bytes
    seconds: tuple[float, ...]  # for each node what a move takes: 1, or seconds
    folded: bool = False  # whether a node stands for the ops of a module

    @property
    def sinks(self) -> tuple[int, ...]:
        """The nodes that must have a pebble in the end: nobody needs them."""
        return tuple(sorted(set(range(len(self.needs))).difference(*self.needs)))

    def weight(self, pebbles: Iterable[int]) -> int:
        """What these pebbles take of the budget."""
        return sum(self.weights[node] for node in pebbles)


@dataclass(frozen=True)
class Move:
    """A pebble is placed on a node, or taken off it."""

    place: bool
    node: int


def why_not(
    game: Game, pebbles: frozenset[int], move: Move, *, budget: int, done: frozenset[int] | None = None
) -> str | None:
    """Why a move is against the rules, or None; `done` are the nodes that had a pebble, in the one-shot game."""
    label = game.labels[move.node]
    if not move.place:
        return None if move.node in pebbles else f"{label} has no pebble."
    if move.node in pebbles:
        return f"{label} has a pebble already."
    if missing := [game.labels[node] for node in game.needs[move.node] if node not in pebbles]:
        return f"{label} needs a pebble on {', '.join(missing)}."
    if done is not None and move.node in done:
        return f"{label} had its pebble; in the one-shot game nothing is computed twice."
    if game.weight(pebbles) + game.weights[move.node] > budget:
        return f"no pebble is left for {label}: take one off first."
    return None


def after(pebbles: frozenset[int], move: Move) -> frozenset[int]:
    """The pebbles after a move."""
    return pebbles | {move.node} if move.place else pebbles - {move.node}


# ------------------------------------------------------------------------------------------------------ graphs to play


def _plain(name: str, needs: Sequence[Sequence[int]], labels: Sequence[str] | None = None) -> Game:
    """A game of unit pebbles, its nodes in columns by how long a way leads to them."""
    depth: list[int] = []
    for row in needs:
        depth.append(1 + max((depth[node] for node in row), default=-1))
    count = len(needs)
    return Game(
        name,
        tuple(map(tuple, needs)),
        tuple(labels or (str(node + 1) for node in range(count))),
        ("nodes",) * count,
        tuple(depth),
        (1,) * count,
        (1.0,) * count,
    )


def _trained(name: str, needs: Sequence[Sequence[int]]) -> Game:
    """A forward and its backward: the gradient of a node needs its value, and the gradients of those that read it."""
    count = len(needs)
    readers: list[list[int]] = [[] for _ in needs]
    for node, row in enumerate(needs):
        for other in row:
            readers[other].append(node)
    backward = {node: 2 * count - 1 - node for node in range(count)}
    both = [tuple(row) for row in needs]
    both += [(node, *(backward[reader] for reader in readers[node])) for node in reversed(range(count))]
    labels = [f"f{node + 1}" for node in range(count)] + [f"b{node + 1}" for node in reversed(range(count))]
    columns = [*range(count), *reversed(range(count))]
    rows = (FORWARD,) * count + (BACKWARD,) * count
    return Game(name, tuple(both), tuple(labels), rows, tuple(columns), (1,) * (2 * count), (1.0,) * (2 * count))


def chain(length: int = 8) -> Game:
    """A chain of layers, trained."""
    return _trained(f"chain of {length}", [[node - 1] if node else [] for node in range(length)])


def tree(height: int = 3) -> Game:
    """A complete binary tree, from the leaves to the root."""
    return _plain(f"binary tree of height {height}", binary_tree(height))


def caterpillar(length: int = 6) -> Game:
    """A path, each of whose nodes also needs a leaf of its own."""
    return _plain(f"caterpillar of {length}", caterpillar_needs(length))


def residual(blocks: int = 4) -> Game:
    """Residual blocks, trained: a layer, and its sum with what went in."""
    needs: list[list[int]] = [[]]
    for _ in range(blocks):
        last = len(needs) - 1
        needs += [[last], [last, last + 1]]
    return _trained(f"{blocks} residual blocks", needs)


def unet(depth: int = 3) -> Game:
    """A UNet, trained: on the way up each level also reads what the way down left there."""
    down = [[node - 1] if node else [] for node in range(depth + 1)]
    up = [[depth + level, depth - 1 - level] for level in range(depth)]
    return _trained(f"UNet of depth {depth}", [*down, *up])


def binary_tree(height: int) -> list[list[int]]:
    """What each node of a complete binary tree needs, level by level from the leaves."""
    needs: list[list[int]] = [[] for _ in range(2**height)]
    level = list(range(2**height))
    while len(level) > 1:
        half = len(level) // 2
        needs += [[level[n], level[n + half]] for n in range(half)]
        level = list(range(len(needs) - half, len(needs)))
    return needs


def caterpillar_needs(length: int) -> list[list[int]]:
    """What each node needs of a path of so many nodes, each of which also needs a leaf of its own."""
    return [[], [], [0, 1], *(row for n in range(1, length) for row in ([], [2 * n, 2 * n + 1]))]


GAMES: dict[str, Callable[..., Game]] = {
    "chain": chain,
    "tree": tree,
    "caterpillar": caterpillar,
    "residual": residual,
    "unet": unet,
}


def named(text: str) -> Game | None:
    """The built-in game of a name such as `chain:length=10`; None where it is none."""
    name, _, option = text.partition(":")
    if name not in GAMES:
        return None
    (known,) = signature(GAMES[name]).parameters
    if not option:
        return GAMES[name]()
    key, _, number = option.partition("=")
    if key != known or not number.isdecimal() or not 1 <= int(number) <= LARGEST:
        raise UsageError(f"{text} is no game.", hint=f"write {name}:{known}=4.")
    found = GAMES[name](int(number))
    if len(found.needs) > LARGEST:
        raise UsageError(
            f"{text} has {len(found.needs)} nodes; {LARGEST} can be played.", hint=f"take a smaller {known}."
        )
    return found


# ---------------------------------------------------------------------------------------------------------- a real step


def folded(name: str, graph: Graph, costs: Costs, *, most: int = 24) -> Game:
    """A captured step as a game: a node is what one module does in one go, a pebble the bytes that others read of it.

    Updates are left out, and so is all that persists. Modules are taken as deep as `most` nodes allow.
    """
    ops = [op for op in graph.ordinary if graph.ops[op].phase != "update"]
    deepest = max((graph.ops[op].module.count(".") + 1 for op in ops), default=1)
    pieces: list[list[int]] = []
    for depth in range(1, deepest + 1):
        finer = _pieces(graph, ops, depth)
        if pieces and len(finer) > most:
            break
        pieces = finer
    while len(pieces) > most:  # a step with more turns than that, however coarse: neighbours join
        pieces = [pieces[at] + (pieces[at + 1] if at + 1 < len(pieces) else []) for at in range(0, len(pieces), 2)]
    return _contracted(name, graph, costs, pieces)


def _pieces(graph: Graph, ops: Sequence[int], depth: int) -> list[list[int]]:
    """The ops in pieces that follow each other: of one phase, and of one module down to this depth."""
    found: list[list[int]] = []
    before = None
    for op in ops:
        item = graph.ops[op]
        key = item.phase, ".".join(item.module.split(".")[:depth])
        if key != before:
            found.append([])
        found[-1].append(op)
        before = key
    return found


def _contracted(name: str, graph: Graph, costs: Costs, pieces: Sequence[Sequence[int]]) -> Game:
    piece = {op: number for number, ops in enumerate(pieces) for op in ops}
    lasting = graph.lasting_storages
    needs: list[set[int]] = [set() for _ in pieces]
    weights = [0] * len(pieces)
    for value, maker in enumerate(graph.maker):
        if maker not in piece or graph.values[value].storage in lasting:
            continue
        others = {piece[reader] for reader in graph.readers[value] if reader in piece} - {piece[maker]}
        for other in others:
            needs[other].add(piece[maker])
        weights[piece[maker]] += costs.nbytes[value] if others else 0
    rows: list[str] = [graph.ops[ops[0]].phase for ops in pieces]
    labels = [_label(graph, ops) for ops in pieces]
    forward, backward = rows.count(FORWARD), rows.count(BACKWARD)
    wide = max(forward, backward)  # both rows end where the forward turns round
    ahead = {FORWARD: iter(range(wide - forward, wide)), BACKWARD: iter(reversed(range(wide - backward, wide)))}
    columns = [next(ahead[row]) for row in rows]
    seconds = tuple(sum(costs.seconds[op] for op in ops) for ops in pieces)
    return Game(
        name, tuple(tuple(sorted(row)) for row in needs), tuple(labels), tuple(rows), tuple(columns), tuple(weights),
        seconds, folded=True,
    )  # fmt: skip


def _label(graph: Graph, ops: Sequence[int]) -> str:
    """The modules of some ops, as far as they agree."""
    paths = [graph.ops[op].module.split(".") for op in ops]
    same = [one[0] for one in zip(*paths, strict=False) if len(set(one)) == 1]
    return ".".join(same) or "(top)"
