"""What may be done to a step that changes its bits, as people write it."""

from __future__ import annotations

import pytest

from lowtide.choice import Leave
from lowtide.errors import UsageError
from lowtide.graph import Graph
from lowtide.rewrite import PASSES
from lowtide.rewrites import BY_NAME, LOSSY_ORDER, ROUNDING, Allowed, Rewrite, encode_rewrite, read_allow
from lowtide.rewrites import REWRITE as SHAPE


def test_nothing_named_is_bitwise() -> None:
    allowed = read_allow(None)
    assert not allowed
    assert not [name for name in (*ROUNDING, *LOSSY_ORDER, *BY_NAME) if name in allowed]
    assert str(allowed) == ""


def test_tiers_nest() -> None:
    rounding, lossy = read_allow("rounding"), read_allow("lossy")
    assert [name for name in (*ROUNDING, *LOSSY_ORDER) if name in rounding] == list(ROUNDING)
    assert [name for name in (*ROUNDING, *LOSSY_ORDER) if name in lossy] == [*ROUNDING, *LOSSY_ORDER]
    assert rounding == read_allow(None, rounding=True) == read_allow(["rounding"])
    assert read_allow("lossy", rounding=True) == lossy
    assert "activations4" not in lossy
    assert lossy.lossy == LOSSY_ORDER


def test_names_allow_only_themselves() -> None:
    allowed = read_allow(" sparse:0.3 , split,batch-statistics=previous")
    assert [name for name in (*ROUNDING, *LOSSY_ORDER) if name in allowed] == ["split", "batch-statistics", "sparse"]
    assert [allowed.setting(name) for name in ("sparse", "split", "batch-statistics")] == [0.3, None, "previous"]
    assert allowed.lossy == ("batch-statistics", "sparse")
    assert read_allow(str(allowed)) == allowed
    assert read_allow(["microbatch:4"]).setting("microbatch") == 4
    assert read_allow("lossy,sparse:0.1").setting("sparse") == 0.1
    assert str(read_allow("lossy,sparse:0.1")) == "lossy,sparse:0.1"


@pytest.mark.parametrize("wrong", ["sparsity", "rounding:2", "split,", "", ["split", 3]])
def test_wrong_words_are_refused(wrong: object) -> None:
    with pytest.raises(UsageError) as raised:
        read_allow(wrong)  # type: ignore[arg-type]
    assert raised.value.hint


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="sparsity") as raised:
        read_allow("sparsity")
    assert all(name in str(raised.value.hint) for name in ("rounding", "lossy", *ROUNDING, *LOSSY_ORDER, *BY_NAME))


def test_a_name_without_a_pass_is_refused_by_name_and_skipped_in_a_tier() -> None:
    missing = next((name for name in (*LOSSY_ORDER, *BY_NAME) if name not in {one.name for one in PASSES}), None)
    if missing is None:
        return
    with pytest.raises(UsageError, match=missing):
        Leave(Allowed(named=((missing, None),)))
    Leave(Allowed("lossy"))


def test_every_pass_that_changes_bits_can_be_named() -> None:
    for one in PASSES:
        if one.exactness != "bitwise":
            assert one.name in (ROUNDING if one.exactness == "rounding" else (*LOSSY_ORDER, *BY_NAME))


def test_a_measured_error_is_kept() -> None:
    rewrite = Rewrite("sparse", 0.3, "lossy", 2e-3)
    assert SHAPE(encode_rewrite(rewrite)).error == 2e-3
    assert SHAPE(encode_rewrite(Rewrite("merge"))).error is None


def test_levels_take_one_technique_after_the_other_with_the_mildest_settings_first() -> None:
    """Nothing, then the fixed order; 8 bits take the place of 16; no level has harsher settings before milder ones."""
    empty = Graph((), (), (), ())
    levels = Leave(read_allow("lossy,sparse:0.5")).levels(empty)
    assert levels[0] == [()]
    last = [{one.name for one in level[-1]} for level in levels]
    present = [name for name in LOSSY_ORDER if name != "batch-statistics"]  # there is no batch norm
    assert last[1:] == [
        {name for name in present[:count] if not (name == "activations16" and "activations8" in present[:count])}
        for count in range(1, len(present) + 1)
    ]
    settings = [{one.name: one.setting for one in row} for row in levels[-1]]
    assert [row["activations8"] for row in settings] == ["all", "products", "sums"]
    assert all(row["sparse"] == 0.5 for row in settings)


def test_of_two_techniques_the_later_one_keeps_its_mildest_setting_longer() -> None:
    leave = Leave(read_allow("activations16,activations4"))
    rows = leave.levels(Graph((), (), (), ()))[-1]
    assert [[one.setting for one in row] for row in rows] == [
        [first, second] for second in ("all", "products", "sums") for first in ("all", "products", "sums")
    ]
