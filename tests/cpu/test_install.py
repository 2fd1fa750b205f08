"""What a user installs: the wheel and the sdist have every file, and the installed wheel trains in an empty folder."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{what}(sys.argv[1]))"
TRAIN = """
import copy, json, sys, torch, lowtide

def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)))
twin = copy.deepcopy(model)
batch = torch.randn(512, 64), torch.randint(64, (512,))
train = lowtide.fit(step, model, torch.optim.SGD(model.parameters(), 0.1), example=batch, budget="70%")
plain = torch.optim.SGD(twin.parameters(), 0.1)
losses = [(train(*batch).item(), step(twin, plain, *batch).item()) for _ in range(3)]
same = all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
print(json.dumps([lowtide.__file__, losses, same, train.peak]))
"""


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What a command prints, in a folder, with nothing of this process's paths."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LOWTIDE", "XDG"))}
    ran = subprocess.run(
        command, cwd=folder, env={**inherited, **environment}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def build(source: Path, into: Path, what: str) -> Path:
    """Build a wheel or an sdist of a source tree, without the network."""
    into.mkdir(exist_ok=True)
    printed = run([sys.executable, "-c", BUILD.format(what=what), str(into)], source)
    return into / printed.split()[-1]


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, but for the record of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, for building leaves files beside it."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "lowtide", ignore=LEFT_OUT))


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build(source, source.parent / "wheel", "build_wheel")


@pytest.fixture(scope="module")
def sdist(source: Path) -> Path:
    return build(source, source.parent / "sdist", "build_sdist")


def files_below(folder: Path) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    found, benches = set(contents(wheel)), files_below(ROOT / "lowtide" / "bench")
    assert len(benches) > 20
    assert files_below(ROOT / "lowtide") - found == benches, "benches, which no user imports, stay in the repository"
    assert {name.partition("/")[0] for name in found} == {"lowtide", "lowtide-0.1.0.dist-info"}


def test_the_sdist_has_every_file_of_the_project_and_makes_the_same_wheel(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    kept = {"Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "mkdocs.yml"}
    wanted = kept.union(*(files_below(ROOT / name) for name in ("lowtide", "tests", "docs")))
    assert wanted - found == set()
    assert contents(build(unpacked, tmp_path / "wheel", "build_wheel")) == contents(wheel)


def test_every_file_parses_for_the_oldest_python() -> None:
    for path in (ROOT / "lowtide").rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 11))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the wheel in it; what it depends on is read from this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "-q", str(wheel)], home)
    site = next(home.glob("lib/python*/site-packages"))
    # A path from a .pth file brings the packages that are there, and not the .pth files: no editable lowtide.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


@pytest.mark.long
def test_the_installed_wheel_trains_in_an_empty_folder_with_an_empty_cache(installed: Path, tmp_path: Path) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "work"
    folder.mkdir()
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    printed = run([str(installed / "python"), str(script)], folder, XDG_CACHE_HOME=str(cache), HOME=str(tmp_path))
    where, losses, same, peak = json.loads(printed)
    assert Path(where).is_relative_to(installed.parent)
    assert losses[0][0] != losses[2][0]
    assert all(mine == eager for mine, eager in losses)
    assert same
    assert peak > 0  # it was metered: the allocator was compiled from the wheel
    assert {path.name.partition("-")[0] for path in (cache / "lowtide").glob("*.so")} >= {"allocator", "layout"}
    assert list(folder.iterdir()) == []


def test_the_installed_command_says_where_the_benches_are(installed: Path, tmp_path: Path) -> None:
    command = [str(installed / "lowtide"), "bench", "fit", "--rounds", "3"]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LOWTIDE", "XDG"))}
    ran = subprocess.run(command, cwd=tmp_path, env=inherited, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    assert ran.stderr.startswith("error: the benches are not part of an installed lowtide.\nhint: they are in its repo")
    assert "bench" in run([str(installed / "lowtide"), "--help"], tmp_path)


@pytest.mark.long
def test_the_installed_command_trains_on_packaged_data_beside_files_named_like_modules(
    installed: Path, tmp_path: Path
) -> None:
    for name in ("lowtide", "json", "torch"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w').close()\n")
    model = "gpt:layers=2,width=32,context=16,vocabulary=256,batch=4"
    command = [str(installed / "lowtide"), "train", model, "--data", "austen", "--steps", "3", "--budget", "80%"]
    run(command, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), HOME=str(tmp_path))
    assert not (tmp_path / "imported").exists()
