"""The built-in training steps that the command line can name."""

from lowtide.models.catalog import Entry, Target, build, catalog, parse
from lowtide.models.options import Kind, Option
from lowtide.models.small import SMALL
from lowtide.models.steps import Step

__all__ = ["SMALL", "Entry", "Kind", "Option", "Step", "Target", "build", "catalog", "parse"]
