"""Bytes by module, as a tree in which identical siblings are one row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

Weight = tuple[str, str, int]  # module path, category, bytes


@dataclass(frozen=True)
class Branch:
    """A module, or several that are alike: the same parts, with the same bytes in each category."""

    path: str  # "blocks.{0..11}.attention"
    label: str  # what the path adds to that of the branch above: "attention"
    count: int  # how many modules this row stands for
    categories: Mapping[str, int]  # bytes of all of them, with what is below them
    parts: tuple[Branch, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all these modules, with what is below them."""
        return sum(self.categories.values())

    def to_json(self) -> dict[str, Any]:
        """This row and those below it."""
        return {
            "module": self.path,
            "count": self.count,
            "bytes": self.nbytes,
            "categories": dict(self.categories),
            "parts": [part.to_json() for part in self.parts],
        }


@dataclass
class _Node:
    own: dict[str, int] = field(default_factory=dict)
    children: dict[str, _Node] = field(default_factory=dict)

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Equal for modules that are alike."""
        below = tuple((name, child.signature) for name, child in self.children.items())
        return (tuple(sorted(self.own.items())), below)

    def total(self) -> dict[str, int]:
        """Bytes by category, with what is below."""
        found = dict(self.own)
        for child in self.children.values():
            for category, nbytes in child.total().items():
                found[category] = found.get(category, 0) + nbytes
        return found


def fold(weights: Iterable[Weight], *, top: str) -> tuple[Branch, ...]:
    """The tree of these weights; those of no module get a row named `top`, after all others."""
    root = _Node()
    for path, category, nbytes in weights:
        node = root
        for name in filter(None, path.split(".")):
            node = node.children.setdefault(name, _Node())
        node.own[category] = node.own.get(category, 0) + nbytes
    branches = _fold(root.children, "", 1)
    return (*branches, Branch(top, top, 1, root.own)) if root.own else branches


def _fold(children: Mapping[str, _Node], above: str, count: int) -> tuple[Branch, ...]:
    """The branches of these siblings, each of which there are `count` of, in their order."""
    numbered = all(name.isdecimal() for name in children)
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name in sorted(children, key=int) if numbered else children:
        alike.setdefault(children[name].signature, []).append(name)
    return tuple(_branch(children[names[0]], fold_names(names), above, count * len(names)) for names in alike.values())


def _branch(node: _Node, label: str, above: str, count: int) -> Branch:
    path = f"{above}.{label}" if above else label
    parts = _fold(node.children, path, count)
    if len(parts) == 1 and not node.own:
        return replace(parts[0], label=f"{label}.{parts[0].label}")
    categories = {category: nbytes * count for category, nbytes in node.total().items()}
    return Branch(path, label, count, categories, parts)


def fold_names(names: Sequence[str]) -> str:
    """Several names as one: `{0..11}`, `{0,2..4}`, `{key,query}`."""
    if len(names) == 1:
        return names[0]
    if not all(name.isdecimal() for name in names):
        return "{" + ",".join(names) + "}"
    stretches: list[list[int]] = []
    for number in sorted(map(int, names)):
        if stretches and stretches[-1][-1] == number - 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    return "{" + ",".join(_stretch(stretch) for stretch in stretches) + "}"


def _stretch(numbers: list[int]) -> str:
    return f"{numbers[0]}..{numbers[-1]}" if len(numbers) > 2 else ",".join(map(str, numbers))


def pattern(path: str) -> str:
    """The path with its numbers left open, equal for layers that differ only in their place."""
    return ".".join("#" if name.isdecimal() else name for name in path.split("."))


def fold_paths(paths: Sequence[str]) -> str:
    """Several module paths of one pattern as one: `blocks.{0..11}.attention`."""
    distinct = dict.fromkeys(paths)
    columns = [list(dict.fromkeys(column)) for column in zip(*(path.split(".") for path in distinct), strict=True)]
    if math.prod(map(len, columns)) != len(distinct):
        return f"{next(iter(distinct))} and {len(distinct) - 1} more"
    return ".".join(map(fold_names, columns))


@dataclass(frozen=True)
class Line:
    """A row to show: a branch at its depth of the tree, or what stands for the rest."""

    label: str
    depth: int
    count: int
    categories: Mapping[str, int]


def lines(branches: Sequence[Branch], *, limit: int = 18, least: float = 0.02) -> list[Line]:
    """The tree in at most `limit` rows: the largest branches are opened first, those below `least` stay closed."""
    whole = sum(branch.nbytes for branch in branches)
    kept = _largest(branches, limit)
    opened: set[str] = set()
    rows = len(kept) + (len(kept) < len(branches))
    queue = list(kept)
    while queue:
        branch = max(queue, key=lambda item: item.nbytes)
        queue.remove(branch)
        if branch.parts and branch.nbytes >= least * whole and rows + len(branch.parts) <= limit:
            opened.add(branch.path)
            rows += len(branch.parts)
            queue += branch.parts
    return list(_lines(kept, opened, 0)) + _rest(branches, kept)


def _largest(branches: Sequence[Branch], limit: int) -> list[Branch]:
    if len(branches) <= limit:
        return list(branches)
    kept = {branch.path for branch in sorted(branches, key=lambda item: -item.nbytes)[: limit - 1]}
    return [branch for branch in branches if branch.path in kept]


def _lines(branches: Iterable[Branch], opened: set[str], depth: int) -> Iterable[Line]:
    for branch in branches:
        yield Line(branch.label, depth, branch.count, branch.categories)
        if branch.path in opened:
            yield from _lines(branch.parts, opened, depth + 1)


def _rest(branches: Sequence[Branch], kept: Sequence[Branch]) -> list[Line]:
    shown = {branch.path for branch in kept}
    left = [branch for branch in branches if branch.path not in shown]
    if not left:
        return []
    total: dict[str, int] = {}
    for branch in left:
        for category, nbytes in branch.categories.items():
            total[category] = total.get(category, 0) + nbytes
    count = sum(branch.count for branch in left)
    return [Line(f"({count} smaller ones)", 0, 1, total)]
