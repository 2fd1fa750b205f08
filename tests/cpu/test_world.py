"""What programs keep their state in, and how they reach it: equal to eager, captured anew and equal, or refused."""

from __future__ import annotations

import builtins
import collections
import copy
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from test_guards import Twin, X, both
from torch import Tensor, nn
from twins import assert_same, everything

import lowtide
from lowtide.errors import LowtideError

STEP = """
{before}
def step(model, optimizer, x, y):
    {line}
    return plain(model, optimizer, x, y)
"""


def put(name: str, key: Any) -> Callable[[Twin, float], None]:
    """An edit that sets an item of a global."""
    return lambda twin, number: twin.names[name].__setitem__(key, number)


def give(name: str, key: str) -> Callable[[Twin, float], None]:
    """An edit that sets an attribute of a global."""
    return lambda twin, number: setattr(twin.names[name], key, number)


def turn(twin: Twin, number: float) -> None:
    """The same objects in another order."""
    twin.names["OPS"]["a"] = twin.names["OPS"].pop("a")


def turn_linked(twin: Twin, number: float) -> None:
    twin.names["OPS"].move_to_end("a")


MODULE = "import types\nmine = types.ModuleType('mine'); mine.k = 0.5; mine.part = types.SimpleNamespace(k=0.5)\n"
IMPORT = f"{MODULE}import sys\nsys.modules['mine'] = mine"
REACHED = {
    "a dict by its order": (
        "OPS = {'a': torch.tanh, 'b': torch.relu}",
        "x = OPS['b'](x)\n    for f in OPS.values(): x = f(x)",
        turn,
    ),
    "an OrderedDict by its order": (
        "import collections\nOPS = collections.OrderedDict(a=torch.tanh, b=torch.relu)",
        "for f in OPS.values(): x = f(x)",
        turn_linked,
    ),
    "a mapping with a get of its own": (
        "class Own(dict):\n    def get(self, key): return dict.get(self, key)\nOWN = Own(k=0.5)",
        "x = x * OWN.get('k')",
        put("OWN", "k"),
    ),
    "keywords of a partial": (
        "import functools\npart = functools.partial(torch.mul, other=0.5)",
        "x = part(x)",
        lambda twin, number: put("KEY", "other")(
            types.SimpleNamespace(names={"KEY": twin.names["part"].keywords}), number
        ),  # type: ignore[arg-type]
    ),
    "an attribute of a function": ("def note(): pass\nnote.k = 0.5", "x = x * note.k", give("note", "k")),
    "an attribute by its path": (
        "import operator\nclass C: k = 0.5\nc, get = C(), operator.attrgetter('k')",
        "x = x * get(c)",
        give("c", "k"),
    ),
    "a new attribute, by vars()": (
        "class C: pass\nc = C(); c.k = 0.5",
        "x = x * sum(vars(c).values())",
        lambda twin, number: setattr(twin.names["c"], f"k{number}", number),
    ),
    "an attribute of a metaclass": (
        "class Meta(type): k = 0.5\nclass C(metaclass=Meta): pass",
        "x = x * C.k",
        give("Meta", "k"),
    ),
    "what a weak reference leads to": (
        "import weakref\nclass C: k = 0.5\nc = C(); w = weakref.ref(c)",
        "x = x * w().k",
        give("c", "k"),
    ),
    "what belongs to a thread": ("import threading\nV = threading.local(); V.k = 0.5", "x = x * V.k", give("V", "k")),
    "an array": ("import array\nA = array.array('d', [0.5])", "x = x * A[0]", put("A", 0)),
    "the value of an enum": (
        "import enum\nclass E(enum.Enum): A = [0.5]",
        "x = x * E.A.value[0]",
        lambda twin, number: twin.names["E"].A.value.__setitem__(0, number),
    ),
    "a module by another name": (MODULE, "other = mine\n    x = x * other.k", give("mine", "k")),
    "an object in a module": (
        MODULE,
        "x = x * mine.part.k",
        lambda twin, number: setattr(twin.names["mine"].part, "k", number),
    ),
    "a module that the step imports": (IMPORT, "import mine\n    x = x * mine.k", give("mine", "k")),
    "a name that the step imports": (IMPORT, "from mine import k\n    x = x * k", give("mine", "k")),
    "a module that importlib finds": (
        f"import importlib\n{IMPORT}",
        "x = x * importlib.import_module('mine').k",
        give("mine", "k"),
    ),
    "an attribute by a path that the step makes": (
        "import operator\nclass C: k = 0.5\nclass D: c = C()\nd = D()",
        "x = x * operator.attrgetter('c.k')(d)",
        lambda twin, number: setattr(twin.names["d"].c, "k", number),
    ),
    "a list in a module of the standard library": (
        "import sys\nsys.argv = ['0.5']",
        "x = x * float(sys.argv[-1])",
        lambda twin, number: sys.argv.__setitem__(-1, str(number)),
    ),
    "such a list of a module that the step imports": (
        "import sys\nsys.argv = ['0.5']",
        "import sys as s\n    x = x * float(s.argv[-1])",
        lambda twin, number: sys.argv.__setitem__(-1, str(number)),
    ),
    "an event of another thread": (
        "import threading\nE = threading.Event()",
        "x = x * (2 if E.is_set() else 0.5)",
        lambda twin, number: twin.names["E"].set() if number == 0.75 else twin.names["E"].clear(),
    ),
    "a function of Python itself": (
        "import builtins",
        "x = x * round(0.5)",
        lambda twin, number: setattr(twin.names["builtins"], "round", lambda _: number),
    ),
}


