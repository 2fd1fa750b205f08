"""Decisions by the data that nearly always end the same way: they are assumed so, and checked when the step runs.

Two kinds: a branch that does nothing but raise, and the question whether numbers are finite.
"""

from __future__ import annotations

import dis
import math
import os
import sys
from functools import cache
from types import CodeType, FrameType

from lowtide.graph import Op, Read

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_USERS = tuple(os.path.join(_OURS, room) + os.sep for room in ("models", "bench"))
_BETWEEN = ("_ops.py", "_python_dispatch.py", "_compile.py")  # of torch, between a call and what becomes of it
AND = ("mul.Tensor", "logical_and.default", "bitwise_and.Tensor")
OR = ("logical_or.default", "bitwise_or.Tensor", "add.Tensor")
SAME = ("all.default", "any.default", "all.dim", "any.dim", "clone.default")
NOT = ("logical_not.default", "bitwise_not.default")


def expected(ops: list[Op], read: Read) -> tuple[bool, str] | None:
    """What a step expects of a number that is true or false, and what becomes of it otherwise; None: nobody knows."""
    frame = _deciding()
    if frame is not None and (answer := _not_raising(frame.f_code, frame.f_lasti)) is not None:
        return answer, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} raises"
    finite = _if_finite(ops, read.value)
    if finite is None:
        return None
    where = "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} "
    return finite, f"{where}finds numbers that are not finite, and does something else than the program"


def _deciding() -> FrameType | None:
    """The innermost frame that is neither ours nor between a call and us."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith(_OURS) and not name.startswith(_USERS)
        if not ours and os.path.basename(name) not in _BETWEEN:
            return frame
        frame = frame.f_back
    return None


@cache
def _not_raising(code: CodeType, at: int) -> bool | None:
    """The answer with which the code at this instruction does not raise, if with the other it does nothing else."""
    found = [item for item in dis.get_instructions(code) if item.opname not in ("CACHE", "EXTENDED_ARG", "NOP")]
    place = next((place for place, item in enumerate(found) if item.offset >= at), len(found))
    turned = False
    while place < len(found) and found[place].opname in ("UNARY_NOT", "TO_BOOL"):
        turned ^= found[place].opname == "UNARY_NOT"
        place += 1
    if place >= len(found) or not found[place].opname.startswith("POP_JUMP"):
        return None
    jump = found[place]
    if not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    goes = next((number for number, item in enumerate(found) if item.offset >= jump.argval), len(found))
    raising = {jump.opname.endswith("IF_TRUE") ^ turned: _only_raises(found, goes)}
    raising[not jump.opname.endswith("IF_TRUE") ^ turned] = _only_raises(found, place + 1)
    return not raising[True] if raising[True] != raising[False] else None


def _only_raises(found: list[dis.Instruction], place: int) -> bool:
    for item in found[place:]:
        if item.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in item.opname or item.opname.startswith(("RETURN", "YIELD", "FOR_ITER", "STORE", "DELETE", "SEND")):
            return False
    return False


def _if_finite(ops: list[Op], value: int) -> bool | None:
    """What a value is if all numbers that it is made of are finite; None where it says something else of them."""
    op = next((op for op in reversed(ops) if value in op.makes), None)
    if op is None:
        return None
    name = op.target.removeprefix("aten.")
    first, *rest = op.args
    if not isinstance(first, Read):
        return None
    if name in ("isnan.default", "isinf.default"):
        return False
    if name in ("eq.Tensor", "ne.Tensor"):  # NaN alone is not equal to itself
        return name == "eq.Tensor" if rest[0] == first else None
    if name in ("eq.Scalar", "ne.Scalar"):
        infinite = isinstance(rest[0], float) and math.isinf(rest[0])
        return name == "ne.Scalar" if infinite else None
    if name in SAME:
        return _if_finite(ops, first.value)
    if name in NOT:
        inner = _if_finite(ops, first.value)
        return None if inner is None else not inner
    if name in AND + OR:
        both = [_if_finite(ops, arg.value) if isinstance(arg, Read) else None for arg in (first, rest[0])]
        if None in both:
            return None
        return all(both) if name in AND else any(both)
    return None
