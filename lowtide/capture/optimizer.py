"""The optimizer as data: its hyperparameters become inputs of the graph, its state exists before the first step."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide import private
from lowtide.capture.first_state import first_state
from lowtide.capture.origin import user_line
from lowtide.capture.recorder import Recorder
from lowtide.capture.stand_in import fake_like
from lowtide.captured import optimizers_of
from lowtide.errors import CaptureError, LowtideError
from lowtide.graph import Input
from lowtide.private import FakeTensorMode, state_maker

# What schedulers change between steps; every other option is a constant of the graph and checked at each call.
SCHEDULED = ("lr", "momentum", "betas", "weight_decay")


def refuse_unknown(optimizer: Any) -> None:
    """Refuse optimizers whose step is no fixed list of ops, and several that share a parameter."""
    owners: dict[int, int] = {}
    for number, one in enumerate(optimizers_of(optimizer)):
        _refuse_unknown(one)
        for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
            if owners.setdefault(id(parameter), number) != number:
                raise CaptureError(
                    f"a parameter of shape {tuple(parameter.shape)} belongs to two optimizers.",
                    hint="give each parameter to one optimizer.",
                )


@contextlib.contextmanager
def followed(optimizers: tuple[Any, ...], before: Callable[..., None]) -> Iterator[None]:
    """A context in which `before` is called before each update, and optimizers that nobody handed over are refused."""

    thread = threading.get_ident()  # others go on beside it

    def start(optimizer: Any, *_: Any) -> None:
        if threading.get_ident() != thread:
            return
        if not any(optimizer is one for one in optimizers):
            raise CaptureError(
                f"{user_line()}: the step calls a {type(optimizer).__name__} that it was not given.",
                hint="pass it: fit(step, model, optimizer, ...), or optimizer=(one, two); the step gets them as its "
                "second argument.",
            )
        before()

    hook = register_optimizer_step_pre_hook(start)
    try:
        yield
    finally:
        hook.remove()


def _refuse_unknown(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CaptureError(
            f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer.",
            hint="pass optimizer=None for a step that needs none, and a tuple where it needs several.",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CaptureError(
            "LBFGS runs the step a number of times that depends on the data.",
            hint="use an optimizer with a fixed update, such as SGD or AdamW; or lowtide.attach(model), with which it "
            "works.",
        )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("fused"):
            raise CaptureError(
                f"parameter group {number} has fused=True: one op that updates every parameter at once.",
                hint="leave fused at its default; lowtide runs the plain loop and frees each gradient early. Or "
                "lowtide.attach(model), which leaves the optimizer to your loop.",
            )
        if isinstance(group.get("lr"), torch.Tensor):
            raise CaptureError(
                f"parameter group {number} has a tensor as learning rate.", hint="give it as a Python float."
            )


def initial_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """The state that the optimizer would make for a parameter at its first step, made by its own code."""
    if isinstance(optimizer, torch.optim.SGD):
        if group["momentum"] == 0:
            return {}
        if group["dampening"] != 0:
            raise CaptureError(
                f"SGD with dampening {group['dampening']} treats its first step in another way than the others.",
                hint="take one step in eager PyTorch first, then capture.",
            )
        # SGD's first buffer is the gradient itself: -0.0 * momentum + gradient is that, to the bit.
        return {"momentum_buffer": torch.full_like(parameter, -0.0, requires_grad=False)}
    initialise = state_maker(optimizer)
    if initialise is None:
        return first_state(optimizer, group, parameter)
    lists = len(inspect.signature(initialise).parameters) - 1
    stand_in = parameter.detach().requires_grad_(parameter.requires_grad)
    stand_in.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand_as(parameter)
    kept = optimizer.state.get(stand_in)
    try:
        initialise({**group, "params": [stand_in]}, *([] for _ in range(lists)))
        return dict(optimizer.state[stand_in])
    finally:
        optimizer.state.pop(stand_in, None)
        assert kept is None


@contextlib.contextmanager
def as_inputs(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    recorder: Recorder,
    fake_mode: FakeTensorMode,
    first: int = 0,
) -> Iterator[tuple[list[Input], list[Input], list[tuple[torch.Tensor, str]]]]:
    """State and hyperparameters as inputs while the step is traced.

    Yields the inputs of the state, those of the hyperparameters, and what state is missing in the real optimizer.
    `first` is the number of its first group among those of all optimizers.
    """
    states: list[Input] = []
    hypers: list[Input] = []
    missing: list[tuple[torch.Tensor, str]] = []
    groups = [dict(group) for group in optimizer.param_groups]
    attributes = dict(optimizer.__dict__)
    real_state = optimizer.state
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                known = real_state.get(parameter)
                with fake_mode:
                    entries = {
                        key: fake_like(item, fake_mode) if isinstance(item, torch.Tensor) else item
                        for key, item in (known or initial_state(optimizer, group, parameter)).items()
                    }
                if not parameter.requires_grad and parameter.grad is None and not known:
                    continue
                if entries:
                    state[parameter] = entries
                for key, item in entries.items():
                    if isinstance(item, torch.Tensor):
                        name = names[id(parameter)]
                        states.append(Input(recorder.add_input(item, f"{name} {key}", "state"), (name, key)))
                        if not known:
                            missing.append((parameter, key))
        optimizer.state = state
        for number, group in enumerate(optimizer.param_groups):
            if group.get("foreach", False) is None:
                group["foreach"] = False
            if group.get("fused", False) is None:
                group["fused"] = False
            for key in SCHEDULED:
                if key in group:
                    group[key] = _scalars(group[key], (first + number, key), recorder, hypers)
        given = [dict(group) for group in optimizer.param_groups]
        plain = {parameter: _plain(entries) for parameter, entries in state.items()}
        yield states, hypers, missing
        _refuse_changes(optimizer, given)
        for parameter, entries in state.items():
            if _plain(entries) != plain.get(parameter, {}):
                raise CaptureError(
                    f"{type(optimizer).__name__} counts with Python numbers in its state, which would be the same at "
                    "every step.",
                    hint="keep them as tensors, as torch's own optimizers do: state['step'] = torch.tensor(0.0); or "
                    "lowtide.attach(model), which leaves the optimizer to your loop.",
                )
    finally:
        optimizer.__dict__.clear()
        optimizer.__dict__.update(attributes)
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(options)


def _plain(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in entries.items() if not isinstance(item, torch.Tensor)}


def _refuse_changes(optimizer: torch.optim.Optimizer, given: list[dict[str, Any]]) -> None:
    """Refuse a step that changes the options of an optimizer."""
    for number, (group, before) in enumerate(zip(optimizer.param_groups, given, strict=True)):
        for key in {**group, **before}:
            if group.get(key) is not before.get(key):
                raise CaptureError(
                    f"the step changes {key!r} of parameter group {number}, as a scheduler does.",
                    hint="call scheduler.step() after the step, not inside it.",
                )


def _scalars(option: Any, path: tuple[str | int, ...], recorder: Recorder, hypers: list[Input]) -> Any:
    if isinstance(option, tuple):
        return tuple(_scalars(item, (*path, place), recorder, hypers) for place, item in enumerate(option))
    if isinstance(option, bool) or not isinstance(option, (int, float)):
        return option
    value, scalar = recorder.add_scalar_input(".".join(map(str, path[1:])), float(option), path)
    hypers.append(Input(value, path))
    return scalar


def plain_loop_note(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """What to tell a user who left it to the optimizer to choose its implementation."""
    left = [key for key in ("foreach", "fused") if any(group.get(key, 0) is None for group in optimizer.param_groups)]
    if not left:
        return ()
    return (f"{type(optimizer).__name__} was left to choose {' or '.join(left)}: it runs as the plain loop.",)


def constant_options(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """For each parameter group the options that capture makes constants."""
    return tuple(
        {key: item for key, item in group.items() if key != "params" and key not in SCHEDULED}
        for group in optimizer.param_groups
    )


MadeState = Callable[[torch.Tensor, dict[str, Any]], None]  # told a parameter and its state, as soon as that is made


def make_state(
    optimizers: tuple[Any, ...], needed: list[tuple[torch.Tensor, str]], made: MadeState = lambda *_: None
) -> None:
    """Make the real state of these parameters where it is still missing: of all of them, or of none."""
    for optimizer in optimizers:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        _make_state(optimizer, [parameter for parameter, _ in needed if id(parameter) in own], made)


def _make_state(optimizer: torch.optim.Optimizer, needed: list[torch.Tensor], told: MadeState) -> None:
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    missing = [one for one in dict.fromkeys(needed) if not optimizer.state.get(one)]
    try:
        made = []
        for parameter in missing:
            made.append(initial_state(optimizer, groups[id(parameter)], parameter))
            told(parameter, made[-1])
    except (RuntimeError, MemoryError) as error:
        nbytes = sum(parameter.nbytes for parameter in missing)
        raise LowtideError(
            f"the state of {type(optimizer).__name__} for {len(missing)} parameters of {nbytes:,} bytes can't be made: "
            f"{str(error).splitlines()[0]} Nothing was changed.",
            hint="give the process more memory, or take an optimizer with less state.",
        ) from error
    optimizer.state.update(zip(missing, made, strict=True))


def state_bytes(optimizer: Any) -> int | None:
    """The bytes of the state that these optimizers have or will make at their first step; None: that is not known."""
    nbytes, fake_mode = 0, private.fake_mode()
    for one in optimizers_of(optimizer):
        one = innermost(one)
        for group in one.param_groups:
            for parameter in (parameter for parameter in group["params"] if parameter.requires_grad):
                entries = one.state.get(parameter)
                try:
                    with fake_mode:
                        entries = entries or initial_state(one, group, fake_like(parameter, fake_mode))
                except CaptureError:
                    return None
                nbytes += sum(item.nbytes for item in entries.values() if isinstance(item, torch.Tensor))
    return nbytes


def innermost(optimizer: Any) -> Any:
    """The optimizer inside others that only pass calls on, as Accelerate's and Lightning's do."""
    while isinstance(inside := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inside
    return optimizer
