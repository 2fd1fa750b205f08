"""Whatever the user changes between two steps: equal to eager, captured anew and equal, or one clear error."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from twins import assert_same, everything

import lowtide
from lowtide.errors import LowtideError

PROGRAM = """
import random
from random import random as die
import numpy
import torch
import torch.nn.functional as F
from torch import nn

GAIN = 1.5
SETTINGS = {"weight": 0.5, "sizes": [1, 2]}
COUNT = 0


class Registry(dict):
    def get(self, key):  # without a default, as a subclass may have it
        return super().get(key, 0.0)


KNOWN = Registry(shift=0.125)
losses, history, log = [], {"loss": []}, {}


class Config:
    scale = 1.0

    def __init__(self):
        self.shift = 0.25
        self.unread = 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Dropout(0.2)
        self.gain, self.calls, self.mode = 2.0, 0, "plain"

    def forward(self, x):
        y = self.drop(torch.relu(self.norm(self.linear(x)))) * self.gain
        return y + 1.0 if self.mode == "more" else y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(12, 4)
        self.config = Config()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        scale = self.config.scale + self.config.shift + KNOWN.get("shift")
        return self.head(x) * scale * GAIN * SETTINGS["weight"] * SETTINGS["sizes"][0]


def helper(loss):
    return loss * 1.0


def build():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(
        [{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 0.05}], lr=0.1, momentum=0.9
    )
    return model, optimizer


def plain(model, optimizer, x, y):
    loss = helper(F.cross_entropy(model(x), y))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""
X, Y = torch.randn(6, 12, generator=torch.Generator().manual_seed(3)), torch.arange(6) % 4


class Twin:
    """One copy of a program, with globals of its own."""

    def __init__(self, step: str = "") -> None:
        self.names: dict[str, Any] = types.ModuleType("twin").__dict__
        exec(compile(PROGRAM + step, "twin.py", "exec"), self.names)
        self.model, self.optimizer = self.names["build"]()
        self.step = self.names["step" if step else "plain"]
        self.take: Callable[..., Any] = lambda *batch: self.step(self.model, self.optimizer, *batch)

    def fit(self, **options: Any) -> lowtide.Fitted:
        """Let lowtide take the steps."""
        options = {"budget": "1GiB", "costs": "roofline", "time_limit": 0.1, **options}
        fitted = lowtide.fit(self.step, self.model, self.optimizer, example=(X, Y), **options)
        self.take = fitted
        return fitted

    def state(self) -> dict[str, Any]:
        """All that can be compared."""
        kinds = (bool, int, float, str)
        names = {key: item for key, item in self.names.items() if isinstance(item, kinds)}
        modules = {
            f"{name}.{key}": item
            for name, module in self.model.named_modules()
            for key, item in vars(module).items()
            if isinstance(item, kinds)
        }
        lists = {key: repr(self.names[key]) for key in ("losses", "history", "log")}
        return {**everything(self.model, self.optimizer), **names, **modules, **lists}


