"""The real command, and the folders that it serves."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.model.hf.build import build_policy
from tests.engine.byte_policy import NAME, build_byte_policy
from tests.gateway.serve.serving import Serving, serve_process
from tests.tiny_policy import TINY


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy without a chat template."""
    path = tmp_path_factory.mktemp("plain") / "policy"
    build_policy(TINY, path, seed=1)
    return path


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that writes any bytes, with a chat template."""
    return build_byte_policy(tmp_path_factory.mktemp("serve") / NAME)


@pytest.fixture(scope="session")
def serving(byte_folder: Path) -> Iterator[Serving]:
    """The real command, once for all tests that only send requests to it."""
    with serve_process(byte_folder, "engine.slots=16") as running:
        yield running
