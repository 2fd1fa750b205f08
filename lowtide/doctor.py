"""What this machine has and lacks, and what that means for lowtide."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

import torch

from lowtide import allocator, report
from lowtide import device as devices
from lowtide.budget import allowance, free_memory
from lowtide.costs import Lane
from lowtide.device.disk import choose_folder
from lowtide.device.mounts import file_system
from lowtide.errors import LowtideError
from lowtide.files.cache import LIMIT, cache_folder
from lowtide.measure.lanes import measure_lanes
from lowtide.native import COMPILERS, INSTALL
from lowtide.plan import exact
from lowtide.plan.problem import library as search_library

Verdict = Literal["good", "worse", "missing"]
PROBE_SECONDS = 60  # that a child process may take, import of torch included
PROBES = {  # what a step may call, tried in a child: a processor may announce what it does not have
    "fp32 matrix products": "a = torch.ones(64, 64); a @ a",
    "bf16 matrix products": "a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a",
    "fp16 matrix products": "a = torch.ones(64, 64, dtype=torch.float16); a @ a",
    "bf16 convolutions": "a = torch.ones(16, 16, 8, 8, dtype=torch.bfloat16); torch.conv2d(a, a)",
}
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")
SLOW = 200e6  # bytes a second: a disk below this is seldom quicker than to compute again


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    means: str = ""  # for somebody who uses lowtide; empty where all is well
    hint: str = ""  # what to do about it


def examine(tell: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """Look at everything, the quick things first."""
    for look in (_system, _versions, _compiler, _limits, _memory, _cache):
        tell(f"looking at {look.__name__.removeprefix('_')}")
        yield from look()
    tell("trying instruction sets")
    yield from _processor()
    tell("measuring the disk")
    yield from _disk()


def healthy(findings: list[Finding]) -> bool:
    """Whether lowtide works here."""
    return all(finding.verdict != "missing" for finding in findings)


def to_json(findings: list[Finding]) -> dict[str, Any]:
    """All of it as plain data."""
    return {"lowtide": "doctor", "version": 1, "healthy": healthy(findings), "findings": list(map(asdict, findings))}


def _system() -> Iterator[Finding]:
    fine = sys.platform == "linux"
    yield Finding(
        "system",
        "good" if fine else "worse",
        f"{platform.system()} {platform.release()}, {platform.machine()}",
        "" if fine else "lowtide is tried on Linux only; the meter, the arena and offload may not work.",
    )
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    crowded = "more threads than cores: steps take longer" if threads > cores else ""
    yield Finding("threads", "worse" if crowded else "good", f"{threads} of torch, {cores} cores", crowded)


def _versions() -> Iterator[Finding]:
    yield Finding("Python", "good", platform.python_version())
    found = torch.__version__
    yield Finding("torch", "good", found)  # lowtide refuses others when it is imported
    for name in ("numpy", "scipy", "ortools"):
        try:
            yield Finding(name, "good", version(name))
        except PackageNotFoundError:
            wanted = next((need for need in requires("lowtide") or () if need.startswith(name)), name)
            yield Finding(name, "missing", "not installed", "nothing can be planned.", f"pip install '{wanted}'")
    cuda = torch.cuda.is_available()
    yield Finding(
        "accelerators",
        "good",
        torch.cuda.get_device_name(0) if cuda else "none",
        "lowtide plans and meters the CPU only for now; steps on a GPU are refused." if cuda else "",
    )


def _compiler() -> Iterator[Finding]:
    named = os.environ.get("CXX", "")
    path = shutil.which(named.split()[0]) if named else next(filter(None, map(shutil.which, COMPILERS)), None)
    built = {
        "the allocator": allocator.available(),
        "the search": search_library() is not None,
        "the exact solver": exact.library() is not None,
    }
    lacking = [name for name, there in built.items() if not there]
    if path is None:
        words = f"none of {', '.join(COMPILERS)}" if not named else f"$CXX is {named!r}, which is not there"
        means = (
            "compiled parts from before are used."
            if not lacking
            else f"without {', '.join(lacking)}: plans are worse, "
        )
        means += "" if not lacking else "nothing is metered, and there is no arena."
        yield Finding("compiler", "worse", words, means, INSTALL)
        return
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=PROBE_SECONDS)
    first = (done.stdout or done.stderr).splitlines()
    found = f"{path}: {first[0] if first else 'says no version'}"
    if lacking:
        means = f"{', '.join(lacking)} can't be compiled with it: plans are worse, nothing is metered."
        yield Finding("compiler", "worse", found, means, INSTALL)
    else:
        yield Finding("compiler", "good", found)


def _limits() -> Iterator[Finding]:
    limits = {"ulimit -v": resource.RLIMIT_AS, "ulimit -d": resource.RLIMIT_DATA, "ulimit -l": resource.RLIMIT_MEMLOCK}
    set_ = {name: resource.getrlimit(kind)[0] for name, kind in limits.items()}
    shown = [f"{name} {report.show_bytes(most)}" for name, most in set_.items() if most != resource.RLIM_INFINITY]
    left = allowance()
    if left is None:
        yield Finding("limits", "good", ", ".join(shown) or "none")
    else:
        means = "budgets above that fail when a step runs, whatever is free on the machine."
        yield Finding("limits", "worse", f"{', '.join(shown)}; {report.show_bytes(left)} are left", means)


def _memory() -> Iterator[Finding]:
    free = free_memory()
    yield Finding("free memory", "good", report.show_bytes(free), "what a step gets without a budget is 0.9 of it")
    preloaded = os.environ.get("LD_PRELOAD", "")
    if preloaded:
        yield Finding("LD_PRELOAD", "good", preloaded, "another malloc serves what is not in the arena")


def _cache() -> Iterator[Finding]:
    try:
        folder = cache_folder()
    except RuntimeError as error:
        yield Finding("cache", "worse", str(error), "costs are measured anew each time.", "set $LOWTIDE_CACHE.")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        means = "ops are measured and libraries compiled anew in every process."
        yield Finding("cache", "worse", f"{folder}: {error.strerror}", means, "name a folder in $LOWTIDE_CACHE.")
        return
    held = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    yield Finding("cache", "good", f"{folder}: {report.show_bytes(held)} of {report.show_bytes(LIMIT)}")


def _processor() -> Iterator[Finding]:
    """What the processor announces, and what works: each is tried in a child process, which may die of it."""
    announced = [flag for flag in FLAGS if flag in _flags()]
    yield Finding("processor", "good", f"{torch.backends.cpu.get_cpu_capability()}; announces {', '.join(announced)}")
    for name, call in PROBES.items():
        died = probe(call)
        if died is None:
            yield Finding(name, "good", "work")
        else:
            means = f"a step that calls them dies, in eager too: {died}."
            hint = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE (or AVX2) before Python starts."
            yield Finding(name, "missing" if name.startswith("fp32") else "worse", died, means, hint)


def _flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), []))


def probe(call: str) -> str | None:
    """How a child process dies that makes a call of torch, or None where it lives."""
    command = [sys.executable, "-c", f"import torch; {call}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {PROBE_SECONDS} s"
    if not done.returncode:
        return None
    if done.returncode < 0:
        return signal.strsignal(-done.returncode) or f"signal {-done.returncode}"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _disk() -> Iterator[Finding]:
    """How quickly values could go to the disk and back, past any cache."""
    try:
        folder = choose_folder(None)
        out, back = _lanes()
    except (LowtideError, OSError) as error:
        words = error.message if isinstance(error, LowtideError) else str(error)
        yield Finding("disk", "worse", words, "nothing can be offloaded.", "name another folder: offload_dir.")
        return
    there = report.show_bytes(shutil.disk_usage(folder).free)
    found = f"{folder} ({file_system(folder)}), {there} free: {_rate(out)} out, {_rate(back)} back"
    slow = min(out.rate, back.rate) < SLOW
    means = "to compute again is mostly quicker than to offload here" if slow else ""
    yield Finding("disk", "good", found, means)


def _lanes() -> tuple[Lane, Lane]:
    found = measure_lanes(devices.of("cpu"), "disk")
    lanes = {lane.direction: lane for lane in found}
    return lanes["out"], lanes["in"]


def _rate(lane: Lane) -> str:
    return f"{report.show_bytes(lane.rate)}/s"
