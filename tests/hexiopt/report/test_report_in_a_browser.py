"""The page of a plan in Chromium: no error, numbers under the mouse, folding, phone and wide screen, dark, offline.

Skipped where Playwright or a browser is missing: `pip install playwright`, and Chromium of the system or
`playwright install chromium`.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from hexiopt.report.facts import PlanFacts
from hexiopt.report.page.html import report_html
from hexiopt.solving.result import Point
from tests.hexiopt.report.pictures import SOLVER, Case

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page_file(mixed: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    trajectory = (Point(0.1, 1, 50.0), Point(0.5, 10, 40.0), Point(2.0, 99, mixed[2].step_time_s))
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report_html(PlanFacts(*mixed, SOLVER), trajectory=trajectory), encoding="utf-8")
    return path


class Opened:
    """A page opened offline, with all that it complained about and asked for."""

    def __init__(self, browser: Any, path: Path, **how: Any) -> None:
        self.context = browser.new_context(offline=True, **how)
        self.page = self.context.new_page()
        self.console: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        pixels: int = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        return pixels


def test_no_error_and_nothing_loaded(browser: Any, page_file: Path) -> None:
    opened = Opened(browser, page_file)
    opened.page.mouse.move(300, 300)
    opened.page.mouse.move(500, 500)
    assert opened.console == []
    assert opened.asked == [page_file.as_uri()]


def test_the_mouse_shows_numbers(browser: Any, page_file: Path) -> None:
    page = Opened(browser, page_file, viewport={"width": 1200, "height": 800}).page
    tip = page.locator("#tip")
    assert not tip.is_visible()
    operation = page.locator('svg.timeline rect[data-o="backward"]').nth(3)
    operation.hover()
    text = tip.inner_text()
    assert re.fullmatch(r"\d+·\d+: backward of micro-batch \d+, [\d.]+ m?s to [\d.]+ m?s \([\d.]+ m?s\)", text), text
    page.locator(".bar.step i").first.hover()
    assert "%" in tip.inner_text()
    page.mouse.move(2, 2)
    assert not tip.is_visible()


def test_pipelines_fold_and_unfold(browser: Any, page_file: Path, mixed: Case) -> None:
    page = Opened(browser, page_file).page
    folds, shown = page.locator("details.pipeline"), page.locator("details.pipeline svg.timeline:visible")
    assert folds.count() == shown.count() == len(mixed[1].pipelines)
    page.locator("summary").first.click()
    assert shown.count() == len(mixed[1].pipelines) - 1
    page.get_by_role("button", name="Fold all", exact=True).click()
    assert shown.count() == 0
    page.get_by_role("button", name="Unfold all").click()
    assert shown.count() == len(mixed[1].pipelines)


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("name", ["mixed", "large", "woven", "ragged"])
def test_it_fits_phones_and_wide_screens(
    browser: Any, width: int, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_html(PlanFacts(*request.getfixturevalue(name), SOLVER)), encoding="utf-8")  # type: ignore[call-arg]
    opened = Opened(browser, path, viewport={"width": width, "height": 900})
    assert opened.overflow() <= 0
    timeline = opened.page.locator("svg.timeline").first.bounding_box()
    assert timeline["width"] > 0.6 * min(width, 1180)
    small = opened.page.evaluate(
        "[...document.querySelectorAll('main *')].filter(e => e.innerText && e.children.length == 0 &&"
        " parseFloat(getComputedStyle(e).fontSize) < 11 && e.offsetParent).length"
    )
    assert small == 0


CONTRAST = """() => {
  const light = ([r, g, b]) => [r, g, b].map(c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, k) => sum + c * [.2126, .7152, .0722][k], 0);
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const ground = e => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  } return [255, 255, 255]; };
  let least = 21, where = "";
  for (const e of document.querySelectorAll("main *")) {
    if (!e.innerText || e.children.length || !e.offsetParent) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < least) { least = ratio; where = e.outerHTML.slice(0, 200); }
  }
  return [least, where];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(browser: Any, page_file: Path, scheme: str) -> None:
    """The contrast of WCAG 2 for large text, 3 to 1, for every word."""
    page = Opened(browser, page_file, color_scheme=scheme).page
    least, where = page.evaluate(CONTRAST)
    assert least >= 3.0, where
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (min(map(int, re.findall(r"\d+", ground))) > 128) == (scheme == "light")
