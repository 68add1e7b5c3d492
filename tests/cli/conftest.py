"""The door, opened in this process: as quick as a function call, and as complete as the command."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launch.running import Ended, Laboratory
from tests.launch.running import laboratory as laboratory


@pytest.fixture
def door(laboratory: Laboratory) -> Callable[..., Ended]:
    """``door("inspect", run_dir)`` is ``stretto inspect RUN_DIR``."""
    return laboratory.run
