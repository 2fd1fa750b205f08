"""Sparse weights that move: the smallest of all layers go, the pool stays, and a run goes on to the bit."""

from __future__ import annotations

import io
from typing import Any

import numpy
import pytest
import torch
from formed import batches, made, step

import lowtide
from lowtide.fit.moving import SHARE, Moving, shared_out
from lowtide.forms import MASK, VALUES
from lowtide.packed import Content, Packed, mask_bits
from lowtide.rewrite.sparse import read_choice, room

BUDGET = 440_000  # bytes: what the step takes without sparse weights is more
pytestmark = pytest.mark.filterwarnings("ignore:.*weights that were not zero are zero now")


def fitted(allow: str, optimizer: str = "sgd") -> tuple[Any, Any, Any]:
    model, one = made(optimizer, convolutions=True)
    example = batches(1)[0]
    allow = f"{allow},-blocked"  # with which the step would fit without sparse weights, where it is taken
    train = lowtide.fit(step, model, one, example=example, allow=allow, budget=BUDGET, time_limit=0.2)
    assert "sparse" in {rewrite.name for rewrite in train.plan.rewrites}
    return train, model, one


def sparse_of(model: Any) -> dict[str, Content]:
    found = {name: one.content for name, one in model.named_parameters() if isinstance(one, Packed)}
    return {name: content for name, content in found.items() if MASK in content.parts}


def places(content: Content) -> numpy.ndarray[Any, Any]:
    return numpy.flatnonzero(mask_bits(content.parts[MASK], content.dense().numel()))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_smallest_of_all_layers_move_in_a_pool_of_constant_size(optimizer: str) -> None:
    train, model, one = fitted("sparse:0.3/move:1000,weights16,state8", optimizer)
    for batch in batches(3):
        train(*batch)
    pool = sparse_of(model)
    before = {name: content.dense().view(-1) for name, content in pool.items()}
    bits = {name: places(content) for name, content in pool.items()}
    states = {key: item for key, item in one.state[model[2].weight].items() if isinstance(item, Packed)}
    assert states
    kept_state = {key: item.content.dense().view(-1) for key, item in states.items()}
    counts = {name: len(content.parts[VALUES]) for name, content in pool.items()}
    sizes = numpy.sort(numpy.concatenate([before[name].abs().numpy()[bits[name]] for name in pool]))
    dropped = round(SHARE * sum(counts.values()))
    with lowtide.meter() as meter:
        now = meter.current
        train.give_back()
        Moving().move(model)
        assert meter.peak - now < train.plan.peak
    after = {name: len(content.parts[VALUES]) for name, content in pool.items()}
    assert sum(after.values()) == sum(counts.values())
    assert after != counts, "some went to another layer"
    gone = 0
    for name, content in pool.items():
        new, dense = places(content), content.dense().view(-1)
        assert len(new) == after[name]
        stayed = numpy.intersect1d(new, bits[name])
        assert torch.equal(dense[stayed], before[name][stayed])
        assert not dense[numpy.setdiff1d(new, bits[name])].any()
        lost = numpy.setdiff1d(bits[name], new)
        gone += len(lost)
        assert before[name].abs().numpy()[lost].max(initial=0) <= sizes[dropped - 1]
    assert gone == dropped
    stayed = numpy.intersect1d(places(pool["2.weight"]), bits["2.weight"])
    for key, item in states.items():
        dense = item.content.dense().view(-1)
        assert not dense[numpy.setdiff1d(places(pool["2.weight"]), bits["2.weight"])].any()
        near = (dense[stayed] - kept_state[key][stayed]).abs().max() / kept_state[key].abs().max()
        assert near < 0.02, "8 bits are rounded anew, for their blocks are others"
    for batch in batches(3):
        assert torch.isfinite(train(*batch))
    assert train.mismatches == 0
    assert train.peak == train.plan.peak


@pytest.mark.parametrize("allow", ["sparse:0.3/move:3", "sparse:0.4/dense/move:3,weights16,state8"])
def test_a_run_goes_on_to_the_bit(allow: str) -> None:
    given = batches(10)
    first, model, optimizer = fitted(allow)
    torch.manual_seed(3)
    for batch in given[:5]:
        first(*batch)
    saved = io.BytesIO()
    rest = {"draws": torch.get_rng_state(), "parts": first.state_dict()}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **rest}, saved)
    expected = [first(*batch).item() for batch in given[5:]]
    saved.seek(0)
    back = torch.load(saved, weights_only=True)
    second, resumed, other = fitted(allow)
    resumed.load_state_dict(back["model"])
    other.load_state_dict(back["optimizer"])
    second.load_state_dict(back["parts"])
    torch.set_rng_state(back["draws"])
    assert [second(*batch).item() for batch in given[5:]] == expected
    for (name, a), b in zip(sparse_of(model).items(), sparse_of(resumed).values(), strict=True):
        assert all(torch.equal(a.parts[part], b.parts[part]) for part in a.parts), name
    with second.dense() as plain:
        assert type(plain[2].weight) is torch.nn.Parameter
        assert torch.equal(plain[2].weight, sparse_of(model)["2.weight"].dense())
    assert first.peak == first.plan.peak


def test_trained_weights_are_dropped_aloud() -> None:
    model, one = made("sgd", convolutions=True)
    example = batches(1)[0]
    train = lowtide.fit(step, model, one, example=example, allow="sparse:0.3", budget=BUDGET, time_limit=0.2)
    had = {name: int((parameter != 0).sum()) for name, parameter in model.named_parameters()}
    with pytest.warns(lowtide.LowtideWarning, match="weights that were not zero are zero now") as said:
        train(*example)
    dropped = sum(had[name] - len(content.parts[VALUES]) for name, content in sparse_of(model).items())
    assert f"{dropped:,} weights" in str(said[0].message)


def test_layers_share_blocks_by_what_they_keep() -> None:
    drawn = numpy.random.default_rng(0)
    for _ in range(100):
        layers = int(drawn.integers(1, 8))
        counts = [256 * int(drawn.integers(1, 40)) for _ in range(layers)]
        kept = [int(drawn.integers(0, count + 1)) for count in counts]
        rooms = [room(count, 10 * count + 7) for count in counts]
        found = shared_out(kept, counts, rooms)
        assert sum(found) == sum(counts)
        for target, some, most in zip(found, kept, rooms, strict=True):
            assert target % 256 == 0
            assert max(1, some) <= target <= most
    assert shared_out([2000, 1000], [1536, 1536], [10**6, 10**6]) == [2048, 1024]


@pytest.mark.parametrize(
    "setting", ["0", "1", "0.3/", "0.3/move:0", "0.3/moved", "0.3/move/move:3", "x", "0.3/dense/dense"]
)
def test_other_settings_are_refused(setting: str) -> None:
    with pytest.raises(lowtide.UsageError, match="has no setting"):
        read_choice(setting)
    assert read_choice("0.3/move=7").every == read_choice("0.3/move:7").every == 7
