"""One cache of built models for all system tests of a session; a home for agents, in which nothing may be left."""

import fcntl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.running import children
from tests.launch.running import laboratory as laboratory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run's folder; what agents leave, a process, a temporary file or shared memory, is found at the end."""
    (tmp_path / "newest").write_text("7")
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.setattr(tempfile, "tempdir", None)
        before, processes = shared(), children()
        yield tmp_path
        assert children() == processes
        until_now = time.monotonic() + 10
        while left := [*Path(temporary).iterdir(), *(shared() - before)]:
            assert time.monotonic() < until_now, left
            time.sleep(0.02)


def shared() -> set[Path]:
    """Folders of agents in shared memory that no living process uses."""
    return {folder for folder in Path("/dev/shm").glob("stretto-agent-*") if not in_use(folder)}


def in_use(folder: Path) -> bool:
    for held in folder.glob("*-vowned"):
        try:
            with held.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            continue
    return False
