"""Steps in parts: the gradients are those of the whole batch, and what couples examples is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide import models, tree
from lowtide.errors import BudgetError, FileError, UsageError
from lowtide.graph import Graph
from lowtide.kernels.probe import Behaviour, Grows, Operand, Seen, Source, Trial, behaviour
from lowtide.plan import keep_everything
from lowtide.plan import least as least_plan
from lowtide.resized import Resized, resizable, resized
from lowtide.rewrite import EXACT, apply, named, with_narrow
from lowtide.rewrite.parts import spans

COUPLED = {"resnet", "wrn-28-2", "densenet121", "unet"}  # they have batch norms
FIXED = {"tanh-chain"}  # its parameters have the batch's size


class Still:
    """An optimizer that leaves the gradients where they are."""

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


@dataclass
class Run:
    """What one step came to."""

    results: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    generator: Tensor
    notes: tuple[str, ...] = ()
    changed: bool = True

    def distance(self, other: Run) -> float:
        """The distance of the whole gradient from another one, relative to its norm."""
        off = sum(
            float((one.double() - other.gradients[name].double()).pow(2).sum()) for name, one in self.gradients.items()
        )
        norm = sum(float(one.double().pow(2).sum()) for one in other.gradients.values())
        return (off / norm) ** 0.5


Recipe = tuple[Callable[..., Any], nn.Module, tuple[Any, ...]]


def built(target: str) -> Recipe:
    step, model, _, example = models.build(target)
    return (lambda model, _, *batch: step(model, Still(), *batch)), model, example


def doubled(recipe: Recipe) -> Recipe:
    step, model, example = recipe
    leaves, structure = tree.flatten(example)
    wide = [leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    return step, copy.deepcopy(model).double(), tuple(structure.build(wide))


def eager(recipe: Recipe) -> Run:
    step, model, example = recipe
    model = copy.deepcopy(model)
    torch.manual_seed(7)
    return outcome(step(model, None, *example), model)


def outcome(returned: Any, model: nn.Module, **more: Any) -> Run:
    leaves, _ = tree.flatten(returned)
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    results = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    return Run(results, gradients, dict(model.named_buffers()), torch.get_rng_state(), **more)


def rewritten(recipe: Recipe, name: str, setting: Any) -> tuple[Any, Graph]:
    """A step as it is captured, and its graph after a pass and all exact ones."""
    step, model, example = recipe
    captured = lowtide.capture(step, model, None, example)
    sizes = resizable(captured.graph, example, lambda batch: lowtide.capture(step, model, None, batch).graph)
    one = named(name)
    assert one is not None
    assert sizes is not None
    return captured, apply(captured.graph, (*EXACT, one.by(setting)), sizes).graph


def in_parts(recipe: Recipe, name: str, setting: Any) -> Run:
    """One step by the graph in parts."""
    step, model, example = recipe
    recipe = step, copy.deepcopy(model), example
    captured, graph = rewritten(recipe, name, setting)
    train = lowtide.execute(replace(captured, graph=graph), keep_everything(graph))
    torch.manual_seed(7)
    returned = train(*example)
    changed = any("_part1" in op.name for op in graph.ops)
    return outcome(returned, recipe[1], notes=graph.notes, changed=changed)


def assert_same_gradients(recipe: Recipe, name: str, setting: Any) -> Run:
    """Hold a step in parts to eager's in single and in double precision."""
    wide = doubled(recipe)
    exact, expected = eager(wide), eager(recipe)
    for one, whole, limit in (
        (recipe, expected, max(1e-6, 2 * expected.distance(exact))),
        (wide, exact, 1e-12),
    ):
        found = in_parts(one, name, setting)
        assert found.changed, found.notes
        assert found.gradients.keys() == whole.gradients.keys()
        assert found.distance(whole) <= limit, (found.distance(whole), limit)
        for result, other in zip(found.results, whole.results, strict=True):
            assert torch.allclose(result, other, rtol=1e-5 if result.dtype == torch.float32 else 1e-11), (result, other)
        assert torch.equal(found.generator, whole.generator)
        for key, buffer in whole.buffers.items():
            apart = (found.buffers[key].double() - buffer.double()).norm()
            assert apart <= limit * buffer.double().norm(), (key, apart)
    return found


