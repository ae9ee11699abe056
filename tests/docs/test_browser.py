"""Pages in a browser, 1,280 and 400 pixels wide: nothing is cut off, every figure is there.

Needs Debian's packages chromium and chromium-driver and Python's selenium.
"""

import shutil

import pytest

WIDTHS = (1280, 400)
# Tables that show less than they hold, in a frame of their own or by themselves.
_CUT_OFF = """
const seen = [];
for (const table of document.querySelectorAll("table")) {
  const frame = table.closest(".md-typeset__scrollwrap") || table.parentElement;
  if (table.scrollWidth > table.clientWidth + 1 || frame.scrollWidth > frame.clientWidth + 1)
    seen.push(table.innerText.slice(0, 80));
}
return {
  wide: document.documentElement.scrollWidth > window.innerWidth,
  tables: seen,
  missing: [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
};
"""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]


@pytest.fixture(scope="module")
def browser():
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("no chromium and chromedriver; Debian's packages chromium and chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is in the extra dev")
    options = webdriver.ChromeOptions()
    # Without a sandbox, as containers run as root.
    for name in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{name}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield running
    running.quit()


def look(browser, page, width):
    """What a window of this width does not show of a page, and what the browser complains of."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    seen = browser.execute_script(_CUT_OFF)
    seen["log"] = browser.get_log("browser")
    return seen


def test_pages_of_the_site_are_whole(browser, site):
    pages = [page for page in site.rglob("*.html") if "repository" not in page.parts]
    # The page of an address that is not there has no place of its own to load styles from.
    pages = [page for page in pages if page.name != "404.html"]
    assert len(pages) > 15
    for width in WIDTHS:
        for page in pages:
            seen = look(browser, page, width)
            # On a telephone wide tables are moved in their frames.
            if width == min(WIDTHS):
                seen["tables"] = []
            assert seen == {"wide": False, "tables": [], "missing": [], "log": []}, page.name


def test_notebooks_are_pages_with_code_outputs_and_figures(browser, site):
    for name, figures in (("first_distance", 1), ("flow", 1), ("choosing_a_source", 0)):
        browser.get((site / "notebooks" / f"{name}.html").as_uri())
        assert browser.execute_script("return document.querySelectorAll('pre').length") > 5, name
        assert browser.execute_script("return document.images.length") == figures, name


def test_the_page_of_a_study_is_whole(browser, tmp_path):
    from small_tasks import small_study

    from otdd_flash.report.study.writing import write_study_report

    study = small_study(5, measures=["frechet", "knn"])
    write_study_report(study.run(tmp_path, threads=1), tmp_path)
    for width in WIDTHS:
        seen = look(browser, tmp_path / "report.html", width)
        assert seen == {"wide": False, "tables": [], "missing": [], "log": []}
