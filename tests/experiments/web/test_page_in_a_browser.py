"""The page in Chromium: a plan of unequal cards, phone, dark, keyboard; nothing asked of others, nothing complained of.

Skipped where starlette, Playwright or a browser is missing.
"""

import subprocess
import time
from typing import Any

import pytest

from tests.hexiopt.report.test_report_in_a_browser import CONTRAST

pytestmark = pytest.mark.slow
QUICK = "#pcs=3090*1%2B4090*1&model=llama2_7b&training=lora&seq_len=1024&global_batch=8&seconds=1"
SMALL = "#pcs=rtx_3060_12gb*1&model=llama2_13b&training=full&seq_len=1024&global_batch=4&seconds=1"
SEARCH_MS = 240_000


class Opened:
    """The page in a tab, with all that it complained about and asked for."""

    def __init__(self, browser: Any, address: str, **how: Any) -> None:
        self.context = browser.new_context(**how)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def wait(self) -> str:
        """Wait for the end of a search that was just asked for; the verdict."""
        self.page.locator("#go:enabled").wait_for(timeout=SEARCH_MS)
        verdict: str = self.page.locator("#verdict").inner_text()
        return verdict

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        pixels: int = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        return pixels


@pytest.fixture(scope="module")
def plan_tab(browser: Any, address: str) -> Opened:
    """A tab with a plan, asked for from the keyboard alone."""
    opened = Opened(browser, address + QUICK, viewport={"width": 1360, "height": 1000})
    page = opened.page
    page.get_by_label("Seconds of search").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "go"
    page.keyboard.press("Enter")
    assert opened.wait() == "FITS", page.locator("#reason").inner_text()
    return opened


def test_a_plan_has_bars_comparisons_files_and_our_report(plan_tab: Opened) -> None:
    page = plan_tab.page
    assert page.locator(".bar").count() >= 1
    labels = page.locator("#lines dt").all_inner_texts()
    assert labels == ["speed", "limits", "plan", "beside", "reason"]
    same = "model=llama2_7b 'gpus=[rtx_3090,rtx_4090]' workload.training=lora "
    typed = page.locator("#typed code").all_inner_texts()
    assert [typed[0].startswith(f"hexiopt fit {same}"), typed[1].startswith(f"hexiopt plan {same}")] == [True, True]
    assert typed[2] == "hexiopt train plan=plan.json"
    report = page.frame_locator("iframe")
    report.locator("h1").wait_for()
    assert "llama2_7b" in report.locator("h1").inner_text()
    with page.expect_download() as download:
        page.get_by_role("link", name="plan.json").click()
    assert download.value.suggested_filename == "plan.json"


def test_nothing_is_asked_of_others_and_nothing_complained_of(plan_tab: Opened, address: str) -> None:
    plan_tab.page.frame_locator("iframe").locator("h1").wait_for()
    assert plan_tab.complaints == []
    home = address.partition("?")[0]
    assert [url for url in plan_tab.requests if not url.startswith((home, "data:,"))] == []


def test_the_report_can_ask_for_nothing(plan_tab: Opened) -> None:
    frame = plan_tab.page.frames[1]
    assert frame.evaluate("origin") == "null"
    denied = "fetch('/').then(() => 'answered', () => 'denied')"
    assert frame.evaluate(denied) == "denied"
    plan_tab.complaints.clear()  # which Chromium makes of it


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1360])
def test_it_fits_phones_and_text_stands_out(plan_tab: Opened, width: int, scheme: str) -> None:
    plan_tab.page.emulate_media(color_scheme=scheme)
    plan_tab.page.set_viewport_size({"width": width, "height": 840})
    assert plan_tab.overflow() <= 0
    least, where = plan_tab.page.evaluate(CONTRAST)
    assert least >= 4.5, where


def test_every_control_has_a_name(plan_tab: Opened) -> None:
    nameless = plan_tab.page.evaluate(
        "[...document.querySelectorAll('input, select, button, iframe')].filter(e => !(e.labels && e.labels.length) &&"
        " !e.ariaLabel && !e.title && !e.textContent.trim()).length"
    )
    assert nameless == 0


def test_the_address_keeps_the_form_but_no_token(plan_tab: Opened, browser: Any, address: str) -> None:
    url = plan_tab.page.url
    assert "token" not in url
    again = Opened(browser, address + url[url.index("#") :])
    assert again.page.get_by_label("Tokens a sequence").input_value() == "1024"
    assert [row.input_value() for row in again.page.locator(".card input[list]").all()] == ["3090", "4090"]


def test_bad_cards_are_one_line(browser: Any, address: str) -> None:
    opened = Opened(browser, address + QUICK.replace("3090", "<b>x"))
    opened.page.get_by_role("button", name="Plan", exact=True).click()
    opened.page.locator("#verdict.no").wait_for()
    assert "'<b>x' is not a known GPU" in opened.page.locator("#reason").inner_text()


def test_what_does_not_fit_offers_a_cure_that_fits(browser: Any, address: str) -> None:
    opened = Opened(browser, address + SMALL)
    opened.page.get_by_role("button", name="Plan", exact=True).click()
    assert opened.wait() in ("DOES NOT FIT", "NOT FOUND"), opened.page.locator("#reason").inner_text()
    cure = opened.page.locator("#cures button").first
    assert cure.inner_text().startswith("Try ")
    cure.click()
    assert opened.wait() == "FITS"


def test_closing_the_tab_ends_the_search_and_a_second_tab_waits(browser: Any, address: str) -> None:
    first = Opened(browser, address + QUICK.replace("seconds=1", "seconds=100"))
    first.page.get_by_role("button", name="Plan", exact=True).click()
    first.page.locator("#stop:visible").wait_for()
    deadline_s = time.monotonic() + 60
    while not _jobs() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert _jobs()
    second = Opened(browser, address + QUICK)
    second.page.get_by_role("button", name="Plan", exact=True).click()
    second.page.locator("#verdict.no").wait_for()
    assert second.page.locator("#reason").inner_text() == "a search is running; one at a time"
    first.context.close()
    while _jobs() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert not _jobs()


def _jobs() -> list[str]:
    """The searches of this machine's pages."""
    listed = subprocess.run(["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if "experiments.web.job" in line and "hexiopt-page-" in line]
