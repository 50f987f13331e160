"""The page in a real browser: Chromium, where it is installed (Debian: ``apt-get install chromium``)."""

import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from test_inspector_page import hostile  # noqa: F401  a fixture

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")

# The folder in which screenshots are kept for a look at them; default: pytest's temporary folder.
SCREENSHOTS = os.environ.get("SHARDTRACE_SCREENSHOTS")


SCREEN = {"width": 1400, "height": 1000}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def file(zoo, tmp_path_factory):
    return zoo.to_html(tmp_path_factory.mktemp("page") / "zoo.html")


@pytest.fixture(scope="module")
def new_page(browser):
    """Makes a page that is open until the last test. It collects the errors of its console."""
    pages = []

    def new_page(**options):
        page, errors = browser.new_page(viewport=SCREEN, reduced_motion="reduce", **options), []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.set_default_timeout(60_000)  # a busy machine
        pages.append(page)
        return page, errors

    yield new_page
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def shared(new_page):
    """The page of all tests that need no other one: a file is loaded again in a third of the time of a new page."""
    return new_page()


@pytest.fixture
def visit(new_page, shared):
    """Opens a file; at the end there must have been no error in the console."""
    seen = []

    def visit(file, ready="html.js", **options):
        page, errors = new_page(**options) if options else shared
        errors.clear()
        seen.append(errors)
        page.set_viewport_size(SCREEN)
        page.mouse.move(0, 0)
        page.goto(file.as_uri())
        if options.get("java_script_enabled", True):
            page.wait_for_selector(ready)  # the script has unpacked its data
        return page

    yield visit
    for errors in seen:
        assert errors == []


def show_all_lines(page):
    """Makes the window so high that all lines of a pass are in the document."""
    page.set_viewport_size({"width": 1400, "height": 3000})
    page.wait_for_function("document.querySelector('#view').clientHeight > 2000")
    assert page.evaluate("document.querySelector('#rows').clientHeight < document.querySelector('#view').clientHeight")


@pytest.fixture
def page(visit, file, zoo):
    """The page at the last pass of forward, with all lines of it."""
    page = visit(file)
    page.click(f'[data-stage="{max(k for k, stage in enumerate(zoo.stages) if stage.phase == "forward")}"]')
    page.click("#dels")
    return page


def numbers(page, css):
    return {int(e.get_attribute("data-line")) for e in page.query_selector_all(f".line.{css}")}


def stage(page):
    return page.inner_text("#stage").split("\n")[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screenshot(visit, file, tmp_path, scheme):
    page = visit(file, color_scheme=scheme)
    page.click('.line:has-text("wait_all_gather") >> nth=1')
    folder = Path(SCREENSHOTS) if SCREENSHOTS else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    picture = page.screenshot(path=folder / f"inspector-{scheme}.png", full_page=True)
    assert len(picture) > 20_000
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 3 * 128) == (scheme == "dark")


def test_the_peak_is_chosen_at_first(visit, file, zoo):
    page = visit(file)
    at = zoo.record.phases[1].peak.line
    assert f"line {at} of backward" in page.inner_text(".cards")
    assert numbers(page, "chosen") == {at}
    assert page.is_visible(".line.chosen")
    assert page.is_visible(".cursor.fixed")


def test_lines_that_free_are_folded(visit, file, zoo):
    page = visit(file)
    show_all_lines(page)
    frees = {i for i, line in enumerate(zoo.record.phases[1].lines) if line.code.startswith("del ")}
    assert frees
    assert not frees & numbers(page, "line:not(.part)[data-line]")
    page.click("#dels")
    assert frees <= numbers(page, "line:not(.part)[data-line]")
    page.click("#dels")
    page.fill("#search", zoo.record.phases[1].lines[min(frees)].code)  # is shown if it is looked for
    page.keyboard.press("Enter")
    assert min(frees) in numbers(page, "chosen")


