"""The errors that users meet most, in full: what happened, the numbers, and what to do next."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faulty_steps as faulty
import pytest
import torch
from test_output import Golden, run
from torch import nn

import lowtide
from lowtide import native, private
from lowtide.capture import door
from lowtide.device import disk

Cases = dict[str, Callable[[], Any]]


def fit(step: Any = faulty.plain, net: Any = None, optimizer: Any = None, **options: Any) -> Any:
    """Fit a step of the faulty ones, with estimated costs."""
    net = faulty.model() if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if optimizer is None else optimizer
    options = {"example": faulty.batch(), "costs": "roofline", "budget": "1MiB", **options}
    return lowtide.fit(step, net, optimizer, **options)


def sgd(net: nn.Module, kind: Any = torch.optim.SGD, **options: Any) -> Any:
    return kind(net.parameters(), lr=0.1, **options)


def optimized(kind: Any, **options: Any) -> Any:
    net = faulty.model()
    return fit(net=net, optimizer=sgd(net, kind, **options))


def keeps_a_tensor() -> Any:
    net = faulty.model()
    net.last = torch.zeros(())  # type: ignore[assignment]
    return fit(faulty.keeps_a_tensor, net=net)


def compiled() -> Any:
    return fit(net=torch.compile(faulty.model()))


def under_autocast() -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fit()


def other_batch() -> Any:
    captured = lowtide.capture(faulty.plain, *_trained(), faulty.batch())
    train = lowtide.execute(captured, lowtide.keep_everything(captured.graph))
    return train(torch.ones(31, 8), torch.zeros(31).long())


def _trained() -> tuple[nn.Module, Any]:
    net = faulty.model()
    return net, sgd(net)


def step_fails() -> Any:
    net, optimizer = _trained()
    train = fit(net=net, optimizer=optimizer)
    x, _ = faulty.batch()
    return train(x, torch.full((32,), 7))


def loop_too_small() -> Any:
    cell = nn.GRUCell(4, 8)
    return lowtide.scan(cell, torch.ones(50, 2, 4), torch.zeros(2, 8), budget=100)


class DistributedDataParallel(nn.Module):
    """What the door knows torch's class by: its name, and that it is torch's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


DistributedDataParallel.__module__ = "torch.nn.parallel.distributed"


def on_a_gpu() -> None:
    door._refuse_device(iter([("parameter '0.weight'", _Elsewhere())]))  # type: ignore[arg-type, list-item]


class _Elsewhere:
    device = torch.device("cuda", 0)


@contextmanager
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk without room."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        patch.setattr(disk, "free_bytes", lambda _: 1_048_576)
        yield


def without_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    def call() -> Any:
        source = folder / "new.cpp"
        source.write_text("int nothing;\n")
        with monkeypatch.context() as patch:
            patch.delenv("CXX", raising=False)
            patch.setenv("PATH", str(folder))
            return native.library(source, {}, what="the meter")

    return call


def text_of(cases: Cases, folder: Path) -> str:
    """Each error under its name, as Python shows it; the test's own folder is called FOLDER."""
    parts = []
    for name, call in cases.items():
        with pytest.raises(lowtide.LowtideError) as caught:
            call()
            pytest.fail(f"{name} is no error")
        shown = str(caught.value).replace(str(folder), "FOLDER").replace("tests/golden/", "")
        parts.append(f"# {name}\n{type(caught.value).__name__}: {shown}\n")
    return "\n".join(parts)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when torch.compile is imported
def test_errors_in_full(golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "damaged.plan"
    damaged.write_text("not a plan\n")

    def offload() -> Any:
        with full(monkeypatch):
            return disk.Disk(10_000_000, tmp_path)

    cases: Cases = {
        "a step that decides by a tensor": lambda: fit(faulty.decides_by_a_tensor),
        "a step that decides by the loss": lambda: fit(faulty.decides_by_the_loss),
        "sizes that depend on the data": lambda: fit(faulty.has_sizes_of_the_data),
        "a step that leaves torch": lambda: fit(faulty.leaves_torch),
        "a step that keeps a tensor": keeps_a_tensor,
        "a scheduler inside the step": lambda: fit(faulty.schedules),
        "an example that is no tuple": lambda: fit(example=list(faulty.batch())),
        "LBFGS": lambda: optimized(torch.optim.LBFGS),
        "a fused optimizer": lambda: optimized(torch.optim.AdamW, fused=True),
        "a compiled model": compiled,
        "DistributedDataParallel, wrapped": lambda: lowtide.wrap(
            DistributedDataParallel(faulty.model()), example=faulty.batch()[:1], budget=2**30
        ),
        "autocast around the step": under_autocast,
        "a GPU": on_a_gpu,
        "a budget and a plan": lambda: fit(plan="mine.plan"),
        "a damaged plan": lambda: fit(budget=None, plan=damaged),
        "a batch of another size, by a runner": other_batch,
        "a step that fails half-way": step_fails,
        "a loop with too few bytes": loop_too_small,
        "no compiler": without_a_compiler(tmp_path, monkeypatch),
        "a full disk": offload,
        "another torch": lambda: private.refuse_version("3.1.0"),
    }
    golden("errors", text_of(cases, tmp_path))


def test_errors_of_a_planned_forward(golden: Golden, tmp_path: Path) -> None:
    def wrapped() -> tuple[Any, torch.Tensor]:
        x, _ = faulty.batch()
        return lowtide.wrap(faulty.model(), example=(x,), budget="1MiB", costs="roofline"), x

    def twice() -> None:
        net, x = wrapped()
        loss = net(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def doubly() -> None:
        net, x = wrapped()
        torch.autograd.grad(net(x).sum(), list(net.parameters()), create_graph=True)

    def too_small() -> None:
        captured = lowtide.capture(faulty.plain, *_trained(), faulty.batch())
        lowtide.plan(captured.graph, lowtide.roofline(captured.graph), 4096)

    cases: Cases = {
        "a budget that nothing fits": too_small,
        "what is no budget": lambda: fit(budget="plenty"),
        "a gradient of a gradient": doubly,
        "a second backward": twice,
    }
    golden("errors-planned", text_of(cases, tmp_path))


def test_errors_of_what_is_allowed(golden: Golden, tmp_path: Path) -> None:
    cases: Cases = {
        "a technique that there is not": lambda: fit(allow="weights8"),
    }
    golden("errors-allowed", text_of(cases, tmp_path))


def test_errors_of_the_command_line(golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = [
        ["plan", "resnet51", "--budget", "50%"],
        ["plan", "mlp"],
        ["plan", "mlp", "--budget", "50%", "--method", "x"],
    ]
    golden("errors-cli", "\n".join(run(*call) for call in calls))
