"""A model that can't be captured as a whole: its largest parts go by plans of their own, equal to the bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import assert_same, everything, same

import lowtide
from lowtide.allocator.arena import POOL

QUICK: dict[str, Any] = {"costs": "roofline", "time_limit": 0.3}
WIDTH, WORDS = 32, 16


class Block(nn.Module):
    """Normalised after it adds, so that what comes in has gradients from four places."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.find, self.take, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        seen = F.scaled_dot_product_attention(self.ask(x), self.find(x), self.take(x))
        x = self.first(x + F.dropout(self.out(seen), 0.1, self.training))
        return self.second(x + self.wide(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks between which a number decides; the first embeds words with the weight that the last one reads them by."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x) + 0.1 * x
            if x.detach().sum() > 0:
                x = x * self.scale
        return x @ self.words.weight.T


class Searching(Net):
    """Takes what a mask of booleans leaves."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        kept = tokens > 3
        return torch.zeros(*tokens.shape, WORDS).masked_scatter(kept[..., None], x[kept] @ self.words.weight.T)


class Counting(Net):
    """Asks numpy in the middle of a block that is called by another name than forward, and calls a block twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        twice = 1 + int(tokens.numpy().sum()) % 2
        for block in self.blocks:
            for _ in range(twice):
                x = block(x)
        return x @ self.words.weight.T


def train(model: nn.Module, optimizer: Any, steps: int = 4, *, autocast: bool = False) -> dict[str, Any]:
    torch.manual_seed(1)
    found: dict[str, Any] = {}
    for number in range(steps):
        tokens = torch.randint(WORDS, (4 if number == 2 else 8, 12))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {number}"] = loss.detach()
        model.eval()
        with torch.no_grad():
            found[f"evaluated {number}"] = model(tokens).sum()
        model.train()
    return found


def both(cls: type[Net], budget: int | str | None, look: Callable[[Any, Any], None] | None = None) -> Any:
    """Train in eager and attached; returns what runs the second model."""
    found, attached = [], None
    for planned in (False, True):
        torch.manual_seed(0)
        model = cls()
        seen: list[int] = []
        model.blocks[1].register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.numel()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if planned:
            attached = lowtide.attach(model, budget, optimizer, fallback="modules", tell=lambda _: None, **QUICK)
        results = train(model, optimizer)
        found.append({**results, **everything(model, optimizer), "hooked": torch.tensor(seen)})
    assert_same(*found)
    return attached


@pytest.mark.parametrize("cls", [Net, Searching, Counting])
@pytest.mark.parametrize("budget", ["least", "50%", None])
def test_what_can_not_be_captured_runs_in_parts(cls: type[Net], budget: str | None) -> None:
    attached = both(cls, budget)
    assert attached.calls == {"by its parts": 4, "in eval()": 4}
    assert [*attached.parts.planned] == ["blocks.0", "blocks.1", "blocks.2"]
    assert {"", "words"} <= attached.parts.plain.keys()
    assert "blocks.1: by a plan" in attached.report()
    assert "the whole model: as ever" in attached.report()


def test_a_model_that_can_be_captured_is_one_part() -> None:
    class Whole(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](self.words(tokens))) @ self.words.weight.T  # type: ignore[no-any-return]

    attached = both(Whole, "90%")
    assert attached.calls["by a plan"] == 4
    assert not attached.parts.planned


@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
def test_a_budget_in_bytes_is_of_all_parts_together() -> None:
    def peak(budget: int | str | None, *, planned: bool = True) -> tuple[int, dict[str, Any]]:
        torch.manual_seed(0)
        POOL.empty()
        with lowtide.meter() as meter:
            model = Net(6)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            if planned:
                lowtide.attach(model, budget, optimizer, fallback="modules", **QUICK)
            torch.manual_seed(1)
            for _ in range(3):
                tokens = torch.randint(WORDS, (32, 24))
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            seen = {"loss": loss.detach(), **model.state_dict()}
            most = meter.peak
        if planned:
            lowtide.detach(model)
        return most, seen

    plain, expected = peak(None, planned=False)
    least, found = peak("least")
    assert least < 0.6 * plain
    assert_same(expected, found)
    with pytest.raises(lowtide.BudgetError, match="the parts of the model that can be planned need") as said:
        peak(least // 2)
    assert said.value.least is not None
    budget = (said.value.least + plain) // 2
    between, found = peak(budget)
    assert least < between <= budget
    assert_same(expected, found)


def test_forwards_that_wait_are_counted_together() -> None:
    torch.manual_seed(0)
    model = Net()
    tokens = torch.arange(32 * 24).reshape(32, 24) % WORDS
    lowtide.attach(model, "1KiB", fallback="modules", tell=lambda _: None, **QUICK)
    with pytest.raises(lowtide.BudgetError) as said:
        model(tokens)
    assert said.value.least is not None
    attached = lowtide.attach(model, said.value.least * 5 // 4, fallback="modules", tell=lambda _: None, **QUICK)
    for _ in range(2):
        model(tokens).sum().backward()
    assert attached.outstanding == (0, 0)
    first = model(tokens)
    with pytest.warns(lowtide.LowtideWarning, match="[2-4] forwards of the model wait for their backward and hold"):
        others = [model(tokens) for _ in range(3)]
    assert attached.outstanding[0] == 4
    torch.stack([first, *others]).sum().backward()
    assert attached.outstanding == (0, 0)


def test_a_batch_that_is_too_large_for_a_share_is_refused_in_words() -> None:
    torch.manual_seed(0)
    model = Net()
    small, large = torch.ones(4, 12, dtype=torch.int64), torch.ones(256, 12, dtype=torch.int64)
    lowtide.attach(model, "1MiB", fallback="modules", tell=lambda _: None, **QUICK)
    for _ in range(2):
        model(small).sum().backward()
    with pytest.raises(lowtide.BudgetError, match=r"blocks\.0 needs [\d,]+ bytes more for this batch than its share"):
        model(large)


def test_a_part_that_is_given_nothing_at_first_is_planned_later() -> None:
    class Routed(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.words(tokens).flatten(0, 1)
            for number, block in enumerate(self.blocks):
                chosen = tokens.flatten() % 3 == number
                x = x.index_add(0, chosen.nonzero()[:, 0], block(x[chosen]))
            return x @ self.words.weight.T

    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Routed()
        attached = lowtide.attach(model, fallback="modules", tell=lambda _: None, **QUICK) if planned else None
        for step in (3, 1, 1, 2):
            model(torch.arange(24).reshape(4, 6) * step % 15).square().sum().backward()
        found.append([one.grad for one in model.parameters()])
    assert attached is not None
    assert attached.parts is not None
    assert [*attached.parts.planned] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(same(one, other) for one, other in zip(*found, strict=True))


def test_where_nothing_can_be_planned_the_model_is_left_plain() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.parts(x) * float(x.sum())  # type: ignore[no-any-return]

    model = Odd()
    before = {name: dict(vars(one)) for name, one in model.named_modules()}
    lowtide.attach(model, fallback="modules", **QUICK)
    with pytest.raises(lowtide.CaptureError, match="no part of the model can be planned"):
        model(torch.ones(2, 4))
    assert {name: dict(vars(one)) for name, one in model.named_modules()} == before
    model(torch.ones(2, 4)).sum().backward()


def test_what_is_planned_is_said_and_detach_puts_all_of_it_back() -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    before = {name: dict(vars(one)) for name, one in model.named_modules()}
    lowtide.attach(model, "least", fallback="modules", **QUICK)
    with pytest.warns(lowtide.LowtideWarning, match=r"3 parts go by plans[\s\S]*words runs as ever: it keeps next to"):
        model(torch.randint(WORDS, (2, 4)))
    with pytest.warns(lowtide.LowtideWarning, match="plain model") as said:
        found = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert len(said) == 1
    assert all([*vars(one)] == [*before[name]] for name, one in found.named_modules())
    lowtide.detach(model)
    assert {name: dict(vars(one)) for name, one in model.named_modules()} == before
    plain.load_state_dict(model.state_dict())
    pair = [train(one, torch.optim.SGD(one.parameters(), lr=0.1)) for one in (plain, model)]
    assert_same(*pair)


def test_a_part_that_is_given_what_others_use_too() -> None:
    """Eager adds what an input gets from inside a part one by one to what it gets from elsewhere."""
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Net(2)
        if planned:
            lowtide.attach(model, None, fallback="modules", tell=lambda _: None, **QUICK)
        tokens = torch.randint(WORDS, (8, 12))
        x = model.words(tokens)
        model(tokens).square().sum().backward()
        y = model.blocks[0](x) + x.sin() + x.exp() * model.blocks[1](x)
        (y.square().sum() + model.blocks[0].ask.weight.pow(3).sum()).backward()
        found.append([one.grad for one in model.parameters()])
    assert all(same(one, other) for one, other in zip(*found, strict=True))


def test_an_argument_that_ops_have_made_is_cast_at_each_use() -> None:
    """Autocast casts leaves once, and adds up the gradients of what it cast; those of others are added in 32 bits."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            one, two, three = (part(x) for part in self.parts)
            return one.tanh() * two + three

    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        before, model = nn.Linear(WIDTH, WIDTH), Three()
        if planned:
            lowtide.attach(model, **QUICK)
        for leaf in (False, True, False):
            x = torch.randn(64, WIDTH)
            x = x.requires_grad_() if leaf else before(x)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().sum()
            loss.backward()
            found.append([x.grad if leaf else before.weight.grad.clone(), model.parts[0].weight.grad.clone()])
    for one, other in zip(found[:3], found[3:], strict=True):
        assert all(same(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
def test_a_part_that_comes_later_is_within_the_budget() -> None:
    class Later(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.words(tokens)
            for number, block in enumerate(self.blocks):
                x = block(x) if number < 2 or tokens.sum() > 500 else x
            return x @ self.words.weight.T

    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Later()
        attached = lowtide.attach(model, "8MiB", fallback="modules", **QUICK) if planned else None
        for rows in (4, 4, 8, 16, 16):
            model(torch.arange(12 * rows).reshape(rows, 12) % WORDS).square().sum().backward()
        found.append([one.grad for one in model.parameters()])
    assert attached is not None
    assert attached.parts is not None
    assert [*attached.parts.planned] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(same(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    """The caller's own; what the first call captures must not be counted as saved by what is checkpointed."""

    class Checkpointed(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.words(tokens)
            x = self.blocks[0](x) if x.detach().sum() > -1e9 else x
            x = checkpoint(lambda x: self.blocks[1](x).sin(), x, use_reentrant=reentrant)
            return x @ self.words.weight.T  # type: ignore[no-any-return]

    attached = both(Checkpointed, "50%")
    assert "blocks.0" in attached.parts.planned


def test_wrong_words() -> None:
    with pytest.raises(lowtide.UsageError, match=r"fallback='parts' is unknown[\s\S]*modules"):
        lowtide.attach(Net(), fallback="parts")  # type: ignore[arg-type]
    with pytest.raises(lowtide.UsageError, match="plans parts by themselves"):
        lowtide.attach(Net(), fallback="modules", offload="disk")
    model = Net()
    lowtide.attach(model.blocks[0])
    with pytest.raises(lowtide.UsageError, match="a part of the model is attached already"):
        lowtide.attach(model, fallback="modules")