# All built-in models


def small(name: str, batch: int) -> str:
    return ",".join(part for part in models.SMALL[name].split(",") if not part.startswith("batch=")) + f",batch={batch}"


@pytest.mark.parametrize("name", sorted(models.SMALL.keys() - COUPLED - FIXED))
def test_microbatches_of_every_model(name: str) -> None:
    """Five examples in two and in three parts are uneven, and in five there is one in each."""
    for parts in (2, 3, 5):
        assert_same_gradients(built(small(name, 5)), "microbatch", parts)


@pytest.mark.parametrize("name", sorted(COUPLED))
def test_batch_norm_is_refused_by_name(name: str) -> None:
    found = in_parts(built(models.SMALL[name]), "microbatch", 2)
    assert not found.changed
    assert any(
        "native_batch_norm_0" in note and "couples the examples" in note and ".py:" in note for note in found.notes
    )


def test_parameters_of_the_size_of_the_batch_are_refused() -> None:
    found = in_parts(built(models.SMALL["tanh-chain"]), "microbatch", 2)
    assert not found.changed
    assert any("there is no step" in note for note in found.notes)


@pytest.mark.parametrize("name", ["gpt", "bert", "dynamicconv", "lstm", "hf-gpt2", "hf-bert"])
def test_chunked_losses(name: str) -> None:
    if name in models.SMALL:
        wide = (
            small(name, 4)
            .replace("vocabulary=64", "vocabulary=512")
            .replace("target_vocabulary=48", "target_vocabulary=400")
        )
        assert_same_gradients(built(wide), "chunked-loss", 3)


@pytest.mark.parametrize(
    ("name", "batch"),
    [("gpt", 1), ("gpt", 2), ("bert", 1), ("bert", 2), ("dynamicconv", 1), ("dynamicconv", 2), ("hf-gpt2", 1)],
)
def test_losses_are_chunked_along_tokens_where_examples_run_out(name: str, batch: int) -> None:
    """The logits of one example are never whole: in three parts there are never two thirds of them at once."""
    if name not in models.SMALL:
        return
    target = small(name, batch).replace("vocabulary=64", "vocabulary=512").replace("vocabulary=48", "vocabulary=400")
    found = assert_same_gradients(built(target), "chunked-loss", 3)
    assert any("3 parts" in note for note in found.notes)
    captured, graph = rewritten(built(target), "chunked-loss", 3)
    whole = max(value.nbytes for value in captured.graph.values if value.kind == "activation")
    assert max(value.nbytes for value in graph.values if value.kind == "activation") < whole * 2 / 3


@pytest.mark.parametrize("name", ["unet", "wrn-28-2", "resnet", "densenet121", "gpt"])
def test_large_ops_in_parts(name: str) -> None:
    """Batch norms between them see the whole batch; their running statistics are eager's."""
    assert_same_gradients(built(small(name, 4)), "split", 0.3)


# Losses, masks, weights


def backward(loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8, 10)),
    )


def labelled(*, weights: bool, ignored: list[int]) -> Recipe:
    model, inputs = convolutional(), torch.randn(7, 3, 8, 8)
    labels = torch.randint(0, 10, (7,))
    labels[ignored] = -100
    weight = torch.rand(10) + 0.5 if weights else None
    model.register_buffer("weight", weight)

    def step(model: Any, _: None, inputs: Tensor, labels: Tensor) -> Tensor:
        return backward(F.cross_entropy(model(inputs), labels, weight=model.weight))

    return step, model, (inputs, labels)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("ignored", [[], [3, 6], [0, 1, 2]], ids=str)
def test_labels_that_do_not_count(weights: bool, ignored: list[int]) -> None:
    """In parts of two or three, the last case has one without any label that counts."""
    assert_same_gradients(labelled(weights=weights, ignored=ignored), "microbatch", 3)


