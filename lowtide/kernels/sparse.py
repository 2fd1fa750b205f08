"""Convolutions and linear layers with a weight that has values only where a mask has a bit, as ops of a graph.

The dense weight is never made, nor its gradient: that of the values comes out. Scratch holds some rows of the images
and the taps of a few channels; it is allocated as any tensor is, so that it is metered. Sums have a fixed order,
whatever the number of threads. Without a compiler the dense weight is made, and torch's kernels run.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from lowtide import native
from lowtide.kernels import forms

SOURCE = Path(__file__).with_name("sparse.cpp")
FLAGS = ("-O3", "-Wno-psabi", "-ldl")
TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of values, as sparse.cpp numbers them
LARGEST, TAPS = 8, 49  # of a kernel's side and of a stride; of a kernel's elements
WIDTH = 64  # examples of a linear layer at a time
FORWARD, INPUT, WEIGHT = range(3)  # as sparse.cpp numbers them
CONVOLUTION, CONVOLUTION_INPUT, CONVOLUTION_WEIGHT = (
    f"lowtide.sparse_convolution{name}.default" for name in ("", "_input", "_weight")
)
LINEAR, LINEAR_INPUT, LINEAR_WEIGHT = (f"lowtide.sparse_linear{name}.default" for name in ("", "_input", "_weight"))
# Where the mask, the values or their number, and the size of the dense weight stand among the arguments.
_MASK = {
    forms.UNPACK: (2, 0, 3),
    forms.UPDATE: (3, 0, 5),
    CONVOLUTION: (2, 1, 4),
    CONVOLUTION_INPUT: (2, 1, 4),
    CONVOLUTION_WEIGHT: (2, 3, 4),
    LINEAR: (2, 1, 4),
    LINEAR_INPUT: (2, 1, 3),
    LINEAR_WEIGHT: (2, 3, 4),
}

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
SIGNATURES: native.Signatures = {
    "lowtide_sparse_scratch": ([_POINTER, _INT, _INT], _INT),
    "lowtide_sparse_run": ([_POINTER, _INT, _POINTER, _INT], None),
}


class _Task(ctypes.Structure):
    _fields_ = (
        *(("type", _INT), ("values", _POINTER), ("mask", _POINTER), ("count", _INT), ("rows", _INT)),
        ("columns", _INT),
        *((name, _INT * 2) for name in ("kernel", "stride", "padding", "dilation")),
        ("images", _INT),
        *((name, _INT * 2) for name in ("in_size", "out_size")),
        *(("input", _POINTER), ("in_stride", _INT * 4), ("output", _POINTER), ("out_stride", _INT * 4)),
        *((name, _POINTER) for name in ("bias", "gradient")),
    )


def define(registry: torch.library.Library) -> None:
    """Add the ops to lowtide's."""
    weight, window = "Tensor values, Tensor? mask", "int[] size, int[] stride, int[] padding, int[] dilation"
    for name, arguments, function, fake in (
        ("convolution", f"Tensor input, {weight}, Tensor? bias, {window}", convolution, _convolved),
        ("convolution_input", f"Tensor gradient, {weight}, int[] input, {window}", convolution_input, _like_input),
        ("convolution_weight", f"Tensor gradient, Tensor input, Tensor? mask, int room, {window}", *_WEIGHTS[0]),
        ("linear", f"Tensor input, {weight}, Tensor? bias, int[] size", linear, _multiplied),
        ("linear_input", f"Tensor gradient, {weight}, int[] size", linear_input, _multiplied_back),
        ("linear_weight", "Tensor gradient, Tensor input, Tensor? mask, int room, int[] size", *_WEIGHTS[1]),
    ):
        registry.define(f"sparse_{name}({arguments}) -> Tensor")
        registry.impl(f"sparse_{name}", function, "CPU")
        if function in (convolution, convolution_input):  # bands of rows are copied before they are written over
            registry.define(f"sparse_{name}.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)")
            registry.impl(f"sparse_{name}.out", function, "CPU")
        torch.library.register_fake(f"lowtide::sparse_{name}", fake, lib=registry)


@cache
def library() -> ctypes.CDLL | None:
    """Our kernels; None where they can't be compiled or loaded."""
    try:
        return native.library(SOURCE, SIGNATURES, what="lowtide's sparse kernels", flags=FLAGS)
    except native.NativeUnavailable:  # the arena has said so
        return None


