"""Our own kernels in place of a few of torch's slowest: the same bits, sooner.

Each is tried against torch's on this machine before it is used, and does only what it was written for: contiguous
float32 tensors in the memory of the CPU, of sizes that belong together. Everything else, and all where a bit differs,
stays with torch, which raises what eager raises.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide import native
from lowtide.private import bare_kernel, flushes_denormals

SOURCE = Path(__file__).with_name("own.cpp")
FLAGS = ("-O3", "-ffp-contract=off", "-Wno-psabi", "-ldl")
LEAST = 2**14  # elements: for fewer, torch has done it before we have asked
IMAGE = 8  # elements of a channel in one input: for fewer, torch's is as quick
STATE = 5056  # bytes of a saved generator, as own.cpp reads them
FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # of trials, whatever the user's default is
PLAIN = (Tensor, torch.nn.Parameter)  # subclasses may mean something else
LANES = 8  # channels that are added up side by side
ROUNDINGS = (3, 0, 1, 2)  # of torch's batch norm, as own.cpp numbers them

_POINTER, _INT, _PAIR = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64 * 2


class _Norm(ctypes.Structure):
    _fields_ = (
        *(
            (name, _POINTER)
            for name in ("input", "weight", "bias", "running_mean", "running_var", "out", "mean", "scale")
        ),
        *((name, _INT) for name in ("batch", "channels", "image")),
        *((name, ctypes.c_double) for name in ("momentum", "epsilon")),
        ("fused", _INT),
    )


class _Pool(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input", "out", "where")),
        *((name, _INT) for name in ("planes", "height", "width", "out_height", "out_width")),
        *((name, _PAIR) for name in ("kernel", "stride", "padding", "dilation")),
    )


SIGNATURES: native.Signatures = {
    "lowtide_has_threads": ([], _INT),
    "lowtide_bernoulli": ([_POINTER, _POINTER, _INT, _INT], _INT),
    "lowtide_batch_norm": ([_POINTER, _INT], None),
    "lowtide_max_pool": ([_POINTER, _INT], None),
}


@cache
def quicker(target: str) -> Callable[..., Any] | None:
    """Our kernel for a target, to be called as torch's; None where there is none, or where it can't be used here."""
    if target not in _MAKERS or flushes_denormals() or (library := _library()) is None:
        return None
    with _undisturbed():
        return _MAKERS[target](library)


@cache
def _library() -> ctypes.CDLL | None:
    try:
        depends = (torch.__version__,)
        return native.library(SOURCE, SIGNATURES, what="lowtide's own kernels", flags=FLAGS, depends=depends)
    except native.NativeUnavailable:  # the arena has said so
        return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the generator as it was."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _ours(tensor: Tensor | None) -> bool:
    """Whether our kernels can read a tensor, or write to it; one that is not there is no hindrance."""
    return tensor is None or (
        type(tensor) in PLAIN
        and tensor.dtype is torch.float32
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_neg()  # its numbers are those in memory
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)  # they are in memory
    )


def _apart(written: Sequence[Tensor | None], read: Sequence[Tensor | None]) -> bool:
    """Whether no tensor that is written to shares a byte with another."""
    targets = [_span(tensor) for tensor in written if tensor is not None]
    spans = [*targets, *(_span(tensor) for tensor in read if tensor is not None)]
    return all(
        one[1] <= other[0] or other[1] <= one[0] for number, one in enumerate(targets) for other in spans[number + 1 :]
    )


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def _same(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(mine, theirs, strict=True))


# ----------------------------------------------------------------------------------------------------------- bernoulli_


def _bernoulli(library: ctypes.CDLL) -> Callable[..., Any] | None:
    """Torch draws one number after the other, ten nanoseconds each; ours come in blocks, from the same generator."""
    theirs, default = bare_kernel(torch.ops.aten.bernoulli_.float), torch.default_generator
    if default.get_state().numel() != STATE:
        return None

    def draw(tensor: Tensor, p: float) -> bool:
        state = default.get_state()
        if library.lowtide_bernoulli(state.data_ptr(), tensor.data_ptr(), tensor.numel(), math.ceil(p * 2**53)):
            return False
        default.set_state(state)
        return True

    def bernoulli_(self: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
        fits = generator is None and self.numel() >= LEAST and 0 <= p <= 1 and _ours(self) and not self.is_inference()
        if not (fits and draw(self, p)):
            drawn: Tensor = theirs(self, p, generator=generator)
            return drawn
        torch.autograd.graph.increment_version(self)
        return self

    for count, p in ((1, 0.5), (1000, 0.9), (1001, 1 / 3)):  # within a block, over its end, and from half a number
        state, mine, other = default.get_state(), torch.empty(count, **FLOATS), torch.empty(count, **FLOATS)
        drawn, after = draw(mine, p), default.get_state()
        default.set_state(state)
        theirs(other, p)
        if not drawn or not _same([mine], [other]) or not torch.equal(after, default.get_state()):
            return None
    return bernoulli_


# ---------------------------------------------------------------------------------------------------- native_batch_norm


def _batch_norm(library: ctypes.CDLL) -> Callable[..., Any] | None:
    """Torch adds up one channel after the other, each number when the last one is in; ours adds up eight at a time."""
    theirs, checked = (
        bare_kernel(getattr(torch.ops.aten, name).default) for name in ("native_batch_norm", "_batch_norm_impl_index")
    )

    def normalize(
        rounding: int, x: Tensor, parameters: Sequence[Tensor | None], momentum: float, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        made = x.new_empty(x.shape), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
        tensors = [None if tensor is None else tensor.data_ptr() for tensor in (x, *parameters, *made)]
        image = x.numel() // (x.shape[0] * x.shape[1])
        norm = _Norm(*tensors, x.shape[0], x.shape[1], image, momentum, eps, rounding)
        library.lowtide_batch_norm(ctypes.byref(norm), torch.get_num_threads())
        return made

    def exact(rounding: int) -> bool:
        for shape in ((2, 3, 5, 7), (4, 16, 8, 8), (3, 21, 33)):
            x, own = torch.randn(shape, **FLOATS) * 3 + 1, [torch.rand(shape[1], **FLOATS) for _ in range(4)]
            other = [tensor.clone() for tensor in own]
            mine = normalize(rounding, x, own, 0.1, 1e-5)
            if not _same([*mine, *own], [*theirs(x, *other, True, 0.1, 1e-5), *other]):
                return False
        return True

    rounding = next(filter(exact, ROUNDINGS), None)
    if rounding is None:
        return None

    def native_batch_norm(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Any:
        parameters = (weight, bias, running_mean, running_var)
        if not _one_for_each_channel(input, parameters, training):  # torch's kernel does not look
            return checked(input, *parameters, training, momentum, eps, False)[:3]
        if not (training and _readable(input, parameters) and _together(library)):
            return theirs(input, *parameters, training, momentum, eps)
        return normalize(rounding, input, parameters, momentum, eps)

    return native_batch_norm


def _one_for_each_channel(input: Tensor, parameters: Sequence[Tensor | None], training: bool) -> bool:
    """Whether each parameter has one number for each channel, and without a batch's statistics there are others."""
    if input.dim() < 2 or not (training or all(tensor is not None for tensor in parameters[2:])):
        return False
    return all(tensor is None or tensor.numel() == input.shape[1] for tensor in parameters)


