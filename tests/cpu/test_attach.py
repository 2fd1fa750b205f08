"""An attached model in loops that others wrote: the same object, the same numbers to the bit, within the budget."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import assert_exact, assert_same, everything, same

import lowtide
from lowtide import models
from lowtide.allocator.arena import POOL

QUICK: dict[str, Any] = {"costs": "roofline", "time_limit": 0.3}


class Net(nn.Module):
    """Draws, has statistics, a branch and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 16}
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Logits."""
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return self.second(hidden) * scale  # type: ignore[no-any-return]


def twins() -> tuple[Net, Net]:
    torch.manual_seed(0)
    model = Net()
    return model, copy.deepcopy(model)


def train(model: nn.Module, *, optimizer: Any = torch.optim.AdamW, steps: int = 5, **options: Any) -> list[Tensor]:
    """A loop with all that loops have: accumulation, clipping, autocast, evaluation, a smaller batch."""
    update = optimizer(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    losses = []
    for number in range(steps):
        x = torch.randn(3 if number == 2 else 6, 8)
        y = torch.randint(0, 4, (len(x),))
        with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        if number % options.get("accumulate", 1) == 0:
            if options.get("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            update.step()
            update.zero_grad(set_to_none=not options.get("zeros", False))
        losses.append(loss.detach())
        model.eval()
        with torch.no_grad():
            losses.append(model(x).sum())
        model.train()
    return losses


def assert_alike(model: nn.Module, mirror: nn.Module, **options: Any) -> None:
    found = train(model, **options), train(mirror, **options)
    assert all(same(one, other) for one, other in zip(*found, strict=True))
    assert_same(everything(model, None), everything(mirror, None))


def attaching(
    budget: str | None, options: dict[str, Any], step: Callable[..., Any], model: nn.Module, optimizer: Any, _: Any
) -> Callable[..., Any]:
    attached = lowtide.attach(model, budget=budget, **options)

    def train(*batch: Any) -> Any:
        return step(model, optimizer, *batch)

    train.attached = attached  # type: ignore[attr-defined]
    return train


@pytest.mark.parametrize("name", models.SMALL)
def test_every_model_is_exact(name: str) -> None:
    train = assert_exact(lambda: models.build(models.SMALL[name]), steps=3, make=partial(attaching, None, QUICK))
    assert train.attached.calls["by a plan"] == 3
    assert train.attached.fitted.mismatches == 0


@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_a_tight_budget_is_kept(name: str) -> None:
    train = assert_exact(
        lambda: models.build(models.SMALL[name]), make=partial(attaching, "least", {"time_limit": 0.3})
    )
    fitted = train.attached.fitted
    assert fitted.mismatches == 0
    assert fitted.peak <= fitted.plan.budget


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2, "clip": True}, {"zeros": True, "accumulate": 3}, {"autocast": True}],
    ids=["plain", "accumulated", "zeros", "autocast"],
)
def test_loops_are_exact(options: dict[str, Any]) -> None:
    model, mirror = twins()
    attached = lowtide.attach(mirror, **QUICK)
    assert_alike(model, mirror, **options)
    assert attached.calls == {"by a plan": 5, "in eval()": 5}


def test_what_stands_around_the_model_is_free() -> None:
    """A scaler, a test of the loss, lengths that the forward asserts, and an optimizer that lowtide does not know."""

    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["count"], state["average"] = 0, torch.zeros_like(parameter)
                state["count"] += 1
                parameter.add_(state["average"].lerp(parameter.grad, 0.1).sign(), alpha=-self.param_groups[0]["lr"])
                state["average"].lerp_(parameter.grad, 0.01)

    class Short(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            if len(x) > 8:
                raise ValueError(f"{len(x)} rows are too many")
            return super().forward(x)

    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Short()
        optimizer, scaler = Lion(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        if planned:
            lowtide.attach(model, None, optimizer, **QUICK)
        for rows in (8, 3, 8, 5):
            loss = model(torch.randn(rows, 8)).square().mean()
            if not torch.isfinite(loss):
                continue
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        with pytest.raises((ValueError, lowtide.CaptureError), match="9 rows are too many"):
            model(torch.randn(9, 8))
        found.append([*model.state_dict().values()])
    assert all(same(one, other) for one, other in zip(*found, strict=True))


def test_a_batch_that_is_optimised_itself() -> None:
    found = []
    for model in twins():
        model.requires_grad_(False)
        attached = lowtide.attach(model, **QUICK) if found else None
        torch.manual_seed(7)
        image = torch.randn(6, 8, requires_grad=True)
        optimizer = torch.optim.Adam([image], lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(image).square().sum().backward()
            optimizer.step()
        found.append(image.detach())
        assert attached is None or attached.calls == {"by a plan": 4}
    assert same(*found)


def test_lbfgs_works_in_ones_own_loop() -> None:
    found = []
    for model in twins():
        model.drop.p = 0.0
        if found:
            lowtide.attach(model, **QUICK)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
        x, y = torch.linspace(-1, 1, 48).reshape(6, 8), torch.arange(6) % 4

        def closure(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        found.append([optimizer.step(closure) for _ in range(3)] + [*model.state_dict().values()])
    assert all(same(one, other) for one, other in zip(*found, strict=True))


def test_the_model_stays_what_it_is() -> None:
    model, mirror = twins()
    before, names = dict(vars(mirror)), dir(mirror)
    state = torch.get_rng_state()
    attached = lowtide.attach(mirror, **QUICK)
    assert attached.fitted is None
    assert torch.equal(state, torch.get_rng_state())
    assert type(mirror) is Net
    assert mirror.config == {"width": 16}
    assert inspect.signature(mirror.forward) == inspect.signature(model.forward)
    assert mirror.forward.__doc__ == "Logits."
    assert mirror.state_dict().keys() == model.state_dict().keys()
    assert [name for name, _ in mirror.named_modules()] == [name for name, _ in model.named_modules()]
    train(mirror, steps=1)
    assert "calls: 1 by a plan, 1 in eval()" in attached.report()
    lowtide.detach(mirror)
    assert [*vars(mirror)] == [*before]
    assert all(vars(mirror)[key] is item for key, item in before.items())
    assert dir(mirror) == names
    train(model, steps=1)
    assert_alike(model, mirror)


def test_detach_gives_the_arena_back() -> None:
    gc.collect()
    POOL.empty()
    _, mirror = twins()
    lowtide.attach(mirror, **QUICK)
    train(mirror, steps=2)
    lowtide.detach(mirror)
    gc.collect()
    assert POOL.held() == 0


@pytest.mark.parametrize("on_top", [False, True])
def test_with_the_forwards_of_others(on_top: bool) -> None:
    """Accelerate puts a forward of its own into the model: before ours, or after it."""
    model, mirror = twins()
    for one in (model, mirror):
        if one is mirror and on_top:
            lowtide.attach(mirror, **QUICK)
        forward = one.forward
        one.forward = lambda *args, forward=forward, **kwargs: forward(*args, **kwargs) * 2  # type: ignore[method-assign]
        if one is mirror and not on_top:
            lowtide.attach(mirror, **QUICK)
    assert_alike(model, mirror)
    theirs = mirror.forward
    lowtide.detach(mirror)
    assert (mirror.forward is theirs) == on_top
    assert_alike(model, mirror)


# ------------------------------------------------------------------------------------------ others that look at it


def traced_by_jit(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.trace(model, (x,), check_trace=False)


def traced_by_fx(model: nn.Module, x: Tensor) -> Any:
    return torch.fx.symbolic_trace(model)


def compiled(model: nn.Module, x: Tensor) -> Any:
    return torch.compile(model, backend="eager")


def exported(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model, (x,)).module()


def functional(model: nn.Module, x: Tensor) -> Any:
    model.norm.eval()
    parameters = dict(model.named_parameters())
    grad = torch.func.grad(lambda given, x: torch.func.functional_call(model, given, (x,)).sum())
    return lambda x: torch.stack([one.sum() for one in grad(parameters, x).values()])


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("look", [traced_by_jit, traced_by_fx, compiled, exported, functional])
def test_it_steps_aside_for_tracing_by_others(look: Callable[..., Any]) -> None:
    found = []
    for model in twins():
        model.drop.p = 0.0
        if found:
            attached = lowtide.attach(model, **QUICK)
        torch.manual_seed(2)
        x = torch.randn(6, 8)
        found.append(look(model, x)(x).detach())
    assert same(*found)
    assert "by a plan" not in attached.calls


def test_tensors_in_place_of_its_parameters() -> None:
    """functional_call without a transform: the gradients go to what was given."""
    found = []
    for model in twins():
        model.norm.eval()
        if found:
            lowtide.attach(model, **QUICK)
        torch.manual_seed(2)
        x = torch.randn(6, 8)
        given = {name: (one.detach() * 2).requires_grad_() for name, one in model.named_parameters()}
        torch.func.functional_call(model, given, (x,)).square().sum().backward()
        found.append([one.grad for one in given.values()])
        assert all(parameter.grad is None for parameter in model.parameters())
    assert all(same(one, other) for one, other in zip(*found, strict=True))


def test_one_part_inside_another() -> None:
    model, mirror = twins()
    inner = lowtide.attach(mirror.first, **QUICK)
    outer = lowtide.attach(mirror, **QUICK)
    assert_alike(model, mirror)
    assert inner.calls.keys() == {"traced by others", "in eval()"}
    assert outer.calls["by a plan"] == 5


def test_fit_takes_an_attached_model() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = []
    for model in twins():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.linspace(-1, 1, 48).reshape(6, 8)
        torch.manual_seed(3)
        run: Callable[..., Any] = partial(step, model, optimizer)
        if found:
            lowtide.attach(model, **QUICK)
            run = lowtide.fit(step, model, optimizer, example=(x,), **QUICK)
        found.append([run(x) for _ in range(3)])
    assert all(same(one, other) for one, other in zip(*found, strict=True))


def dumped(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: nn.Module) -> Any:
    return torch.optim.swa_utils.AveragedModel(model).module


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, dumped, saved, averaged])
@pytest.mark.parametrize("door", ["attach", "wrap"])
def test_copies_are_plain_models(take: Callable[[Any], Any], door: str) -> None:
    model, mirror = twins()
    net: nn.Module = mirror
    if door == "wrap":
        net = lowtide.wrap(mirror, example=(torch.randn(6, 8),), **QUICK)
    else:
        lowtide.attach(mirror, **QUICK)
    with pytest.warns(lowtide.LowtideWarning, match="what you get is the plain model") as said:
        found = take(net)
    assert len(said) == 1
    assert type(found) is Net
    assert [*vars(found)] == [*vars(model)]
    assert found is not mirror
    assert_alike(model, found)


def test_a_copy_inside_another_object_is_plain() -> None:
    model, mirror = twins()
    both = nn.Sequential(mirror)
    lowtide.attach(mirror, **QUICK)
    with pytest.warns(lowtide.LowtideWarning, match="plain model"):
        found = copy.deepcopy(both)
    assert [*vars(found[0])] == [*vars(model)]
    assert mirror.__dict__["_lowtide"].model is mirror


# ----------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("autocast", [False, True])
def test_an_evaluation_that_eager_has_no_room_for_is_planned(autocast: bool, off: Any) -> None:
    """Layers that are wide for a moment: eager's forward holds two of them, and more where they are named."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 512) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            wide = [part(x) for part in self.parts]  # all at once, though each is used alone
            return torch.stack([one.square().mean() for one in wide]).sum()

    torch.manual_seed(0)
    model = Wide().eval()
    x = torch.randn(400, 8)
    with off(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        x = x + 0  # what is made under inference_mode is of another kind
        expected = model(x)
        budget = 2 * 400 * 512 * 4 + 400_000
        with torch.inference_mode(False):
            attached = lowtide.attach(model, budget=budget, time_limit=0.3)
        found = [model(x) for _ in range(3)]
        assert all(same(expected, one) for one in found)
        (planned,) = attached.evaluation._known.values()
        assert planned is not None
        assert planned.peak <= budget
        assert planned.mismatches == 0
        assert all(same(model(x[:rows]), Wide.forward(model, x[:rows])) for rows in (3, 4, 5))
        assert len(attached.evaluation._known) <= 2  # small ones fit for sure


def test_an_evaluation_that_can_not_be_captured_runs_as_ever() -> None:
    _, mirror = twins()
    forward = mirror.forward
    mirror.forward = lambda x: forward(x) * float(x.sum())  # type: ignore[method-assign]
    lowtide.attach(mirror, budget="1MiB", **QUICK)
    mirror.eval()
    with torch.no_grad(), pytest.warns(lowtide.LowtideWarning, match="not planned, and may hold more"):
        mirror(torch.ones(6, 8))
    with torch.no_grad():
        mirror(torch.ones(5, 8))


def digits(planned: bool) -> tuple[int, list[Tensor]]:
    """The peak of a whole program, small batches to train and large ones to evaluate, and its losses."""
    torch.manual_seed(0)
    gc.collect()
    POOL.empty()  # of arenas that other programs left in this process
    with lowtide.meter() as meter:
        parts = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2))
        model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * 12 * 12, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters())
        if planned:
            lowtide.attach(model, None, optimizer, time_limit=0.3)
        found = []
        for epoch in range(3):
            model.train()
            for number in range(3):
                x, y = torch.randn(7 if number == 2 else 16, 1, 28, 28), torch.tensor([number])
                loss = F.cross_entropy(model(x), y.expand(len(x)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
            model.eval()
            with torch.no_grad():
                found.append(model(torch.randn(150 * (epoch + 1), 1, 28, 28)).sum())
    return meter.peak, found


def test_the_peak_of_a_whole_program_is_not_above_the_plain_one() -> None:
    (plain, expected), (peak, found) = digits(False), digits(True)
    assert all(same(one, other) for one, other in zip(expected, found, strict=True))
    assert peak <= plain + 8  # each of the two plans has a mark of 4 bytes


# ------------------------------------------------------------------------------------------------------- odd backwards


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_on_modules() -> None:
    """Those of the model itself run outside of its plan, those of its parts inside."""
    found: list[list[Any]] = []
    for model in twins():
        if found:
            lowtide.attach(model, **QUICK)
        seen: list[Any] = []
        model.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
        model.register_forward_hook(lambda _, __, out: out + 1)
        model.register_full_backward_hook(lambda _, __, out, seen=seen: seen.append(out[0].sum()))
        model.first.register_forward_hook(lambda _, __, out: out * 3)
        train(model)
        seen += [one.detach() for one in model.parameters()]
        found.append(seen)
    assert all(same(one, other) for one, other in zip(*found, strict=True))


def test_forwards_that_wait_are_counted_and_said() -> None:
    model, mirror = twins()
    x = torch.randn(64, 8)
    lowtide.attach(mirror, **QUICK)
    mirror(x).sum().backward()
    least = mirror.__dict__["_lowtide"].fitted.plan.peak
    lowtide.detach(mirror)
    mirror.load_state_dict(model.state_dict())
    mirror.zero_grad()
    attached = lowtide.attach(mirror, budget=least, **QUICK)
    torch.manual_seed(4)
    first = mirror(x)
    with pytest.warns(lowtide.LowtideWarning, match="2 forwards of the model wait for their backward") as said:
        second = mirror(x)
    assert len(said) == 1
    count, nbytes = attached.outstanding
    assert count == 2
    assert attached.fitted.program.arena < nbytes <= 2 * attached.fitted.program.arena
    (first.sum() + second.square().sum()).backward()
    assert attached.outstanding == (0, 0)
    torch.manual_seed(4)
    (model(x).sum() + model(x).square().sum()).backward()
    assert_same(everything(model, None), everything(mirror, None))


def test_a_backward_that_never_comes() -> None:
    model, mirror = twins()
    attached = lowtide.attach(mirror, **QUICK)
    for one in (model, mirror):
        torch.manual_seed(5)
        for _ in range(4):
            one(torch.randn(6, 8))
    assert attached.outstanding == (0, 0)
    assert_alike(model, mirror)


def test_what_is_refused_points_to_fit() -> None:
    _, mirror = twins()
    lowtide.attach(mirror, **QUICK)
    loss = mirror(torch.randn(6, 8)).square().sum()
    with pytest.raises(lowtide.UsageError, match=r"gradient of a gradient[\s\S]*lowtide\.fit"):
        torch.autograd.grad(loss, [*mirror.parameters()], create_graph=True)
    loss = mirror(torch.randn(6, 8)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(lowtide.UsageError, match=r"had its backward already[\s\S]*lowtide\.fit"):
        loss.backward()


def test_one_autocast_around_two_calls_is_refused_where_eager_adds_in_its_precision() -> None:
    _, mirror = twins()
    lowtide.attach(mirror, **QUICK)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mirror(torch.randn(6, 8)).sum() + mirror(torch.randn(6, 8)).sum()
    with pytest.raises(lowtide.UsageError, match=r"under torch\.autocast[\s\S]*lowtide\.fit"):
        loss.backward()


def test_an_argument_that_ops_have_made_is_cast_at_each_use() -> None:
    """Autocast casts leaves once, and adds up the gradients of what it cast; those of others are added in 32 bits."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            one, two, three = (part(x) for part in self.parts)
            return one.tanh() * two + three

    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        before, model = nn.Linear(32, 32), Three()
        if planned:
            lowtide.attach(model, **QUICK)
        for leaf in (False, True, False):
            x = torch.randn(64, 32)
            x = x.requires_grad_() if leaf else before(x)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().sum()
            loss.backward()
            found.append([x.grad if leaf else before.weight.grad.clone(), model.parts[0].weight.grad.clone()])
    for one, other in zip(found[:3], found[3:], strict=True):
        assert all(same(*pair) for pair in zip(one, other, strict=True))


def test_each_autocast_has_its_plan() -> None:
    model, mirror = twins()
    attached = lowtide.attach(mirror, **QUICK)
    for autocast in (True, False, True):
        assert_alike(model, mirror, autocast=autocast, steps=2)
    assert len(attached._loops) == 2


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_can_not_be_attached_says_why() -> None:
    model, mirror = twins()
    with pytest.raises(lowtide.UsageError, match=r"not a torch\.nn\.Module"):
        lowtide.attach(len)  # type: ignore[arg-type]
    with pytest.raises(lowtide.UsageError, match="is not attached"):
        lowtide.detach(model)
    lowtide.attach(model, **QUICK)
    with pytest.raises(lowtide.UsageError, match=r"attached already[\s\S]*detach"):
        lowtide.attach(model)
    with pytest.raises(lowtide.UsageError, match="wrapped already"):
        lowtide.attach(lowtide.wrap(mirror, example=(torch.randn(6, 8),), **QUICK))
    with pytest.raises(lowtide.UsageError, match="is no budget"):
        lowtide.attach(mirror, budget="much")
    assert "forward" not in vars(mirror)


def test_a_model_with_nothing_to_train_runs_as_ever() -> None:
    _, mirror = twins()
    mirror.requires_grad_(False)
    attached = lowtide.attach(mirror, **QUICK)
    mirror(torch.randn(6, 8))
    assert attached.calls == {"with nothing to train": 1}


def test_a_budget_that_nothing_fits_is_said_at_the_first_call() -> None:
    _, mirror = twins()
    lowtide.attach(mirror, budget=100, **QUICK)
    with pytest.raises(lowtide.BudgetError):
        mirror(torch.randn(6, 8))
    lowtide.detach(mirror)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mirror(torch.randn(6, 8)).sum().backward()
