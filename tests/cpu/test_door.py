"""What is refused at the door: each thing by its name, with the reason and what to do, before anything is traced."""

from __future__ import annotations

import copy
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_capture import plain, recipe
from test_refusals import assert_refused
from torch import distributed, multiprocessing, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide import CaptureError

Change = Callable[[nn.Module], nn.Module]


def refused(change: Change, *words: str, fits: bool = False) -> None:
    """A plain step with its model changed is refused with these words, by `fit`, `wrap` and `attach` too.

    What `fits` is refused by the others.
    """
    step, model, optimizer, example = recipe(plain)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what is old
        changed = change(model)
    doors = [
        lambda: lowtide.capture(step, changed, optimizer, example),
        lambda: lowtide.wrap(changed, example=example[:1]),
        lambda: lowtide.attach(changed),
    ]
    if not fits:
        doors.append(lambda: lowtide.fit(step, changed, optimizer, example=example))
    for door in doors:
        with pytest.raises(CaptureError) as caught:
            door()
        for word in words:
            assert word in str(caught.value), str(caught.value)
        assert "hint: " in str(caught.value)


def inside(change: Change) -> Change:
    """The change, of the first module in the model."""

    def apply(model: nn.Module) -> nn.Module:
        assert isinstance(model, nn.Sequential)
        model[0] = change(model[0])
        return model

    return apply


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def test_compiled_models() -> None:
    refused(lambda model: torch.compile(model, backend="eager"), "the model", "OptimizedModule", "_orig_mod")
    refused(inside(lambda part: torch.compile(part, backend="eager")), "module '0'", "OptimizedModule", "to the bit")
    refused(in_place, "compile()", "to the bit")


def test_compiled_steps() -> None:
    assert_refused(recipe(torch.compile(plain, backend="eager")), "torch.compile", "to the bit")


def test_scripted_models() -> None:
    refused(torch.jit.script, "ScriptModule", "torch.jit")
    refused(inside(torch.jit.script), "module '0'", "ScriptModule")
    refused(lambda model: torch.jit.trace(model, torch.randn(5, 6)), "ScriptModule", "torch.jit")


def test_data_parallel() -> None:
    refused(nn.DataParallel, "DataParallel", "several devices", "model.module")


def test_distributed_data_parallel_of_one_rank() -> None:
    with one_rank():
        ddp = nn.parallel.DistributedDataParallel
        refused(ddp, "DistributedDataParallel", "drift apart", "lowtide.fit(step, ", fits=True)
        refused(inside(ddp), "module '0'", "DistributedDataParallel", fits=True)


def test_sharded_models() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    def spread(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (1,))
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Replicate()]))
        return model

    with one_rank():
        refused(lambda model: FullyShardedDataParallel(model, device_id="cpu"), "FullyShardedDataParallel", "shards")
        refused(lambda model: fully_shard(model), "FSDPModule", "fully_shard", fits=True)
        refused(inside(lambda part: fully_shard(part)), "module '0'", "FSDPModule", fits=True)
        refused(spread, "parameter '0.weight'", "DTensor", "full_tensor")


def test_a_process_group_of_one_rank_is_fine() -> None:
    step, model, optimizer, example = recipe(plain)()
    with one_rank():
        lowtide.fit(step, model, optimizer, example=example, costs="roofline", time_limit=0)(*example)


def test_a_process_group_of_several_ranks() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        refused(lambda model: model, "rank 1 of 3", "drift apart in silence", "destroy_process_group")
    finally:
        distributed.destroy_process_group()


