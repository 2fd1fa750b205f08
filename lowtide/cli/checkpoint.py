"""A checkpoint: all that the rest of a training run depends on, in a file that is there as a whole or not at all."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any

import torch

from lowtide.errors import FileError, UsageError
from lowtide.files.disk import advice, beside, settle

FORMAT = "lowtide checkpoint 1"
PICKLED = "a checkpoint holds tensors, numbers and texts, in lists and dicts: keep nothing else in the state."
RESUME = "--resume takes what --save wrote."


@dataclass(frozen=True)
class Checkpoint:
    """A training run between two steps."""

    target: str
    data: str | None  # name of the data; None: the example batch again and again
    seed: int  # of the data, and of the generator before the first step
    losses: Sequence[float | None]  # of each step so far
    model: Mapping[str, Any]  # its state_dict
    buffers: Mapping[str, torch.Tensor]  # those that a state_dict leaves out
    gradients: Mapping[str, torch.Tensor]  # those that the step leaves behind
    optimizer: Mapping[str, Any] | None  # its state_dict
    generator: torch.Tensor  # state of torch's own, on the CPU
    made_with: str  # what the bits depend on

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return len(self.losses)

    def check(self, path: Path, *, target: str, data: str | None, seed: int | None, steps: int) -> None:
        """Raise where these options ask for another run than this one; what is None was not asked for."""
        if PurePath(target).name != PurePath(self.target).name:
            raise UsageError(f"{path} is a run of {self.target}, not of {target}.", hint=f"pass {self.target}.")
        if data is not None and data != self.data:
            on = "the example batch" if self.data is None else self.data
            raise UsageError(f"{path} is a run on {on}, not on {data}.", hint="leave --data out to go on with it.")
        if seed is not None and seed != self.seed:
            raise UsageError(f"{path} is a run with seed {self.seed}, not {seed}.", hint="leave --seed out.")
        if steps <= self.step:
            raise UsageError(
                f"{path} has taken {self.step} steps already.",
                hint=f"--steps counts them too: pass more than {self.step}.",
            )

    def restore(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Put everything where it was."""
        try:
            model.load_state_dict(self.model)
            for name, buffer in self.buffers.items():
                module, _, key = name.rpartition(".")
                owner = model.get_submodule(module)
                if key not in dict(owner.named_buffers(recurse=False)):
                    raise KeyError(f"{name} is no buffer")
                setattr(owner, key, buffer.clone())
            for name, gradient in self.gradients.items():
                model.get_parameter(name).grad = gradient.clone()
            if self.optimizer is not None:
                optimizer.load_state_dict(self.optimizer)
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                for number, parameter in enumerate(parameters):
                    if number in self.optimizer["state"]:  # load_state_dict may have rounded it
                        optimizer.state[parameter].update(_copied(self.optimizer["state"][number]))
            torch.set_rng_state(self.generator)
        except (RuntimeError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(
                f"the checkpoint does not fit {self.target}: {reason}", hint="was the model changed since?"
            ) from error

    def write(self, path: Path) -> None:
        """Replace the file by this checkpoint, once that is complete, on the disk and proven to be readable."""
        payload = {"format": FORMAT, "step": self.step}
        payload |= {field.name: getattr(self, field.name) for field in fields(self)}
        partial = _partial(path)
        try:
            with open(partial, "xb") as file:
                try:
                    torch.save(payload, file)
                    file.flush()
                    os.fsync(file.fileno())
                    torch.load(partial, weights_only=True, mmap=True)
                    os.replace(partial, path)
                except BaseException:
                    partial.unlink(missing_ok=True)
                    raise
            settle(path.parent)
        except FileExistsError as error:
            raise FileError(f"another run is saving to {path}.", hint="give each run a file of its own.") from error
        except (OSError, RuntimeError, TypeError, AttributeError, pickle.PickleError) as error:
            failed = _of_the_system(error)
            if failed is None:
                raise FileError(f"cannot save {path}: {error}", hint=PICKLED) from error
            raise FileError(f"cannot save {path}: {failed.strerror or failed}", hint=advice(failed)) from error


def take(
    target: str,
    data: str | None,
    seed: int,
    losses: Sequence[float | None],
    model: torch.nn.Module,
    optimizer: Any,
) -> Checkpoint:
    """The run as it is now, between two steps; the tensors are not copied."""
    state = model.state_dict()
    return Checkpoint(
        target=target,
        data=data,
        seed=seed,
        losses=list(losses),
        model=state,
        buffers={name: buffer for name, buffer in model.named_buffers() if name not in state},
        gradients={name: found.grad for name, found in model.named_parameters() if found.grad is not None},
        optimizer=None if optimizer is None else optimizer.state_dict(),
        generator=torch.get_rng_state(),
        made_with=made_with(),
    )


def made_with() -> str:
    """What the bits of a run depend on, besides the run itself."""
    return f"lowtide {version('lowtide')}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def read(path: Path) -> Checkpoint:
    """Read what `write` wrote, or say why this file is not it."""
    try:
        damaged = _damaged(path)  # torch itself does not look at the checksums
        # Mapped, a tensor that says that it is larger than it was saved meets the end of the file, not of the memory.
        payload = None if damaged else torch.load(path, weights_only=True, mmap=True)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}.", hint=RESUME) from error
    except Exception as error:  # readers of archives and pickles raise whatever the bytes lead them to
        raise UsageError(f"{path} is damaged, or no checkpoint.", hint=RESUME) from error
    if damaged:
        raise UsageError(f"{path} is damaged: {damaged} does not match its checksum.", hint="take an older one.")
    if not isinstance(payload, dict) or payload.get("format") != FORMAT or not FIELDS.keys() <= payload.keys():
        raise UsageError(f"{path} is no checkpoint of this lowtide.", hint=RESUME)
    for name, fits in FIELDS.items():
        if not fits(payload[name]):
            raise UsageError(f"{path} is no checkpoint of this lowtide: its {name} is something else.", hint=RESUME)
    return Checkpoint(**{name: payload[name] for name in FIELDS})


