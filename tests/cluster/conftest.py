"""One cache of built models for all system tests of a session."""

from __future__ import annotations

import pytest

from tests.launch.running import Laboratory


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("laboratory"), tmp_path_factory.mktemp("cache"), warm=True)
