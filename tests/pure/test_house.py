"""The rules of the house, held by walking the imports without importing anything; a violation names file and line."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lowtide"

# The map of the house. Every file and folder of the package has its place here, and in CONTRIBUTING.md.
NOUNS = {"graph", "costs", "program", "budget", "simulate", "engines", "check", "errors", "files", "tree"} | {
    "captured",
    "resized",
    "forms",
    "guards",
    "changes",
    "sizes",
    "lifetimes",
    "limits",
    "rewrites",
    "aten",
    "game",
}
INSTRUMENTS = {
    "allocator",
    "device",
    "ending",
    "kernels",
    "child",
    "native",
    "packed",
    "private",
    "progress",
    "recompute",
    "watch",
}
VERBS = {"capture", "rewrite", "measure", "plan", "execute", "report"}
MODELS = {"models"}
DATA = {"data"}
DOORS = {
    "__init__",
    "batch",
    "fit",
    "candidates",
    "trials",
    "choice",
    "attach",
    "evaluation",
    "frameworks",
    "arriving",
    "giving",
    "handover",
    "parts",
    "wrap",
    "scan",
    "verify",
    "peaks",
    "pace",
    "page",
    "doctor",
    "cli",
    "bench",
}
REPOSITORY = "bench"  # a room that is not in the wheel
ENTRANCE = "lowtide.cli.bench"  # the one file that asks for it

PLAIN = {
    "graph",
    "costs",
    "program",
    "rewrites",
    "aten",
    "errors",
    "files",
}  # data that the judge and the simulator both may read
WITHOUT_TORCH = NOUNS | {"child", "ending", "native", "plan", "progress", "report"}
MAY_IMPORT = {  # besides itself
    **dict.fromkeys(NOUNS, NOUNS),
    **dict.fromkeys(INSTRUMENTS, NOUNS | INSTRUMENTS),
    **dict.fromkeys(VERBS, NOUNS | INSTRUMENTS),
    **dict.fromkeys(MODELS | DATA, NOUNS),
    **dict.fromkeys(DOORS, NOUNS | INSTRUMENTS | VERBS | MODELS | DATA | DOORS),
}
REFUSED = {"utils", "common", "core", "base", "misc", "helpers", "manager", "v2"}
OPEN = {"sys", "os", "aten", "torch.ops.aten"}  # whose names may begin with an underscore
KNOWN = {"_fields", "_name", "_handle"}  # of a named tuple and of ctypes: documented
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


@dataclass(frozen=True)
class Import:
    """One import, as written."""

    importer: str  # dotted name of the module
    target: str  # dotted name of what it imports
    where: str  # "lowtide/plan/keep.py:5"


class House:
    """The modules of a package and their imports, read from the source."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / PACKAGE
        self.modules = {self._name(path): path for path in sorted(self.folder.rglob("*.py"))}
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.modules.items()}
        self.imports = [found for name in self.modules for found in self._imports(name)]

    def rooms(self) -> set[str]:
        """The files and folders right in the package, `__init__` for the package itself."""
        return {room(name) for name in self.modules}

    def reached(self, start: str) -> dict[str, list[Import]]:
        """Everything that a module imports, also through others, with the chain that leads there."""
        chains: dict[str, list[Import]] = {start: []}
        queue = [start]
        while queue:
            name = queue.pop()
            for found in self.imports:
                if found.importer != name:
                    continue
                for target in _with_parents(found.target):
                    if target not in chains and target != PACKAGE:
                        chains[target] = [*chains[name], found]
                        queue.append(target)
        return chains

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _imports(self, name: str) -> Iterator[Import]:
        path = self.modules[name]
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(self.trees[name]):
            for target in self._targets(node, package):
                yield Import(name, target, f"{path.relative_to(self.root)}:{node.lineno}")  # type: ignore[attr-defined]

    def _targets(self, node: ast.AST, package: str) -> Iterator[str]:
        """What one piece of code imports; a name imported from a package is a module where there is such a module."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in self.modules else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            given = node.args[0] if node.args else None
            yield given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else "?"


def room(name: str) -> str:
    """The place on the map that a module of the package belongs to."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def ours(name: str) -> bool:
    """Whether a module is the package's own."""
    return name.partition(".")[0] == PACKAGE


