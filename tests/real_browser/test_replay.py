"""Promise: a replay is begun from the page; its mistakes are in the command's words, its log is shown, it can be
stopped, and what it has made is a branch whose curves lie over those of the run."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.real_browser.conftest import WatchServer, free_port
from tests.real_browser.recorded import RECORDED

REPLAY_MILLISECONDS = 300_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchServer]:
    """A server that may begin replays, over one run."""
    runs = tmp_path_factory.mktemp("runs")
    shutil.copytree(RECORDED, runs / "recorded")
    watching = WatchServer(runs, tmp_path_factory.mktemp("cache"), free_port(), replays=True)
    watching.start()
    yield watching
    watching.stop()


def begin(page: Page, settings: str) -> None:
    page.get_by_label("Settings").fill(settings)
    page.get_by_role("button", name="Begin").click()


def test_a_branch_is_made_from_the_page(page: Page, faults: list[str]) -> None:
    page.get_by_test_id("run-row").locator("a").first.click()
    page.keyboard.press("7")
    begin(page, "task.kind=gsm8k")
    expect(page.get_by_role("alert")).to_contain_text("a replay may change algorithm and trainer")
    begin(page, "trainer.learning_rat=1\nalgorithm.los=gspo")
    expect(page.locator("[data-replay=refused]")).to_contain_text("did you mean", timeout=REPLAY_MILLISECONDS)
    expect(page.locator("[data-replay=refused]")).to_contain_text("los")
    begin(page, "trainer.learning_rate=0.01")
    expect(page.locator("[data-replay=running]")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("[data-replay=stopped]")).to_contain_text("stopped from the page", timeout=REPLAY_MILLISECONDS)
    begin(page, "trainer.learning_rate=0.01")
    expect(page.locator("[data-replay=done]")).to_contain_text("steps 1 to 6 of", timeout=REPLAY_MILLISECONDS)
    branch = page.locator("[data-branch]")
    expect(branch).to_contain_text("trainer.learning_rate")
    branch.get_by_role("link", name="where they part").click()
    expect(page.get_by_test_id("diff")).to_have_attribute("data-step", "1")
    page.go_back()
    branch.get_by_role("link", name="Curves over each other").click()
    expect(page.get_by_test_id("curve").first.locator(".latest")).to_contain_text("recorded")
    expect(page.get_by_role("heading", name="2 runs over each other")).to_be_visible()
    faults[:] = [fault for fault in faults if "status of 400" not in fault]
