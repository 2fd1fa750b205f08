"""Runs a part of the tests with other versions of torch, each in an environment of its own: `make compat`.

Wheels of torch from the registry bring gigabytes of GPU packages. None is needed on a CPU, but importing torch loads
the libraries of some: these are installed once, for the newest torch, and shared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".compat"
SUITE = (  # of tests/cpu: the canaries, and what uses private parts the most
    "test_private.py",
    "test_capture.py::test_optimizers",
    "test_capture.py::test_gradient_penalty_differentiates_twice",
    "test_capture.py::test_custom_autograd_function",
    "test_capture.py::test_batch_norm_dropout_and_in_place_activations",
    "test_capture.py::test_attention_embedding_and_layer_norm",
    "test_capture.py::test_recurrent_modules",
    "test_capture.py::test_random_ops_of_all_kinds",
    "test_fit.py::test_schedulers_and_learning_rates",
    "test_wrap.py::test_draws_of_the_loop_come_between_the_halves",
    "test_wrap.py::test_two_forwards_before_their_backwards",
)
INTERPRETER = os.environ.get("PYTHON", sys.executable)
TESTERS = ["pytest", "hypothesis"]
LOADED = "[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]"  # of CUDA's, by any torch
LIBRARY = re.compile(r"lib[\w.+-]+\.so[.\d]*: cannot open shared object file")
SHOW = """
import json, platform, torch
print(json.dumps([torch.__version__, platform.python_version()]))
"""
NEEDS = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('torch')))"


@dataclass(frozen=True)
class Outcome:
    """What one environment gave."""

    asked: str  # the version of torch
    ran: str  # the versions of torch and of Python that ran; empty: none did
    said: str  # the last line of the tests, or why there were none
    passed: bool


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command at the root of the project."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=ROOT, env={**inherited, **environment}, capture_output=True, text=True, check=False
    )


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line.strip("= ") for line in reversed(text.splitlines()) if line.strip()), "nothing was said")


def install(python: Path, *options: str) -> str | None:
    """Install packages into an environment; what pip said where it could not."""
    ran = run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options])
    return None if ran.returncode == 0 else last_line(ran.stderr)


def newest_of_each() -> list[str]:
    """The newest version of each minor version of torch that lowtide accepts and the registry has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = next(line for line in project["dependencies"] if line.startswith("torch"))
    first, beyond = (tuple(map(int, bound.split("."))) for bound in re.findall(r"\d+\.\d+", bounds))
    listed = run([sys.executable, "-m", "pip", "index", "versions", "torch"]).stdout
    found: dict[tuple[int, ...], str] = {}
    for version in re.findall(r"\b\d+\.\d+\.\d+\b(?!\+)", listed.partition("Available versions:")[2]):
        minor = tuple(map(int, version.split(".")[:2]))
        if first <= minor < beyond:
            found.setdefault(minor, version)  # the newest comes first
    return list(found.values())


def needed_by_torch(python: Path, *, libraries: bool) -> list[str]:
    """What torch says that it needs: the libraries of the GPU packages, or the rest, but for its compiler."""
    found = []
    for line in json.loads(run([str(python), "-c", NEEDS]).stdout):
        requirement, _, condition = line.partition(";")
        gpu = requirement.startswith(("nvidia", "cuda-toolkit"))
        if "extra" not in condition and not requirement.startswith(("triton", "cuda-bindings")) and gpu == libraries:
            found.append(requirement.strip())
    return found


def prepare(python: Path, version: str) -> str | None:
    """Make an environment with this torch; why it can't be had, or None."""
    home = python.parents[1]
    if not python.exists():
        made = run([INTERPRETER, "-m", "venv", str(home)])
        if made.returncode != 0:
            return last_line(made.stderr)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ours = [line for line in project["dependencies"] if not line.startswith("torch")]
    problem = install(python, "--no-deps", f"torch=={version}")
    problem = problem or install(python, *needed_by_torch(python, libraries=False), *ours, *TESTERS)
    if problem is None and LIBRARY.search(run([str(python), "-c", SHOW]).stderr):
        problem = share_libraries(python)
    return problem


def share_libraries(python: Path) -> str | None:
    """Put the libraries that importing torch loads where torch looks for them; why that can't be, or None."""
    shared = HOME / "libraries"
    if not shared.exists():
        whole = [re.sub(r"\[.*\]", LOADED, line) for line in needed_by_torch(python, libraries=True)]
        if problem := install(python, "--target", str(shared), *whole):
            return problem
    site = next(python.parents[1].glob("lib/python*/site-packages"))
    link = site / "nvidia"
    if not link.is_symlink():
        link.symlink_to(shared / "nvidia", target_is_directory=True)
    return None


def outcome(version: str) -> Outcome:
    """Run the tests with one version of torch."""
    number = run([INTERPRETER, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]).stdout.strip()
    python = HOME / f"python-{number}-torch-{version}" / "bin" / "python"
    if problem := prepare(python, version):
        return Outcome(version, "", problem, passed=False)
    shown = run([str(python), "-c", SHOW])
    if shown.returncode != 0:
        return Outcome(version, "", last_line(shown.stderr), passed=False)
    ran = "torch {}, Python {}".format(*json.loads(shown.stdout))
    chosen = [f"tests/cpu/{name}" for name in SUITE]
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-m", "not long", *chosen]
    tests = run(command, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    if tests.returncode != 0:
        print(tests.stdout[-6000:], tests.stderr[-2000:], file=sys.stderr)
    return Outcome(version, ran, last_line(tests.stdout), passed=tests.returncode == 0)


def main() -> int:
    """Try each version, newest first, and print what was really run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", help="of torch; default: the newest of each that lowtide accepts")
    versions = parser.parse_args().versions or newest_of_each()
    versions.sort(key=lambda version: tuple(map(int, version.split("."))), reverse=True)  # whose libraries are shared
    outcomes = []
    for version in versions:
        outcomes.append(one := outcome(version))
        print(f"{'passed' if one.passed else 'FAILED'}  {one.ran or f'torch {one.asked} did not run'}: {one.said}")
        sys.stdout.flush()
    return 0 if outcomes and all(one.passed for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
