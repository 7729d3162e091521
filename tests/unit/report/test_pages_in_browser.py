"""The page in a real browser: it opens from a file, answers, and fits a phone and a desk."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evidences import HOSTILE, classes

from credo.report import Run, comparison_page

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = [
    name
    for name, there in (
        ("chromium", BROWSER),
        ("chromedriver", DRIVER),
        ("selenium", importlib.util.find_spec("selenium")),
    )
    if not there
]
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
)  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    # selenium leaves sockets to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = classes((HOSTILE, "VI", "a method with quite a long name", "IVON"), seeds=2, examples=60)
    runs = [*made.runs, Run("HMC", 0, error="out of memory: " + "x" * 300)]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(comparison_page(type(made)(**{**vars(made), "runs": runs})), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def open_page(browser: Any, page: Path, width: int = 1440) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())


def all_of(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def column(browser: Any, index: int) -> list[str]:
    script = (
        "return [...document.querySelector('table.sortable').tBodies[0].rows].map("
        "r => r.cells[arguments[0]]?.dataset.value ?? 'none')"
    )
    return browser.execute_script(script, index)


@pytest.mark.parametrize("width", [390, 1440])
def test_it_opens_without_complaint_and_nothing_overflows(browser, page, width: int) -> None:
    open_page(browser, page, width)
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    # what is wider than the page is in a box that scrolls by itself
    outside = browser.execute_script(
        "return [...document.querySelectorAll('body *')].filter(e => {"
        "  const box = e.getBoundingClientRect();"
        "  return box.width && box.right > innerWidth + 1 && !e.closest('.scroll, .chips');"
        "}).map(e => `${e.tagName}.${e.className}`)"
    )
    assert outside == []
    small = browser.execute_script(
        "return [...document.querySelectorAll('.plot text')].map(t => {"
        "  const { a, b } = t.getScreenCTM();"
        "  return parseFloat(getComputedStyle(t).fontSize) * Math.hypot(a, b);"
        "}).filter(px => px < 9).length"
    )
    assert small == 0


def test_columns_sort_by_pointer_and_keyboard(browser, page) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(browser, page)
    heads = all_of(browser, "table.sortable thead th")
    place = next(i for i, head in enumerate(heads) if head.text.startswith("NLL"))
    button = heads[place].find_element("tag name", "button")
    button.click()
    assert heads[place].get_attribute("aria-sort") == "ascending"
    *values, failed = column(browser, place)
    assert values == sorted(values, key=float)
    assert failed == "none"
    button.send_keys(Keys.ENTER)
    assert heads[place].get_attribute("aria-sort") == "descending"
    *backwards, failed = column(browser, place)
    assert backwards == values[::-1]
    assert failed == "none"  # a row without a number stays last
    first = next(i for i, head in enumerate(heads) if head.text.startswith("Accuracy"))
    heads[first].find_element("tag name", "button").send_keys(Keys.SPACE)
    assert heads[first].get_attribute("aria-sort") == "descending"  # the best first
    assert heads[place].get_attribute("aria-sort") == "none"


def test_methods_are_hidden_in_every_figure_and_come_back(browser, page) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(browser, page)
    parts = all_of(browser, "main [data-method=m1]")
    assert len(parts) > 10
    visible = "return arguments[0].getClientRects().length > 0"
    seen = [part for part in parts if browser.execute_script(visible, part)]
    box = all_of(browser, ".chooser input")[1]
    box.send_keys(Keys.SPACE)
    assert not any(browser.execute_script(visible, part) for part in parts)
    other = all_of(browser, "figure [data-method=m3]")[0]
    assert browser.execute_script(visible, other)
    all_of(browser, ".chooser button")[0].click()
    assert all(browser.execute_script(visible, part) for part in seen)


def test_figures_answer_to_pointer_and_arrow_keys(browser, page) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    open_page(browser, page)
    plot = all_of(browser, "#selective .plot")[0]
    tip, spoken = all_of(browser, "#tip")[0], all_of(browser, "#spoken")[0]
    assert not tip.is_displayed()
    browser.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot
    )
    ActionChains(browser).move_to_element(plot).perform()
    assert tip.is_displayed()
    assert "kept" in tip.text
    assert HOSTILE in tip.text
    plot.send_keys(Keys.ARROW_RIGHT)
    first = spoken.get_attribute("textContent")
    plot.send_keys(Keys.ARROW_RIGHT)
    assert spoken.get_attribute("textContent") != first
    assert "IVON" in first
    plot.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    assert browser.get_log("browser") == []


def test_without_its_script_it_still_shows_everything(browser, page) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        open_page(browser, page)
        assert not all_of(browser, ".chooser")[0].is_displayed()
        assert all_of(browser, ".legend")[0].is_displayed()
        assert not all_of(browser, "thead button")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