def both(one: Twin, other: Twin, *batch: Any) -> None:
    """One step of both, from the same generators; everything must be equal."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    expected = one.take(*(batch or (X, Y)))
    after = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    found = other.take(*(batch or (X, Y)))
    assert torch.equal(torch.as_tensor(expected), torch.as_tensor(found))
    assert torch.equal(after[0], torch.get_rng_state())
    assert after[1] == random.getstate()
    assert after[2] == str(numpy.random.get_state())
    assert_same(one.state(), other.state())


def set_attribute(name: str, value: Any) -> Callable[[Twin], None]:
    """An edit of an attribute of a part of the model."""
    path, _, last = name.rpartition(".")

    def edit(twin: Twin) -> None:
        setattr(twin.model.get_submodule(path), last, value)

    edit.__name__ = name
    return edit


def scaled_forward(twin: Twin) -> None:
    plain = twin.names["Block"].forward
    twin.names["Block"].forward = lambda self, x: plain(self, x) * 3.0


def other_helper(twin: Twin) -> None:
    exec("def helper(loss): return loss * 2.0", twin.names)


def swap(twin: Twin) -> None:
    first, second = twin.model.blocks[0].drop, twin.model.blocks[1].drop
    first.p, second.p = 0.5, 0.1
    twin.model.blocks[0].drop, twin.model.blocks[1].drop = second, first


def replace_module(twin: Twin) -> None:
    torch.manual_seed(5)
    twin.model.blocks[1].linear = nn.Linear(12, 12)


def append(twin: Twin) -> None:
    torch.manual_seed(6)
    twin.model.blocks.append(twin.names["Block"]())


def delete(twin: Twin) -> None:
    del twin.model.blocks[1]


def tie(twin: Twin) -> None:
    twin.model.blocks[1].linear.weight = twin.model.blocks[0].linear.weight


def replace_parameter(twin: Twin) -> None:
    twin.model.head.bias = nn.Parameter(torch.ones(4))


def assign(twin: Twin) -> None:
    twin.model.load_state_dict({key: item.clone() for key, item in twin.model.state_dict().items()}, assign=True)


def move_between_groups(twin: Twin) -> None:
    one, other = twin.optimizer.param_groups
    other["params"].append(one["params"].pop())


def reorder_groups(twin: Twin) -> None:
    twin.optimizer.param_groups.reverse()


def other_options(twin: Twin) -> None:
    twin.optimizer.param_groups[0]["lr"] = 0.01
    twin.optimizer.param_groups[1]["nesterov"] = True


def hook_that_scales(twin: Twin) -> None:
    twin.model.blocks[0].register_forward_hook(lambda _, __, output: output * 2.0)


def hook_before(twin: Twin) -> None:
    twin.model.blocks[0].register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2.0,))


def shared_list(twin: Twin) -> None:
    twin.names["SETTINGS"]["sizes"][0] = 3


def other_dict(twin: Twin) -> None:
    twin.names["SETTINGS"] = {"weight": 0.7, "sizes": [2]}


def registered(twin: Twin) -> None:
    twin.names["KNOWN"]["shift"] = 0.5


def other_gain(twin: Twin) -> None:
    twin.names["GAIN"] = 0.5


def class_attribute(twin: Twin) -> None:
    twin.names["Config"].scale = 3.0


def instance_over_class(twin: Twin) -> None:
    twin.model.config.scale = 2.0


def evaluate_a_part(twin: Twin) -> None:
    twin.model.blocks[0].eval()


def freeze(twin: Twin) -> None:
    twin.model.head.weight.requires_grad_(False)


EDITS = [
    set_attribute("blocks.0.gain", 3.0),
    set_attribute("blocks.0.mode", "more"),
    set_attribute("blocks.1.drop.p", 0.7),
    set_attribute("blocks.0.norm.momentum", 0.5),
    set_attribute("blocks.0.norm.eps", 0.1),
    set_attribute("blocks.0.norm.track_running_stats", False),
    set_attribute("blocks.0.forward", torch.relu),
    scaled_forward,
    other_helper,
    swap,
    replace_module,
    append,
    delete,
    tie,
    replace_parameter,
    assign,
    move_between_groups,
    reorder_groups,
    other_options,
    hook_that_scales,
    hook_before,
    shared_list,
    other_dict,
    registered,
    other_gain,
    class_attribute,
    instance_over_class,
    evaluate_a_part,
    freeze,
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_what_is_changed_after_fit_is_seen(edit: Callable[[Twin], None]) -> None:
    one, other = Twin(), Twin()
    told: list[str] = []
    other.fit(tell=told.append)
    told.clear()
    both(one, other)
    both(one, other)
    assert not told  # nothing changed, nothing was captured
    edit(one)
    edit(other)
    both(one, other)
    both(one, other)
    assert told


def test_what_the_step_does_not_read_may_change() -> None:
    one, other = Twin(), Twin()
    fitted = other.fit()
    for number in range(3):
        for twin in (one, other):
            twin.model.config.unread = number
            twin.model.note = f"step {number}"  # new, and nobody asks for it
            twin.model.blocks[0].gain = 1.0 + 1.0  # another object, the same number
        both(one, other)
    assert len(fitted._fits) == 1


def test_a_scheduler_after_fit_needs_no_new_capture() -> None:
    one, other = Twin(), Twin()
    fitted = other.fit()
    both(one, other)
    schedulers = [torch.optim.lr_scheduler.StepLR(twin.optimizer, 1, gamma=0.5) for twin in (one, other)]
    for _ in range(3):
        both(one, other)
        for scheduler in schedulers:
            scheduler.step()
    assert len(fitted._fits) == 1


STEPS = {
    "a counter and its parity": """
def step(model, optimizer, x, y):
    global COUNT
    COUNT += 1
    model.blocks[0].calls += 1
    loss = plain(model, optimizer, x * (1.0 + 1.0 / COUNT), y)
    if COUNT % 2 == 0:
        losses.append(COUNT)
    return loss
""",
    "losses that are kept": """
def step(model, optimizer, x, y):
    loss = plain(model, optimizer, x, y)
    losses.append(loss.item())
    history["loss"].append(loss.item())
    log["last"] = loss.item()
    model.head.last = loss.item()
    return loss
""",
    "random in arithmetic": """
def step(model, optimizer, x, y):
    return plain(model, optimizer, x * random.uniform(0.5, 1.5) + die() * numpy.random.beta(0.4, 0.4), y)
""",
    "random decisions": """
