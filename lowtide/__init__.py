"""lowtide trains a PyTorch model inside the memory you have, with the same results to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lowtide.private  # noqa: F401 - first, for it refuses a torch that lowtide can't use
from lowtide.allocator import meter
from lowtide.attach import Attached, attach, detach
from lowtide.capture import capture
from lowtide.captured import Captured
from lowtide.check import check
from lowtide.costs import Costs
from lowtide.errors import (
    BatchError,
    BudgetError,
    CaptureError,
    FileError,
    LowtideError,
    LowtideWarning,
    ProgramError,
    RankError,
    StepError,
    UsageError,
    VerifyError,
    VersionError,
)
from lowtide.execute import Runner, execute
from lowtide.fit import Fitted, fit
from lowtide.frameworks import CALLBACKS, callback
from lowtide.graph import Graph
from lowtide.measure import measure, roofline
from lowtide.plan import as_eager, keep_everything, plan
from lowtide.program import Copy, Free, Plan, Program, Run, Wait
from lowtide.recompute import recompute
from lowtide.scan import ScanPlan, scan, scan_plan
from lowtide.simulate import Simulation, simulate
from lowtide.wrap import Wrapped, wrap

if TYPE_CHECKING:
    from lowtide.frameworks.hugging_face import TrainerCallback
    from lowtide.frameworks.lightning import LightningCallback


def __getattr__(name: str) -> Any:
    """Callbacks of frameworks that are imported only when they are used."""
    if name in CALLBACKS:
        return callback(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Attached",
    "BatchError",
    "BudgetError",
    "Captured",
    "CaptureError",
    "Copy",
    "Costs",
    "FileError",
    "Fitted",
    "Free",
    "Graph",
    "LightningCallback",
    "LowtideError",
    "LowtideWarning",
    "Plan",
    "Program",
    "ProgramError",
    "RankError",
    "Run",
    "Runner",
    "ScanPlan",
    "Simulation",
    "StepError",
    "TrainerCallback",
    "UsageError",
    "VersionError",
    "VerifyError",
    "Wait",
    "Wrapped",
    "as_eager",
    "attach",
    "capture",
    "check",
    "detach",
    "execute",
    "fit",
    "keep_everything",
    "measure",
    "meter",
    "plan",
    "recompute",
    "roofline",
    "scan",
    "scan_plan",
    "simulate",
    "wrap",
]
