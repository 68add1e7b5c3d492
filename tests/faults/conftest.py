"""One cache of built models for all system tests of a session, and a folder that no disk slows down."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.running import laboratory as laboratory

ROOM = 256 << 20  # bytes; 50 schedules take a tenth of it


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if there is room: nobody loses power here, and a disk that others write to takes seconds for
    what has to be on it."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shutil.disk_usage(shared).free < ROOM:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="st-", dir=shared) as folder:
        yield Path(folder)
