"""What a device is: one record of functions for each, and the only place that knows one by its name.

Whoever runs, measures or meters asks `device.of(graph.device)`; a new device is a file beside `cpu.py`, and a line in
`DEVICES`.
"""

from __future__ import annotations

import torch

from lowtide.device.cpu import CPU
from lowtide.device.record import Device, Flight, Homes, Store
from lowtide.errors import UsageError
from lowtide.graph import Place

__all__ = ["CPU", "Device", "Flight", "Homes", "Store", "known", "of", "refuse_place"]

DEVICES = {"cpu": CPU, "meta": CPU}  # a model without numbers is planned for the CPU


def of(name: str) -> Device:
    """The device that a graph or a tensor names so; one that lowtide does not know is refused."""
    if not known(name):
        raise UsageError(
            f"lowtide does not know the device {name!r}: it plans, meters and runs on {_names()}.",
            hint='model.to("cpu") and batches there too, or train on that device without lowtide.',
        )
    return DEVICES[torch.device(name).type]


def known(name: str) -> bool:
    """Whether lowtide knows a device."""
    return torch.device(name).type in DEVICES


def refuse_place(where: Device, place: Place) -> None:
    """Raise where values can't be offloaded from this device to a place."""
    if place not in where.stores:
        there = " or ".join(f'"{name}"' for name in where.stores)
        why = "the memory of the host is the device itself" if place == "host" else "there is no such place"
        raise UsageError(f'values can\'t be offloaded to "{place}" from the {where.name}: {why}.', hint=f"use {there}.")


def _names() -> str:
    return " and ".join(dict.fromkeys(device.name for device in DEVICES.values()))
