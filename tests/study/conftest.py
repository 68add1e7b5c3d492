"""The door, for the one test that trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launch.running import Ended, Laboratory


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("laboratory"), tmp_path_factory.mktemp("cache"), warm=True)


@pytest.fixture
def door(laboratory: Laboratory) -> Callable[..., Ended]:
    """``door("study", FILE)`` is ``stretto study FILE``."""
    return laboratory.run
