"""Lightning's Trainer: the module that it trains, or the net in it, is attached while it trains."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import nn

from lowtide.attach import MARK, Attached, attach, detach
from lowtide.errors import UsageError


class LightningCallback(Callback):
    """Trains within a budget: `Trainer(callbacks=[lowtide.LightningCallback(budget="2GiB")])`.

    What runs by a plan is the forward of the one part of the module that has all parameters, or of the module itself;
    `module` names another part: "encoder.net". The budget counts the optimizers' state, too. Other options are those of
    `lowtide.attach`.
    """

    def __init__(self, budget: int | str | None = None, *, module: str | None = None, **options: Any) -> None:
        self.attached: Attached | None = None  # what runs the model, from the beginning of a training on
        self._budget, self._module, self._options = budget, module, options

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the net."""
        net = _net(pl_module, self._module)
        if MARK in net.__dict__:
            detach(net)
        self.attached = attach(net, self._budget, tuple(trainer.optimizers), **self._options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Raise where nothing has run by a plan: the budget would be kept by nobody."""
        if self.attached is not None and not self.attached.trains:
            name = next((name for name, one in pl_module.named_modules() if one is self.attached.model), "")
            raise UsageError(
                f"training_step did not call the forward of {name or 'the module'} with gradients on: nothing was "
                "planned.",
                hint='name the part that it calls: lowtide.LightningCallback(budget=..., module="net").',
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the net be as it was."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same, where the training failed."""
        self._end()

    def _end(self) -> None:
        if self.attached is not None and MARK in self.attached.model.__dict__:
            detach(self.attached.model)


def _net(module: nn.Module, name: str | None) -> nn.Module:
    """The part of a LightningModule whose forward is to be planned."""
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError:
            known = ", ".join(name for name, _ in module.named_children())
            raise UsageError(f"the module has no part {name!r}.", hint=f"its parts: {known}.") from None
    everything = {id(parameter) for parameter in module.parameters()}
    parts = [child for child in module.children() if {id(one) for one in child.parameters()} == everything]
    return parts[0] if len(parts) == 1 else module