def _with_parents(name: str) -> list[str]:
    """A module and the packages around it, which are imported first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


# --------------------------------------------------------------------------------- the rules: each lists what breaks it


def strangers(house: House) -> Iterator[str]:
    """Imports of rooms that a room may not import."""
    for found in house.imports:
        if not ours(found.target):
            continue
        here, there = room(found.importer), room(found.target)
        if there != here and there not in MAY_IMPORT.get(here, set()):
            yield f"{found.where}: {here} imports {there} ({found.target})"


def joining(house: House) -> Iterator[str]:
    """Imports of a second verb in rooms that are no front door."""
    for here in sorted(house.rooms() - DOORS):
        mine = [found for found in house.imports if room(found.importer) == here and ours(found.target)]
        verbs = {room(found.target): found.where for found in mine if room(found.target) in VERBS}
        if len(verbs.keys() | ({here} & VERBS)) > 1:
            for verb, where in verbs.items():
                if verb != here:
                    yield f"{where}: {here} joins {verb} to other verbs; only {', '.join(sorted(DOORS))} may"


def left_behind(house: House) -> Iterator[str]:
    """Imports, in what is installed, of what is not."""
    for found in house.imports:
        inside = room(found.importer) == REPOSITORY or found.importer == ENTRANCE
        if ours(found.target) and room(found.target) == REPOSITORY and not inside:
            yield f"{found.where}: {found.importer} imports {found.target}, which is not in the wheel"


def torch_inside(house: House) -> Iterator[str]:
    """Imports of torch, also through other modules, where there must be none."""
    for name in house.modules:
        if room(name) not in WITHOUT_TORCH:
            continue
        for target, chain in house.reached(name).items():
            if target in ("torch", "?"):
                what = "torch" if target == "torch" else "a module that only the running program knows"
                through = ", ".join(f"{step.target} at {step.where}" for step in chain[1:])
                yield f"{chain[0].where}: {name} imports {what}" + (f" through {through}" if through else "")


def shared_eyes(house: House) -> Iterator[str]:
    """What the judge and the simulator have in common beyond plain data."""
    judge, simulator = f"{PACKAGE}.check", f"{PACKAGE}.simulate"
    seen = {name: house.reached(name) for name in (judge, simulator) if name in house.modules}
    for name, other in ((judge, simulator), (simulator, judge)):
        for target, chain in seen.get(name, {}).items():
            if target == other:
                yield f"{chain[0].where}: {name} imports {other}"
            elif chain and ours(target) and target in seen.get(other, {}) and room(target) not in PLAIN:
                yield f"{chain[0].where}: {name} and {other} both import {target}"


def odd_names(house: House) -> Iterator[str]:
    """Files and folders whose names say nothing."""
    for path in sorted(house.folder.rglob("*")):
        if path.stem.lower() in REFUSED and "__pycache__" not in path.parts:
            yield f"{path.relative_to(house.root)}:1: the name {path.stem} says nothing"


def unfinished(house: House) -> Iterator[str]:
    """Notes that something is still to be done."""
    for path in sorted(house.folder.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if match := UNFINISHED.search(line):
                    yield f"{path.relative_to(house.root)}:{number}: {match[0]}"


def reaching_in(house: House) -> Iterator[str]:
    """Private parts of torch, and of others, outside of the one file for them."""
    own = {name for tree in house.trees.values() for name in _defined(tree)}
    for module, tree in house.trees.items():
        if room(module) == "private":
            continue
        for node in ast.walk(tree):
            for name in _private_names(node):
                if name not in own | KNOWN:
                    where = f"{house.modules[module].relative_to(house.root)}:{node.lineno}"  # type: ignore[attr-defined]
                    yield f"{where}: {name} is a private part of somebody else; only private.py may use it"


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file gives to things itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _private_names(node: ast.AST) -> Iterator[str]:
    """The private names that one piece of code takes from elsewhere."""
    if isinstance(node, ast.Attribute):
        if _private(node.attr) and ast.unparse(node.value) not in OPEN:
            yield node.attr
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        dotted = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        yield from filter(_private, (part for name in dotted for part in name.split(".")))
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
        yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and _private(str(arg.value)))


def off_the_map(house: House) -> Iterator[str]:
    """Files and folders without a place on the map."""
    for name, path in house.modules.items():
        if room(name) not in MAY_IMPORT:
            yield f"{path.relative_to(house.root)}:1: {room(name)} is not on the map (tests/pure/test_house.py)"


def unexplained(root: Path) -> Iterator[str]:
    """Dependencies without a comment that says why."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    needed = [*project["dependencies"], *(d for group in project["optional-dependencies"].values() for d in group)]
    lines = text.splitlines()
    for dependency in needed:
        number = next(n for n, line in enumerate(lines, 1) if f'"{dependency}"' in line)
        _, _, after = lines[number - 1].partition(f'"{dependency}"')
        if len(after.partition("#")[2].split()) < 2:
            yield f"pyproject.toml:{number}: {dependency} has no comment that says why it is needed"


