"""Parameters with 16 bits an element between their uses, rounded by chance after each update.

What differs: a weight is off by at most one step of its dtype after each update (2**-10 of its size in float16, 2**-7
in bfloat16), and by nothing on average. Products are of floats, as before.
"""

from __future__ import annotations

from lowtide.errors import UsageError
from lowtide.graph import Graph
from lowtide.rewrite.forms import Layout, candidates, in_parts, with_values
from lowtide.rewrites import Setting

DTYPES = ("float16", "bfloat16")  # the first one where nothing is said


def weights16(graph: Graph, setting: Setting) -> Graph:
    """The graph whose parameters are stored with 16 bits an element."""
    dtype = DTYPES[0] if setting is None else str(setting)
    if dtype not in DTYPES:
        raise UsageError(f"weights16 has no setting {setting!r}.", hint=f"there are {', '.join(DTYPES)}.")
    narrowed = with_values(graph, "parameter", lambda _: dtype)
    chosen = candidates(narrowed, "parameter")
    return in_parts(narrowed, [(item, Layout(dtype)) for item in chosen]) if chosen else narrowed
