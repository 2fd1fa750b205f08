"""Graph + Costs + budget -> Program; each way to arrange a step is a file, and none of them knows torch."""

from __future__ import annotations

from lowtide.plan.keep import as_eager, keep_everything

__all__ = ["as_eager", "keep_everything"]