@pytest.mark.parametrize(("width", "columns"), [(1400, 4), (800, 2), (420, 2)])
def test_no_page_is_wider_than_its_screen(visit, file, width, columns):
    page = visit(file)
    page.set_viewport_size({"width": width, "height": 1000})
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert len({page.locator(".card").nth(k).bounding_box()["x"] for k in range(4)}) == columns
    assert page.locator("#view").bounding_box()["height"] < 1000
    ticks = [page.locator(".axis span").nth(k).bounding_box() for k in range(page.locator(".axis span").count())]
    assert all(a["x"] + a["width"] <= b["x"] + 1 for a, b in pairwise(ticks))


def test_passes_by_click_and_by_key(page, zoo):
    assert stage(page).startswith("shardtrace: schedule")
    page.click('.stage:has-text("insert_synchronize")')
    assert stage(page).startswith("shardtrace: insert_synchronize")
    assert page.locator(".line", has_text="= synchronize(").count() == 5  # one is of the replicated scale
    page.focus("#stages")
    page.keyboard.press("ArrowUp")
    assert stage(page).startswith("shardtrace: shard_parameters")
    page.keyboard.press("]")
    assert stage(page).startswith("shardtrace: insert_synchronize")


def test_prologue_is_folded(page):
    assert page.locator('[data-stage]:visible:has-text("Transform for execution")').count() == 0
    page.click('.stages summary:has-text("prologue")')
    page.click('[data-stage]:visible:has-text("Transform for execution")')
    assert stage(page).startswith("Transform for execution")
    assert page.is_visible(".line:has-text('fetch_parameters(module')")


def test_diff(page, zoo):
    page.click('.stage:has-text("schedule")')
    page.keyboard.press("d")
    assert page.get_attribute('[data-mode="diff"]', "aria-pressed") == "true"
    changes = next(s for s in zoo.stages if s.name == "shardtrace: schedule").changes
    show_all_lines(page)
    assert page.locator(".line.m1").count() == changes["added"]
    assert page.locator(".line.m3").count() == changes["removed"]
    folds = page.locator(".line.fold").count()
    assert folds > 0
    page.click(".line.fold >> nth=0")
    assert page.locator(".line.fold").count() == folds - 1


def test_hover_shows_producers_and_consumers(page, zoo):
    forward = zoo.record.phases[0]
    at = next(i for i, line in enumerate(forward.lines) if "wait_all_gather(" in line.code)
    line = forward.lines[at]
    producers = {
        i for i, other in enumerate(forward.lines) if set(other.results) & set(line.names[len(line.results) :])
    }
    consumers = {
        i
        for i, other in enumerate(forward.lines)
        if set(other.names[len(other.results) :]) & set(line.results) and i > at
    }
    show_all_lines(page)
    page.hover(f'[data-line="{at}"] .no')
    assert numbers(page, "producer") == producers == {min(producers)}
    assert numbers(page, "consumer") == consumers
    details = page.inner_text("#details")
    assert "waited for here: the next line uses it" in details
    assert forward.buckets[at] in details
    page.click(f'[data-line="{at + 2}"]')
    code = forward.lines[at + 2].code
    assert page.inner_text("#details .code-line") == code
    for fact in ("cpu f32", "module", "time", "memory"):
        assert fact in page.inner_text("#details")


def test_keys_in_the_code(page):
    page.click('.line:has-text("wait_all_gather") >> nth=0')
    first = numbers(page, "chosen")
    page.focus("#view")
    page.keyboard.press("ArrowDown")
    assert numbers(page, "chosen") == {min(first) + 1}
    page.keyboard.press("ArrowUp")
    page.keyboard.press("p")
    (issue,) = numbers(page, "chosen")
    assert "all_gather" in page.inner_text(f'[data-line="{issue}"]')
    page.keyboard.press("Escape")
    assert numbers(page, "chosen") == set()