def step(model, optimizer, x, y):
    if random.random() < 0.5:
        x = x * 2.0
    if numpy.random.rand() < 0.5:
        x = x + 1.0
    return plain(model, optimizer, x, y)
""",
    "a choice": """
def step(model, optimizer, x, y):
    return plain(model, optimizer, x * random.choice([0.5, 2.0]), y)
""",
}


@pytest.mark.parametrize("name", STEPS)
def test_what_steps_draw_count_and_keep(name: str) -> None:
    random.seed(7)
    numpy.random.seed(7)
    one, other = Twin(STEPS[name]), Twin(STEPS[name])
    fitted = other.fit()
    for _ in range(10):
        both(one, other)
    assert len(fitted._fits) <= 4


def test_what_a_step_prints_is_printed_at_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    step = """
def step(model, optimizer, x, y):
    loss = plain(model, optimizer, x, y)
    print("loss", loss.item())
    return loss
"""
    twin = Twin(step)
    fitted = twin.fit()
    assert capsys.readouterr().out == ""
    found = [fitted(X, Y).item() for _ in range(3)]
    assert capsys.readouterr().out == "".join(f"loss {loss}\n" for loss in found)


def test_a_number_that_changes_all_the_time_becomes_an_input() -> None:
    one, other = Twin(), Twin()
    fitted = other.fit()
    for number in range(12):
        for twin in (one, other):
            twin.model.blocks[0].gain = 1.0 + number / 10
            twin.names["GAIN"] = 1.0 + number / 7
        both(one, other)
    assert len(fitted._fits) <= 5
    assert {place.name for place in fitted.captured.guards.numbers} == {"model.blocks.0.gain", "GAIN (twin.py)"}


def test_a_storm_of_captures_is_an_error_with_the_name() -> None:
    twin = Twin()
    fitted = twin.fit()
    with pytest.raises(LowtideError, match=r"model\.blocks\.0\.mode"):
        for number in range(40):
            twin.model.blocks[0].mode = f"mode {number}"
            fitted(X, Y)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x = x + time.time()", "time.time"),
        ("x = x + next(stream)", "stream"),
        ("x = x + dice.random()", "dice"),
        ("text = f'{model.head.bias.sum().item():.2f}'", "text"),
        ("x = x * float(open('/dev/null').read() or 1)", "open"),
        ("x = x * numpy.random.permutation(4)[0]", "twin.py"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_words(line: str, words: str) -> None:
    step = f"""
import time
stream = iter([1.0, 2.0, 3.0])
dice = random.Random(3)


def step(model, optimizer, x, y):
    {line}
    return plain(model, optimizer, x, y)
"""
    twin = Twin(step)
    before = twin.state()
    with pytest.raises(LowtideError, match=words):
        fitted = twin.fit()
        before = None
        for _ in range(40):
            fitted(X, Y)
    if before is not None:
        assert_same(before, twin.state())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_in_which_eager_raises(mode: Any) -> None:
    twin = Twin()
    fitted = twin.fit()
    before = {key: item.clone() for key, item in twin.model.state_dict().items()}
    with mode(), pytest.raises(LowtideError):
        fitted(X, Y)
    assert all(torch.equal(item, before[key]) for key, item in twin.model.state_dict().items())
    fitted(X, Y)


def test_autocast_around_a_step_is_refused_and_changes_nothing() -> None:
    twin = Twin()
    fitted = twin.fit()
    before = {key: item.clone() for key, item in twin.model.state_dict().items()}
    with torch.autocast("cpu"), pytest.raises(LowtideError, match="autocast"):
        fitted(X, Y)
    assert all(torch.equal(item, before[key]) for key, item in twin.model.state_dict().items())


def test_hooks_on_parameters_are_refused() -> None:
    twin = Twin()
    fitted = twin.fit()
    twin.model.head.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(LowtideError, match="hook"):
        fitted(X, Y)


def test_parameters_in_the_same_memory_are_refused() -> None:
    twin = Twin()
    twin.model.blocks[1].linear.weight.data = twin.model.blocks[0].linear.weight.data
    with pytest.raises(LowtideError, match="same memory"):
        twin.fit()


def test_parameters_that_come_to_share_memory_are_refused() -> None:
    twin = Twin()
    fitted = twin.fit()
    twin.model.blocks[1].linear.weight.data = twin.model.blocks[0].linear.weight.data
    with pytest.raises(LowtideError, match="same memory"):
        fitted(X, Y)


def test_an_optimizer_that_nobody_handed_over_is_refused() -> None:
    twin = Twin("\ndef step(model, _, x, y):\n    return plain(model, other, x, y)\n")
    twin.names["other"], twin.optimizer = twin.optimizer, None
    with pytest.raises(LowtideError, match="was not given"):
        twin.fit()


def test_two_optimizers() -> None:
    step = """
