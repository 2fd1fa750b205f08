"""Real data for the built-in models: what there is, how it gets here, and the batch of each training step."""

from lowtide.data.catalog import Entry, catalog
from lowtide.data.fetch import DataUnavailable
from lowtide.data.sources import Source, source
from lowtide.data.store import Stored, install

__all__ = ["DataUnavailable", "Entry", "Source", "Stored", "catalog", "install", "source"]