def _damaged(path: Path) -> str | None:
    """The first member of an archive that is not as it was written."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                return member.filename  # torch stores its members as they are; one that is packed may be endless
        return archive.testzip()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter in memory of its own: what was read is mapped from the file."""
    return {key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in state.items()}


def _named(data: Any) -> bool:
    return isinstance(data, Mapping) and all(type(name) is str for name in data)


def _tensors(data: Any) -> bool:
    return _named(data) and all(isinstance(item, torch.Tensor) for item in data.values())


def _optimizer(data: Any) -> bool:
    return data is None or (
        _named(data)
        and isinstance(data.get("state"), Mapping)
        and all(isinstance(state, Mapping) for state in data["state"].values())
        and isinstance(data.get("param_groups"), list)
        and all(_named(group) for group in data["param_groups"])
    )


FIELDS: Mapping[str, Callable[[Any], bool]] = {  # what each field of a file must be
    "target": lambda data: type(data) is str,
    "data": lambda data: data is None or type(data) is str,
    "seed": lambda data: type(data) is int and -(2**63) <= data < 2**64,
    "losses": lambda data: type(data) is list and all(loss is None or type(loss) is float for loss in data),
    "model": _named,
    "buffers": _tensors,
    "gradients": _tensors,
    "optimizer": _optimizer,
    "generator": lambda data: isinstance(data, torch.Tensor) and data.dtype == torch.uint8 and data.dim() == 1,
    "made_with": lambda data: type(data) is str,
}


def make_room(path: Path) -> None:
    """Make the folder of a checkpoint, and remove what a killed run left half written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _partial(path).unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"cannot save {path}: {error.strerror or error}.", hint=advice(error)) from error


def _of_the_system(error: BaseException | None) -> OSError | None:
    """The failed write behind an error: torch's archives answer it with one of their own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _partial(path: Path) -> Path:
    return beside(path, "partial")
