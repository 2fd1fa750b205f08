"""What a hostile user changes between steps, through both doors: equal to eager, captured anew, or a clear error."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from twins import assert_same, everything

import lowtide
from lowtide.errors import LowtideError

PROGRAM = """
import collections, concurrent.futures, ctypes, enum, functools, queue, sys, threading, types, weakref
import numpy, torch
import torch.nn.functional as F
from torch import nn

GAIN = 1.5


def value():
    return 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)).sigmoid()) * value()


def build():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model, optimizer, x, y, *rest):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def between(number, model, optimizer):
    pass
"""
OPTIONS: dict[str, Any] = {"budget": "1GiB", "costs": "roofline", "time_limit": 0.1}
Y = torch.arange(6) % 4
STEPS = 6

FOLLOWED = {
    "the value behind an enum": """
class Mode(enum.Enum):
    A = 1.0
def value(): return Mode.A.value
def between(number, model, optimizer): Mode.A._value_ = 2.0 + number
""",
    "the method of a descriptor": """
class Doubled:
    held = 1.0
    def __get__(self, thing, kind): return self.held * 2
class Config:
    gain = Doubled()
CONFIG = Config()
def value(): return CONFIG.gain
def between(number, model, optimizer):
    if number == 1: Doubled.held = 2.0
    if number == 2: Doubled.__get__ = lambda self, thing, kind: 7.0
""",
    "a name that a subclass gets": """
class One:
    gain = 1.0
class Two(One): pass
TWO = Two()
def value(): return TWO.gain
def between(number, model, optimizer):
    if number == 1: Two.gain = 3.0
    if number == 2: TWO.gain = 4.0
    if number == 3: del Two.gain, TWO.gain
""",
    "a special method that a class gets": """
class Config:
    gain = 1.0
CONFIG = Config()
def value(): return CONFIG.gain if CONFIG else 3.0
def between(number, model, optimizer):
    if number == 1: Config.__bool__ = lambda self: False
    if number == 3: del Config.__bool__
""",
    "a name that hides a metaclass's": """
class Meta(type):
    gain = 1.0
class Config(metaclass=Meta): pass
def value(): return Config.gain
def between(number, model, optimizer):
    if number == 1: Config.gain = 3.0
""",
    "other bases": """
class One:
    gain = 1.0
class Other:
    gain = 5.0
class Two(One): pass
TWO = Two()
def value(): return TWO.gain
def between(number, model, optimizer):
    if number == 1: Two.__bases__ = (Other,)
""",
    "a large array": """
TABLE = numpy.ones(5000)
def value(): return float(TABLE[4000])
def between(number, model, optimizer): TABLE[4000] += 1
""",
    "the factory of a defaultdict": """
TABLE = collections.defaultdict(lambda: 1.0)
def value(): return TABLE.default_factory()
def between(number, model, optimizer):
    if number == 1: TABLE.default_factory = lambda: 2.0
""",
    "what is behind a proxy": """
INSIDE = {"gain": 1.0}
PROXY = types.MappingProxyType(INSIDE)
def value(): return PROXY["gain"]
def between(number, model, optimizer): INSIDE["gain"] += 1
""",
    "a mapping of weak keys": """
class Key: pass
KEY = Key()
TABLE = weakref.WeakKeyDictionary({KEY: 1.0})
def value(): return TABLE[KEY]
def between(number, model, optimizer): TABLE[KEY] += 1
""",
    "a mapping of weak values": """
class Item: pass
ITEM = Item()
ITEM.gain = 1.0
TABLE = weakref.WeakValueDictionary(item=ITEM)
def value(): return TABLE["item"].gain
def between(number, model, optimizer): ITEM.gain += 1
""",
    "a set of weak references": """
class Item: pass
ITEMS = [Item(), Item()]
TABLE = weakref.WeakSet(ITEMS[:1])
def value(): return float(len(TABLE))
def between(number, model, optimizer):
    if number == 1: TABLE.add(ITEMS[1])
