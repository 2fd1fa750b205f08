"""Values that are away from the device: where they are, and the copies from and to there that run meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from lowtide.costs import Direction, Transfer
from lowtide.device import Device, Flight, Store
from lowtide.errors import PlaceError
from lowtide.execute.slots import Slots
from lowtide.graph import Place

Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class _Form:
    """How a tensor sees the bytes of its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements before its first one

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor of this form on these bytes."""
        empty = torch.empty(0, dtype=self.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class _Stored:
    """A value in another place."""

    store: Store
    place: Place
    offset: int
    nbytes: int
    form: _Form


@dataclass(frozen=True)
class _Scattered:
    """A copy to a tensor with gaps between its elements: by way of other memory, for the gaps are not ours."""

    flight: Flight
    flat: torch.Tensor
    form: _Form
    home: torch.Tensor

    @property
    def seconds(self) -> float | None:
        """What the copy took."""
        return self.flight.seconds

    def wait(self) -> None:
        """Put the elements where they belong."""
        self.flight.wait()
        self.home.copy_(self.form.of(self.flat))


class Places:
    """The stores of a program, for one step at a time: begin it, end it, and no copy runs any more.

    They are opened before the first step that needs them, and stay open for the next.
    """

    def __init__(self, device: Device, slots: Mapping[Place, Slots], folder: Folder = None) -> None:
        self.slots = slots
        self.beyond: dict[tuple[int, str], tuple[int, int]] = {}  # offset and room of what needs more than was planned
        self.stored: dict[tuple[int, str], _Stored] = {}
        self.flights: dict[tuple[int, str], Flight] = {}
        self.from_: dict[int, _Stored] = {}  # where what comes back comes from
        self.transfers: list[Transfer] = []  # of this step
        self.process = os.getpid()  # a child has the files of its parent, and none of its threads
        self.stores: dict[Place, Store] = {}
        self.homes: dict[int, _Stored] = {}  # the caller's storages that are elsewhere
        self.order = tuple(device.stores)  # the nearest first
        try:
            for place, open_store in device.stores.items():
                if place in slots:
                    self.stores[place] = open_store(slots[place].nbytes, folder)
        except BaseException:
            self.close()
            raise

    @property
    def staging(self) -> int:
        """The bytes of the device's memory that copies go through."""
        return sum(store.staging for store in self.stores.values())

    def store(self, number: int, value: int, place: Place, tensor: torch.Tensor, *, part: bool) -> None:
        """Start to copy a tensor away, by this instruction: with all of its storage, or only the part that it spans."""
        flat, offset = _bytes_of(tensor), int(tensor.storage_offset())
        if part:  # the rest is not ours
            start = offset * tensor.element_size()
            flat, offset = flat[start : start + _span(tensor) * tensor.element_size()], 0
        form = _Form(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)
        at = self._room(number, place, len(flat))
        self.stored[value, place] = _Stored(self.stores[place], place, at, len(flat), form)
        self.flights[value, place] = self.stores[place].write(at, flat)

    def begin(self, homes: Iterable[tuple[int, int, Place, torch.Tensor, Store, int]]) -> None:
        """Begin a step with inputs elsewhere: value, storage, place, the caller's tensor, its store and offset."""
        self.transfers.clear()
        self.homes = {}
        for value, storage, place, tensor, store, offset in homes:
            form = _Form(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), 0)
            stored = _Stored(store, place, offset, _span(tensor) * tensor.element_size(), form)
            self.homes[storage] = self.stored[value, place] = stored

    def store_home(self, value: int, place: Place, tensor: torch.Tensor, storage: int) -> None:
        """Start to copy a tensor to the caller's own storage in this place."""
        home, start = self.homes[storage], int(tensor.storage_offset()) * tensor.element_size()
        if tuple(tensor.stride()) != home.form.stride or tensor.dtype != home.form.dtype:
            raise PlaceError(f"%{value} has strides {tuple(tensor.stride())}, its home {home.form.stride}.")
        self.stored[value, place] = home
        self.flights[value, place] = home.store.write(home.offset, _bytes_of(tensor)[start : start + home.nbytes])

    def load(self, value: int) -> torch.Tensor:
        """Start to copy a value back to the device, to new memory, which is returned at once."""
        stored = self.from_[value] = self._find(value)
        made = torch.empty(stored.nbytes, dtype=torch.uint8)
        self.flights[value, "device"] = stored.store.read(stored.offset, made)
        return stored.form.of(made)

    def load_home(self, value: int, home: torch.Tensor) -> None:
        """Start to copy a value to the caller's own tensor; only its elements, for what lies between is not ours."""
        stored = self.from_[value] = self._find(value)
        store = stored.store
        form, start = stored.form, int(home.storage_offset()) * home.element_size()
        first = form.offset * home.element_size()
        if _is_dense(home) and form.stride == tuple(home.stride()) and (first, stored.nbytes) == (0, home.nbytes):
            flat = _bytes_of(home)[start : start + home.nbytes]
            self.flights[value, "device"] = store.read(stored.offset, flat)
            return
        flat = torch.frombuffer(bytearray(max(1, stored.nbytes)), dtype=torch.uint8)[: stored.nbytes]
        self.flights[value, "device"] = _Scattered(store.read(stored.offset, flat), flat, form, home)

    def wait(self, value: int, place: str) -> None:
        """Return when the copy of a value in this place can be read; one that failed raises a PlaceError."""
        flight = self.flights.get((value, place))
        if flight is not None:  # else it was there all the time
            flight.wait()
            del self.flights[value, place]
            moved = self.from_.get(value) if place == "device" else self.stored.get((value, place))
            if moved is not None and flight.seconds is not None:
                direction: Direction = "in" if place == "device" else "out"
                self.transfers.append(Transfer(moved.place, direction, moved.nbytes, flight.seconds))

    def free(self, value: int, place: str) -> None:
        """Forget a stored value; its room goes to another."""
        del self.stored[value, place]

    def end(self) -> None:
        """Let go of all values, after the last copy is done or given up; tensors must be alive until then."""
        for store in dict.fromkeys((*self.stores.values(), *(home.store for home in self.homes.values()))):
            store.settle()
        self.flights.clear()
        self.stored.clear()
        self.from_.clear()

    def close(self) -> None:
        """Let go of the stores."""
        for store in self.stores.values():
            store.close()

    def _room(self, number: int, place: Place, nbytes: int) -> int:
        """The offset of what an instruction copies there; at the end of the place where it is more than was planned."""
        planned = self.slots[place].offset[number], self.slots[place].room[number]
        offset, room = self.beyond.get((number, place), planned)
        if nbytes > room:
            offset = self.stores[place].nbytes
            self.stores[place].grow(offset + nbytes)
            self.beyond[number, place] = offset, nbytes
        return offset

    def _find(self, value: int) -> _Stored:
        """A value in the nearest place where it is complete."""
        there = [place for place in self.order if (value, place) in self.stored]
        complete = [place for place in there if (value, place) not in self.flights]
        return self.stored[value, (complete or there)[0]]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the tensor's storage."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def _span(tensor: torch.Tensor) -> int:
    """The elements from the tensor's first one to its last one."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no byte between its elements that is not its own."""
    return _span(tensor) == tensor.numel()
