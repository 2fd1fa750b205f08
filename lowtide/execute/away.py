"""What the steps of a program have in other places: values that are copied there, and inputs that live there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lowtide import device as devices
from lowtide.costs import Transfer
from lowtide.device import Device, Homes, Store
from lowtide.errors import PlaceError
from lowtide.execute.places import Places
from lowtide.execute.slots import slots
from lowtide.graph import Graph, Place
from lowtide.program import Program

SMALL = 2**20  # bytes: what is less does not move by itself
REMEMBERED = 3  # steps whose copies are remembered


class Away:
    """The stores of one program, which are opened at its first step and kept between steps."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        nbytes: Sequence[int],
        device: Device,
        folder: str | os.PathLike[str] | None,
    ) -> None:
        self._graph, self._device = graph, device
        self._folder = folder  # for the file of what is copied to the disk
        self._slots = slots(graph, program, nbytes)
        self._inputs = [(number, item) for number, item in enumerate(graph.inputs) if item.home != "device"]
        for place in {*self._slots, *(item.home for _, item in self._inputs)}:
            devices.refuse_place(device, place)
        self._homes: dict[Place, Homes] = {}  # where inputs live that are elsewhere between steps
        self._settled: dict[Place, list[Any]] = {}  # what moved there before the step that will need it
        self._places: list[Places] = []  # that no step uses now
        self.transfers: list[list[Transfer]] = []  # of the last steps

    @property
    def staging(self) -> int:
        """The bytes of the device's memory that copies to other places and back go through; 0 without copies."""
        return self._device.staging if self._slots or self._inputs else 0

    @property
    def resident(self) -> int:
        """The bytes of the device's memory that hold what is elsewhere, too, beside any budget: pages of files."""
        stores = [store for places in self._places for store in places.stores.values()]
        return sum(store.resident() for store in stores) + sum(home.resident() for home in self._homes.values())

    def settle(self, number: int, tensor: Any) -> None:
        """Let an input live where it belongs as soon as it is made; small ones wait for the others."""
        place = self._graph.inputs[number].home
        if place == "device" or tensor.nbytes < SMALL:
            return
        home, settled = self._home(place), self._settled.setdefault(place, [])
        try:
            home.locate([tensor])
        except PlaceError:  # none of what was made is kept
            home.forget(settled)
            settled.clear()
            raise
        settled.append(tensor)

    def begin(self, stack: ExitStack, inputs: list[Any]) -> Places:
        """The places of one step, until the stack ends."""
        self._settled.clear()
        homes = self._locate(inputs)
        found = stack.enter_context(self._borrow())
        found.begin(homes)
        return found

    def _locate(self, inputs: list[Any]) -> list[tuple[int, int, Place, Any, Store, int]]:
        """Where the inputs are that live elsewhere; those that are on the device still move there."""
        found = []
        for place in dict.fromkeys(item.home for _, item in self._inputs):
            mine = [(inputs[number], item.value) for number, item in self._inputs if item.home == place]
            located = self._home(place).locate([tensor for tensor, _ in mine])
            for (tensor, value), (store, offset) in zip(mine, located, strict=True):
                found.append((value, self._graph.values[value].storage, place, tensor, store, offset))
        return found

    def _home(self, place: Place) -> Homes:
        if place not in self._homes:
            self._homes[place] = self._device.homes[place](self._folder)
        return self._homes[place]

    @contextmanager
    def _borrow(self) -> Iterator[Places]:
        """The stores of what is copied away, for one step; they are opened once, and room is taken for all of it."""
        found = self._places.pop() if self._places else None
        if found is None or found.process != os.getpid():
            found = Places(self._device, self._slots, self._folder)
        try:
            yield found
            self.transfers = [*self.transfers, found.transfers[:]][-REMEMBERED:]
        finally:
            found.end()
            self._places.append(found)