""",
    "what a weak reference led to is gone": """
class Item:
    gain = 2.0
ITEMS = [Item()]
REFERENCE = weakref.ref(ITEMS[0])
def value():
    found = REFERENCE()
    return 1.0 if found is None else found.gain
def between(number, model, optimizer):
    if number == 1: ITEMS.clear()
""",
    "a function for a type": """
@functools.singledispatch
def of(thing): return 1.0
def value(): return of(3)
def between(number, model, optimizer):
    if number == 1: of.register(int)(lambda thing: 2.0)
""",
    "the sizes of a tensor": """
TABLE = torch.ones(4)
def value(): return float(TABLE.shape[0])
def between(number, model, optimizer): TABLE.resize_(5 + number)
""",
    "an attribute of a tensor": """
TABLE = torch.ones(4)
TABLE.gain = 1.0
def value(): return TABLE.gain
def between(number, model, optimizer): TABLE.gain += 1
""",
    "a queue": """
QUEUE = queue.Queue()
for number in range(9): QUEUE.put(number + 1.0)
def value(): return QUEUE.get()
""",
    "another module of the name": """
sys.modules["attack_settings"] = types.ModuleType("attack_settings")
sys.modules["attack_settings"].gain = 1.0
def value():
    import attack_settings
    return attack_settings.gain
def between(number, model, optimizer):
    other = types.ModuleType("attack_settings")
    other.gain = 3.0 + number
    sys.modules["attack_settings"] = other
""",
    "an object that answers to any name": """
class Config:
    def __init__(self): self.held = {"gain": 1.0}
    def __getattr__(self, name): return self.__dict__["held"][name]
CONFIG = Config()
def value(): return CONFIG.gain
def between(number, model, optimizer):
    if number == 1: CONFIG.held["gain"] = 2.0
    if number == 2: CONFIG.gain = 4.0
""",
    "the forward of torch's layers": """
LINEAR = nn.Linear.forward
def between(number, model, optimizer):
    nn.Linear.forward = (lambda self, x: LINEAR(self, x) * 2) if number in (1, 2) else LINEAR
""",
    "a function of torch's": """
LINEAR = F.linear
def between(number, model, optimizer):
    F.linear = (lambda *given: LINEAR(*given) * 2) if number in (1, 2) else LINEAR
""",
    "a method of tensors": """
def between(number, model, optimizer):
    if number == 1: torch.Tensor.sigmoid = lambda x: torch.sigmoid(x) * 2
    elif "sigmoid" in vars(torch.Tensor): del torch.Tensor.sigmoid
""",
    "how every module is called": """
CALL = nn.Module.__call__
def twice(self, *given): return CALL(self, *given) * (2.0 if isinstance(self, nn.Linear) else 1.0)
def between(number, model, optimizer): nn.Module.__call__ = twice if number in (1, 2) else CALL
""",
    "the step of torch's optimizer": """
STEP = torch.optim.SGD.step
def doubled(self, closure=None):
    for parameter in self.param_groups[0]["params"]: parameter.grad.mul_(2)
    return STEP(self, closure)
def between(number, model, optimizer): torch.optim.SGD.step = doubled if number in (1, 2) else STEP
""",
    "the class of an optimizer": """
class Scaled(torch.optim.SGD):
    scale = 1.0
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]: parameter.grad.mul_(self.scale)
        return super().step(closure)
def build():
    torch.manual_seed(0)
    model = Net()
    return model, Scaled(model.parameters(), lr=0.1)
def between(number, model, optimizer):
    if number == 1: Scaled.scale = 0.5
    if number == 3: optimizer.scale = 0.25
""",
}
BATCHES = {
    "an object": """
class Weight: pass
REST = Weight()
REST.now = 1.0
def of(rest): return rest.now
def between(number, model, optimizer): REST.now += 1
""",
    "a set": """
REST = {1.0}
of = sum
def between(number, model, optimizer): REST.add(number + 2.0)
""",
    "an array": """
