"""A TARGET: the name of a built-in model, or `file.py:function`."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from lowtide import models, tree
from lowtide.errors import LowtideError, UsageError

SHAPE = "(step, model, optimizer, example)"


class Built(NamedTuple):
    """What a target stands for."""

    step: Callable[..., Any]
    model: torch.nn.Module
    optimizer: Any
    example: tuple[Any, ...]


def build(target: str, *, batch: int | None = None) -> Built:
    """Build a built-in model, or call the function of the user's file; with a batch of this many examples, if given."""
    file, colon, function = target.rpartition(":")
    if target.endswith(".py"):
        raise UsageError(
            f"{target} names no function.",
            hint=f"write {target}:make, where make() returns {SHAPE}.",
        )
    if not colon or not file.endswith(".py"):
        return Built(*models.build(target if batch is None else _sized(target, batch)))
    return _from_file(Path(file), function, batch)


def _sized(target: str, batch: int) -> str:
    """A built-in target with another batch."""
    name, _, text = target.partition(":")
    models.parse(target)  # raises where it is none
    options = [option for option in text.split(",") if option and not option.startswith("batch=")]
    return f"{name}:{','.join([*options, f'batch={batch}'])}"


def _from_file(path: Path, name: str, batch: int | None) -> Built:
    if not path.is_file():
        raise UsageError(
            f"there is no file {path}.", hint="write file.py:function, with the path from where you are now."
        )
    with _importable(path.parent), _blaming(path):
        function = getattr(_load(path), name, None)
        if not callable(function):
            raise UsageError(
                f"{path} has no function {name!r}.", hint=f"define {name}(), which returns {SHAPE}, at its top level."
            )
        if _needs_arguments(function):
            raise UsageError(
                f"{name} in {path} needs arguments.",
                hint=f"lowtide calls {name}() without any: give its parameters defaults.",
            )
        where = f"{name} in {path}"
        if batch is None:
            return _checked(function(), where)
        if "batch" in inspect.signature(function).parameters:
            return _checked(function(batch=batch), where)
        return _resized(_checked(function(), where), batch, where)


def _resized(built: Built, batch: int, where: str) -> Built:
    """The same with an example of so many rows: its own, over and over."""
    leaves, structure = tree.flatten(built.example)
    rows = {len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(rows) != 1:
        what = "no tensor" if not rows else f"tensors of {', '.join(map(str, sorted(rows)))} rows"
        raise UsageError(
            f"the example that {where} returned has {what}, so its batch can't be seen.",
            hint="give the function a parameter `batch`, and return an example of that many.",
        )
    order = torch.arange(batch) % rows.pop()
    sized = [leaf[order] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf for leaf in leaves]
    return built._replace(example=tuple(structure.build(sized)))


def _load(path: Path) -> ModuleType:
    """Import the file under its own name, or under another one where that is taken."""
    name = path.stem if path.stem not in sys.modules else f"lowtide_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let the file import its neighbours."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


@contextlib.contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Turn an exception of the user's file into an answer that names its line."""
    try:
        yield
    except LowtideError:
        raise
    except SyntaxError as error:
        raise UsageError(f"{_shown(error.filename, path)}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        line = f"{path}:{lines[-1]}" if lines else str(path)
        raise UsageError(
            f"{line}: {type(error).__name__}: {error}", hint=f"run the file by itself first: python {path}."
        ) from error


def _shown(filename: str | None, path: Path) -> str:
    """The file at fault as the user wrote it, if it is the one that he named."""
    return str(path) if filename is None or Path(filename).resolve() == path.resolve() else filename


def _needs_arguments(function: Callable[..., Any]) -> bool:
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(
        parameter.default is parameter.empty and parameter.kind not in fixed
        for parameter in inspect.signature(function).parameters.values()
    )


def _checked(made: Any, where: str) -> Built:
    """What the function returned, if it is what it must be."""
    hint = f"return {SHAPE}: step(model, optimizer, *example) is one training step."
    if not isinstance(made, tuple | list) or len(made) != 4:
        what = f"{len(made)} things" if isinstance(made, tuple | list) else f"a {type(made).__name__}"
        raise UsageError(f"{where} returned {what}, not {SHAPE}.", hint=hint)
    step, model, optimizer, example = made
    if not callable(step) or isinstance(step, torch.nn.Module):
        raise UsageError(f"the step that {where} returned is a {type(step).__name__}, not a function.", hint=hint)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"the model that {where} returned is a {type(model).__name__}.", hint=hint)
    if not isinstance(example, tuple):
        raise UsageError(
            f"the example that {where} returned is a {type(example).__name__}, not a tuple.",
            hint="return a tuple of the arguments after model and optimizer: (x, y), or (batch,).",
        )
    return Built(step, model, optimizer, example)
