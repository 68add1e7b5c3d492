"""Runs on real clusters; minutes each, so they are no part of the other tests (`make test-clusters`)."""

import pytest

from tests.launch.running import Laboratory
from tests.real_clusters.nodes import NO_TOKEN


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NO_TOKEN.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("laboratory"), tmp_path_factory.mktemp("cache"))