REST = numpy.ones(3)
def of(rest): return float(rest[1])
def between(number, model, optimizer): REST[1] += 1
""",
    "another array": """
REST = numpy.ones(3)
def of(rest): return float(rest[1])
def between(number, model, optimizer):
    global REST
    REST = numpy.full(3, number + 2.0)
""",
    "an object with a comparison": """
class Weight:
    def __init__(self, now): self.now = now
    def __eq__(self, other): return True
    __hash__ = None
REST = Weight(1.0)
def of(rest): return rest.now
def between(number, model, optimizer):
    global REST
    REST = Weight(number + 2.0)
""",
}
REFUSED = {
    "globals()": ('def value(): return globals()["GAIN"]', r"looks at globals\(\)"),
    "a view of memory": ("HELD = memoryview(bytearray(b'ab'))\ndef value(): return float(HELD[0])", "a memoryview"),
    "memory of C": ("HELD = ctypes.c_double(1.0)\ndef value(): return HELD.value", "a c_double"),
    "a thread": (
        "def value():\n    thread = threading.Thread(target=print)\n    thread.start()\n    return 1.0",
        "another thread",
    ),
    "a pool of threads": (
        "POOL = concurrent.futures.ThreadPoolExecutor(1)\ndef value(): return POOL.submit(float, 2).result()",
        "another thread",
    ),
}


class Attack:
    """A program with globals of its own, in eager or through a door."""

    def __init__(self, source: str, door: str) -> None:
        self.names: dict[str, Any] = types.ModuleType("attack").__dict__
        exec(compile(PROGRAM + source, "attack.py", "exec"), self.names)
        self.model, self.optimizer = self.names["build"]()
        self.net: Any = self.model
        self.take: Any = lambda *batch: self.names["step"](self.net, self.optimizer, *batch)
        if door == "fit":
            example = self.batch(0)
            self.take = lowtide.fit(self.names["step"], self.model, self.optimizer, example=example, **OPTIONS)
        elif door == "wrap":
            self.net = lowtide.wrap(self.model, example=self.batch(0)[:1], **OPTIONS)

    def batch(self, number: int) -> tuple[Any, ...]:
        """The batch of a step."""
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(number))
        return (x, Y, self.names["REST"]) if "REST" in self.names else (x, Y)

    def run(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """After each step what it returned, and the state."""
        for number in range(STEPS):
            result = self.take(*self.batch(number))
            state = everything(self.model, self.optimizer)
            yield (
                result.detach(),
                {key: torch.as_tensor(item).clone() for key, item in state.items() if item is not None},
            )
            self.names["between"](number, self.model, self.optimizer)


def assert_equal(source: str, door: str) -> None:
    expected = list(Attack(source, "eager").run())  # one after the other, for some change torch itself
    for (one, state), (other, found) in zip(expected, Attack(source, door).run(), strict=True):
        assert torch.equal(one, other)
        assert_same(state, found)


@pytest.mark.parametrize("door", ["fit", "wrap"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_changed_between_steps_is_seen(name: str, door: str) -> None:
    assert_equal(FOLLOWED[name], door)


@pytest.mark.parametrize("name", BATCHES)
def test_what_changes_inside_of_a_batch_is_seen(name: str) -> None:
    step = """
def step(model, optimizer, x, y, rest):
    loss = F.cross_entropy(model(x), y) * of(rest)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""
    assert_equal(BATCHES[name] + step, "fit")


@pytest.mark.parametrize("door", ["fit", "wrap"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_seen_is_refused(name: str, door: str) -> None:
    source, words = REFUSED[name]
    with pytest.raises(LowtideError, match=words):
        Attack(source, door)


def test_the_guards_keep_nothing_alive_that_is_held_weakly() -> None:
    attack = Attack(FOLLOWED["what a weak reference led to is gone"], "fit")
    reference = attack.names["REFERENCE"]
    attack.take(*attack.batch(0))
    assert reference() is not None
    attack.names["ITEMS"].clear()
    assert reference() is None
