"""Where an op comes from: the phase of the step, the module, and the user's own line."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide import private
from lowtide.graph import Phase

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODELS = os.path.join(_OURS, "models") + os.sep


@cache
def _shown(filename: str) -> str | None:
    """The file as a person names it, or None where the code is not the user's."""
    if filename.startswith("<") or filename.startswith(_TORCH):
        return None
    if filename.startswith(_OURS) and not filename.startswith(_MODELS):
        return None
    if filename.startswith(_OURS):  # wherever people are, it is the same name
        return os.path.join(*filename.split(os.sep)[-2:])
    relative = os.path.relpath(filename)
    return relative if not relative.startswith("..") else os.path.join(*filename.split(os.sep)[-2:])


def user_line(frame: FrameType | None = None) -> str:
    """The innermost line of the call stack that is the user's: `train.py:42`."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        shown = _shown(frame.f_code.co_filename)
        if shown is not None:
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of_error(error: BaseException) -> str:
    """The innermost user line of an exception's traceback."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        shown = _shown(trace.tb_frame.f_code.co_filename)
        if shown is not None:
            found = f"{shown}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


class Origins:
    """Follows the step while it is traced; a backward op gets the origin of the forward op that it differentiates."""

    def __init__(self, model: torch.nn.Module, optimizers: tuple[Any, ...]) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.optimizers = optimizers
        self.stack: list[str] = []
        self.updating = False
        self.by_sequence: dict[int, tuple[str, str]] = {}
        self._outer = private.current_node()  # of a backward in which the step is traced

    def node(self) -> Any:
        """The node of autograd that is running now, of the step's own backward; None in its forward."""
        node = private.current_node()
        return None if node is self._outer else node

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Hooks on modules and on the optimizer, gone again afterwards."""

        thread = threading.get_ident()  # others go on beside it

        def enter(module: torch.nn.Module, _: Any) -> None:
            if threading.get_ident() == thread:
                self.stack.append(self.names.get(id(module), self.stack[-1] if self.stack else ""))

        def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
            if threading.get_ident() == thread:
                self.stack.pop()

        def start(optimizer: Any, *_: Any) -> None:
            self.updating = any(optimizer is one for one in self.optimizers)

        def stop(*_: Any) -> None:
            self.updating = False

        hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        hooks += [register_optimizer_step_pre_hook(start), register_optimizer_step_post_hook(stop)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def here(self) -> tuple[Phase, str, str]:
        """Phase, module path and source line of the op that is running now."""
        node = self.node()
        if node is not None:
            module, source = self.by_sequence.get(private.sequence_number(node), ("", ""))
            return "backward", module, source or user_line()
        module = self.stack[-1] if self.stack else ""
        source = user_line()
        if self.updating:
            return "update", module, source
        if torch.is_grad_enabled():
            self.by_sequence.setdefault(private.next_sequence_number() - 1, (module, source))
        return "forward", module, source
