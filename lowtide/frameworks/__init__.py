"""Callbacks for the loops of frameworks, each in a file that is imported only when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lowtide.errors import UsageError

CALLBACKS = {  # the name of a callback, where it is, and what must be installed
    "TrainerCallback": ("lowtide.frameworks.hugging_face", "transformers[torch]"),
    "LightningCallback": ("lowtide.frameworks.lightning", "lightning"),
}


def callback(name: str) -> Any:
    """The class of this name; a UsageError where its framework is not installed."""
    home, needs = CALLBACKS[name]
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"lowtide.{name} needs {error.name}, which is not installed.", hint=f"pip install '{needs}'."
        ) from error
