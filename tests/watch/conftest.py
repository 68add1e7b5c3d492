"""One server for all tests of a file, over a folder of runs; requests are real ones."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from stretto.processes.http.asgi import HostNames
from stretto.processes.http.server import HttpServer, settings_of
from stretto_report.watch.runs.catalog import Catalog
from stretto_report.watch.web.app import Dashboard
from stretto_report.watch.web.guard import Guard
from stretto_report.watch.web.replay import Replays
from tests.watch.runs import write_run

TOKEN = "a-token"


@contextmanager
def serving(
    runs: Path, cache: Path, replays: Replays | None = None, *, most_held: int = 1 << 30
) -> Iterator[httpx.Client]:
    """A server of the runs of a folder, and a client that knows the token; `most_held`: as `Catalog`'s."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    dashboard = Dashboard(Catalog([runs], cache, most_held=most_held), replays)
    app = Guard(dashboard.app(), TOKEN, port, HostNames(loopback=True))
    server = HttpServer(settings_of(app, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        headers = {"authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30, verify=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(20)
        dashboard.close()
        listening.close()
        assert not thread.is_alive()


@contextmanager
def alone(folder: Path, replays: Replays | None = None) -> Iterator[tuple[httpx.Client, str]]:
    """A server of the one run in ``runs`` of a folder, and the address of the run."""
    with serving(folder / "runs", folder / "cache", replays) as client:
        (run,) = client.get("/api/runs").json()["runs"]
        yield client, f"/api/runs/{run['id']}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are looked at twenty times a second, and a wrong secret costs a twentieth of one."""
    for name in ("guard._WRONG", "events._LOOK", "events._LONGEST"):
        monkeypatch.setattr(f"stretto_report.watch.web.{name}_SECONDS", 0.05)
    for name in ("catalog._LOOK", "pieces._PAUSE", "run._PAUSE"):
        monkeypatch.setattr(f"stretto_report.watch.runs.{name}_SECONDS", 0.05)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run, ``first``."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first")
    return folder


@pytest.fixture(scope="module")
def client(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(runs, tmp_path_factory.mktemp("cache")) as client:
        yield client


@pytest.fixture(scope="module")
def first(client: httpx.Client) -> str:
    """The address of the run ``first``."""
    (run,) = [run for run in client.get("/api/runs").json()["runs"] if run["name"] == "first"]
    return f"/api/runs/{run['id']}"