@pytest.mark.parametrize("weights", [False, True])
def test_a_loss_that_is_split_apart_from_its_backward_divides_by_all_labels(weights: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 64)
    model.register_buffer("weight_of", torch.rand(64) + 0.5 if weights else None)
    labels = torch.randint(0, 64, (6, 9))
    labels[0, :4] = -100

    def step(model: Any, _: None, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs).flatten(0, 1)
        return backward(F.cross_entropy(logits, labels.flatten(), weight=model.weight_of))

    assert_same_gradients((step, model, (torch.randn(6, 9, 4), labels)), "split", 0.125)


def linear(loss: Callable[..., Tensor], *more: Tensor) -> Recipe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 4))
    inputs = torch.randn(10, 7, 16)
    return (lambda model, _, inputs, *more: backward(loss(model(inputs), *more))), model, (inputs, *more)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean": lambda y, t, m: y.pow(2).mean(),
    "sum": lambda y, t, m: (y * t).sum(),
    "mse": lambda y, t, m: F.mse_loss(y, t),
    "mse sum": lambda y, t, m: F.mse_loss(y, t, reduction="sum"),
    "l1": lambda y, t, m: F.l1_loss(y, t),
    "smooth l1": lambda y, t, m: F.smooth_l1_loss(y, t),
    "huber": lambda y, t, m: F.huber_loss(y, t),
    "bce": lambda y, t, m: F.binary_cross_entropy_with_logits(y, t.sigmoid()),
    "bce probabilities": lambda y, t, m: F.binary_cross_entropy(y.sigmoid(), t.sigmoid()),
    "kl": lambda y, t, m: F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "soft labels": lambda y, t, m: F.cross_entropy(y.flatten(0, 1), t.softmax(-1).flatten(0, 1)),
    "masked": lambda y, t, m: ((y - t).pow(2).mean(-1) * m).sum() / m.sum(),
    "masked, selected": lambda y, t, m: torch.where(m[..., None] > 0, (y - t).abs(), 0.0).sum() / m.sum().clamp(min=1),
    "by hand": lambda y, t, m: (y - t).pow(2).sum() / (y.size(0) * 3) + 0.1 * y.abs().mean(),
    "log of a sum": lambda y, t, m: y.exp().sum(-1).log().mean(),
    "two": lambda y, t, m: F.mse_loss(y, t) + 0.5 * (y * m[..., None]).sum() / m.sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    torch.manual_seed(1)
    more = torch.randn(10, 7, 4), (torch.rand(10, 7) > 0.4).float()
    for parts in (3, 10):
        assert_same_gradients(linear(LOSSES[name], *more), "microbatch", parts)


@pytest.mark.parametrize(("layers", "dropout"), [(1, 0.0), (2, 0.2)])
def test_recurrent_layers_that_turn_their_results_in_place(layers: int, dropout: float) -> None:
    torch.manual_seed(0)
    model, batch = nn.RNN(6, 8, layers, batch_first=True, dropout=dropout), (torch.randn(8, 5, 6),)

    def step(model: Any, _: None, inputs: Tensor) -> Tensor:
        return backward(model(inputs)[0].flatten(0, 1).square().mean())

    assert_same_gradients((step, model, batch), "microbatch", 3)


def contrastive(model: Any, _: None, inputs: Tensor, others: Tensor) -> Tensor:
    near = F.normalize(model(inputs)) @ F.normalize(model(others)).t()
    return backward(F.cross_entropy(near / 0.1, torch.arange(len(near))))


def centred(model: Any, _: None, inputs: Tensor, others: Tensor) -> Tensor:
    found = model(inputs)
    return backward((found - found.mean(0)).pow(2).sum() + model(others).sum())


def root(model: Any, _: None, inputs: Tensor, others: Tensor) -> Tensor:
    return backward(F.mse_loss(model(inputs), model(others)).sqrt())


def cumulated(model: Any, _: None, inputs: Tensor, others: Tensor) -> Tensor:
    return backward(model(inputs).cumsum(0).mul(model(others)).mean())


def rolled(model: Any, _: None, inputs: Tensor, others: Tensor) -> Tensor:
    return backward(model(inputs).mul(model(others).roll(1, 0)).mean())


