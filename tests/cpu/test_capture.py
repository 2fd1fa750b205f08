"""Steps as people write them: each is captured unchanged and equals eager PyTorch to the bit."""

from __future__ import annotations

import collections
import cProfile
import dataclasses
import string
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from twins import assert_exact, assert_same, everything

import lowtide
from lowtide import models
from lowtide.capture import calls, capture


def seeded(make: Callable[[], Any]) -> Any:
    """What `make` makes, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make()


def recipe(
    step: Callable[..., Any],
    make: Callable[[], nn.Module] | None = None,
    optimizer: Callable[..., Any] | None = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    example: Callable[[], tuple[Any, ...]] | None = None,
) -> Callable[[], Any]:
    def build() -> Any:
        model = seeded(make or (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))))
        made = seeded(example or (lambda: (torch.randn(5, 6), torch.randint(3, (5,)))))
        return step, model, optimizer(model.parameters()) if optimizer else None, made

    return build


def plain(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


# Gradients: how they are made, clipped, accumulated, kept and cleared


def test_zero_grad_first_keeps_the_gradients_afterwards() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    train = assert_exact(recipe(step))
    assert len(train._fits) == 1, "clearing first, the gradients of the step before do not matter"


def test_zero_grad_to_zeros_at_the_end() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    assert_exact(recipe(step))


def test_zero_grad_to_zeros_at_the_start() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    assert_exact(recipe(step))


def test_gradients_that_pile_up() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert_exact(recipe(step, optimizer=None))


def test_gradients_present_before_the_first_step() -> None:
    def build() -> Any:
        step, model, optimizer, example = recipe(plain)()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        return step, model, optimizer, example

    assert_exact(build)


def test_accumulation_inside_the_step_and_clipping() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        losses = []
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = functional.cross_entropy(model(part), target) / 2
            loss.backward()
            losses.append(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return {"losses": losses, "norm": norm}

    assert_exact(recipe(step, example=lambda: (torch.randn(6, 6), torch.randint(3, (6,)))))


def test_clipping_by_value_and_a_closure_over_the_parameters() -> None:
    def build() -> Any:
        _, model, optimizer, example = recipe(plain)()
        held = list(model.parameters())

        def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_value_(held, 0.01)
            optimizer.step()
            optimizer.zero_grad()
            return sum(p.detach().abs().sum() for p in held)

        return step, model, optimizer, example

    assert_exact(build)


def test_autograd_grad_and_several_losses() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores = model(x)
        main, penalty = functional.cross_entropy(scores, y), scores.square().mean()
        penalty.backward(retain_graph=True)
        gradients = torch.autograd.grad(main, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad.add_(gradient)
        optimizer.step()
        optimizer.zero_grad()
        return main, penalty

    assert_exact(recipe(step))


def test_gradient_penalty_differentiates_twice() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in gradients)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert_exact(recipe(step))


def test_parameter_gradients_that_share_memory() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.a + self.b)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    assert_exact(recipe(step, Sum))


# Parameters: tied, frozen, unused, outside the model


def test_tied_weights() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        model[2].weight = model[0].weight
        return model

    assert_exact(recipe(plain, make))


def test_frozen_and_unused_parameters() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        model[0].weight.requires_grad_(False)
        model.register_parameter("spare", nn.Parameter(torch.ones(4)))
        return model

    for optimizer in (torch.optim.Adam, torch.optim.Adagrad):
        assert_exact(recipe(plain, make, lambda p, kind=optimizer: kind(p, lr=0.1)))


def test_parameters_of_the_optimizer_only() -> None:
    def build() -> Any:
        _, model, _, example = recipe(plain)()
        scale = nn.Parameter(torch.ones(3))

        def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = functional.cross_entropy(model(x) * scale, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, model, torch.optim.SGD([*model.parameters(), scale], lr=0.1, momentum=0.9), example

    assert_exact(build)


def test_no_optimizer_object_but_updates_by_hand() -> None:
    def step(model: nn.Module, optimizer: None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        return loss

    assert_exact(recipe(step, optimizer=None))


# Optimizers


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
        lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9)),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
        lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adadelta(p, lr=0.5),
        lambda p: torch.optim.Adamax(p, lr=0.01),
        lambda p: torch.optim.NAdam(p, lr=0.01),
        lambda p: torch.optim.Rprop(p, lr=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    ],
)
def test_optimizers(make: Callable[..., Any]) -> None:
    assert_exact(recipe(plain, optimizer=make))


def test_parameter_groups() -> None:
    def optimizer(parameters: Any) -> Any:
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first], "lr": 0.1, "weight_decay": 0.0}, {"params": rest}], lr=0.01)

    assert_exact(recipe(plain, optimizer=optimizer))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=8),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_schedulers_need_no_new_capture(kind: Any, schedule: Callable[[Any], Any]) -> None:
    schedulers: dict[int, Any] = {}

    def optimizer(parameters: Any) -> Any:
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        made = kind(parameters, lr=0.1, **options)
        schedulers[id(made)] = schedule(made)
        return made

    train = assert_exact(
        recipe(plain, optimizer=optimizer), between=lambda _, optimizer: schedulers[id(optimizer)].step()
    )
    assert len(train._fits) == 1


def test_state_loaded_between_steps() -> None:
    def reload(model: nn.Module, optimizer: Any) -> None:
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(model.state_dict())

    assert_exact(recipe(plain, optimizer=lambda p: torch.optim.Adam(p, lr=0.1)), between=reload)


def test_capture_in_the_middle_of_training() -> None:
    def build() -> Any:
        step, model, optimizer, example = recipe(plain, optimizer=lambda p: torch.optim.Adam(p, lr=0.1))()
        for _ in range(3):
            step(model, optimizer, *example)
        return step, model, optimizer, example

    assert_exact(build)


def test_an_option_that_is_a_constant_is_captured_again() -> None:
    def change(_: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["eps"] *= 2

    train = assert_exact(recipe(plain, optimizer=lambda p: torch.optim.Adam(p, lr=0.1)), between=change, steps=3)
    assert len(train._fits) == 3


# Batches and results


def test_dictionaries_tuples_and_numbers_in_the_batch() -> None:
    def step(model: nn.Module, optimizer: Any, batch: dict[str, Any], weights: Any) -> Any:
        scores = model(batch["x"]) * weights[0] * batch["scale"]
        loss = functional.cross_entropy(scores, batch["y"], reduction=batch["how"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "scores": (scores.argmax(1), [scores])}

    def example() -> Any:
        data = collections.OrderedDict(x=torch.randn(5, 6), y=torch.randint(3, (5,)), scale=2.0, how="sum")
        return data, (torch.ones(3), None)

    assert_exact(recipe(step, example=example))


def test_dataclass_and_namedtuple_results() -> None:
    @dataclasses.dataclass
    class Result:
        loss: torch.Tensor
        count: int
        nothing: None = None

    Pair = collections.namedtuple("Pair", "a b")

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = plain(model, optimizer, x, y)
        return Result(loss, 3), Pair(loss.detach() * 2, "text")

    train = assert_exact(recipe(step))
    _, _, _, example = recipe(step)()
    result, pair = train(*example)
    assert isinstance(result, Result)
    assert result.count == 3
    assert pair.b == "text"


def test_results_as_numbers_and_as_parts_of_the_batch() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = plain(model, optimizer, x, y)
        return loss.item() * 2 + 1, x, model[0].weight, loss.view(1)

    train = assert_exact(recipe(step))
    _, _, _, example = recipe(step)()
    number, x, weight, _ = train(*example)
    assert isinstance(number, float)
    assert x is example[0]
    assert weight is train.captured.model[0].weight


def test_a_step_that_returns_nothing() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        plain(model, optimizer, x, y)

    assert assert_exact(recipe(step))(*recipe(step)()[3]) is None


def test_gradients_of_the_batch() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return x.grad

    assert_exact(recipe(step))


# Modules


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_custom_autograd_function() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(Double.apply(model(x)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert_exact(recipe(step))


IMAGES = lambda: (torch.randn(4, 3, 8, 8), torch.randint(3, (4,)))  # noqa: E731


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.SiLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(8, 3),
    )  # fmt: skip


def test_batch_norm_dropout_and_in_place_activations() -> None:
    assert_exact(recipe(plain, convolutional, example=IMAGES))


def test_channels_last() -> None:
    def make() -> nn.Module:
        return convolutional().to(memory_format=torch.channels_last)

    def example() -> Any:
        x, y = IMAGES()
        return x.contiguous(memory_format=torch.channels_last), y

    assert_exact(recipe(plain, make, example=example))


@pytest.mark.parametrize("name", ["native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"])
def test_batch_norm_of_every_library_writes_its_statistics_in_training_alone(name: str) -> None:
    call = getattr(torch.ops.aten, name).default
    x, weight, bias, mean, var = torch.ones(2, 3), *(torch.ones(3) for _ in range(4))
    written = calls.written_by(call, (x, weight, bias, mean, var, True, 0.1, 1e-5), {})
    assert [id(tensor) for tensor in written] == [id(mean), id(var)]
    assert calls.written_by(call, (x, weight, bias, mean, var, False, 0.1, 1e-5), {}) == []
    assert calls.written_by(call, (x, weight, bias, None, None, True, 0.1, 1e-5), {}) == []


def test_batch_norm_in_eval_mode_and_without_statistics() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False))
        model.append(nn.Flatten()).append(nn.Linear(144, 3))
        model[1].eval()
        return model

    assert_exact(recipe(plain, make, example=IMAGES))


def test_autocast_to_bfloat16() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert_exact(recipe(step, convolutional, example=IMAGES))
    assert_exact(recipe(step))


def test_attention_embedding_and_layer_norm() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
            self.attend = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = self.norm(self.embed(x))
            mixed, _ = self.attend(seen, seen, seen, need_weights=False)
            plainly = functional.scaled_dot_product_attention(mixed, seen, seen, is_causal=True)
            return self.head(seen + mixed + plainly)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert_exact(recipe(step, Attention, example=lambda: (torch.randint(11, (3, 9)),)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(6, 8, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
            self.head = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cell(x)[0][:, -1])

    assert_exact(recipe(plain, Recurrent, example=lambda: (torch.randn(4, 5, 6), torch.randint(3, (4,)))))


def test_writes_to_slices_and_views_of_views() -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.register_buffer("seen", torch.zeros(2, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = torch.zeros(5, 6)
            made[1:] = self.inner(x)[1:]
            made[:, 2].mul_(3.0)
            made.t()[0].add_(x[:, 0])
            with torch.no_grad():
                self.seen[1] += x.mean(0)
                self.seen.view(-1)[3:5].zero_()
            parts = made.unfold(0, 2, 1).transpose(1, 2).reshape(-1, 3).split(4)
            return torch.cat([part.exp() for part in parts])[:5] + self.seen.sum() * torch.tensor([1.0, 2.0, 3.0])

    assert_exact(recipe(plain, Writer))


def test_ops_that_return_their_input() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.contiguous().to(torch.float32).requires_grad_(False).view_as(x).expand(5, 6).squeeze(0)
        return plain(model, optimizer, functional.dropout(x, 0.0), y)

    assert_exact(recipe(step))


def test_random_ops_of_all_kinds() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + torch.randn_like(x) * torch.rand(6) + torch.empty_like(x).normal_() + torch.randint(3, (5, 6))
        x = functional.gumbel_softmax(functional.rrelu(x, training=True))
        return plain(model, optimizer, x[torch.randperm(5)], y)

    assert_exact(recipe(step))


def test_tensors_that_nobody_registered() -> None:
    def build() -> Any:
        _, model, optimizer, example = recipe(plain)()
        mask, counter = torch.ones(5, 3), torch.zeros(())
        model.hidden_mask = [mask]

        def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            counter.add_(1)
            loss = functional.cross_entropy(model(x) * model.hidden_mask[0] * counter, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, model, optimizer, example

    assert_exact(build)


def test_a_teacher_outside_the_model() -> None:
    teacher = seeded(lambda: nn.Linear(6, 3))

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x).softmax(1)
        loss = functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert_exact(recipe(step))


def test_double_precision_and_complex_numbers() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x.double()) * self.filter, n=6)[:, :3]

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step_, model, optimizer, example = recipe(step, Spectrum)()
    _, mirror, mirrored, _ = recipe(step, Spectrum)()
    train = lowtide.fit(step, mirror, mirrored, example=example)
    for _ in range(3):
        assert torch.equal(step_(model, optimizer, *example), train(*example))
    assert torch.equal(model.filter, mirror.filter)


def test_buffers_that_are_replaced() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)
            self.register_buffer("running", torch.zeros(6))
            self.register_buffer("last", torch.zeros(5, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.running = self.running * 0.9 + x.mean(0)
            self.last = x
            return self.inner(x - self.running.detach())

    train = assert_exact(recipe(plain, Running))
    assert len(train._fits) == 1


# What stays as it was


@pytest.mark.parametrize("name", ["mlp", "gpt", "unet", "lstm"])
def test_capture_changes_nothing(name: str) -> None:
    step, model, optimizer, example = models.build(models.SMALL[name])
    before = {key: None if item is None else item.clone() for key, item in everything(model, optimizer).items()}
    objects = [id(item) for item in (*model.parameters(), *model.buffers())]
    groups = [dict(group) for group in optimizer.param_groups]
    attributes = [dict(module.__dict__) for module in model.modules()]
    generator = torch.get_rng_state()
    lowtide.capture(step, model, optimizer, example)
    assert_same(before, everything(model, optimizer))
    assert objects == [id(item) for item in (*model.parameters(), *model.buffers())]
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * len(list(model.parameters()))
    assert groups == optimizer.param_groups
    assert not optimizer.state
    assert not optimizer._optimizer_step_pre_hooks
    assert [dict(module.__dict__) for module in model.modules()] == attributes
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert not torch.nn.modules.module._global_forward_hooks
    assert_exact(lambda: (step, *models.build(models.SMALL[name])[1:]), steps=1)


def test_a_model_too_large_to_exist_is_captured_on_the_meta_device() -> None:
    with torch.device("meta"):
        step, model, optimizer, example = models.build(models.SMALL["resnet"])
    graph = lowtide.capture(step, model, optimizer, example).graph
    real = lowtide.capture(*models.build(models.SMALL["resnet"])).graph
    assert [op.target for op in graph.ops] == [op.target for op in real.ops]
    assert lowtide.simulate(graph, lowtide.roofline(graph), lowtide.keep_everything(graph)).peak > 0


def test_evaluation_between_steps() -> None:
    _, _, _, (x, _) = recipe(plain, convolutional, example=IMAGES)()

    def evaluate(model: nn.Module, optimizer: Any) -> None:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()

    assert_exact(recipe(plain, convolutional, example=IMAGES), between=evaluate)


# A new kind of call: captured again by fit, refused by a single program


def test_a_batch_of_another_shape_and_a_change_of_mode() -> None:
    build = recipe(plain, convolutional, example=IMAGES)
    x, y = build()[3]
    train = assert_exact(build, batches=[(x, y), (x[:2], y[:2]), (x, y), (x[:2], y[:2])])
    assert len(train._fits) == 2
    step, model, optimizer, example = build()
    captured = lowtide.capture(step, model, optimizer, example)
    run = lowtide.execute(captured, lowtide.keep_everything(captured.graph))
    for wrong, words in [
        ((x[:2], y[:2]), "float32.2x3x8x8. on cpu.*captured with float32.4x3x8x8."),
        ((x.double(), y), "float64"),
        ((x,), "captured with tuple"),
        (([x], y), "captured with tuple"),
        ((x, 3), "int"),
        ((x.to(memory_format=torch.channels_last), y), "strides"),
    ]:
        with pytest.raises(lowtide.BatchError, match=words):
            run(*wrong)
    model.eval()
    with pytest.raises(lowtide.BatchError, match="mode"):
        run(x, y)
    model.train()
    model[0].weight.requires_grad_(False)
    with pytest.raises(lowtide.BatchError, match="frozen"):
        run(x, y)
    model[0].weight.requires_grad_(True)
    assert_same(everything(build()[1], build()[2]), everything(model, optimizer))


def test_hugging_face_outputs_come_back_whole() -> None:
    pytest.importorskip("transformers")
    build = models.build

    def step(model: nn.Module, optimizer: Any, batch: dict[str, torch.Tensor]) -> Any:
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return output

    def recipe_of() -> Any:
        _, model, optimizer, example = build(models.SMALL["hf-bert"])
        return step, model, optimizer, example

    train = assert_exact(recipe_of, steps=2)
    output = train(*recipe_of()[3])
    assert type(output).__name__ == "MaskedLMOutput"
    assert output["logits"] is output.logits


def test_a_profiler_goes_on_after_a_capture() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        capture(*recipe(plain)())
        string.capwords("still there")
    finally:
        profiler.disable()
    assert any(getattr(entry.code, "co_name", "") == "capwords" for entry in profiler.getstats())
