"""Pages in a real Chromium: desktop and phone, light and dark, with the pointer and with the keyboard alone."""

import json
import statistics
from itertools import pairwise

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from tools.chromium import look

PAGES = ["run", "long", "comparison", "timeline", "plan"]
DESKTOP, PHONE = 1280, 400

DRAWN = """
const done = arguments[0];
requestAnimationFrame(() => requestAnimationFrame(() => done(true)));
"""


def opened(driver, path, *, width=DESKTOP, dark=False, opens_all=False):
    """Opens a page afresh and waits until it is drawn; what the log said before is dropped."""
    look(driver, width=width, dark=dark)
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    driver.get(path.as_uri())
    if opens_all:
        driver.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    driver.execute_async_script(DRAWN)


def numbers_of(text):
    """Color channels 0 to 255 in text such as ``rgb(1, 2, 3)`` or ``color(srgb 0.1 0.2 0.3)``."""
    inside = text.partition("(")[2].rstrip(")")
    if text.startswith("color("):
        return [255 * float(each) for each in inside.split()[1:4]]
    return [float(each) for each in inside.replace(",", " ").split()[:3]]


def luminance(text):
    channels = [each / 255 for each in numbers_of(text)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, other):
    """The contrast of two colors, as WCAG 2.2 defines it."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


TEXTS = """
const solid = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (!/(, 0\\)|\\/ 0\\)|transparent)$/.test(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};
const found = new Map();
const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
for (let text = walk.nextNode(); text; text = walk.nextNode()) {
  const node = text.parentElement, style = getComputedStyle(node);
  const isShown = node.getClientRects().length && !["SCRIPT", "NOSCRIPT"].includes(node.tagName);
  if (!text.textContent.trim() || !isShown) continue;
  const colour = node instanceof SVGElement ? style.fill : style.color;
  found.set(`${colour} on ${solid(node)}`, text.textContent.trim().slice(0, 40));
}
return [...found];
"""


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_fits_its_window_reads_well_and_loads_nothing_else(driver, pages, name, width, dark):
    opened(driver, pages[name], width=width, dark=dark, opens_all=True)
    assert driver.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert asked == [pages[name].as_uri()]
    wide = driver.execute_script("return document.documentElement.scrollWidth")
    assert wide <= width
    for colours, text in driver.execute_script(TEXTS):
        one, _, other = colours.partition(" on ")
        assert contrast(one, other) >= 4.5, (colours, text)
    ground = luminance(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert (ground < 0.1) == dark


@pytest.mark.parametrize("name", ["run", "long"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_text_in_a_chart_is_not_cut_and_no_tick_covers_another(driver, pages, name, width):
    opened(driver, pages[name], width=width)
    found = driver.execute_script(
        """
        return [...document.querySelectorAll(".chart svg")].map((svg) => {
          const box = svg.getBoundingClientRect();
          return {box: [box.left, box.right], texts: [...svg.querySelectorAll("text")].map((text) => {
            const at = text.getBoundingClientRect();
            return {words: text.textContent, left: at.left, right: at.right, top: at.top, bottom: at.bottom};
          })};
        });
        """
    )
    assert len(found) == 5
    for chart in found:
        texts = chart["texts"]
        assert len(texts) > 4
        for text in texts:
            assert chart["box"][0] - 1 <= text["left"], text
            assert text["right"] <= chart["box"][1] + 1, text
        for n, one in enumerate(texts):
            for other in texts[:n]:
                beside = one["left"] >= other["right"] or other["left"] >= one["right"]
                assert beside or one["top"] >= other["bottom"] - 3 or other["top"] >= one["bottom"] - 3, (one, other)


def test_the_pointer_reads_the_values_of_a_step(driver, pages):
    opened(driver, pages["run"])
    chart = driver.find_element("css selector", "#loss .chart")
    ActionChains(driver).move_to_element(chart).perform()
    tip = driver.find_element("id", "tip")
    assert tip.is_displayed()
    step, *values = tip.text.split("\n")
    assert step.startswith("step ")
    assert values[0] == "training"
    number = int(step.split()[1])
    metrics = (pages["run"].parent / "small" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in metrics.splitlines()]
    assert float(values[1]) == pytest.approx(rows[number - 1]["loss"], rel=1e-4)
    ActionChains(driver).move_to_element(driver.find_element("tag name", "h1")).perform()
    assert not tip.is_displayed()


def focused(driver, selector, most=80):
    """Presses Tab until an element that the selector matches has the focus, and returns it."""
    for _ in range(most):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        at = driver.switch_to.active_element
        if driver.execute_script("return arguments[0].matches(arguments[1])", at, selector):
            return at
    raise AssertionError(f"{selector} is not reached by the keyboard")


def test_a_chart_is_read_by_the_keyboard_alone(driver, pages):
    opened(driver, pages["run"])
    chart = focused(driver, "#loss .chart")
    outline = driver.execute_script("return getComputedStyle(arguments[0]).outlineStyle", chart)
    assert outline == "solid"
    assert chart.get_attribute("role") == "slider"
    assert chart.get_attribute("aria-valuetext").startswith("Training loss falls from ")
    chart.send_keys(Keys.HOME)
    assert chart.get_attribute("aria-valuenow") == "1"
    chart.send_keys(Keys.ARROW_RIGHT)
    assert chart.get_attribute("aria-valuetext").startswith("step 2: training ")
    assert ", evaluation " in chart.get_attribute("aria-valuetext")
    chart.send_keys(Keys.END)
    assert chart.get_attribute("aria-valuenow") == "8"
    assert driver.find_element("id", "tip").is_displayed()
    chart.send_keys(Keys.ESCAPE)
    assert not driver.find_element("id", "tip").is_displayed()


def test_a_curve_is_hidden_and_shown_by_its_button(driver, pages):
    opened(driver, pages["comparison"])
    drawn = "return document.querySelectorAll('#loss .curve').length"
    assert driver.execute_script(drawn) == 2
    button = focused(driver, "#loss .legend button")
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-pressed") == "false"
    assert driver.execute_script(drawn) == 1
    button.send_keys(Keys.SPACE)
    assert driver.execute_script(drawn) == 2


def test_the_resume_is_marked_on_each_chart(driver, pages):
    opened(driver, pages["run"])
    marks = driver.execute_script(
        "return [...document.querySelectorAll('.chart svg')].map((svg) => svg.querySelectorAll('.resume').length)"
    )
    assert marks == [1] * 5
    words = driver.execute_script("return [...document.querySelectorAll('#loss svg text')].map((t) => t.textContent)")
    assert any("pp2/1f1b mb4" in each for each in words)


def test_the_map_of_memory_is_read_rank_by_rank(driver, pages):
    opened(driver, pages["long"])
    box = focused(driver, ".map")
    box.send_keys(Keys.HOME)
    box.send_keys(Keys.ARROW_DOWN * 3)
    assert ": rank 3 about 16." in box.get_attribute("aria-valuetext")
    shades = driver.execute_script(
        """
        const canvas = document.querySelector(".map canvas"), g = canvas.getContext("2d");
        const at = (line) => [...g.getImageData(0, line, 1, 1).data];
        return [canvas.width, canvas.height, at(0), at(7)];
        """
    )
    assert shades[:2] == [160, 256]
    assert shades[2] != shades[3]


@pytest.mark.parametrize("name", ["run", "timeline"])
def test_a_pipeline_is_drawn_and_read_by_the_keyboard(driver, pages, name):
    opened(driver, pages[name])
    canvas = focused(driver, ".panel canvas")
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert "forward" in driver.find_element("id", "live").get_attribute("textContent")
    colours = driver.execute_script(
        """
        const canvas = arguments[0], g = canvas.getContext("2d");
        const data = g.getImageData(0, 0, canvas.width, canvas.height).data;
        const found = new Set();
        for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 3).join());
        return found.size;
        """,
        canvas,
    )
    assert colours > 5


@pytest.mark.parametrize("name", PAGES)
def test_headings_are_nested_and_each_part_has_a_name(driver, pages, name):
    opened(driver, pages[name], opens_all=True)
    levels = driver.execute_script(
        "return [...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map((h) => +h.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    nameless = driver.execute_script(
        """
        return [...document.querySelectorAll("button, [tabindex], summary, canvas")].filter((each) =>
          !(each.getAttribute("aria-label") || each.textContent.trim() || each.closest("[aria-label]"))).length;
        """
    )
    assert nameless == 0


def test_a_long_run_is_drawn_at_once_and_follows_the_pointer(driver, pages):
    opened(driver, pages["long"])
    load = driver.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert load < 3000
    moves_ms = driver.execute_script(
        """
        const box = document.querySelector("#loss .chart"), edge = box.getBoundingClientRect(), found = [];
        for (let n = 0; n < 200; n++) {
          const x = edge.left + edge.width * n / 200, start = performance.now();
          box.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: edge.top + 60, bubbles: true}));
          document.body.offsetHeight;
          found.push(performance.now() - start);
        }
        return found;
        """
    )
    assert statistics.median(moves_ms) < 16  # a frame of a screen


def test_a_page_without_scripts_has_sentences_tables_and_bars(driver, pages):
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.get(pages["run"].as_uri())
        text = driver.find_element("tag name", "main").text
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "Training loss falls from" in text
    assert "Some of the values" in text
    assert "Sent in a step for each layer" in text
