"""Loops within a budget against the plain loop in eager PyTorch, to the bit; forwards counted, memory metered."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from twins import same

import lowtide
from lowtide import tree
from lowtide.errors import BudgetError, UsageError
from lowtide.plan.loop import plan_loop, usual

LENGTH, BATCH, WIDTH = 13, 4, 8


# ------------------------------------------------------------------------------------------------------ the plain loop


def plain(
    cell: Any, inputs: Any, state: Any, *, lengths: Tensor | None = None, truncate: int | None = None
) -> tuple[Any, Any]:
    """The obvious loop."""
    if isinstance(inputs, Tensor):
        time_steps = list(inputs.unbind(0))
    elif isinstance(inputs, dict):
        time_steps = [
            dict(zip(inputs, parts, strict=True)) for parts in zip(*(v.unbind(0) for v in inputs.values()), strict=True)
        ]
    else:
        time_steps = list(inputs)
    outputs = []
    for time, time_step in enumerate(time_steps):
        if truncate is not None and time and time % truncate == 0:
            leaves, form = tree.flatten(state)
            state = form.build([leaf.detach() for leaf in leaves])
        result = cell(time_step, state)
        pair = (
            isinstance(result, tuple)
            and len(result) == 2
            and not (isinstance(result[1], Tensor) and len(leaves_of(state)) == 2)
        )
        output, new = result if pair else (leaves_of(result)[0], result)
        if lengths is not None:
            going = time < lengths
            olds, form = tree.flatten(state)
            news = tree.flatten(new)[0]
            new = form.build([torch.where(column(going, b), b, a) for a, b in zip(olds, news, strict=True)])
            output = torch.where(column(going, output), output, 0)
        state = new
        outputs.append(output)
    if outputs[0] is None:
        return None, state
    flat = [tree.flatten(one) for one in outputs]
    return flat[0][1].build([torch.stack(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]), state


def leaves_of(thing: Any) -> list[Any]:
    return tree.flatten(thing)[0]


def column(going: Tensor, like: Tensor) -> Tensor:
    return going.reshape(-1, *[1] * (like.dim() - 1))


# --------------------------------------------------------------------------------------------------- cells of all kinds


class Case(NamedTuple):
    """A cell with everything that it needs; all of it made anew, the same at every call."""

    cell: Any
    inputs: Any
    state: Any
    parameters: list[Tensor]


def noise(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def module(cell: nn.Module, state: Any, *, grad: bool = True) -> Case:
    for number, parameter in enumerate(cell.parameters()):
        parameter.data = noise(*parameter.shape, seed=100 + number) * 0.3
    return Case(cell, noise(LENGTH, BATCH, WIDTH, grad=grad), state, list(cell.parameters()))


def zeros() -> Tensor:
    return torch.zeros(BATCH, WIDTH)


def lstm() -> Case:
    return module(nn.LSTMCell(WIDTH, WIDTH), (noise(BATCH, WIDTH, seed=1, grad=True), zeros()))


def gru() -> Case:
    return module(nn.GRUCell(WIDTH, WIDTH), zeros(), grad=False)


def tanh() -> Case:
    return module(nn.RNNCell(WIDTH, WIDTH), noise(BATCH, WIDTH, seed=1, grad=True))


class Readout(nn.Module):
    """Returns an output of its own, and uses its state and one matrix several times."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.inner, self.out, self.drop = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Dropout(drop)
        self.tied = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        h = torch.tanh(state["h"] @ self.tied + torch.sigmoid(x) @ self.tied) * state["h"].cos()
        h, c = self.inner(self.drop(x), (self.drop(h), state["c"]))
        return {"y": self.out(h), "h": h}, {"h": h @ self.tied, "c": c}


def readout() -> Case:
    return module(Readout(), {"h": zeros(), "c": noise(BATCH, WIDTH, seed=1, grad=True)})


def dropout() -> Case:
    return module(Readout(0.4), {"h": zeros(), "c": zeros()})


def emits_the_state_before() -> Case:
    cell = nn.GRUCell(WIDTH, WIDTH)
    case = module(cell, noise(BATCH, WIDTH, seed=1, grad=True))
    return case._replace(cell=lambda x, h: (h, cell(x, h * h.sin())))


