"""Products of matrices by our kernel have the bits of torch's library: alone, on a bias, and inside of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trying import assert_torchs_bits
from twins import assert_exact

import lowtide
from lowtide import models
from lowtide.graph import Graph
from lowtide.kernels import TRIED as OURS
from lowtide.kernels import attention_products, products
from lowtide.kernels.tried import same_bits
from lowtide.measure.trial import has_torch_bits
from lowtide.plan import as_eager
from lowtide.rewrite import products as rewrite
from lowtide.rewrite.attention import attention

SIZES = (
    (64, 64, 64),
    (28, 192, 128),
    (256, 193, 96),
    (130, 383, 77),
    (100, 384, 40),
    (65, 1000, 300),
    (14, 2049, 1100),
)
known = pytest.mark.skipif(
    products._block() is None, reason="torch's library adds otherwise here, or there is no kernel"
)


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _matrix(rows: int, columns: int, turned: bool, count: int = 0) -> Tensor:
    """Of plain or turned order, as a part of a larger one."""
    generator = torch.Generator().manual_seed(rows + 7 * columns)
    sizes = (columns, rows + 3) if turned else (rows, columns + 3)
    whole = torch.randn((count, *sizes) if count else sizes, generator=generator)
    return (whole.mT if turned else whole)[..., :rows, :columns]


@known
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_have_the_bits_of_torchs(sizes: tuple[int, int, int], one: bool, other: bool, threads: int) -> None:
    """Of ordinary numbers; which NaN is kept is for the trial to say."""
    rows, depth, columns = sizes
    a, b = _matrix(rows, depth, one), _matrix(depth, columns, other)
    bias = torch.randn(columns)
    assert same_bits([products.product(a, b)], [torch.mm(a, b)])
    assert same_bits([products.added_product(bias, a, b)], [torch.addmm(bias, a, b)])
    many = [_matrix(rows, depth, one, 3), _matrix(depth, columns, other, 3)]
    made, wanted = products.products(*many), torch.stack([torch.mm(*pair) for pair in zip(*many, strict=True)])
    assert same_bits([made], [wanted])
    assert torch.equal(products.into(*many, torch.empty_like(wanted)), wanted)


@known
@pytest.mark.parametrize("sizes", [(256, 384, 384), (64, 1536, 130), (130, 64, 256)], ids=str)
def test_special_numbers_have_the_bits_of_torchs(sizes: tuple[int, int, int], threads: int) -> None:
    rows, depth, columns = sizes
    a, b = torch.empty(rows, depth), torch.empty(columns, depth)
    assert has_torch_bits(products.PRODUCT, [a, b.t()])
    assert has_torch_bits(products.ADDED, [torch.empty(columns), a, b.t()])


def test_what_a_kernel_does_not_know_is_torchs(threads: int) -> None:
    steps = torch.randn(40, 60)[::2, ::2]
    for a, b in (
        (steps, torch.randn(30, 50)),
        (torch.randn(3, 0), torch.randn(0, 4)),
        (torch.randn(4, 5).double(), torch.randn(5, 6).double()),
    ):
        assert torch.equal(products.product(a, b), torch.mm(a, b))
        assert torch.equal(products.products(a[None], b[None]), torch.bmm(a[None], b[None]))
    bias = torch.randn(20, 50)
    a, b = torch.randn(20, 30), torch.randn(30, 50)
    assert torch.equal(products.added_product(bias, a, b), torch.addmm(bias, a, b))
    with pytest.raises(RuntimeError):
        products.product(torch.randn(3, 4), torch.randn(5, 6))


def test_blocks_of_sums_are_whole_or_halves_or_the_librarys() -> None:
    assert [products._block_of(depth, 192) for depth in (1, 192, 193, 383, 384, 5000)] == [1, 192, 96, 191, 192, 192]


def _ours(graph: Graph) -> Graph:
    """Attention in chunks, and all products ours, however small."""
    changed = rewrite.multiplied(attention(graph))
    assert changed.fault is None
    assert any(op.target in OURS for op in changed.ops)
    assert_torchs_bits(changed)
    return changed


@known
@pytest.mark.parametrize("name", ["gpt", "bert", "gpt,dropout=0,attention=plain"])
def test_models_train_with_our_products_as_eager_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "LEAST", 1)
    model, _, options = name.partition(",")
    target = ",".join(filter(None, [models.SMALL[model], options]))
    assert_exact(lambda: models.build(target), change=_ours, program=as_eager)


def _step() -> tuple[Callable[..., Any], nn.Module, Any, tuple[Any, ...]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return step, model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(128, 128),)


@known
def test_a_small_net_trains_as_eager_does() -> None:
    assert_exact(_step, change=_ours, program=as_eager)


def test_names_and_small_products_stay_torchs() -> None:
    graph = lowtide.capture(*_step()).graph
    changed = rewrite.multiplied(graph)
    mine = [op.name for op in changed.ops if op.target in OURS]
    assert {op.target for op in changed.ops if op.name in mine} == {products.PRODUCT, products.ADDED}
    left = rewrite.multiplied(graph, "+".join(mine[1:]))
    assert [op.name for op in left.ops if op.target in OURS] == mine[:1]
    assert rewrite.multiplied(graph, "+".join(mine)) is graph
    assert rewrite.multiplied(lowtide.capture(*models.build(models.SMALL["mlp"])).graph).fault is None


def test_each_op_of_attention_has_one_with_our_products() -> None:
    assert len(attention_products.QUICK) == 4
    assert set(attention_products.QUICK.values()) <= set(OURS)