RULES = (strangers, joining, left_behind, torch_inside, shared_eyes, odd_names, unfinished, reaching_in, off_the_map)


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_its_rules(house: House, rule: object) -> None:
    broken = list(rule(house))  # type: ignore[operator]
    assert not broken, "\n".join(["", *broken])


def test_every_dependency_says_why() -> None:
    broken = list(unexplained(ROOT))
    assert not broken, "\n".join(["", *broken])


def test_the_map_is_in_contributing(house: House) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    missing = [name for name in sorted(house.rooms()) if not re.search(rf"`(lowtide/)?{name}(\.py|/)?`", text)]
    assert not missing, f"CONTRIBUTING.md does not place {', '.join(missing)}"


# ------------------------------------------------------------------------------- the rules on houses that break them


def build(folder: Path, files: dict[str, str]) -> House:
    """A house of these files."""
    for name, text in files.items():
        path = folder / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(folder)


def fired(house: House) -> dict[str, list[str]]:
    """What each rule has to say, where it has."""
    found = {rule.__name__: list(rule(house)) for rule in RULES}
    return {name: broken for name, broken in found.items() if broken}


ALLOWED = (
    "__init__, arriving, attach, batch, bench, candidates, choice, cli, doctor, evaluation, fit, frameworks, giving, "
    "handover, pace, page, parts, peaks, scan, trials, verify, wrap"
)

