"""The pages in a real browser: what they show is what their documents say, and a person can use them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pages import HOSTILE, document, hostile, long_chain, planned
from windows import Opened, Opening

from lowtide import report
from lowtide.game import named
from lowtide.plan.games import frontier, least_once, least_pebbles
from lowtide.report.bytes import show_bytes
from lowtide.report.pebble import PebblePage, Play, frames

ADVICE = (
    report.Advice("allow 1.00 MiB more", "--budget 2MiB", 0.9, 2**21, 0.1, -(2**20)),
    report.Advice("clear gradients", "optimizer.zero_grad()", 1.0, 2**19, 0.0, 2**19, exact=False),
)
METERED = report.Metered(peak=300_000, eager_peak=470_000, seconds=0.001, eager_seconds=0.0009)


@pytest.fixture(scope="session")
def data() -> Any:
    graph, costs, found = planned("gpt-small", 0.5)
    return document(graph, costs, found, points=5, advice=ADVICE, metered=METERED, notes=["a note"])


@pytest.fixture(scope="session")
def path(data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "report.html"
    report.write_page(path, data, kind="report", title="a step")
    return path


def at(data: Any, key: str) -> Any:
    """A value of a document by its path; names of categories may have spaces, not dots."""
    for name in key.split("."):
        data = data[int(name)] if isinstance(data, list) else data[name]
    return data


def test_the_numbers_on_the_page_are_those_of_the_document(opening: Opening, path: Path, data: Any) -> None:
    opened = opening(path)
    found = opened.numbers()
    assert found
    assert all(value == at(data, key) for key, value in found.items())
    wanted = {f"numbers.{name}" for name in ("predicted_peak", "eager_peak", "budget", "metered_peak", "overhead")}
    assert wanted <= found.keys()
    headline = opened.page.inner_text("h1").replace("\xa0", " ")
    assert show_bytes(data["numbers"]["predicted_peak"]) in headline
    assert show_bytes(data["numbers"]["eager_peak"]) in headline
    shown = opened.page.eval_on_selector_all("[data-key]", "all => all.map(one => [one.dataset.key, one.textContent])")
    for key, text in shown:
        if "peak" in key or key == "numbers.budget":
            assert text == show_bytes(at(data, key))
    modules = opened.page.eval_on_selector_all(
        "#kept tr[data-module]", "rows => rows.map(row => [row.dataset.module, row.lastChild.dataset.value])"
    )
    assert {(row["module"], str(row["bytes"])) for row in data["fates"]} <= {tuple(row) for row in modules}
    assert opened.page.locator("[data-advice]").count() == len(ADVICE)
    opened.page.locator("#peak .choice [data-name=eager]").click()
    assert "peaks.eager.predicted_peak" in opened.numbers()


def test_hovering_says_what_runs_and_what_is_there(opening: Opening, path: Path, data: Any) -> None:
    opened = opening(path)
    plan = next(one for step in data["steps"] for one in step["tracks"] if one["name"] == "plan")
    canvas = opened.page.locator("#memory canvas").first
    box = canvas.bounding_box()
    when = (plan["points"]["begin"][plan["at"]] + plan["points"]["end"][plan["at"]]) / 2
    end = opened.page.evaluate("Math.max(...Object.values(lowtide.tracks).map(one => one.time.at(-1)))")
    opened.page.mouse.move(box["x"] + 66 + when / end * (box["width"] - 80), box["y"] + 200)
    assert int(opened.page.get_attribute("#tip-total", "data-value")) == max(plan["points"]["bytes"])
    text = opened.page.inner_text("#tip")
    at_peak = data["peaks"]["plan"]["peak_at"]
    assert at_peak["target"].removesuffix(".default") in text
    assert (at_peak["source"] or "(top level)") in text
    opened.page.locator("#arena canvas").scroll_into_view_if_needed()
    lanes = opened.page.locator("#arena canvas").bounding_box()
    opened.page.mouse.move(lanes["x"] + lanes["width"] / 2, lanes["y"] + lanes["height"] - 30)
    assert "address" in opened.page.inner_text("#tip")
    opened.page.mouse.move(5, 5)
    assert opened.page.locator("#tip").is_hidden()


def picture(opened: Opened, selector: str) -> str:
    return str(opened.page.eval_on_selector(selector, "canvas => canvas.toDataURL()"))


def test_dragging_zooms_both_charts_and_a_double_click_goes_back(opening: Opening, path: Path) -> None:
    opened = opening(path)
    before = [picture(opened, f"#memory {place} canvas") for place in (".card:not(#arena)", "#arena")]
    box = opened.page.locator("#memory canvas").first.bounding_box()
    opened.page.mouse.move(box["x"] + 300, box["y"] + 150)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + 500, box["y"] + 160, steps=4)
    opened.page.mouse.up()
    assert opened.page.locator("#all").is_enabled()
    zoomed = [picture(opened, f"#memory {place} canvas") for place in (".card:not(#arena)", "#arena")]
    assert all(one != other for one, other in zip(before, zoomed, strict=True))
    opened.page.mouse.dblclick(box["x"] + 400, box["y"] + 150)
    opened.page.mouse.move(5, 5)
    assert opened.page.locator("#all").is_disabled()
    assert picture(opened, "#arena canvas") == before[1]
    opened.page.locator("#memory canvas").first.focus()
    opened.page.keyboard.press("+")
    assert opened.page.locator("#all").is_enabled()


def test_both_themes(opening: Opening, path: Path) -> None:
    colours = {}
    for theme in ("light", "dark"):
        opened = opening(path, theme=theme)
        assert opened.page.get_attribute("html", "data-theme") == theme
        colours[theme] = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        opened.page.click("#theme")
        other = {"light": "dark", "dark": "light"}[theme]
        assert opened.page.get_attribute("html", "data-theme") == other
    assert colours["light"] != colours["dark"]


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_runs_out_of_the_window(opening: Opening, path: Path, width: int) -> None:
    opened = opening(path, width=width, height=800, touch=width < 500)
    wide = opened.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    sizes = opened.page.eval_on_selector_all(
        "td, p, .note, .legend", "all => all.map(one => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert min(sizes) >= 11


def test_names_with_markup_are_text(opening: Opening, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    report.write_page(page, document(*hostile(), target=HOSTILE, notes=[HOSTILE]), kind="report", title=HOSTILE)
    opened = opening(page)
    assert opened.page.title() == HOSTILE
    assert opened.page.locator("main img").count() == 0
    assert HOSTILE in opened.page.inner_text(".target")
    assert HOSTILE in opened.page.inner_text("#notes")
    assert HOSTILE in opened.page.inner_text("#peak")


def test_a_step_of_thirty_thousand_ops(opening: Opening, tmp_path: Path) -> None:
    graph, costs, found = long_chain(15_000)
    page = tmp_path / "page.html"
    report.write_page(page, document(graph, costs, found), kind="report", title="long")
    begun = time.monotonic()
    opened = opening(page)
    taken = time.monotonic() - begun
    print(f"opened {page.stat().st_size:,} bytes and drew them in {taken:.2f} s")
    assert opened.page.evaluate("lowtide.tracks.plan.count") == len(graph.ops)
    assert opened.page.evaluate("Math.max(...lowtide.tracks.plan.total)") == max(
        report.track("plan", graph, costs, found.program).live
    )


def pebble_page(path: Path, name: str) -> PebblePage:
    game = named(name)
    assert game is not None
    plays = [
        Play(f"with {one.budget}", one.budget, one.moves, one.seconds, one.proven, False) for one in frontier(game)
    ]
    alone = least_once(game)
    plays.append(Play("once", alone.budget, alone.moves, alone.seconds, alone.proven, True))
    page = PebblePage(game, plays, least_pebbles(game)[0])
    report.write_page(path, page.to_json(), kind="pebble", title=name)
    return page


@pytest.mark.parametrize("name", ["chain:length=5", "tree:height=2", "unet:depth=2"])
def test_the_game_is_watched_move_by_move(opening: Opening, tmp_path: Path, name: str) -> None:
    page = pebble_page(tmp_path / "game.html", name)
    opened = opening(tmp_path / "game.html")
    play = page.plays[0]
    for frame in frames(page.game, play.moves):
        there = opened.page.eval_on_selector_all(
            '[data-node][data-pebble="true"]', "all => all.map(one => Number(one.dataset.node))"
        )
        assert set(there) == frame.pebbles
        assert opened.numbers()["spent"] == frame.seconds
        opened.page.click("#step")
    opened.page.click("#back")
    opened.page.eval_on_selector("#scrub", "one => { one.value = '0'; one.dispatchEvent(new Event('input')); }")
    assert opened.numbers()["weight"] == 0
    opened.page.click("#play")
    opened.page.wait_for_selector('[data-key=spent]:not([data-value="0"])')
    opened.page.click("#play")
    # The search in the page and the one that planned share nothing but the game.
    for number, one in enumerate(page.plays):
        rest = opened.page.evaluate(
            "([most, once]) => lowtide.remaining(lowtide.data.game, lowtide.start(lowtide.data.game), most, once)",
            [one.budget, one.once],
        )
        assert rest == one.seconds, number


def test_the_game_is_played_by_hand(opening: Opening, tmp_path: Path) -> None:
    page = pebble_page(tmp_path / "game.html", "chain:length=3")
    opened = opening(tmp_path / "game.html", width=390, touch=True)
    opened.page.click(".choice [data-name=hand]")
    node = opened.page.locator("[data-node]")
    node.nth(1).click()
    assert "needs a pebble on f1" in opened.page.inner_text("#verdict")
    for move in page.plays[0].moves:
        node.nth(move.node).click()
    assert opened.page.inner_text("#verdict") == f"Done in {page.plays[0].seconds:.0f}: that is the optimum."
    opened.page.click("#again")
    for index in (0, 0, 0):  # place, take off, place again: one placement too many
        node.nth(index).click()
    assert "1 more than the optimum" in opened.page.inner_text("#verdict")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_two_steps_beside_each_other(opening: Opening, tmp_path: Path) -> None:
    sides = [report.side(f"gpt@{part}", document(*planned("gpt-small", part))) for part in (0.4, 0.9)]
    found = report.diff(*sides)
    report.write_page(tmp_path / "diff.html", found.to_json(), kind="diff", title="two")
    opened = opening(tmp_path / "diff.html")
    data = found.to_json()
    assert all(value == at(data, key) for key, value in opened.numbers().items())
    rows = opened.page.eval_on_selector_all("#moved tr[data-module]", "all => all.map(one => one.dataset.module)")
    assert rows == [one.module for one in found.moved][:40]
