"""Pictures of the main pages of `stretto watch`, of the small run of the tests: docs/images/watch_*.png.

stretto watch tests/data --port 8123 --token T --no-open &
python -m benchmarks.screenshots "http://127.0.0.1:8123/?token=T"
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
PAGES = {
    "curves": "#/runs/{run}/curves",
    "timeline": "#/runs/{run}/timeline",
    "trajectory": "#/runs/{run}/trajectory/0.50.0%2F3?colour=logprob",
    "health": "#/runs/{run}/health",
}
SETTLED_MILLISECONDS = 1500  # curves are drawn in the frames after their data


def photograph(address: str) -> None:
    """Write a picture for each page of the run `synchronous_run` at the address that stretto watch has printed."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme="light")
        page.goto(address)
        row = page.get_by_test_id("run-row").filter(has_text="synchronous_run").first
        run = row.get_attribute("data-run")
        for name, place in PAGES.items():
            page.goto(address.partition("?")[0] + place.format(run=run))
            page.wait_for_timeout(SETTLED_MILLISECONDS)
            if name == "trajectory":
                page.get_by_test_id("token").nth(4).hover()
            page.screenshot(path=IMAGES / f"watch_{name}.png")
        browser.close()


if __name__ == "__main__":
    photograph(sys.argv[1])