def fits(size: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]) -> bool:
    """Whether a convolution with a weight of this size is one that these kernels know."""
    return (
        len(size) == 4
        and len(stride) == len(padding) == len(dilation) == 2
        and math.prod(size) > 0
        and max(*size[2:], *stride) <= LARGEST
        and size[2] * size[3] <= TAPS
        and min(*stride, *dilation) > 0
        and min(padding) >= 0
    )


# ------------------------------------------------------------------------------------------------------- convolutions


def convolution(
    input: Tensor,
    values: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """What aten.convolution makes with the dense weight of this size; `out` may be the input."""
    _check(values.dtype, values, mask, values.numel(), size, (input, bias))
    made = _onto(out, _convolved_size(input, bias, size, (stride, padding, dilation)))
    if library() is None:
        return made.copy_(torch.conv2d(input, _dense(values, mask, size), bias, stride, padding, dilation))
    window = (stride, padding, dilation)
    _run(FORWARD, values, mask, size, window, _image(input), _image(made), input.shape[0], bias=bias)
    return made


def convolution_input(
    gradient: Tensor,
    values: Tensor,
    mask: Tensor | None,
    input: list[int],
    size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of the input, which has this size, given that of the result; `out` may be the latter."""
    _check(values.dtype, values, mask, values.numel(), size, (gradient,))
    _refuse_window(input, gradient.shape, size, stride, padding, dilation)
    made = _onto(out, input)
    if library() is None:
        return made.copy_(_backward(gradient, made, _dense(values, mask, size), (stride, padding, dilation), 0))
    window = (stride, padding, dilation)
    _run(INPUT, values, mask, size, window, _image(made), _image(gradient), input[0])
    return made


def convolution_weight(
    gradient: Tensor,
    input: Tensor,
    mask: Tensor | None,
    room: int,
    size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    """The gradient of the values, in their order; what there is room for beyond them is zero.

    Without a mask it is that of the weight.
    """
    _check(torch.float32, None, mask, room, size, (gradient, input))
    _refuse_window(input.shape, gradient.shape, size, stride, padding, dilation)
    if library() is None:
        dense = _backward(gradient, input, torch.empty(size), (stride, padding, dilation), 1)
        return _at_bits(dense, mask, room)
    made, window = torch.zeros(size if mask is None else room), (stride, padding, dilation)
    _run(WEIGHT, None, mask, size, window, _image(input), _image(gradient), input.shape[0], gradient=made)
    return made


# ------------------------------------------------------------------------------------------------------- linear layers


def linear(input: Tensor, values: Tensor, mask: Tensor | None, bias: Tensor | None, size: list[int]) -> Tensor:
    """What aten.addmm makes of a matrix and the dense weight of this size."""
    _check(values.dtype, values, mask, values.numel(), size, (input, bias))
    made = _multiplied(input, values, mask, bias, size)
    if library() is None:
        return torch.nn.functional.linear(input, _dense(values, mask, size), bias)
    _run_rows(FORWARD, values, mask, size, input, made, bias=bias)
    return made


def linear_input(gradient: Tensor, values: Tensor, mask: Tensor | None, size: list[int]) -> Tensor:
    """The gradient of the input, given that of the result."""
    _check(values.dtype, values, mask, values.numel(), size, (gradient,))
    made = _multiplied_back(gradient, values, mask, size)
    if library() is None:
        return torch.mm(gradient, _dense(values, mask, size))
    _run_rows(INPUT, values, mask, size, made, gradient)
    return made


def linear_weight(gradient: Tensor, input: Tensor, mask: Tensor | None, room: int, size: list[int]) -> Tensor:
    """The gradient of the values, in their order; what there is room for beyond them is zero."""
    _check(torch.float32, None, mask, room, size, (gradient, input))
    shapes = (gradient.shape, input.shape)
    if input.dim() != 2 or shapes != ((input.shape[0], size[0]), (input.shape[0], size[1])):
        raise ValueError(f"no gradient {list(gradient.shape)} of {list(input.shape)} by {size}")
    if library() is None:
        return _at_bits(gradient.t() @ input, mask, room)
    made = torch.zeros(room)
    _run_rows(WEIGHT, None, mask, size, input, gradient, gradient=made)
    return made


# ---------------------------------------------------------------------------------------------------- sizes and calls

Sides = tuple[list[int], list[int], list[int]]  # strides, paddings and dilations
Image = tuple[
    Tensor, list[int], list[int]
]  # a tensor; the sizes of its sides; its strides: image, channel, row, column


def _run_rows(
    way: int, values: Tensor | None, mask: Tensor | None, size: list[int], input: Tensor, output: Tensor, **more: Any
) -> None:
    """A linear layer as a convolution over rows of examples; what is left over is a shorter row."""
    whole = input.shape[0] // WIDTH * WIDTH
    for first, last in ((0, whole), (whole, input.shape[0])):
        if first < last:
            width = WIDTH if first == 0 and whole else last - first
            images = [
                (part, [1, width], [width * part.stride(0), part.stride(1), 0, part.stride(0)])
                for part in (input[first:last], output[first:last])
            ]
            window = ([1, 1], [0, 0], [1, 1])
            _run(way, values, mask, [*size, 1, 1], window, images[0], images[1], (last - first) // width, **more)


def _run(
    way: int,
    values: Tensor | None,
    mask: Tensor | None,
    size: list[int],
    window: Sides,
    input: Image,
    output: Image,
    images: int,
    *,
    bias: Tensor | None = None,
    gradient: Tensor | None = None,
) -> None:
    compiled, threads = library(), torch.get_num_threads()
    assert compiled is not None
    stored = values if values is not None else gradient
    assert stored is not None
    if not images or not input[0].numel() or not output[0].numel():
        return
    side, sides = _INT * 2, _INT * 4
    task = _Task(
        *(TYPES.index(stored.dtype), stored.data_ptr(), _address(mask), stored.numel(), *size[:2], side(*size[2:])),
        *(side(*one) for one in window),
        images,
        *(side(*input[1]), side(*output[1])),
        *(input[0].data_ptr(), sides(*input[2]), output[0].data_ptr(), sides(*output[2])),
        *(_address(bias), _address(gradient)),
    )
    floats = compiled.lowtide_sparse_scratch(ctypes.byref(task), way, threads)
    if floats >= 2**31:
        raise ValueError(f"images of {input[1]} are too large for sparse kernels")
    scratch = torch.empty(floats)
    compiled.lowtide_sparse_run(ctypes.byref(task), way, scratch.data_ptr(), threads)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _image(tensor: Tensor) -> Image:
    return tensor, list(tensor.shape[2:]), list(tensor.stride())


def _onto(out: Tensor | None, size: list[int]) -> Tensor:
    """A tensor for a result of this size: the one that is given, if it is such a one, or a new one."""
    if out is None:
        return torch.empty(size)
    if list(out.shape) != size or out.dtype is not torch.float32 or not out.is_contiguous():
        raise ValueError(f"a result of {size} can't be written over {out.dtype} {list(out.shape)}")
    return out


def _dense(values: Tensor, mask: Tensor | None, size: list[int]) -> Tensor:
    if mask is None:
        return values.float().view(size)
    return forms.unpack(values, None, mask, size, list(torch.empty(size, device="meta").stride()))


def _backward(gradient: Tensor, input: Tensor, dense: Tensor, window: Sides, which: int) -> Tensor:
    """The gradient of the input (0) or of the weight (1) as torch makes it."""
    wanted = [which == 0, which == 1, False]
    found: Tensor = torch.ops.aten.convolution_backward(
        gradient, input, dense, None, *window, False, [0, 0], 1, wanted
    )[which]
    return found


def _at_bits(dense: Tensor, mask: Tensor | None, room: int) -> Tensor:
    if mask is None:
        return dense
    made, bits = torch.zeros(room), numpy.unpackbits(mask.numpy(), bitorder="little", count=dense.numel())
    forms.pack(made[: int(bits.sum())], None, mask, None, dense.contiguous(), list(range(dense.dim())))
    return made


def _check(
    dtype: torch.dtype,
    values: Tensor | None,
    mask: Tensor | None,
    count: int,
    size: list[int],
    floats: tuple[Tensor | None, ...],
) -> None:
    elements = math.prod(size)
    parts = [part for part in (values, mask) if part is not None]
    plain = all(part.is_contiguous() and part.device.type == "cpu" for part in parts)
    there = [tensor for tensor in floats if tensor is not None]
    known = all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in there)
    if not plain or not known or dtype not in TYPES or (mask is not None and mask.dtype is not torch.uint8):
        raise ValueError(f"a sparse layer takes float32, values without gaps and a mask of bytes; not {dtype}")
    bits = elements if mask is None else 8 * mask.numel()
    if bits < elements or not 0 <= count <= elements or (mask is None and count != elements):
        raise ValueError(f"{count} values and a mask of {bits} bits are not those of {size}")


def _refuse_window(
    input: Any, result: Any, size: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> None:
    """Raise where images and results of these sizes are not those of a convolution."""
    right = fits(tuple(size), tuple(stride), tuple(padding), tuple(dilation)) and len(input) == len(result) == 4
    if not right or [input[0], size[0], size[1]] != [result[0], result[1], input[1]]:
        raise ValueError(f"no convolution of {list(input)} to {list(result)} by {size}")
    wanted = _sides(input, size, (stride, padding, dilation))
    if wanted != list(result[2:]) or min(wanted) < 1:
        raise ValueError(f"a convolution of {list(input)} by {size} gives {wanted}, not {list(result[2:])}")


def _convolved(
    input: Tensor,
    values: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    return input.new_empty(_convolved_size(input, bias, size, (stride, padding, dilation)))


def _sides(input: Any, size: list[int], window: Sides) -> list[int]:
    """The height and width that a convolution gives."""
    sides = zip(input[2:], size[2:], *window, strict=True)
    return [(side + 2 * pad - spread * (k - 1) - 1) // step + 1 for side, k, step, pad, spread in sides]


def _convolved_size(input: Tensor, bias: Tensor | None, size: list[int], window: Sides) -> list[int]:
    if input.dim() != 4 or not fits(tuple(size), *map(tuple, window)):
        raise ValueError(f"no convolution of {list(input.shape)} by {size}")
    found = [input.shape[0], size[0], *_sides(input.shape, size, window)]
    _refuse_window(input.shape, found, size, *window)
    _check_bias(bias, size)
    return found


def _like_input(
    gradient: Tensor,
    values: Tensor,
    mask: Tensor | None,
    input: list[int],
    size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    _refuse_window(input, gradient.shape, size, stride, padding, dilation)
    return gradient.new_empty(input)


def _multiplied(input: Tensor, values: Tensor, mask: Tensor | None, bias: Tensor | None, size: list[int]) -> Tensor:
    if input.dim() != 2 or len(size) != 2 or input.shape[1] != size[1]:
        raise ValueError(f"no product of {list(input.shape)} and {size}")
    _check_bias(bias, size)
    return input.new_empty((input.shape[0], size[0]))


def _multiplied_back(gradient: Tensor, values: Tensor, mask: Tensor | None, size: list[int]) -> Tensor:
    if gradient.dim() != 2 or len(size) != 2 or gradient.shape[1] != size[0]:
        raise ValueError(f"no product of {list(gradient.shape)} and {size}")
    return gradient.new_empty((gradient.shape[0], size[1]))


def _check_bias(bias: Tensor | None, size: list[int]) -> None:
    if bias is not None and (tuple(bias.shape) != (size[0],) or not bias.is_contiguous()):
        raise ValueError(f"a bias of {list(bias.shape)} is not that of {size}")


def _of_values(gradient: Tensor, input: Tensor, mask: Tensor | None, room: int, size: list[int], *_: Any) -> Tensor:
    return gradient.new_empty(size if mask is None else room)


_WEIGHTS = ((convolution_weight, _of_values), (linear_weight, _of_values))


def is_product(target: str) -> bool:
    """Whether a target is one of these ops."""
    return target in _MASK and target not in (forms.UNPACK, forms.UPDATE)


def operations(target: str, args: list[Any], made: Tensor) -> float:
    """Floating point operations: two for each value and each place of one channel of the result."""
    of_weight, size = target in (CONVOLUTION_WEIGHT, LINEAR_WEIGHT), args[_MASK[target][2]]
    count = args[3] if of_weight else args[1].numel()
    result = made if target in (CONVOLUTION, LINEAR) else args[0]
    return float(2 * count * result.numel() // size[0])


def spread(target: str, args: list[Any]) -> None:
    """Let the mask among the arguments have as many bits as there are values, as they would lie in a step."""
    if target not in _MASK:
        return
    place, of, where = _MASK[target]
    mask, size = args[place], args[where]
    if not isinstance(mask, Tensor):
        return
    values = args[of][0] if isinstance(args[of], list) else args[of]
    count, elements = values.numel() if isinstance(values, Tensor) else int(values), math.prod(size)
    bits = numpy.zeros(8 * mask.numel(), bool)
    bits[numpy.random.default_rng(0).choice(elements, min(count, elements), replace=False)] = True
    mask.copy_(torch.from_numpy(numpy.packbits(bits, bitorder="little")))
