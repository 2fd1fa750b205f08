"""Attention in chunks of heads with products of ours, where these have the bits of torch's library and are quicker."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from lowtide.kernels import attention, attention_rows, products
from lowtide.kernels.tried import Family, Own


def _get_ready() -> None:
    attention_rows.get_ready()
    products.get_ready()


def _quick(one: Own) -> Own:
    kernel = partial(one.kernel, multiply=products.into)
    return replace(one, schema=f"quick_{one.schema}", kernel=kernel, ready=_get_ready)


OWN = tuple(map(_quick, attention.OWN))
QUICK = {one.target: quick.target for one, quick in zip(attention.OWN, OWN, strict=True)}
FAMILY = Family(OWN, (*attention.FAMILY.files, *products.FAMILY.files, Path(__file__)))