@pytest.mark.parametrize("name", REACHED)
def test_state_is_seen_wherever_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, line, edit = REACHED[name]
    monkeypatch.setitem(sys.modules, "mine", types.ModuleType("mine"))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(builtins, "round", round)
    one, other = (Twin(STEP.format(before=before, line=line)) for _ in range(2))
    fitted = other.fit()
    for number in (0.5, 0.75, 1.25):
        both(one, other)
        edit(one, number)
        edit(other, number)
    both(one, other)
    assert len(fitted._fits) > 1


def test_a_counter_on_the_step_itself() -> None:
    line = "step.n = getattr(step, 'n', 0) + 1\n    x = x * step.n"
    one, other = (Twin(STEP.format(before="", line=line)) for _ in range(2))
    other.fit()
    assert not hasattr(other.step, "n")  # tracing leaves nothing behind
    for _ in range(4):
        both(one, other)
    assert other.step.n == 4


REFUSED = {
    "import time\n    x = x * time.time()": "time.time",
    "from time import perf_counter\n    x = x * perf_counter()": "time.perf_counter",
    "import os\n    x = x * os.urandom(1)[0]": "os.urandom",
    "import os.path as p\n    x = x * (2 if p.exists('no such') else 1)": "os.stat",
    "import pathlib\n    x = x * len(pathlib.Path('no such').read_text())": "open",
    "import os as o\n    x = x * o.open('/dev/null', 0)": "os.open",
    "import time as t\n    x = x * t.process_time_ns()": "time.process_time_ns",
    "import datetime as d\n    x = x * d.datetime.now().microsecond": "datetime.now",
    "import random as r\n    x = x * r.SystemRandom().random()": "os.urandom",
    "import uuid as u\n    x = x * u.uuid4().int": "os.urandom",
    "import gc\n    x = x * gc.get_count()[0]": "gc.get_count",
    "import sys\n    x = x * sys.getrecursionlimit()": "sys.getrecursionlimit",
    "import sys\n    x = x * len(sys.modules)": "sys.modules",
    "x = x * __import__('math').pi": "__import__",
    "x = x * torch.initial_seed()": "initial_seed",
    "import subprocess\n    x = x * subprocess.run(['true']).returncode": "the step calls",
    "x = x * len(list(os.environ))": "os.environ",
    "x = x * datetime.datetime.now().microsecond": "datetime",
    "x = x * numpy.random.default_rng().random()": "default_rng",
    "x = x * random.Random().random()": r"random\.Random\(\) without a seed",
    "x = x * VAR.get()": "ContextVar",
    "x = x * WEIGHTS.tolist()[0]": "tolist",
    "x = x * float(WEIGHTS.numpy()[0])": "numpy",
    "text = f'{x.sum().item():.3f}'": "format it after the step",
    "if torch.rand(()) < 0.5: x = x * 2": "contents of a tensor",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_another_thing_every_time_is_refused(line: str) -> None:
    before = (
        "import contextvars, datetime, os\nVAR = contextvars.ContextVar('VAR', default=1.0)\nWEIGHTS = torch.ones(2)"
    )
    twin = Twin(STEP.format(before=before, line=line))
    with pytest.raises(LowtideError, match=REFUSED[line]):
        twin.fit()
    assert os.getenv("NO_SUCH") is None  # all is in its place again
    assert torch.ones(2).tolist() == [1.0, 1.0]


def test_generators_with_a_seed_are_no_state() -> None:
    line = "x = x * random.Random(3).random() * numpy.random.default_rng(4).random()"
    one, other = (Twin(STEP.format(before="", line=line)) for _ in range(2))
    other.fit()
    for _ in range(2):
        both(one, other)


def frozen(clears: bool) -> str:
    clear = "optimizer.zero_grad()" if clears else "for p in model.blocks.parameters(): p.grad = None"
    return f"""
def step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    {clear}
    return loss
"""


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_gradients_of_frozen_parameters(clears: bool, late: bool) -> None:
    one, other = Twin(frozen(clears)), Twin(frozen(clears))

    def freeze() -> None:
        for twin in (one, other):
            twin.model.head.requires_grad_(False)
            twin.model.head.weight.grad = torch.ones(4, 12)

    if not late:
        freeze()
    other.fit()
    both(one, other)
    if late:
        freeze()
    for _ in range(3):
        both(one, other)
        assert (other.model.head.weight.grad is None) == clears


def test_a_learning_rate_that_becomes_a_tensor_is_refused() -> None:
    twin = Twin()
    fitted = twin.fit()
    fitted(X, torch.arange(6) % 4)
    before = {key: item.clone() for key, item in twin.model.state_dict().items()}
    twin.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(LowtideError, match="tensor as learning rate"):
        fitted(X, torch.arange(6) % 4)
    assert_same(before, dict(twin.model.state_dict()))


def test_a_class_that_changes() -> None:
    one, other = Twin(), Twin()
    other.fit()
    both(one, other)
    for twin in (one, other):
        kind = twin.names["Block"]
        twin.model.blocks[0].__class__ = type("Doubled", (kind,), {"forward": _doubled(kind)})
    both(one, other)
    both(one, other)


def _doubled(kind: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, x: kind.forward(self, x) * 2


def test_a_backward_hook_on_the_wrapped_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))
    mirror = copy.deepcopy(model)
    net = lowtide.wrap(mirror, example=(X,), costs="roofline", time_limit=0.1)
    seen: list[list[Tensor]] = [[], []]
    for one, notes in zip((model, net), seen, strict=True):
        one.register_full_backward_hook(
            lambda _, __, given, notes=notes: notes.append(given[0].clone())  # type: ignore[misc]
        )
        for _ in range(3):
            one(X.clone().requires_grad_()).square().sum().backward()
    assert len(seen[0]) == 3
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert_same(everything(model, None), everything(mirror, None))


