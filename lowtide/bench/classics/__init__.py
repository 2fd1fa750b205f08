"""What others have published, and what we claim against it: each claim by name, with how to show it.

Each runs in a process of its own (`python -m lowtide.bench.classics NAME [small]`), which gives its memory back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lowtide.bench.classics import chain, loops, residual, resnet
from lowtide.bench.classics.claim import Claim, Figure, Found

__all__ = ["CLAIMS", "Claim", "Figure", "Found", "apart"]

CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for claim in (
        Claim("resnet1000-plan", "1000 layers, batch 32, 224x224: plans on roofline costs", resnet.deep_plan),
        Claim("resnet1000-step", "the same net, executed and metered (many minutes)", resnet.deep_step),
        Claim("resnet1000-equal", "the same net at batch 2, against eager, bit for bit", resnet.deep_equal),
        Claim("resnet1000-small", "the same net at batch 4, 64x64, raced against eager", resnet.deep_small),
        Claim("resnet50", "ResNet-50, batch 32, 224x224, raced against eager", resnet.fifty),
        Claim("sharing", "ResNet-50 without recomputation, against nothing shared", resnet.sharing),
        Claim("lstm-loop", "LSTM cell, 1000 time steps, with 5% and 2% of the plain loop's memory", loops.lstm_loop),
        Claim(
            "lstm-4x1024", "four LSTM layers of 1024, batch 64: 1000 time steps planned, 128 executed", loops.deep_lstm
        ),
        Claim("residual-rnn", "110 layers of a residual RNN in the memory of 9", residual.residual),
        Claim("tanh", "chains of 100 and 1000 nodes of 1 MB in 20 and 30 MB", chain.tanh),
        Claim("tanh-lengths", "memory against length, from 10 to 10,000 nodes", chain.lengths),
    )
}


def apart(name: str, *, small: bool = False) -> dict[str, Any]:
    """What a process of its own finds for a claim: figures and data, or why it failed."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "lowtide.bench.classics", name, *(["small"] if small else [])]
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = ended.stdout.splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (ValueError, IndexError):
        talked = ended.stderr.strip().splitlines() or [f"the process ended with code {ended.returncode}"]
        return {"failure": talked[-1]}
    return found
