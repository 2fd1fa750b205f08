"""Parameters, state and batches in other forms against eager PyTorch: how far they are off, and what they hold."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from formed import OPTIMIZERS, batches, distance, eager, made, run, train
from torch import nn

import lowtide
from lowtide.measure import roofline
from lowtide.packed import Packed
from lowtide.rewrite import EXACT, apply

FORMS = [("weights16",), ("weights16:bfloat16",), ("state8",), ("weights16", "state8")]
NEAR = {"weights16": 2e-3, "weights16:bfloat16": 1.2e-2, "state8": 2e-2}  # of the norm of the weights, after ten steps
APART = 0.35  # of the way that eager went: for optimizers that divide by small numbers, which magnify what is rounded


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("names", FORMS, ids="+".join)
def test_training_stays_near_to_eager(optimizer: str, names: tuple[str, ...]) -> None:
    given = batches(10)
    model, one = made(optimizer)
    expected = train(eager(model, one), given)
    mirror, other = made(optimizer)
    step = run(names, mirror, other, given[0])
    found = train(step, given)
    state = torch.get_rng_state()
    train(eager(*made(optimizer)), given)
    assert torch.equal(state, torch.get_rng_state()), "torch's generator ends as eager's"
    near = sum(NEAR[name] for name in names)
    assert distance(model, mirror) < (
        near if optimizer in ("sgd", "nesterov") else near + APART * distance(model, made()[0])
    )
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 0.1
    targets = [op.target for op in step.captured.graph.ops]
    assert "lowtide.update.default" in targets, "each weight has one op for its update"
    assert "lowtide.pack.default" not in targets


def test_updates_that_mix_elements_take_whole_tensors() -> None:
    class Normed(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(0.01 * parameter.grad).div_(1 + 0.01 * parameter.norm())

    given = batches(5)
    runs = []
    for names in ((), ("weights16",)):
        model, _ = made()
        step = run(names, model, Normed(model.parameters(), lr=0.1), given[0])
        train(step, given)
        runs.append((model, [op.target for op in step.captured.graph.ops]))
    assert "aten.div_.Tensor" in runs[1][1]
    assert distance(runs[0][0], runs[1][0]) < 1e-3


@pytest.mark.parametrize("names", [("sparse:0.3",), ("sparse:0.5",)], ids="+".join)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("convolutions", [False, True])
@pytest.mark.filterwarnings("ignore:.*weights that were not zero are zero now")
def test_a_fixed_mask_trains_the_masked_dense_model(names: tuple[str], optimizer: str, convolutions: bool) -> None:
    given = batches(6)
    mirror, other = made(optimizer, convolutions=convolutions)
    step = run(names, mirror, other, given[0])
    step.binding.wholes.settle()  # as it is before the first step
    model, one = made(optimizer, convolutions=convolutions)
    masks = {}
    with torch.no_grad():
        for (name, parameter), packed in zip(model.named_parameters(), mirror.parameters(), strict=True):
            assert parameter.numel() < 4096 or isinstance(packed, Packed) or parameter.dim() < 2
            masks[name] = (packed.detach() != 0) | (parameter == 0)
            parameter.copy_(packed)

    def masked(*batch: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(masks[name])
        one.step()
        one.zero_grad()
        return loss

    expected, found = train(masked, given), train(step, given)
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1e-5
    assert distance(model, mirror) < 2e-6 if optimizer == "sgd" else distance(model, mirror) < 1e-4
    for (name, parameter), packed in zip(model.named_parameters(), mirror.parameters(), strict=True):
        assert not packed.detach()[~masks[name]].any(), name
        assert packed.shape == parameter.shape


def _least(names: tuple[str, ...], optimizer: str = "adamw") -> int:
    model, one = made(optimizer)
    step = run(names, model, one, batches(1)[0], measured=True)
    step(*batches(1)[0])
    return int(step.peak)


@pytest.mark.parametrize("names", [(), *FORMS, ("sparse:0.3",), ("sparse:0.3", "weights16", "state8", "input8")])
@pytest.mark.filterwarnings("ignore:.*weights that were not zero are zero now")
def test_the_bytes_are_as_predicted_and_really_gone(names: tuple[str, ...]) -> None:
    given = batches(3)
    with lowtide.meter() as meter:
        before = meter.current
        model, optimizer = made("adamw")
        batch: Any = tuple(tensor.clone() for tensor in given[0])
        step = run(names, model, optimizer, given[0], measured=True)
        step(*batch)
        persistent = roofline(step.captured.graph).persistent(step.captured.graph)
        held = meter.current - before - step.arena_bytes
    predicted = persistent + step.program.arena
    assert step.peak is not None
    step(*batch)
    step(*batch)
    assert step.mismatches == 0
    assert step.peak <= predicted * 1.03
    assert held < persistent * 1.03 + 4096 + sum(tensor.nbytes for tensor in batch)  # the floats of the batch, too


@pytest.mark.parametrize(
    "names",
    [("weights16", "state8"), ("sparse:0.3", "weights16", "state8", "input8"), ("microbatch:4", "weights16", "state8")],
    ids="+".join,
)
@pytest.mark.filterwarnings("ignore:.*weights that were not zero are zero now")
def test_recomputation_does_not_change_a_bit(names: tuple[str, ...]) -> None:
    given = batches(4)
    runs = []

    def tight(graph: lowtide.Graph, costs: lowtide.Costs) -> lowtide.Program:
        with pytest.raises(lowtide.BudgetError) as refused:
            lowtide.plan(graph, costs, 1, time_limit=0.2)
        return lowtide.plan(graph, costs, int(refused.value.least or 0), time_limit=0.2).program

    for program in (None, tight):
        model, optimizer = made("sgd", convolutions=True)
        step = run(names, model, optimizer, given[0], program=program)
        losses = train(step, given)
        runs.append((losses, [p.detach().clone() for p in model.parameters()], step.program))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert runs[1][2] != runs[0][2] or "microbatch:4" in names, "else nothing was made again"


@pytest.mark.parametrize("names", [(), ("weights16",), ("state8",), ("sparse:0.3", "weights16", "state8", "input8")])
@pytest.mark.filterwarnings("ignore:.*weights that were not zero are zero now")
def test_momentum_takes_up_the_parts_of_a_batch(names: tuple[str, ...]) -> None:
    given = batches(6)
    runs = []
    for parts in ((), ("microbatch:4",)):
        model, optimizer = made("sgd")
        model[-5] = torch.nn.Identity()  # parts draw other numbers for dropout
        step = run((*parts, *names), model, optimizer, given[0])
        train(step, given)
        runs.append((model, step.captured.graph))
    assert distance(runs[0][0], runs[1][0]) < (1e-6 if not names else 5e-3)
    sums = [op for op in runs[1][1].ops if op.target == "aten.add.Tensor" and op.phase == "backward"]
    large = [op for op in sums if runs[1][1].values[op.makes[0]].nbytes > 4096]
    assert not names or not large, "no gradient of a large weight is kept beside its momentum"


def _fitted(allow: str, budget: int, optimizer: str = "adamw", **more: Any) -> tuple[Any, Any, Any]:
    model, one = made(optimizer)
    from formed import step

    train_ = lowtide.fit(step, model, one, example=batches(1)[0], allow=allow, budget=budget, time_limit=0.3, **more)
    return train_, model, one


ALLOW = "input8,weights16,state8"


def test_a_fitted_step_lives_on() -> None:
    """Evaluation, saving, loading, other batches and a resumed run, with all that is in parts."""
    given = batches(12)
    said: list[str] = []
    budget = _least(("input8", "weights16", "state8")) + 4096
    first, model, optimizer = _fitted(ALLOW, budget, tell=said.append)
    assert {one.name for one in first.plan.rewrites} >= {"weights16", "state8"}
    torch.manual_seed(3)
    for batch in given[:4]:
        first(*batch)
    assert first.peak <= budget
    assert first.peak == first.plan.peak
    assert "weights16" in first.report()
    weight = model[1].weight
    assert isinstance(weight, Packed)
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad
    model.eval()
    with torch.no_grad():
        out = model(given[0][0])
    with first.dense() as plain:
        assert type(plain[1].weight) is torch.nn.Parameter
        assert torch.equal(plain(given[0][0]), out)
    assert model[1].weight is weight
    assert isinstance(weight, Packed)
    assert any("bytes more" in line for line in said)
    assert torch.equal(copy.deepcopy(model)(given[0][0]), out)
    model.train()
    saved = io.BytesIO()
    rest = {"draws": torch.get_rng_state(), "parts": first.state_dict()}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **rest}, saved)
    saved.seek(0)
    back = torch.load(saved, weights_only=True)
    assert all(type(tensor) is torch.Tensor for tensor in back["model"].values())
    made()[0].load_state_dict(back["model"])  # into the dense model
    torch.set_rng_state(back["draws"])
    expected = [first(*batch).item() for batch in given[4:8]]
    second, resumed, other = _fitted(ALLOW, budget)
    resumed.load_state_dict(back["model"])
    other.load_state_dict(back["optimizer"])
    second.load_state_dict(back["parts"])
    torch.set_rng_state(back["draws"])
    assert [second(*batch).item() for batch in given[4:8]] == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    smaller = tuple(tensor[:5] for tensor in given[8])
    assert torch.isfinite(second(*smaller))
    assert {one.name for one in second.plan.rewrites} >= {"weights16", "state8"}, "the form stays"
    assert second.peak <= budget


def test_writing_to_a_tensor_in_parts() -> None:
    train_, model, _ = _fitted("weights16", _least(("weights16",)) + 1024)
    train_(*batches(1)[0])
    weight, twin = model[1].weight, model[1].weight.detach().clone()
    assert isinstance(weight, Packed)
    assert type(twin) is torch.Tensor
    with torch.no_grad():
        for tensor in (weight, twin):
            tensor.data.mul_(2)
            tensor[0].fill_(3)
            tensor.view(-1)[70] = 7
            tensor.t()[2].zero_()
            tensor.copy_(tensor.half().float())
    assert torch.equal(weight, twin)
    assert weight.detach().numpy()[0, 3] == 3
    with pytest.raises(lowtide.UsageError):
        weight.data.resize_(3)
    before = weight.detach().clone()
    train_(*batches(1)[0])
    assert not torch.equal(weight, before)


def test_small_steps_do_not_vanish() -> None:
    """Rounded by chance, a weight moves by what it is told on average; rounded to the nearest it would stay."""
    parameter = torch.nn.Parameter(torch.ones(4096))
    model = torch.nn.Module()
    model.weight = parameter
    optimizer = torch.optim.SGD([parameter], lr=1e-5)

    def down(model: Any, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = (model.weight * batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    captured = lowtide.capture(down, model, optimizer, (torch.ones(4096),))
    from dataclasses import replace

    from formed import rewrites

    graph = apply(captured.graph, [*EXACT, *rewrites(["weights16"])]).graph
    costs = roofline(graph)
    step = lowtide.execute(replace(captured, graph=graph), lowtide.plan(graph, costs, 10**9).program, costs.nbytes)
    for _ in range(100):
        step(torch.ones(4096))
    moved = 1 - model.weight.detach()
    spacing = 2**-11
    assert abs(float(moved.mean()) - 1e-3) < 4 * (1e-3 * spacing) ** 0.5 / 64
    assert set((moved / spacing).tolist()) - {0.0} == {float(k) for k in (moved / spacing).tolist()} - {0.0}
    assert len(set(moved.tolist())) > 2


def test_pixels_come_back_as_they_were() -> None:
    pixels = torch.randint(0, 256, (8, 3, 16, 16), generator=torch.Generator().manual_seed(2))
    mean, spread = torch.tensor([0.49, 0.48, 0.44]).view(1, 3, 1, 1), torch.tensor([0.2, 0.19, 0.21]).view(1, 3, 1, 1)
    images = (pixels / 255 - mean) / spread
    from lowtide.forms import Layout
    from lowtide.packed import Content

    content = Content(images, Layout("uint8", channel=1), "batch")
    content.write(images)
    assert (content.dense() - images).abs().max() < 1e-6
    assert content.nbytes == pixels.numel() + 24
    labels = torch.tensor([[1, 2**31 - 1]])
    whole = Content(labels, Layout("int32"), "batch")
    whole.write(labels)
    assert torch.equal(whole.dense(), labels)
    with pytest.raises(lowtide.UsageError, match="no room"):
        whole.write(torch.tensor([[1, 2**31]]))


def test_trained_weights_say_what_is_dropped() -> None:
    model, optimizer = made()
    given = batches(2)
    step = run(("sparse:0.3",), model, optimizer, given[0])
    with pytest.warns(lowtide.LowtideWarning, match="weights that were not zero are zero now"):
        step(*given[0])
    dense = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(dense)  # they fit: nothing is said
    assert all(torch.equal(tensor, dense[name]) for name, tensor in model.state_dict().items())
    step(*given[1])
    with pytest.warns(lowtide.LowtideWarning, match="room for"):
        model.load_state_dict(made()[0].state_dict())


def test_forms_are_refused_where_parameters_are_the_loops() -> None:
    with pytest.raises(lowtide.UsageError, match="weights16 would store parameters"):
        lowtide.wrap(
            torch.nn.Linear(4, 4), example=(torch.randn(2, 4),), budget="1MB", costs="roofline", allow="weights16"
        )


@pytest.mark.parametrize("part", ["60%", "45%"])
def test_lossy_finds_a_way_in_little(part: str) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4)
    model = nn.Sequential(*layers)
    plain = copy.deepcopy(model)
    batch = torch.randn(96, 16), torch.randint(0, 4, (96,))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (model, plain)]
    train = lowtide.fit(
        step, model, optimizers[0], example=batch, budget=part, allow="lossy", costs="roofline", time_limit=0.1
    )
    losses = [(train(*batch).item(), step(plain, optimizers[1], *batch).item()) for _ in range(3)]
    assert train.plan.rewrites
    assert train.plan.budget is not None
    assert train.plan.peak <= train.plan.budget
    sparse = any(one.name == "sparse" for one in train.plan.rewrites)
    assert all(abs(ours - theirs) < (0.2 if sparse else 0.01) for ours, theirs in losses)