def rank(number: int, ranks: int, store: str, folder: str) -> None:
    """A process that tries both doors with a model of its own, and with one that is synchronised."""
    file = distributed.FileStore(store, ranks)
    distributed.init_process_group("gloo", store=file, rank=number, world_size=ranks)
    step, model, optimizer, example = recipe(plain)()
    words = []
    for one in (model, nn.parallel.DistributedDataParallel(copy.deepcopy(model))):
        for door in (
            lambda one=one: lowtide.fit(step, one, optimizer, example=example),
            lambda one=one: lowtide.wrap(one, example=example[:1]),
            lambda one=one: lowtide.attach(one),
        ):
            try:
                door()
                words.append("let in")
            except CaptureError as error:
                words.append(error.message)
    distributed.barrier()
    distributed.destroy_process_group()
    Path(folder, str(number)).write_text("\n".join(words))


@pytest.mark.long
def test_two_real_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo" if "lo" in dict(map(reversed, socket.if_nameindex())) else "")
    multiprocessing.spawn(rank, (2, str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    for number in range(2):
        found = (tmp_path / str(number)).read_text().splitlines()
        fit, wrap, attach, fit_synchronised, wrap_synchronised, attach_synchronised = found
        assert fit == wrap == attach
        assert f"rank {number} of 2" in fit
        assert "drift apart in silence" in fit
        assert fit_synchronised == "let in"
        assert "DistributedDataParallel" in wrap_synchronised
        assert wrap_synchronised == attach_synchronised


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_other_devices(device: str) -> None:
    model = nn.Module()
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(3, 6, device=device))
        batch = (torch.empty(5, 6, device=device),)
    with pytest.raises(CaptureError, match=rf"on {device}(:0)?: lowtide runs on the CPU only") as caught:
        lowtide.fit(plain, model, torch.optim.SGD(model.parameters(), lr=0.1), example=batch)
    assert "hint: " in str(caught.value)


def test_quantized_modules_and_tensors() -> None:
    def dynamic(part: nn.Module) -> nn.Module:
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(part), {nn.Linear})[0]

    def buffer(model: nn.Module) -> nn.Module:
        model.register_buffer("table", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
        return model

    refused(inside(dynamic), "module '0'", "quantized Linear", "can't be trained")
    refused(buffer, "buffer 'table'", "quantized tensor", "dequantize")


def test_sparse_and_nested_tensors() -> None:
    def buffer(tensor: torch.Tensor) -> Change:
        def change(model: nn.Module) -> nn.Module:
            model.register_buffer("table", tensor)
            return model

        return change

    refused(buffer(torch.eye(3).to_sparse()), "buffer 'table'", "sparse_coo", "to_dense")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressed = torch.eye(3).to_sparse_csr()
        nested = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout) for layout in LAYOUTS]
    refused(buffer(compressed), "buffer 'table'", "sparse_csr", "to_dense")
    for one in nested:
        refused(buffer(one), "buffer 'table'", "nested", "pad")


def test_sparse_gradients() -> None:
    for kind in (nn.Embedding, nn.EmbeddingBag):
        refused(inside(lambda part, kind=kind: kind(6, 8, sparse=True)), "module '0'", "sparse=True", "sparse=False")


LAYOUTS = (torch.strided, torch.jagged)


def test_lazy_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = nn.LazyLinear(8)
    refused(inside(lambda part: lazy), "parameter '0.weight'", "lazy", "call the model once")


def test_a_model_without_numbers_is_planned_but_not_trained() -> None:
    step, model, _, (x, y) = recipe(plain)()
    model = model.to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (x.to("meta"), y.to("meta"))
    lowtide.capture(step, model, optimizer, batch)
    with pytest.raises(CaptureError, match="meta device"):
        lowtide.fit(step, model, optimizer, example=batch, costs="roofline")
    with pytest.raises(CaptureError, match="meta device"):
        lowtide.wrap(model, example=batch[:1], costs="roofline")


def test_what_is_no_model_is_refused_in_words() -> None:
    with pytest.raises(CaptureError, match=r"the model is a str, not a torch\.nn\.Module"):
        lowtide.fit(lambda model, optimizer, x: x, "model", None, example=(torch.ones(2),), budget="1MB")
