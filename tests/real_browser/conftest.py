"""A real Chromium, a real server of `stretto watch`, and run folders that real writers have written."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.real_browser.recorded import write_runs

ROOT = Path(__file__).parent.parent.parent
TOKEN = "token-of-the-tests"
PATIENCE_MILLISECONDS = 20_000


@dataclass
class WatchServer:
    """`stretto watch` in a process of its own; started again, it has the same address."""

    runs: Path
    cache: Path
    port: int
    replays: bool = False
    process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        command = [sys.executable, "-m", "stretto_app.cli.main", "watch", str(self.runs), "--port", str(self.port)]
        command += ["--allow-replay", "--replays", str(self.cache / "replays")] if self.replays else []
        self.process = subprocess.Popen(
            [*command, "--token", TOKEN, "--no-open"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(self.cache)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert f"{self.address}?token=" in self.process.stdout.readline()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.communicate(timeout=20)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchServer]:
    runs = tmp_path_factory.mktemp("runs")
    write_runs(runs)
    watching = WatchServer(runs, tmp_path_factory.mktemp("cache"), free_port())
    watching.start()
    yield watching
    watching.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "no chromium on the PATH: make test-browser installs it"
    expect.set_options(timeout=PATIENCE_MILLISECONDS)
    with sync_playwright() as playwright:
        # No sandbox: root may have none, and the pages are ours.
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def faults() -> list[str]:
    """What the browser's console complained of; a test that expects a complaint clears it."""
    return []


@pytest.fixture
def page(browser: Browser, server: WatchServer, faults: list[str]) -> Iterator[Page]:
    """The page of all runs. At the end nothing has been complained of."""
    with contextlib.closing(browser.new_context(viewport={"width": 1280, "height": 900})) as context:
        opened = context.new_page()
        opened.set_default_timeout(PATIENCE_MILLISECONDS)
        opened.on("console", lambda message: faults.append(message.text) if message.type != "log" else None)
        opened.on("pageerror", lambda error: faults.append(str(error)))
        opened.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        opened.goto(f"{server.address}?token={TOKEN}")
        opened.get_by_test_id("run-row").first.wait_for()
        yield opened
    assert faults == []
