"""Writes the steps of tests/pure/stored anew, and the table of their plans' digests: `python tests/store.py`.

The steps are captured and their costs estimated, both by torch; the tests that plan them need no torch. With
`--digests` only the table is written: after a change that is meant to give other plans.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "pure" / "stored"
TARGETS = {
    **{f"{name}-small": None for name in ("mlp", "gpt", "resnet", "unet", "lstm-cell", "densenet121", "bert")},
    "resnet-50": "resnet:batch=32,size=224",
    "gpt-12x384": "gpt:layers=12,width=384",
}


def store(name: str, target: str) -> None:
    """Capture a step, estimate its costs with its optional ops, and write both into one file."""
    from lowtide import models
    from lowtide.capture import capture
    from lowtide.measure import roofline
    from lowtide.plan import with_narrow

    graph = capture(*models.build(target)).graph
    costs = roofline(with_narrow(graph))
    scratch = FOLDER / "scratch"
    graph.save(scratch, force=True)
    pairs = {op: pairs for op, pairs in enumerate(costs.in_place) if pairs}
    content = {
        "target": target,
        "graph": scratch.read_text(),
        "seconds": [float(f"{seconds:.6g}") for seconds in costs.seconds],
        "in_place": pairs,
    }
    scratch.unlink()
    packed = gzip.compress(json.dumps(content).encode(), mtime=0)
    (FOLDER / f"{name}.json.gz").write_bytes(packed)
    print(f"{name}: {len(graph.ops)} ops, {len(packed):,} bytes", file=sys.stderr)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    if "--digests" not in sys.argv:
        from lowtide.models import SMALL

        for name, target in TARGETS.items():
            store(name, target or SMALL[name.removesuffix("-small")])
    sys.path.insert(0, str(Path(__file__).parent / "pure"))
    from test_digests import write_table

    write_table(sorted(TARGETS))
