"""A real browser for the pages. Without one these tests are skipped, with the reason and what to do; `make browser`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from windows import Opened, Opening

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = f"there is no browser: none of {', '.join(NAMES)} is on the path. `make browser` installs one."
PATIENCE = 180_000  # milliseconds: a machine may be busy


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium: $LOWTIDE_BROWSER, or the first of the usual names."""
    path = os.environ.get("LOWTIDE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(MISSING)
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def opening(browser: Any) -> Iterator[Opening]:
    """Open a file as a person would: in a window of this size and theme; nothing may go wrong in its console."""
    opened: list[Opened] = []

    def open_(path: Path, *, width: int = 1280, height: int = 900, theme: str = "light", touch: bool = False) -> Opened:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, has_touch=touch, offline=True
        )
        context.set_default_timeout(PATIENCE)
        one = Opened(context.new_page())
        one.page.on("console", lambda message: one.complaints.append(message.text))
        one.page.on("pageerror", lambda error: one.complaints.append(str(error)))
        one.page.on("request", lambda request: one.requests.append(request.url))
        one.page.goto(path.as_uri())
        one.page.wait_for_selector("html[data-ready=true]", state="attached")
        one.page.wait_for_timeout(50)
        opened.append(one)
        return one

    yield open_
    for one in opened:
        assert one.complaints == []
        assert len(one.requests) == 1  # the file itself
        one.page.context.close()