@pytest.mark.parametrize("step", [contrastive, centred, root, cumulated, rolled], ids=lambda step: step.__name__)
def test_steps_that_couple_examples_are_refused(step: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), (torch.randn(8, 6), torch.randn(8, 6))
    found = in_parts((step, model, batch), "microbatch", 2)
    assert not found.changed
    assert any("couples the examples" in note and "test_split.py:" in note for note in found.notes)
    assert found.distance(eager((step, model, batch))) == 0


@pytest.mark.parametrize(
    "other",
    [
        lambda images, order: images.flip(0),
        lambda images, order: images.roll(1, 0),
        lambda images, order: images[order],
    ],
    ids=["flipped", "rolled", "permuted"],
)
def test_images_as_bytes_are_mixed_with_others_of_the_whole_batch(other: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 5))
    batch = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8), torch.randperm(8)

    def step(model: Any, _: None, images: Tensor, order: Tensor) -> Tensor:
        mixed = torch.stack([one.to(model[1].weight.dtype) for one in (images, other(images, order))])
        return backward(model(mixed.mean(0) / 255).log_softmax(-1).square().mean())

    assert_same_gradients((step, model, batch), "microbatch", 3)


def test_results_with_the_batch_in_them() -> None:
    """Results that carry the examples are put together; the loss is that of the whole batch."""

    def step(model: Any, _: None, inputs: Tensor) -> Any:
        found = model(inputs)
        return backward(found.pow(2).mean()), found, found.argmax(-1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    assert_same_gradients((step, model, (torch.randn(9, 6),)), "microbatch", 4)


def test_clipping_over_the_whole_gradient() -> None:
    """The norm is that of all parts together, and momentum, decay and clipping come after the last of them."""

    def step(model: Any, optimizer: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = backward(F.mse_loss(model(inputs), targets))
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    batch = torch.randn(9, 6).double(), torch.randn(9, 5).double()
    mirror = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, mirror)]
    at = cache(lambda size: lowtide.capture(step, mirror, optimizers[1], resized(batch, size)).graph)
    one = named("microbatch")
    assert one is not None
    captured = lowtide.capture(step, mirror, optimizers[1], batch)
    graph = apply(captured.graph, (*EXACT, one.by(4)), Resized(captured.graph, 9, at)).graph
    runner = lowtide.execute(replace(captured, graph=graph), keep_everything(graph))
    for _ in range(3):
        assert torch.allclose(step(model, optimizers[0], *batch), runner(*batch), rtol=1e-12)
    for mine, other in zip(model.parameters(), mirror.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-11)


# By the front door

WIDE = "gpt:layers=1,width=32,heads=2,context=32,vocabulary=2048,batch=8,dropout=0"


@pytest.fixture(scope="module")
def least() -> int:
    """The least peak of a language model with large logits, every bit eager's, in bytes."""
    graph = with_narrow(lowtide.capture(*models.build(WIDE)).graph)
    return least_plan(graph, lowtide.measure(graph)).peak


def test_a_budget_that_only_a_chunked_loss_fits(least: int, tmp_path: Path) -> None:
    step, model, optimizer, example = models.build(WIDE)
    graph = lowtide.capture(step, model, optimizer, example).graph
    logits = max(value.nbytes for value in graph.values)
    budget = least - int(1.5 * logits)
    with pytest.raises(BudgetError, match="chunked-loss"):
        lowtide.fit(step, model, optimizer, example=example, budget=budget, time_limit=0.3)
    _, mirror, other, _ = models.build(WIDE)
    train = lowtide.fit(step, mirror, other, example=example, budget=budget, time_limit=0.3, allow="chunked-loss")
    assert [one.name for one in train.plan.rewrites if one.exactness != "bitwise"] == ["chunked-loss"]
    assert "the same up to rounding" in train.report()
    assert "chunked-loss" in train.report()
    for _ in range(3):
        assert torch.allclose(step(model, optimizer, *example), train(*example), rtol=1e-5)
    assert train.peak is not None
    assert train.peak <= budget
    assert abs(train.peak - train.plan.peak) <= 0.005 * train.plan.peak
    assert train.mismatches == 0
    train.plan.save(tmp_path / "plan")
    again = lowtide.fit(*models.build(WIDE)[:3], example=example, plan=tmp_path / "plan", allow="rounding")
    assert again.program == train.program
    with pytest.raises(FileError, match="chunked-loss"):
        lowtide.fit(*models.build(WIDE)[:3], example=example, plan=tmp_path / "plan")


