"""Promises about watching a run that is being written: its steps appear on every page, its death is seen, an engine
that drifts from the trainer raises an alarm, a page goes on by itself after the server was started again, and one that
was left at any moment holds no place of a stream."""

import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
from playwright.sync_api import Page, expect

from stretto.store.series.metrics import MetricsLog
from tests.real_browser.conftest import PATIENCE_MILLISECONDS, ROOT, WatchServer
from tests.watch.runs import step_line, write_run


class Writer:
    """The process of a run that is written while it is watched."""

    def __init__(self, server: WatchServer, name: str) -> None:
        self.name = name
        command = [sys.executable, "-m", "tests.real_browser.recorded", str(server.runs / name)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def step(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        assert self._process.stdout.readline()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=20)


@pytest.fixture
def writer(server: WatchServer, request: pytest.FixtureRequest) -> Iterator[Writer]:
    started = Writer(server, str(request.node.name))
    started.step()
    yield started
    started.kill()


def open_run(page: Page, name: str) -> None:
    page.get_by_test_id("run-row").filter(has_text=name).locator("a").first.click()
    expect(page.locator(".facts").first).to_contain_text("1 / 3")


def test_steps_appear_while_they_are_written_and_a_death_is_seen(page: Page, writer: Writer) -> None:
    open_run(page, writer.name)
    expect(page.locator(".state")).to_contain_text("running")
    reward = page.locator('[data-testid="curve"][data-name="reward"] .latest')
    expect(reward).to_contain_text("0.1")
    writer.step()
    expect(page.locator(".facts").first).to_contain_text("2 / 3")
    expect(reward).to_contain_text("0.2")
    page.keyboard.press("3")
    expect(page.get_by_test_id("trajectory-row")).to_have_count(3)
    writer.step()
    expect(page.get_by_test_id("trajectory-row")).to_have_count(4)
    writer.kill()
    expect(page.locator(".state")).to_contain_text("dead")
    page.keyboard.press("5")
    expect(page.get_by_test_id("alarm")).to_contain_text("its process is gone without a word")


#: The pages of a run, and what each has of one that is being written.
PAGES = {
    "curves": "reward",
    "timeline": "1 of 1 spans",
    "trajectories": "0.p1.0/0",
    "trajectory/0.p1.0%2F0?colour=fate": "trained",
    "trajectory/9.x.0%2F0?colour=fate": "not trained yet",
    "group/0.p1.0": "mean reward",
    "health": "Where the work went",
    "alarms": "alarms fired",
    "recipe": "learning_rate",
    "replay": "There are none",
}


def test_every_page_of_a_run_goes_on_with_it(page: Page, writer: Writer) -> None:
    open_run(page, writer.name)
    run = page.url.partition("#/runs/")[2].partition("/")[0]
    for done, (place, told) in enumerate(PAGES.items(), 1):
        page.goto(f"{page.url.partition('#')[0]}#/runs/{run}/{place}")
        expect(page.locator("main")).to_contain_text(told.replace("1 of 1", f"{done} of {done}"))
        expect(page.locator(".state")).to_contain_text("running")
        writer.step()
        expect(page.locator(".facts").first).to_contain_text(f"{done + 1} / 3")
        if place == "timeline":
            told = f"{done + 1} of {done + 1} spans"
            expect(page.locator("main")).to_contain_text(told)
    page.goto(f"{page.url.partition('#')[0]}#/diff?a={run}&b={run}")
    expect(page.get_by_test_id("diff")).to_have_attribute("data-equal", "true")


def test_an_engine_that_drifts_from_the_trainer_is_an_alarm_with_its_curve(page: Page, server: WatchServer) -> None:
    metrics = MetricsLog(write_run(server.runs / "drifting") / "metrics.jsonl")
    for step in range(3, 31):
        metrics.append(msgspec.structs.replace(step_line(step), canary={"engine-0": 0.02 * step}))
    page.get_by_test_id("run-row").filter(has_text="drifting").locator("a").first.click()
    expect(page.get_by_role("heading", name="drifting", level=1)).to_be_visible()
    page.keyboard.press("5")
    alarm = page.locator('[data-testid="alarm"][data-name="canary_drifting"]')
    expect(alarm).to_contain_text("engine-0 was at 11% of what it may be from the trainer, and is at 51%")
    alarm.get_by_role("link").click()
    expect(page.locator('[data-testid="curve"]').first).to_have_attribute("data-name", "canary.engine-0")


def test_more_tabs_than_a_browser_has_connections_share_them(page: Page, server: WatchServer, writer: Writer) -> None:
    rows = page.get_by_test_id("run-row")
    expect(rows.filter(has_text=writer.name)).to_have_count(1)
    ids = {str(row.locator("th").inner_text()): str(row.get_attribute("data-run")) for row in rows.all()}
    shown = [writer.name] * 7 + ["recorded", "one", "other"]
    tabs = [page.context.new_page() for _ in shown]
    for tab, name in zip(tabs, shown, strict=True):
        tab.goto(f"{server.address}#/runs/{ids[name]}/curves")
        expect(tab.locator(".facts").first).to_be_visible(timeout=PATIENCE_MILLISECONDS)
    writer.step()
    for tab in tabs[:7]:
        expect(tab.locator(".facts").first).to_contain_text("2 / 3")
    tabs[0].close()  # it had the connection
    writer.step()
    for tab in tabs[1:7]:
        expect(tab.locator(".facts").first).to_contain_text("3 / 3")


SLOW_LOCKS = """
const request = LockManager.prototype.request
LockManager.prototype.request = async function (name, ...rest) {
  if (name.startsWith('stream')) await new Promise((resolve) => (window.grant = resolve))
  return request.call(this, name, ...rest)
}
"""


def test_a_page_that_was_left_before_its_stream_began_holds_no_place(page: Page, writer: Writer) -> None:
    page.add_init_script(SLOW_LOCKS)
    page.reload()
    open_run(page, writer.name)
    page.wait_for_function("() => window.grant")
    page.evaluate("location.hash = '#/'")
    page.get_by_test_id("run-row").first.wait_for()
    page.evaluate("window.grant()")
    until = time.monotonic() + PATIENCE_MILLISECONDS / 1000
    while page.evaluate("navigator.locks.query().then((locks) => locks.held.length)"):
        assert time.monotonic() < until
        page.wait_for_timeout(50)


def test_a_page_goes_on_by_itself_after_the_server_was_started_again(
    page: Page, server: WatchServer, writer: Writer, faults: list[str]
) -> None:
    open_run(page, writer.name)
    server.stop()
    expect(page.locator(".lost")).to_be_visible(timeout=PATIENCE_MILLISECONDS)
    writer.step()
    server.start()
    expect(page.locator(".facts").first).to_contain_text("2 / 3")
    expect(page.locator(".lost")).to_have_count(0)
    faults[:] = [fault for fault in faults if "ERR_CONNECTION_REFUSED" not in fault and "ERR_INCOMPLETE" not in fault]
