"""Tensors that are there in parts: to their owner they are tensors of floats, in memory they are bytes.

The owner's object stays the same object: only what is behind it is another one. To read it makes the floats for that
call, to write to it, through views too, makes the parts anew. What is saved, copied or unpickled is a plain tensor.
"""

from __future__ import annotations

import copy
import math
import warnings
import zlib
from typing import Any

import numpy
import torch
from torch import Tensor

from lowtide import private
from lowtide.errors import LowtideWarning, UsageError
from lowtide.forms import BLOCK, COUNTER, MASK, SCALES, STEPS, VALUES, ZEROS, Layout
from lowtide.kernels import forms

ON_GRID = 0.02  # of a step: so far from its place a number may be that was rounded to a float

View = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]  # a call on the whole, and which of its results


class Content:
    """The parts of one tensor, and how they make it."""

    def __init__(self, like: Tensor, layout: Layout, name: str, *, of: Content | None = None) -> None:
        """Parts for a tensor like this one; `of` is the parameter whose mask a state has."""
        self.layout, self.name = layout, name
        self.size, self.stride, self.dtype = tuple(like.shape), tuple(like.stride()), like.dtype
        self.dependents: list[Content] = []  # states with the mask of this one
        self.parts: dict[str, Tensor] = {}
        count = math.prod(self.size) if layout.count is None else layout.count
        self.parts[VALUES] = torch.zeros(count, dtype=getattr(torch, layout.dtype))
        if not self.dtype.is_floating_point:
            self.parts[VALUES] = self.parts[VALUES].view(self.size)
        if layout.scaled:
            self.parts[SCALES] = torch.zeros(-(-count // BLOCK))
        if layout.count is not None:
            nbytes = -(-math.prod(self.size) // 8)
            self.parts[MASK] = of.parts[MASK] if of is not None else torch.zeros(nbytes, dtype=torch.uint8)
        self.follows = layout.count is not None and of is not None  # its mask is that of a parameter
        if of is not None:
            of.dependents.append(self)
        if layout.counted:
            self.parts[COUNTER] = torch.tensor([zlib.crc32(name.encode()) << 24])
        if layout.channel is not None:
            channels = self.size[layout.channel] if layout.channel >= 0 else 1
            self.parts[STEPS], self.parts[ZEROS] = torch.zeros(channels), torch.zeros(channels)

    @property
    def nbytes(self) -> int:
        """The bytes of all parts; a mask counts with its parameter."""
        return sum(part.nbytes for name, part in self.parts.items() if name != MASK or not self.follows)

    @property
    def order(self) -> list[int]:
        """The dimensions as they lie in memory."""
        places = range(len(self.size))
        return sorted(places, key=lambda place: (-self.stride[place], -self.size[place], place))

    def dense(self) -> Tensor:
        """The numbers, as a plain tensor."""
        parts, size, stride = self.parts, list(self.size), list(self.stride)
        if self.layout.channel is not None:
            channel = self.layout.channel
            return forms.from_bytes(parts[VALUES], parts[STEPS], parts[ZEROS], size, stride, 0, channel)
        if not self.dtype.is_floating_point:
            return parts[VALUES].to(self.dtype)
        return forms.unpack(parts[VALUES], parts.get(SCALES), parts.get(MASK), size, stride)

    def write(self, dense: Tensor, *, by_chance: bool = False) -> int:
        """Make the parts of these numbers, each to the nearest, or by chance where there is a counter.

        Returns how many a mask had no room for: they are zero now.
        """
        parts, dropped = self.parts, 0
        if self.layout.channel is not None:
            parts[VALUES].copy_(to_bytes(dense, parts[STEPS], parts[ZEROS], self.layout.channel))
        elif not self.dtype.is_floating_point:
            parts[VALUES].copy_(_whole_numbers(dense, parts[VALUES].dtype))
        else:
            dropped = self._find_room(dense) if MASK in parts and not self.follows else 0
            counter = parts.get(COUNTER) if by_chance else None
            forms.pack(parts[VALUES], parts.get(SCALES), parts.get(MASK), counter, dense, self.order)
        return dropped

    def _find_room(self, dense: Tensor) -> int:
        """Let the mask have a bit for each element that is not zero, as far as there is room: the largest stay."""
        flat = dense.detach().permute(self.order).reshape(-1).numpy()
        bits, wanted, room = mask_bits(self.parts[MASK], len(flat)), flat != 0, self.parts[VALUES].numel()
        if not (wanted & ~bits).any() and int(bits.sum()) == room:
            return 0
        count = int(wanted.sum())
        if count > room:
            chosen = numpy.zeros(len(flat), bool)
            chosen[numpy.argpartition(-numpy.abs(flat), room - 1)[:room]] = True
        else:
            chosen = wanted.copy()
            for spare in (bits & ~wanted, ~bits & ~wanted):  # where there are weights already, then anywhere
                chosen[numpy.flatnonzero(spare)[: room - int(chosen.sum())]] = True
        self.move_to(chosen)
        return max(0, count - room)

    def move_to(self, chosen: numpy.ndarray[Any, Any]) -> None:
        """Let the mask have these bits; states keep what they have there, and are zero where it is new."""
        before = [(one, one.dense()) for one in self.dependents]
        self.parts[MASK].copy_(torch.from_numpy(numpy.packbits(chosen, bitorder="little")))
        for one, dense in before:
            one.write(dense)

    def rearrange(self, chosen: numpy.ndarray[Any, Any]) -> None:
        """Let the mask have these bits, more or fewer; what stays is as it was, what is new is zero, in states too."""
        before = mask_bits(self.parts[MASK], len(chosen))
        kept, known = torch.from_numpy(chosen[before]), torch.from_numpy(before[chosen])
        contents = (self, *self.dependents)
        made = [one.taken_up(kept, known) for one in contents]
        bits = torch.from_numpy(numpy.packbits(chosen, bitorder="little"))
        for one, parts in zip(contents, made, strict=True):  # from here on nothing can fail
            one.parts.update(parts)
        self.parts[MASK].copy_(bits)

    def taken_up(self, kept: Tensor, known: Tensor) -> dict[str, Tensor]:
        """New values: those that are kept where they are known, and zeros."""
        values, scales = self.parts[VALUES], self.parts.get(SCALES)
        made = torch.zeros(len(known), dtype=values.dtype)
        if scales is None:
            made[known] = values[: len(kept)][kept]
            return {VALUES: made}
        floats, scaled = torch.zeros(len(known)), torch.zeros(-(-len(known) // BLOCK))
        floats[known] = forms.unpack(values, scales, None, [len(values)], [1])[: len(kept)][kept]
        forms.pack(made, scaled, None, None, floats, [0])
        return {VALUES: made, SCALES: scaled}


def to_bytes(dense: Tensor, steps: Tensor, zeros: Tensor, channel: int) -> Tensor:
    """Floats as bytes; steps and zeros of each channel are written down.

    Numbers of a grid of up to 256 places, as pixels are, come back as they were, up to rounding; others to the nearest
    of 256 places between the least and the largest.
    """
    moved = dense.detach().movedim(channel, 0).flatten(1) if channel >= 0 else dense.detach().reshape(1, -1)
    codes = torch.empty_like(moved, dtype=torch.uint8, memory_format=torch.contiguous_format)
    for place, numbers in enumerate(moved):
        known = torch.unique(numbers)
        low, high = known[0].item(), known[-1].item()
        if not (math.isfinite(low) and math.isfinite(high)):
            raise UsageError(
                "a batch with numbers that are not finite has no bytes.", hint="leave input8 out of allow."
            )
        step = (high - low) / 255 or 1.0
        if 1 < len(known) <= 256:
            least = known.double().diff().min().item()
            places = round((high - low) / least)
            grid = (known.double() - low) * (places / (high - low))
            if places <= 255 and (grid - grid.round()).abs().max() < ON_GRID:
                step = (high - low) / places
        codes[place] = numbers.double().sub(low).div(step).round().clamp_(0, 255).to(torch.uint8)
        steps[place], zeros[place] = step, low
    shape = dense.movedim(channel, 0).shape if channel >= 0 else dense.shape
    back = codes.view(shape)
    return (back.movedim(0, channel) if channel >= 0 else back).reshape(-1)


def _whole_numbers(dense: Tensor, dtype: torch.dtype) -> Tensor:
    made = dense.to(dtype)
    if not torch.equal(made.to(dense.dtype), dense):
        raise UsageError(
            f"the batch has whole numbers that {str(dtype).removeprefix('torch.')} has no room for.",
            hint="fit with an example whose numbers are as large as any.",
        )
    return made


def mask_bits(mask: Tensor, elements: int) -> numpy.ndarray[Any, Any]:
    """A mask as one truth value an element."""
    return numpy.unpackbits(mask.numpy(), bitorder="little")[:elements].astype(bool)


class Packed(Tensor):
    """A tensor of floats whose memory holds something else."""

    content: Content
    views: tuple[View, ...]  # what leads from the whole to this tensor

    @staticmethod
    def __new__(cls, content: Content, like: Tensor | None = None, views: tuple[View, ...] = ()) -> Packed:
        """A tensor with this content or, through views, a part of it that looks like another one."""
        size, stride = (content.size, content.stride) if like is None else (like.shape, like.stride())
        offset = 0 if like is None else like.storage_offset()
        made: Packed = private.wrapper_subclass(
            cls, size, strides=stride, storage_offset=offset, dtype=content.dtype, device=torch.device("cpu")
        )
        made.content, made.views = content, views
        return made

    __torch_function__ = private.without_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any call: what is read is made for it, what it writes to is packed after it."""
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if not written and isinstance(args[0] if args else None, Packed) and _is_view(func):
            return _seen(func, args, kwargs)
        if any(word in func.__name__ for word in ("set_", "resize_")) and written:
            raise UsageError(
                f"{func} can't give other memory to a tensor that is there in parts.", hint="copy_() to it."
            )
        bases: dict[int, Tensor] = {}

        def plain(item: Any) -> Any:
            if isinstance(item, Packed):
                base = bases.setdefault(id(item.content), None) or item.content.dense()  # type: ignore[arg-type]
                bases[id(item.content)] = base
                return _through(base, item.views)
            return type(item)(map(plain, item)) if isinstance(item, (list, tuple)) else item

        result = func(*map(plain, args), **{key: plain(item) for key, item in kwargs.items()})
        by_chance = not func.__name__.startswith(("copy_", "fill_", "zero_"))  # small steps must not vanish
        for item in written:
            if dropped := item.content.write(bases[id(item.content)], by_chance=by_chance):
                warnings.warn(_dropped(item.content, dropped), LowtideWarning, stacklevel=3)
        return written[0] if written and isinstance(result, Tensor) else result

    @property
    def plain(self) -> Tensor:
        """The floats, as a plain tensor."""
        return _through(self.content.dense(), self.views)

    def numpy(self, **options: Any) -> Any:
        """The floats, as an array."""
        return self.plain.numpy(**options)

    def tolist(self) -> Any:
        """The floats, as a list."""
        return self.plain.tolist()

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.plain.__array__(*args, **options)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.plain!r} (in {self.content.nbytes:,} bytes: {self.content.layout.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = _as_owner_sees(self)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_owner_sees(self).__reduce_ex__(protocol)


def _dropped(content: Content, count: int) -> str:
    room = content.parts[VALUES].numel()
    return (
        f"{content.name!r} has room for {room:,} weights: {count:,} that were not zero are zero now, the smallest ones."
    )


def _as_owner_sees(tensor: Packed) -> Tensor:
    plain = tensor.plain
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(plain, requires_grad=tensor.requires_grad)
    return plain.requires_grad_(tensor.requires_grad)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Packed]:
    """The tensors in parts that a call writes to."""
    found = []
    for place, argument in enumerate(private.schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name) if argument.name in kwargs else args[place] if place < len(args) else None
            found += [
                item for item in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(item, Packed)
            ]
    return found


def _is_view(func: Any) -> bool:
    returns = private.schema(func).returns
    return bool(returns) and returns[0].alias_info is not None


def _seen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of a tensor in parts: it has the same parts."""
    self, *rest = args
    shown = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
    made = func(shown, *rest, **kwargs)
    if isinstance(made, Tensor):
        return Packed(self.content, made, (*self.views, (func, tuple(rest), kwargs, None)))
    return [
        Packed(self.content, one, (*self.views, (func, tuple(rest), kwargs, place))) for place, one in enumerate(made)
    ]


def _through(base: Tensor, views: tuple[View, ...]) -> Tensor:
    for func, rest, kwargs, place in views:
        base = func(base, *rest, **kwargs)
        base = base if place is None else base[place]
    return base


# ------------------------------------------------------------------------------------------------- the owner's objects


def put_in_parts(tensor: Tensor, content: Content) -> None:
    """Let the owner's tensor, the same object, have this content from now on."""
    other = Packed(content)
    if isinstance(tensor, torch.nn.Parameter):
        private.as_parameter(other)
    _exchange(tensor, other)


def make_plain(tensor: Packed) -> None:
    """Let the owner's tensor, the same object, be a plain one again, with what it holds."""
    _exchange(tensor, _as_owner_sees(tensor))


def _exchange(tensor: Tensor, other: Tensor) -> None:
    """Put another tensor behind an object; its gradient and what its owner keeps on it stay."""
    gradient, trains, hooks = tensor.grad, tensor.requires_grad, private.hook_registers(tensor)
    if any(hooks):
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} has hooks, and can't be put into parts.", hint="remove them."
        )
    own = {key: item for key, item in tensor.__dict__.items() if key not in ("content", "views", "_is_param")}
    tensor.grad = None
    private.swap_tensor_impl(tensor, other)
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
    tensor.__dict__.update(own)
    tensor.requires_grad_(trains)
    tensor.grad = gradient


def kind(tensor: Tensor) -> type:
    """The class that a tensor has to its owner."""
    if isinstance(tensor, Packed):
        return torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else Tensor
    return type(tensor)


def plain(tensor: Any) -> Any:
    """A tensor in parts as a plain one; everything else as it is."""
    return tensor.plain if isinstance(tensor, Packed) else tensor