def step(model, optimizers, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss
"""
    twins = Twin(step), Twin(step)
    for twin in twins:
        parts = twin.model.blocks.parameters(), twin.model.head.parameters()
        twin.optimizer = (torch.optim.AdamW(parts[0], lr=0.01), torch.optim.SGD(parts[1], lr=0.1, momentum=0.5))
    fitted = twins[1].fit()
    for number in range(3):
        torch.manual_seed(number)
        expected = twins[0].take(X, Y)
        torch.manual_seed(number)
        assert torch.equal(expected, fitted(X, Y))
    for one, other in zip(twins[0].optimizer, twins[1].optimizer, strict=True):
        assert_same(everything(twins[0].model, one), everything(twins[1].model, other))


class Batch:
    """A batch of a class of one's own, used again for every step."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def test_a_batch_object_with_new_tensors_in_it() -> None:
    step = "\ndef step(model, optimizer, batch):\n    return plain(model, optimizer, batch.x, batch.y)\n"
    one, other = Twin(step), Twin(step)
    batch = Batch(X, Y)
    fitted = lowtide.fit(other.step, other.model, other.optimizer, example=(batch,), budget="1GiB", costs="roofline")
    other.take = fitted
    for number in range(3):
        batch.x = X + number
        both(one, other, batch)
    assert len(fitted._fits) == 1


def test_a_step_that_changes_its_batch_is_refused() -> None:
    step = "\ndef step(model, optimizer, batch):\n    return plain(model, optimizer, batch['x'], batch.pop('y'))\n"
    twin = Twin(step)
    with pytest.raises(LowtideError, match="changes its batch"):
        lowtide.fit(twin.step, twin.model, twin.optimizer, example=({"x": X, "y": Y},), costs="roofline")


def test_counters_and_draws_in_a_wrapped_model() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls, self.gain = nn.Linear(12, 4), 0, 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x) * random.random() * self.gain / self.calls

    torch.manual_seed(0)
    model = Counting()
    torch.manual_seed(0)
    mirror = Counting()
    net = lowtide.wrap(mirror, example=(X,), budget="1GiB", costs="roofline")
    for number in range(4):
        model.gain = mirror.gain = 1.0 + number
        random.seed(number)
        expected = model(X)
        random.seed(number)
        found = net(X)
        assert model.calls == mirror.calls == number + 1
        assert torch.equal(expected, found)
        expected.sum().backward()
        found.sum().backward()
        assert torch.equal(model.linear.weight.grad, mirror.linear.weight.grad)


def test_the_assumptions_can_be_read() -> None:
    text = Twin().fit().explain_guards()
    for line in ("GAIN (twin.py) is 1.5", "model.blocks.0.gain is 2.0", "model.blocks.0.drop.p is 0.2"):
        assert line in text


@pytest.mark.long
def test_stochastic_depth_by_pythons_dice() -> None:
    """12 layers, each left out with probability 0.1, over 200 steps: a program for each outcome that comes."""
    step = """
class Depth(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(12))
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.1:
                continue
            x = x + torch.tanh(layer(x))
        return self.head(x)


def build():
    torch.manual_seed(0)
    model = Depth()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def step(model, optimizer, x, y):
    return plain(model, optimizer, x, y)
"""
    random.seed(11)
    one, other = Twin(step), Twin(step)
    fitted = other.fit(budget="1GiB")
    for _ in range(200):
        both(one, other)
    assert 10 < len(fitted._fits) <= 64


def test_a_counter_in_a_container_that_is_replaced_or_becomes_a_float() -> None:
    """Eager counts on in the new container, in the new type; so does the step, whatever fits are kept."""
    counts: list[list[Any]] = []
    for fitted in (False, True):
        torch.manual_seed(0)
        box = {"state": {"steps": 0}}

        def step(model: nn.Module, optimizer: Any, rows: Tensor, box: Any = box) -> Tensor:
            state = box["state"]
            state["steps"] += 1
            loss = model(rows).square().mean() * min(1.0, state["steps"] / 10)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        model, rows = nn.Linear(4, 4), torch.randn(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train: Any = partial(step, model, optimizer)
        if fitted:
            train = lowtide.fit(step, model, optimizer, example=(rows,), budget="100%", costs="roofline")
        seen: list[Any] = []
        for number in range(9):
            if number in (2, 6):
                box["state"] = dict(box["state"])
            if number in (4, 7):
                box["state"]["steps"] = (float, int)[number == 7](box["state"]["steps"])
            seen.append((train(rows).item(), repr(box["state"]["steps"])))
        counts.append([*seen, *(p.tolist() for p in model.parameters())])
    assert counts[0] == counts[1]