BROKEN: Iterable[tuple[dict[str, str], dict[str, list[str]]]] = [
    (
        {"plan/__init__.py": "", "plan/keep.py": "import os\nfrom lowtide.capture import capture\n", "capture.py": ""},
        {
            "strangers": ["lowtide/plan/keep.py:2: plan imports capture (lowtide.capture)"],
            "joining": [
                f"lowtide/plan/keep.py:2: plan joins capture to other verbs; only {ALLOWED} may",
            ],
        },
    ),
    (
        {"report/__init__.py": "def show():\n    import torch.nn\n"},
        {"torch_inside": ["lowtide/report/__init__.py:2: lowtide.report imports torch"]},
    ),
    (
        {"plan.py": "from lowtide import kernels\n", "kernels.py": "\nimport torch\n"},
        {
            "torch_inside": [
                "lowtide/plan.py:1: lowtide.plan imports torch through torch at lowtide/kernels.py:2",
            ]
        },
    ),
    (
        {"tree.py": "from importlib import import_module\nmodule = import_module('to' + 'rch')\n"},
        {
            "torch_inside": [
                "lowtide/tree.py:2: lowtide.tree imports a module that only the running program knows",
            ]
        },
    ),
    (
        {"graph.py": "from .kernels import kernel\n", "kernels.py": ""},
        {"strangers": ["lowtide/graph.py:1: graph imports kernels (lowtide.kernels)"]},
    ),
    (
        {"check.py": "from lowtide.simulate import memory_states\n", "simulate.py": "memory_states = 1\n"},
        {"shared_eyes": ["lowtide/check.py:1: lowtide.check imports lowtide.simulate"]},
    ),
    (
        {"check.py": "import lowtide.tree\n", "simulate.py": "from lowtide import tree\n", "tree.py": ""},
        {
            "shared_eyes": [
                "lowtide/check.py:1: lowtide.check and lowtide.simulate both import lowtide.tree",
                "lowtide/simulate.py:1: lowtide.simulate and lowtide.check both import lowtide.tree",
            ]
        },
    ),
    (
        {
            "models/__init__.py": "from lowtide.plan import keep\nimport lowtide.execute\n",
            "plan.py": "",
            "execute.py": "",
        },
        {
            "strangers": [
                "lowtide/models/__init__.py:1: models imports plan (lowtide.plan)",
                "lowtide/models/__init__.py:2: models imports execute (lowtide.execute)",
            ],
            "joining": [
                f"lowtide/models/__init__.py:1: models joins plan to other verbs; only {ALLOWED} may",
                f"lowtide/models/__init__.py:2: models joins execute to other verbs; only {ALLOWED} may",
            ],
        },
    ),
    (
        {"measure/utils.py": "x = 1  # FIX" + "ME later\n"},
        {
            "odd_names": ["lowtide/measure/utils.py:1: the name utils says nothing"],
            "unfinished": ["lowtide/measure/utils.py:1: FIXME"],
        },
    ),
    (
        {
            "execute.py": "import torch\nfrom torch._C import ops\nmode = torch.nn._mode\nf = getattr(mode, '_f')\n",
            "plan.py": "class A:\n    def f(self):\n        self._b = sys._getframe()\nc = A()._b\naten._to_copy\n",
            "private.py": "import torch\nmode = torch._C._mode\n",
        },
        {
            "reaching_in": [
                "lowtide/execute.py:2: _C is a private part of somebody else; only private.py may use it",
                "lowtide/execute.py:3: _mode is a private part of somebody else; only private.py may use it",
                "lowtide/execute.py:4: _f is a private part of somebody else; only private.py may use it",
            ],
        },
    ),
    (
        {
            "cli/profile.py": "from lowtide.bench.race import Racer\n",
            "cli/bench.py": "import lowtide.bench.race\n",
            "bench/race.py": "from lowtide.bench import race\n",
        },
        {
            "left_behind": [
                "lowtide/cli/profile.py:1: lowtide.cli.profile imports lowtide.bench.race, which is not in the wheel"
            ]
        },
    ),
    (
        {"attic/__init__.py": ""},
        {"off_the_map": ["lowtide/attic/__init__.py:1: attic is not on the map (tests/pure/test_house.py)"]},
    ),
    (
        {
            "cli/__init__.py": "from lowtide import capture, plan\nimport torch\n",
            "capture.py": "import torch\nfrom lowtide.graph import Graph\n",
            "plan/__init__.py": "from lowtide.plan.keep import keep\n",
            "plan/keep.py": "from ..graph import Graph\n",
            "graph.py": "",
            "__init__.py": "from lowtide.capture import capture\nfrom lowtide.plan import keep\n",
        },
        {},
    ),
]


@pytest.mark.parametrize(("files", "expected"), BROKEN)
def test_a_broken_rule_is_named_with_file_and_line(
    tmp_path: Path, files: dict[str, str], expected: dict[str, list[str]]
) -> None:
    assert fired(build(tmp_path, files)) == expected


def test_a_dependency_without_a_reason_is_named(tmp_path: Path) -> None:
    lines = ["[project]", "dependencies = [", '    "rich>=14",', "]", "[project.optional-dependencies]"]
    lines += ["dev = [", '    "pytest>=8",  # runs the tests', "]"]
    (tmp_path / "pyproject.toml").write_text("\n".join(lines))
    assert list(unexplained(tmp_path)) == ["pyproject.toml:3: rich>=14 has no comment that says why it is needed"]