def test_the_least_budget_is_the_least_with_all_that_is_allowed() -> None:
    asked: dict[str, Any] = {"budget": "least", "costs": "roofline", "time_limit": 0.1}
    step, model, optimizer, example = models.build(WIDE)
    exact = lowtide.fit(step, model, optimizer, example=example, **asked)
    step, model, optimizer, example = models.build(WIDE)
    train = lowtide.fit(step, model, optimizer, example=example, **asked, allow="chunked-loss")
    logits = max(value.nbytes for value in exact.captured.graph.values)
    assert train.plan.budget == train.plan.peak < exact.plan.peak - logits
    assert [one.name for one in train.plan.rewrites if one.exactness != "bitwise"] == ["chunked-loss"]
    train(*example)
    assert train.peak is not None
    assert train.peak <= train.plan.peak


def test_bits_stay_where_they_fit(least: int) -> None:
    step, model, optimizer, example = models.build(WIDE)
    train = lowtide.fit(step, model, optimizer, example=example, budget=4 * least, time_limit=0.3, allow="rounding")
    assert all(one.exactness == "bitwise" for one in train.plan.rewrites)


def test_a_graph_alone_can_not_be_split() -> None:
    one = named("microbatch")
    assert one is not None
    with pytest.raises(UsageError, match="other sizes"):
        apply(lowtide.capture(*models.build(models.SMALL["mlp"])).graph, (one.by(2),))


# The probe


def tried(
    target: str, *args: Any, dims: tuple[int | None, ...] = (0,), other: tuple[int, ...] = ()
) -> Behaviour | None:
    axis = Source("axis", "float32", (Grows(1), 6), (6, 1), 0)
    same = (Source("same", "float32", other, tuple(torch.empty(other).stride())),) if other else ()
    return behaviour(Trial(target, args, (), (axis, *same), dims))


X, Y = Operand(0), Operand(1)


@pytest.mark.parametrize(
    ("call", "dims", "seen"),
    [
        (("aten.relu.default", X), (0,), Seen("axis")),
        (("aten.sum.default", X), (-1,), Seen("partial")),
        (("aten.mean.default", X), (-1,), Seen("partial", share=True)),
        (("aten.sum.dim_IntList", X, (1,)), (0,), Seen("axis")),
        (("aten._softmax.default", X, 1, False), (0,), Seen("axis")),
        (("aten._softmax.default", X, 0, False), (0,), None),
        (("aten.cumsum.default", X, 0), (0,), None),
        (("aten.flip.default", X, (0,)), (0,), None),
        (("aten.amax.default", X), (-1,), None),
        (("aten.var.default", X), (-1,), None),
        (("aten.mse_loss.default", X, X, 1), (-1,), None),  # all zero: nothing can be seen
    ],
)
def test_what_calls_do_along_an_axis(call: tuple[Any, ...], dims: tuple[int, ...], seen: Seen | None) -> None:
    found = tried(*call, dims=dims)
    assert (None if found is None else found.results[0]) == seen


def test_numbers_among_the_arguments_are_sizes_or_counts() -> None:
    count = tried("aten.div.Tensor", X, Grows(6))
    assert count is not None
    assert (count.kept, count.results) == ("numbers", (Seen("axis"),))
    size = tried("aten.slice_backward.default", X, (Grows(1), 9), 1, 0, 6, 1)
    assert size is not None
    assert (size.kept, size.results) == ("none", (Seen("axis"),))


def test_the_probe_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    tried("aten.sigmoid.default", X)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("examples", "parts"), [(7, 3), (8, 4), (5, 5), (100, 7)])
def test_parts_have_two_sizes_at_most(examples: int, parts: int) -> None:
    found = spans(examples, parts)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert (len(found), found[-1][1]) == (parts, examples)
    assert max(b - a for a, b in found) - min(b - a for a, b in found) <= 1