def test_a_matrix_and_its_transpose_in_one_op() -> None:
    line = "h = x @ x.t()\n    x = x * (h.tanh() - h.mT).abs().sum() + (h + h.t()).mean()"
    one, other = (Twin(STEP.format(before="", line=line)) for _ in range(2))
    other.fit()
    for _ in range(2):
        both(one, other)


class Tied(nn.Module):
    """Uses one layer three times, and another one once."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.other = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tied(torch.tanh(self.tied(torch.tanh(self.tied(x))))) + self.other(x.detach())
        return out


Use = Callable[[Any, Tied], Tensor]
ALONE: dict[str, Use] = {
    "alone": lambda net, _: net(X).square().mean(),
    "with a penalty on another": lambda net, model: net(X).square().mean() + model.other.weight.square().sum(),
}
TOGETHER: dict[str, Use] = {
    "with a penalty": lambda net, model: net(X).square().mean() + model.tied.weight.square().sum(),
    "in two calls": lambda net, _: (net(X) - net(X + 1)).square().mean(),
}


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_sums_of_gradients_are_eagers_or_refused(name: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    mirror = copy.deepcopy(model)
    net = lowtide.wrap(mirror, example=(X,), costs="roofline", time_limit=0.1)
    use = {**ALONE, **TOGETHER}[name]
    for _ in range(2):
        use(model, model).backward()
        if name in TOGETHER:
            with pytest.raises(LowtideError, match="uses several times"):
                use(net, mirror).backward()
            mirror.zero_grad()
            continue
        use(net, mirror).backward()
        assert_same(everything(model, None), everything(mirror, None))
    torch.autograd.grad(ALONE["alone"](net, mirror), list(mirror.parameters()))  # no gradient comes to its end
    model.zero_grad()
    mirror.zero_grad()
    ALONE["alone"](model, model).backward()
    ALONE["alone"](net, mirror).backward()
    assert_same(everything(model, None), everything(mirror, None))


class Numbers(dict[str, Any]):
    scale = 1.0


class Several(list[Any]):
    scale = 1.0


class Pair(tuple[Any, ...]):
    scale = 1.0


class Number(float):
    scale = 1.0


class Slotted(list[Any]):
    __slots__ = ("scale",)


class Rows(numpy.ndarray[Any, Any]):
    scale = 1.0


MARKED: dict[str, Any] = {
    "dict": Numbers,
    "list": Several,
    "tuple": Pair,
    "float": Number,
    "slots": Slotted,
    "array": lambda: numpy.zeros(2).view(Rows),
    "ordered": collections.OrderedDict,
}


@pytest.mark.parametrize("where", ["class", "object", "another"])
@pytest.mark.parametrize("name", MARKED)
def test_what_containers_and_numbers_have_by_name_is_seen(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of the user's may derive from one of Python's."""
    if where == "class" and name in ("slots", "ordered"):
        pytest.skip("the class has nothing that could change")

    def step(model: Any, _: None, x: torch.Tensor) -> torch.Tensor:
        return (model(x) * model.settings.scale).sum()  # type: ignore[no-any-return]

    model: Any = nn.Linear(3, 2)
    model.settings = MARKED[name]()
    model.settings.scale = 1.0
    x = torch.randn(4, 3)
    run = lowtide.fit(step, model, None, example=(x,), costs="roofline", time_limit=0.2, tell=lambda _: None)
    for scale in (1.0, 2.0, 3.0):
        if where == "another":
            model.settings = MARKED[name]()
        if where == "class":
            vars(model.settings).clear()
            monkeypatch.setattr(type(model.settings), "scale", scale)
        else:
            model.settings.scale = scale
        assert torch.equal(run(x), step(model, None, x))
