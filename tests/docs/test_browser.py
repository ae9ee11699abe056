"""Pages in a browser, 1,280 and 400 pixels wide: nothing is cut off, every figure is there.

Needs Debian's packages chromium and chromium-driver and Python's selenium.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_runs import run_here

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
def browser() -> Iterator[Any]:
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("no chromium and chromedriver; Debian's packages chromium and chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is in the extra dev")
    options = webdriver.ChromeOptions()
    # Without a sandbox, as containers run as root.
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield running
    running.quit()


def look(browser: Any, page: Path, width: int) -> dict[str, Any]:
    """What a window of this width does not show of a page, and what the browser complains of."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    seen: dict[str, Any] = browser.execute_script(_CUT_OFF)
    seen["log"] = browser.get_log("browser")
    return seen


def test_pages_of_the_site_are_whole(browser: Any, site: Path) -> None:
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


@pytest.mark.parametrize(
    ("name", "figures"), [("first_distance", 1), ("flow", 1), ("choosing_a_source", 0)]
)
def test_a_notebook_is_a_page_with_code_outputs_and_figures(
    browser: Any, site: Path, name: str, figures: int
) -> None:
    browser.get((site / "notebooks" / f"{name}.html").as_uri())
    assert browser.execute_script("return document.querySelectorAll('pre').length") > 5
    assert browser.execute_script("return document.images.length") == figures


def test_the_page_of_a_study_is_whole(
    browser: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from otdd_flash.study.__main__ import main

    draw = "name: blobs, samples: 60, num_classes: 3, spread: 1.5"
    tasks = ", ".join(f"{{{draw}, seed: {k}, as: task number {k}}}" for k in range(6))
    settings = ("transfer.seeds=2", "transfer.source_epochs=1", "transfer.target_samples=6")
    small = ("extractor=identity", "projections=50", "study.workers=1", f"study.tasks=[{tasks}]")
    run = (f"hydra.run.dir={tmp_path}/run", "cache_dir=null")
    assert run_here(main, [*settings, *small, *run], monkeypatch, capsys).code == 0
    for width in WIDTHS:
        seen = look(browser, tmp_path / "run" / "report.html", width)
        assert seen == {"wide": False, "tables": [], "missing": [], "log": []}