def test_search(page, zoo):
    page.keyboard.press("/")
    page.keyboard.insert_text("reduce_scatter")
    assert page.inner_text("#hits") == "0 found"
    page.fill("#search", "all_gather(")
    found = [i for i, line in enumerate(zoo.record.phases[0].lines) if "all_gather(" in line.code]
    assert page.inner_text("#hits") == f"1 of {len(found)}"
    for at in (*found[1:], found[0]):
        page.keyboard.press("Enter")
        assert numbers(page, "chosen") == {at}
    page.keyboard.press("Shift+Enter")
    assert numbers(page, "chosen") == {found[-1]}


def test_timeline_leads_to_lines(page, zoo):
    row = next(row for row in zoo.collectives if row.kind == "reduce_scatter")
    page.hover(f'rect[data-at="backward:{row.issue}"]')
    assert f"reduce_scatter of {row.bucket}" in page.inner_text("#tip")
    page.click(f'rect[data-at="backward:{row.issue}"]')
    assert "backward" in page.inner_text("#stage")
    assert numbers(page, "chosen") == {row.issue}
    page.focus("#timeline")
    page.keyboard.press("ArrowRight")
    assert numbers(page, "chosen") == {row.issue + 1}


def test_zoom(page):
    def widths():
        return [page.evaluate(f"document.querySelector('{css}').clientWidth") for css in (".track", ".scroller")]

    track, scroller = widths()
    assert track == scroller
    page.click('[data-zoom="2"]')
    assert widths() == [2 * scroller, scroller]
    page.keyboard.press("0")
    assert widths() == [scroller, scroller]


def test_tabs_and_modules(page):
    page.keyboard.press("2")
    assert page.is_visible(".tree")
    assert not page.is_visible("#view")
    page.click('.tree summary:has-text("0 … 1") .module')
    page.click('.tree a:has-text("up")')
    assert page.is_visible("#view")
    assert "blocks.0.up" in page.inner_text("#details")
    page.keyboard.press("3")
    assert page.is_visible("text=Largest tensors saved for backward")
    page.keyboard.press("?")
    assert page.is_visible("dialog")


def test_without_script(visit, file):
    page = visit(file, java_script_enabled=False)
    assert page.is_visible("text=insert_synchronize")
    assert page.is_visible(".track svg >> nth=0")
    assert page.is_visible(".tree")


def test_hostile_names(visit, hostile, tmp_path):  # noqa: F811
    page = visit(hostile.to_html(tmp_path / "hostile.html"))
    assert page.title().startswith("</script>")
    page.click('.stage:visible:has-text("Delete Last Used") >> nth=0')
    page.click('.line:has-text("torch_tanh_0(")')
    assert "<script>" in page.inner_text("#details")
    assert page.locator("script").count() == 2
    assert page.locator("img").count() == 0


def test_notebook_frame(browser, visit, zoo, tmp_path):
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><meta charset=utf-8>{zoo._repr_html_()}")
    page = visit(cell, ready="body")
    frame = page.frame_locator("iframe")
    frame.locator("html.js").wait_for()
    frame.locator(".stage:visible", has_text="insert_synchronize").click()
    assert "insert_synchronize" in frame.locator("#stage").inner_text()
    assert not page.is_visible(".shardtrace-plain")


def test_call_of_a_block_opens_in_place(page, zoo):
    forward = zoo.record.phases[0]
    at = next(i for i, line in enumerate(forward.lines) if line.function)
    parts = forward.lines[at].parts
    show_all_lines(page)
    page.click(f'[data-open="{at}"]')
    assert page.locator(".line.part").count() == len(parts)
    k = next(k for k, part in enumerate(parts) if "torch_tanh_0(" in part.code)
    page.click(f'[data-part="{k}"]')
    details = page.inner_text("#details")
    for fact in (parts[k].code, "blocks.0", "predicted", "Block_forward"):
        assert fact in details
    page.click("#details [data-stage]")
    assert stage(page).endswith("Block_forward")
    page.click('.stage:visible:has-text("schedule") >> nth=0')
    page.click(f'[data-line="{at}"]')
    page.keyboard.press("o")  # closes it
    assert page.locator(".line.part").count() == 0
