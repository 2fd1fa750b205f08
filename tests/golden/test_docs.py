"""README and docs: every command that they show is run, and prints what is shown; figures and links are what they say.

`pytest tests/golden/test_docs.py --update-golden` writes outputs and figures anew; times are then put back to `… s`.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from blocks import Block, blocks, commands, matches, run
from typer.testing import CliRunner

import lowtide
from lowtide.cli import app
from lowtide.plan import layout, pebble, planning, recompute
from lowtide.rewrite import PASSES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if "decisions" not in page.parts)]
PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "_TYPER_FORCE_DISABLE_TERMINAL": "1"}
WORDS = 600  # that the README may have


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's clock stands still: its searches end by their work, on a slow machine too."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    for room in (layout, pebble, planning, recompute):
        monkeypatch.setattr(room, "time", clock)


def in_process(arguments: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """What `lowtide` prints for these arguments; talk goes to stderr, and is not shown."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(app, arguments, env=dict(PLAIN), prog_name="lowtide")
    finally:
        os.chdir(before)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def shown_commands(page: Path) -> Iterator[tuple[Block, str]]:
    text = page.read_text(encoding="utf-8")
    for block in blocks(text):
        if block.language == "console":
            for command in commands(block):
                yield block, command.line


@pytest.mark.parametrize("page", [page for page in PAGES if any(True for _ in shown_commands(page))], ids=names)
@pytest.mark.usefixtures("still")
def test_commands_print_what_is_shown(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    here = str(Path(lowtide.__file__).parents[1])
    environment = {**os.environ, **PLAIN, "PYTHONPATH": here, "OMP_NUM_THREADS": "2"}
    update = request.config.getoption("--update-golden", default=False)
    known = {*lowtide.__all__, *(command.callback.__name__ for command in app.registered_commands if command.callback)}
    known |= {command.name for command in app.registered_commands if command.name}
    pieces, last, wrong, missing = [], 0, [], []
    for block in blocks(text):
        if block.title is not None and block.language == "python":
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
        if block.language != "console":
            continue
        if block.needs is not None and block.needs not in known:
            missing.append(block.needs)
            continue
        rows = []
        for command in commands(block):
            printed = run(command.line, tmp_path, in_process, environment, makefile)
            if printed is None or matches(command.shown, printed):
                rows.append(f"$ {command.line}\n{command.shown}")
                continue
            wrong.append(f"$ {command.line}\n{printed}\n-- instead of what is shown:\n{command.shown}")
            gap = "\n" if command.shown.endswith("\n\n") else ""
            rows.append(f"$ {command.line}\n{printed.rstrip()}\n{gap}")
        new = "".join(f"{block.indent}{row}" if row.strip() else row for row in "".join(rows).splitlines(keepends=True))
        pieces += [text[last : block.start], new]
        last = block.end
    if update and wrong:
        page.write_text("".join(pieces) + text[last:], encoding="utf-8")
        return
    assert not wrong, "\n\n".join(wrong)
    if missing:
        pytest.skip(f"lowtide has no {', '.join(missing)} here")


def test_the_worked_example_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks((DOCS / "add-a-technique.md").read_text(encoding="utf-8")):
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = runpy.run_path(str(tmp_path / "test_forget_cheap.py"))
    tests = [test for name, test in found.items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()
    for name in ("forget_cheap", "measure"):
        sys.modules.pop(name, None)


def test_every_rewrite_is_on_the_page_of_techniques() -> None:
    page = (DOCS / "techniques.md").read_text(encoding="utf-8")
    said = {"updates"}  # fuses the updates of what is stored otherwise: a part of these
    for one in PASSES:
        assert one.name in said or f"`{one.name}`" in page, one.name
        section = page[page.index(f"## {one.exactness.capitalize()}") :].split("\n## ")[0]
        assert one.name in said or f"`{one.name}`" in section, f"{one.name} is {one.exactness}"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("in … s, 5 B", "in 0.3 s, 5 B", True),
        ("in … s, 5 B", "in 41.3 ms, 5 B", True),
        ("in … s, 5 B", "in 41.3 ms, 6 B", False),
        ("in … s", "in 41.3 KiB", False),
        ("a\n[…]\nd", "a\nb\nc\nd", True),
        ("a\n[…]\nd", "a\nb\nc\ne", False),
        ("a\n[…]", "a\nb\nc", True),
        ("a\n[…]", "b\nc", False),
        ("a", "a\nb", False),
        ("", "a", False),
    ],
)
def test_what_may_be_left_out(shown: str, printed: str, same: bool) -> None:
    assert matches(f"{shown}\n", f"{printed}\n") is same


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= WORDS


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"\w+:", link):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_figures_are_what_lowtide_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    draw = runpy.run_path(str(DOCS / "figures" / "draw.py"))["draw_all"]
    update = request.config.getoption("--update-golden", default=False)
    monkeypatch.setitem(draw.__globals__, "FOLDER", DOCS / "figures" if update else tmp_path)
    draw()
    for made in tmp_path.glob("*.svg"):
        assert made.read_text(encoding="utf-8") == (DOCS / "figures" / made.name).read_text(encoding="utf-8"), made.name


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.strip() == ""
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert all(f'id="lowtide.{door}"' in reference for door in ("fit.fit", "wrap.wrap", "scan.scan", "plan.plan"))
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        loaded = re.findall(
            r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text(encoding="utf-8")
        )
        assert [one for one in loaded if "canonical" not in one] == [], page