def _readable(input: Tensor, parameters: Sequence[Tensor | None]) -> bool:
    """Whether ours can read all of these, and pays."""
    if input.numel() < max(LEAST, IMAGE * input.shape[0] * input.shape[1]) or not _busy(input.shape[1]):
        return False
    weight, bias, *running = parameters
    return (
        all(map(_ours, (input, *parameters)))
        and (running[0] is None) == (running[1] is None)
        and all(tensor is None or tensor.dim() == 1 for tensor in parameters)
        and _apart(running, (input, weight, bias))
    )


def _busy(channels: int) -> bool:
    """Whether eight channels a time leave enough work for the threads: ours is twice as quick as torch's, not more."""
    return 2 * -(-channels // LANES) > min(torch.get_num_threads(), channels)


def _together(library: ctypes.CDLL) -> bool:
    """Whether ours can use all the threads that torch would."""
    return bool(library.lowtide_has_threads()) or torch.get_num_threads() == 1


# ---------------------------------------------------------------------------------------------- max_pool2d_with_indices


def _max_pool(library: ctypes.CDLL) -> Callable[..., Any] | None:
    """Torch looks at one window after the other; ours goes over a row of them at once."""
    theirs = bare_kernel(torch.ops.aten.max_pool2d_with_indices.default)

    def pool(x: Tensor, sizes: Sequence[tuple[int, int]], ceil_mode: bool) -> tuple[Tensor, Tensor]:
        height, width = (_pooled(x.shape[2 + axis], [size[axis] for size in sizes], ceil_mode) for axis in (0, 1))
        made = x.new_empty(x.shape[0], x.shape[1], height, width)
        where = torch.empty_like(made, dtype=torch.int64)
        pairs = (_PAIR(*size) for size in sizes)
        tensors = [tensor.data_ptr() for tensor in (x, made, where)]
        planes = x.shape[0] * x.shape[1]
        task = _Pool(*tensors, planes, x.shape[2], x.shape[3], height, width, *pairs)
        library.lowtide_max_pool(ctypes.byref(task), torch.get_num_threads())
        return made, where

    def max_pool2d_with_indices(
        self: Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> Any:
        given = (kernel_size, stride or kernel_size, padding, dilation)
        if not (_ours(self) and _windows_fit(self, given) and _together(library)):
            return theirs(self, kernel_size, stride, padding, dilation, ceil_mode)
        return pool(self, [_pair(size) for size in given], ceil_mode)

    for number, sizes in enumerate((((3, 3), (2, 2), (1, 1), (1, 1)), ((2, 3), (2, 1), (0, 1), (1, 2)))):
        x = torch.randn(2, 3, 11, 13, **FLOATS)
        x[0, 0, 2, 3], x[0, 1, :5] = math.nan, -math.inf
        x[1] = x[1].round()  # the first of equals
        mine, other = pool(x, sizes, bool(number)), theirs(x, *sizes, bool(number))
        if mine[0].shape != other[0].shape or not _same(mine, other):
            return None
    return max_pool2d_with_indices


def _windows_fit(x: Tensor, sizes: Sequence[Sequence[int]]) -> bool:
    """Whether torch would take these windows, every place in a plane is a number of 31 bits, and ours pays."""
    if x.dim() != 4 or x.shape[1] < 2 or x.numel() < LEAST or any(len(size) not in (1, 2) for size in sizes):
        return False
    around = 1
    for axis, length in enumerate(x.shape[2:]):
        kernel, stride, padding, dilation = window = [_pair(size)[axis] for size in sizes]
        reach = dilation * (kernel - 1) + 1
        if min(kernel, stride, dilation) < 1 or not 0 <= padding <= kernel // 2 or reach > length + 2 * padding:
            return False
        around *= length + 2 * reach + max(window)
    return around < 2**31


def _pair(size: Sequence[int]) -> tuple[int, int]:
    return size[0], size[-1]


def _pooled(size: int, window: Sequence[int], ceil_mode: bool) -> int:
    """How many windows there are along an axis; the last one starts inside."""
    kernel, stride, padding, dilation = window
    over = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (over + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


_MAKERS: dict[str, Callable[[ctypes.CDLL], Callable[..., Any] | None]] = {
    "aten.bernoulli_.float": _bernoulli,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.max_pool2d_with_indices.default": _max_pool,
}
