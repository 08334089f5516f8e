"""The documentation site in a real Chromium, where ``make docs`` has built it: every page, and of listings a tenth."""

import functools
import http.server
import json
import threading

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from tests_browser.conftest import ROOT
from tools.chromium import look

SITE = ROOT / "build" / "site"
EVERY = sorted(page.relative_to(SITE).as_posix() for page in SITE.rglob("*.html"))
LISTINGS = [page for page in EVERY if page.startswith("source/")]  # of code, which are alike
PAGES = sorted({*EVERY} - {*LISTINGS} | {*LISTINGS[::10]})

CUT = """
const width = document.documentElement.clientWidth, found = [];
const scrolls = (node) => node && (/auto|scroll/.test(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
for (const node of document.querySelectorAll("article *")) {
  const box = node.getBoundingClientRect();
  if (box.width && box.right > width + 1 && !scrolls(node)) found.push(`${node.tagName} ${Math.round(box.right)}`);
}
return found;
"""
"""Elements of a page that are wider than the window, and do not scroll."""

NO_PICTURE = "return [...document.images].filter((each) => !each.naturalWidth || !each.alt).map((each) => each.src)"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and says nothing of it."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def served():
    if not PAGES:
        pytest.skip("no site is built: make docs")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def scheme(driver):
    return driver.execute_script("return document.body.dataset.mdColorScheme")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)], ids=["desktop", "phone"])
def test_each_page_fits_its_window_shows_its_pictures_and_asks_for_nothing_elsewhere(driver, served, width, dark):
    look(driver, width=width, dark=dark)
    assert len(PAGES) > 120
    wrong = {}
    for page in PAGES:
        for kind in ("browser", "performance"):
            driver.get_log(kind)
        driver.get(served + page)
        events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        asked = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
        elsewhere = [url for url in asked if not url.startswith((served, "data:", "blob:"))]
        seen = [each for script in (CUT, NO_PICTURE) for each in driver.execute_script(script)]
        found = [*elsewhere, *driver.get_log("browser"), *seen]
        if found or scheme(driver) != ("slate" if dark else "default"):
            wrong[page] = found or scheme(driver)
    assert not wrong


def test_a_reader_whose_system_turns_dark_gets_a_dark_page_also_after_a_visit_in_light(driver, served):
    for dark in (False, True, False):
        look(driver, width=1280, dark=dark)
        driver.get(served + "start.html")
        assert scheme(driver) == ("slate" if dark else "default")


def test_the_search_finds_a_word_of_the_guide(driver, served):
    look(driver, width=1280, dark=False)
    driver.get(served + "start.html")
    driver.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys("recompute")
    found = "return [...document.querySelectorAll('.md-search-result__link')].map((each) => each.href)"
    links = WebDriverWait(driver, 20).until(lambda each: each.execute_script(found))
    assert any("guide.html" in link for link in links)