def delay_line() -> Case:
    inner = nn.GRUCell(WIDTH, WIDTH)
    start = noise(BATCH, WIDTH, seed=1, grad=True)

    def cell(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        new = inner(x * state[2].cos(), state[0] + state[1] * state[2])
        return new, (new, state[0], state[1])

    return module(inner, (start, start, start))._replace(cell=cell)


def the_same_twice() -> Case:
    inner = nn.GRUCell(WIDTH, WIDTH)

    def cell(x: Tensor, state: list[Tensor]) -> tuple[None, list[Tensor]]:
        new = inner(x + state[1].sin(), state[0] * state[1])
        return None, [new, new]

    return module(inner, [zeros(), zeros()])._replace(cell=cell)


def counts() -> Case:
    inner = nn.GRUCell(WIDTH, WIDTH)

    def cell(x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = inner(x, state[0])
        return h * state[1], (h, state[1] + 1)

    return module(inner, (zeros(), torch.tensor(1)))._replace(cell=cell)


def captured() -> Case:
    """Closes over a leaf, a tensor with a history, a frozen one, and part of a pair; a list of inputs, one twice."""
    leaf, before, frozen = noise(WIDTH, grad=True), noise(WIDTH, WIDTH, seed=3, grad=True), noise(WIDTH, WIDTH, seed=4)
    made = before.exp() * 0.1
    one, _ = (before * 0.2).chunk(2)

    def cell(x: dict[str, Tensor], h: Tensor) -> Tensor:
        h = torch.tanh(x["x"] + h @ made + leaf * x["scale"]) @ frozen
        return h * 0.1 + (h[:, : WIDTH // 2] @ one) * made.diagonal()

    inputs: list[Any] = [
        {"x": noise(BATCH, WIDTH, seed=t), "scale": noise(1, seed=t, grad=True)} for t in range(LENGTH)
    ]
    inputs[7] = inputs[2]
    return Case(cell, inputs, zeros(), [leaf, before])


def tree_of_inputs() -> Case:
    case = module(nn.GRUCell(WIDTH, WIDTH), zeros())
    inputs = {"a": noise(LENGTH, BATCH, WIDTH, grad=True), "b": noise(LENGTH, BATCH, WIDTH, seed=5)}
    return case._replace(cell=lambda x, h, cell=case.cell: cell(x["a"] * x["b"], h), inputs=inputs)


def one_gradient_for_all() -> Case:
    """The parameter and each input get the very same tensor as gradient."""
    offset = noise(BATCH, WIDTH, seed=2, grad=True)
    inputs = [noise(BATCH, WIDTH, seed=t, grad=True) for t in range(LENGTH)]
    return Case(lambda x, h: x + h.sin() + offset, inputs, zeros(), [offset])


def nothing_but_inputs() -> Case:
    return Case(lambda x, h: torch.sin(x) * h + x, noise(LENGTH, BATCH, WIDTH, grad=True), zeros(), [])


CASES: list[Callable[[], Case]] = [
    lstm, gru, tanh, readout, dropout, emits_the_state_before, delay_line, the_same_twice, counts, captured,
    tree_of_inputs, one_gradient_for_all, nothing_but_inputs,
]  # fmt: skip


def train(case: Case, loop: Callable[..., tuple[Any, Any]], *, part: str = "both", **options: Any) -> dict[str, Any]:
    """Everything that a forward and a backward leave behind."""
    torch.manual_seed(7)
    outputs, state = loop(case.cell, case.inputs, case.state, **options)
    found = {f"output {k}": leaf for k, leaf in enumerate(leaves_of(outputs))}
    states = {f"state {k}": leaf for k, leaf in enumerate(leaves_of(state))}
    found["types"] = str(tree.flatten((outputs, state))[1])
    chosen = {**(found if part != "state" else {}), **(states if part != "outputs" else {})}
    differentiable = [leaf for leaf in chosen.values() if isinstance(leaf, Tensor) and leaf.requires_grad]
    found["after"] = torch.get_rng_state()
    loss = sum((leaf * noise(*leaf.shape, seed=9)).sum() + leaf.square().mean() for leaf in differentiable)
    if isinstance(loss, Tensor):
        loss.backward()
    found["after backward"] = torch.get_rng_state()
    given = [*leaves_of(case.inputs), *leaves_of(case.state), *case.parameters]
    found |= {f"gradient {k}": leaf.grad for k, leaf in enumerate(given)}
    return found | states | {f"grad {key}": leaf.requires_grad for key, leaf in states.items()}


def assert_equal(expected: dict[str, Any], found: dict[str, Any]) -> None:
    differing = [key for key in {**expected, **found} if not same(expected.get(key), found.get(key))]
    assert not differing, differing


def budgets(make: Callable[[], Case]) -> list[int | str]:
    case = make()
    least = lowtide.scan_plan(case.cell, case.inputs, case.state).least
    return [max(1, least), round(least * 1.7) + 1, "35%", "60%"]


@pytest.mark.parametrize("make", CASES)
def test_everything_equals_the_plain_loop(make: Callable[[], Case]) -> None:
    expected = train(make(), plain)
    assert any(isinstance(value, Tensor) and key.startswith("gradient") for key, value in expected.items())
    assert_equal(expected, train(make(), lowtide.scan))
    for budget in budgets(make):
        assert_equal(expected, train(make(), lowtide.scan, budget=budget))


@pytest.mark.parametrize("part", ["outputs", "state"])
@pytest.mark.parametrize("make", [lstm, tanh, readout, delay_line])
def test_a_loss_on_a_part_of_the_results(make: Callable[[], Case], part: str) -> None:
    expected = train(make(), plain, part=part)
    for budget in budgets(make):
        assert_equal(expected, train(make(), lowtide.scan, part=part, budget=budget))


@pytest.mark.parametrize("make", [lstm, readout, dropout, delay_line, captured])
@pytest.mark.parametrize("truncate", [1, 4, 50])
def test_truncated(make: Callable[[], Case], truncate: int) -> None:
    expected = train(make(), plain, truncate=truncate)
    for budget in (None, *budgets(make)):
        assert_equal(expected, train(make(), lowtide.scan, truncate=truncate, budget=budget))


@pytest.mark.parametrize("make", [lstm, gru, dropout])
def test_lengths(make: Callable[[], Case]) -> None:
    lengths = torch.tensor([13, 0, 5, 12])
    simple = make is not dropout  # whose output is a dictionary

    def flat(case: Case) -> Case:
        return case if simple else case._replace(cell=lambda x, s: _first_output(case.cell(x, s)))

    expected = train(flat(make()), plain, lengths=lengths)
    assert not expected["output 0"][5:, 2].any()
    for budget in (None, "35%", "60%"):
        assert_equal(expected, train(flat(make()), lowtide.scan, lengths=lengths, budget=budget))


def _first_output(result: Any) -> Any:
    return result[0]["y"], result[1]


# ---------------------------------------------------------------------------------------------- forwards and memory


class Counting(nn.Module):
    """An LSTM cell that counts its runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.runs = nn.LSTMCell(width, width), 0

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.runs += 1
        made: tuple[Tensor, Tensor] = self.inner(x, state)
        return made


@pytest.mark.parametrize("part", [2, 5, 20])
def test_forwards_are_the_optimum_of_the_dynamic_program(part: int) -> None:
    torch.manual_seed(0)
    cell, inputs = Counting(WIDTH), noise(1000, BATCH, WIDTH)
    state = (zeros(), zeros())
    numbers = BATCH * WIDTH * 4  # bytes of one of the seven tensors that a cell saves, two of them its state
    budget = (5 * 1000 + 2 * 999) * numbers * part // 100
    found = lowtide.scan_plan(cell, inputs, state, budget=f"{part}%")
    assert (found.state_bytes, found.cell_bytes) == (numbers, 6 * numbers)  # the outputs hold the other tensor
    assert abs(found.budget - budget) <= 1
    optimum = plan_loop(1000, usual(numbers, 6 * numbers), found.budget).forwards
    assert found.forwards == optimum
    cell.runs = 0
    outputs, _ = lowtide.scan(cell, inputs, state, budget=f"{part}%")
    outputs.square().sum().backward()
    assert cell.runs == optimum


@pytest.mark.parametrize("part", [3, 10, 40])
@pytest.mark.parametrize("readout", [False, True])
def test_the_metered_peak_is_within_the_budget(part: int, readout: bool) -> None:
    batch, width, length = 32, 64, 120
    torch.manual_seed(0)
    inner = nn.LSTMCell(width, width)
    inputs, state = torch.randn(length, batch, width), (torch.zeros(batch, width), torch.zeros(batch, width))

    def silent(x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[None, tuple[Tensor, Tensor]]:
        return None, inner(x, state)

    cell = inner if readout else silent
    plan = lowtide.scan_plan(cell, inputs, state, budget=f"{part}%")
    number = batch * width * 4
    parameters = sum(p.nbytes for p in inner.parameters())

    def peak(loop: Callable[..., Any]) -> int:
        inner.zero_grad(set_to_none=True)
        with lowtide.meter() as meter:
            outputs, last = loop()
            (outputs.sum() if readout else last[0].sum()).backward()
        return meter.peak

    loops = peak(lambda: plain(cell, inputs, state))
    peak(lambda: lowtide.scan(cell, inputs, state, budget=f"{part}%"))
    found = peak(lambda: lowtide.scan(cell, inputs, state, budget=f"{part}%"))
    results = length * number if readout else 0  # the outputs; their gradients are one number, expanded
    on_top = 2 * parameters + 20 * number  # gradients, summed and of one cell; states at hand; temporaries of a cell
    assert plan.budget is not None
    assert plan.nbytes <= plan.budget
    assert found <= plan.budget + results + on_top
    assert found < loops * (part + 10) / 100 + results + on_top


def test_gradients_of_parameters_are_added_up_in_place() -> None:
    case, inputs = lstm(), noise(200, BATCH, WIDTH)
    with lowtide.meter() as meter:
        outputs, _ = lowtide.scan(case.cell, inputs, case.state, budget="20KiB")
        before = meter.allocations
        outputs.sum().backward()
        found = meter.allocations - before
    assert found < 25 * 200  # 24 blocks for the ops of each cell; sums that were not in place would take four more


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_that_were_there_before_are_added_to(hooked: bool) -> None:
    found = []
    for loop in (plain, lowtide.scan):
        cell, inputs, state = lstm()[:3]
        calls: list[int] = []
        if hooked:
            cell.weight_hh.register_post_accumulate_grad_hook(lambda tensor, calls=calls: calls.append(1))
        options = {} if loop is plain else {"budget": "30%"}
        for _ in range(2):
            loop(cell, inputs, state, **options)[0].square().sum().backward()
        found.append([parameter.grad for parameter in cell.parameters()])
        assert len(calls) == 2 * hooked
    assert all(map(torch.equal, *found))


def test_nothing_stays_held() -> None:
    case = lstm()
    for backward in (True, False):
        outputs, state = lowtide.scan(case.cell, case.inputs, case.state, budget="50%")
        with lowtide.meter() as meter:
            if backward:
                outputs.sum().backward()
                [one.grad.zero_() for one in (case.inputs, case.state[0], *case.parameters)]
        del meter
        held = weakref.ref(outputs.grad_fn)
        gc.disable()
        try:
            del outputs, state
            assert held() is None
        finally:
            gc.enable()


def test_an_error_in_the_cell_comes_through_unchanged() -> None:
    inner, limit, runs = nn.GRUCell(WIDTH, WIDTH), 10**9, 0

    def cell(x: Tensor, h: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if runs > limit:
            raise KeyError("mine")
        made: Tensor = inner(x, h)
        return made

    case = module(inner, zeros())._replace(cell=cell)
    outputs, _ = lowtide.scan(case.cell, case.inputs, case.state, budget="20%")
    runs, limit = 0, 3
    with pytest.raises(KeyError, match="mine"):
        outputs.sum().backward()
    runs = 0
    with pytest.raises(KeyError, match="mine"):
        lowtide.scan(case.cell, case.inputs, case.state, budget="20%")
    limit = 10**9
    assert_equal(train(case, plain), train(module(nn.GRUCell(WIDTH, WIDTH), zeros()), lowtide.scan, budget="20%"))


# ------------------------------------------------------------------------------------------------------ other places


def test_without_gradients_it_is_the_plain_loop() -> None:
    case = dropout()
    with torch.no_grad():
        torch.manual_seed(3)
        expected = plain(case.cell, case.inputs, case.state)
        torch.manual_seed(3)
        found = lowtide.scan(case.cell, case.inputs, case.state, budget="5%")
    assert all(same(a, b) for a, b in zip(leaves_of(expected), leaves_of(found), strict=True))
    frozen = module(Readout(0.4), {"h": zeros(), "c": zeros()}, grad=False)
    frozen.cell.requires_grad_(False)
    torch.manual_seed(3)
    again = lowtide.scan(frozen.cell, frozen.inputs, frozen.state, budget="5%")
    assert all(same(a, b) for a, b in zip(leaves_of(expected), leaves_of(again), strict=True))
    assert not any(leaf.requires_grad for leaf in leaves_of(again))
    frozen.cell.requires_grad_(True)  # what was found out before must not hide that now everything trains
    assert_equal(
        train(dropout()._replace(inputs=frozen.inputs), plain),
        train(frozen._replace(parameters=list(frozen.cell.parameters())), lowtide.scan, budget="40%"),
    )


class Model(nn.Module):
    """A loop inside a model."""

    def __init__(self, loop: Callable[..., tuple[Any, Any]], **options: Any) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.loop, self.options = loop, options

    def forward(self, x: Tensor) -> Tensor:
        start = x.new_zeros(BATCH, WIDTH)
        outputs, _ = self.loop(self.cell, x, (start, start), **self.options)
        made: Tensor = self.out(outputs)
        return made


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("inside", [False, True])
def test_steps_with_a_scan_train_alike(inside: bool) -> None:
    models, losses = [], []
    for loop, options in ((plain, {}), (lowtide.scan, {"budget": "30%", "lengths": None})):
        torch.manual_seed(0)
        model = Model(loop, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train_step: Any = lambda x, model=model, optimizer=optimizer: step(model, optimizer, x)  # noqa: E731
        if inside and loop is lowtide.scan:
            train_step = lowtide.fit(
                step, model, optimizer, example=(noise(5, BATCH, WIDTH),), budget="80%", time_limit=0.3
            )
        losses.append([train_step(noise(5, BATCH, WIDTH, seed=seed)).detach() for seed in range(3)])
        models.append(model)
    assert all(same(a, b) for a, b in zip(*losses, strict=True))
    assert all(same(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


def test_every_length_is_planned_for_itself() -> None:
    for length in (1, 2, 13, 40):
        expected, found = (
            train(lstm()._replace(inputs=noise(length, BATCH, WIDTH)), loop, **options)
            for loop, options in ((plain, {}), (lowtide.scan, {"budget": "6KiB"}))
        )
        assert_equal(expected, found)


# ------------------------------------------------------------------------------------------------------------ refusals


def refused(match: str, *, error: type[Exception] = UsageError, case: Case | None = None, **options: Any) -> Any:
    case = case or lstm()
    with pytest.raises(error, match=match) as caught:
        lowtide.scan(case.cell, case.inputs, case.state, **{"budget": "50%", **options})
    assert getattr(caught.value, "hint", "yes")
    return caught.value


def test_budgets_that_are_too_small_name_the_least_that_works() -> None:
    error = refused("too few", error=BudgetError, budget=100)
    case = lstm()
    lowtide.scan(case.cell, case.inputs, case.state, budget=error.least)
    refused("too few", error=BudgetError, budget=error.least - 1)
    refused("is no budget", budget="much")


def test_hooks_on_parameters_are_refused() -> None:
    case = lstm()
    case.cell.weight_hh.register_hook(lambda gradient: None)
    state = torch.get_rng_state()
    refused("has a hook", case=case)
    assert torch.equal(state, torch.get_rng_state())


def test_wrong_calls_are_refused() -> None:
    case = lstm()
    refused("no number of time steps", truncate=0)
    refused("no time steps", case=case._replace(inputs=noise(0, BATCH, WIDTH)))
    refused("no time steps", case=case._replace(inputs=[]))
    refused("a NoneType where a tensor", case=case._replace(state=None))
    refused("returned", case=case._replace(cell=lambda x, s: (x, s, x)))
    refused("returned", case=case._replace(cell=lambda x, s: x))
    refused("of shape|has shape", lengths=torch.tensor([1.0]))
    refused("there are 3 lengths", lengths=[1, 2, 3])
    refused("differ in structure", case=case._replace(inputs=[noise(2), {"x": noise(2)}]))
    with torch.autocast("cpu"):
        refused("autocast")


class Normed(nn.Module):
    """A cell with a batch norm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.GRUCell(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        made: Tensor = self.norm(self.inner(x, h))
        return made


def test_cells_that_write_to_what_is_not_theirs_are_refused_before_they_do() -> None:
    case = module(Normed(), zeros())
    before = {name: buffer.clone() for name, buffer in case.cell.named_buffers()}
    refused("writes to a tensor of shape", case=case)
    assert all(same(before[name], buffer) for name, buffer in case.cell.named_buffers())
    case.cell.eval()
    lowtide.scan(case.cell, case.inputs, case.state, budget="50%")

    mean, variance = torch.zeros(WIDTH), torch.ones(WIDTH)
    bare = case._replace(cell=lambda x, h: torch.nn.functional.batch_norm(x + h, mean, variance, training=True))
    refused("writes to a tensor of shape", case=bare)
    assert not mean.any()
    refused("writes to a tensor of shape", case=lstm()._replace(cell=lambda x, s: (s[0].add_(x), s[1] * 2)))


def test_backward_only_once_and_not_of_the_backward() -> None:
    case = lstm()
    outputs, _ = lowtide.scan(case.cell, case.inputs, case.state, budget="50%")
    outputs.sum().backward(retain_graph=True)
    with pytest.raises(UsageError, match="ran already"):
        outputs.sum().backward()
    outputs, _ = lowtide.scan(case.cell, case.inputs, case.state, budget="50%")
    with pytest.raises(UsageError, match="differentiated twice"):
        torch.autograd.grad(outputs.sum(), case.inputs, create_graph=True)


@pytest.mark.parametrize("what", ["outputs", "inputs", "parameter"])
def test_writing_to_what_the_backward_reads_is_noticed(what: str) -> None:
    case = lstm()
    inputs = case.inputs.detach()
    outputs, _ = lowtide.scan(case.cell, inputs, case.state, budget="50%")
    loss = outputs.sum()
    with torch.no_grad():
        {"outputs": outputs, "inputs": inputs, "parameter": case.parameters[0]}[what].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_that_only_later_time_steps_use_are_found_or_refused() -> None:
    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.GRUCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            inner = self.one if state[1].item() < 5 else self.other
            return inner(x, state[0]), state[1] + 1

    def make() -> Case:
        return module(Switching(), (zeros(), torch.tensor(0)))

    assert_equal(train(make(), plain), train(make(), lowtide.scan, budget="40%"))
    case = make()
    hidden = case._replace(cell=lambda x, s: case.cell(x, s))
    with pytest.raises(UsageError, match="did not use at the first"):
        train(hidden, lowtide.scan, budget="40%")


def test_a_cell_that_computes_other_bits_without_autograd_is_still_exact() -> None:
    inner = nn.GRUCell(WIDTH, WIDTH)

    def cell(x: Tensor, h: Tensor) -> Tensor:
        made: Tensor = inner(x, h)
        return made if torch.is_grad_enabled() else made * 1.0001

    case, again = (module(inner, zeros())._replace(cell=cell) for _ in range(2))
    expected = train(case, plain)
    inner.zero_grad()
    assert_equal(expected, train(again, lowtide.scan, budget="40%"))
