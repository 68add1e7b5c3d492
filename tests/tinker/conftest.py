"""One base model, and one server of it, for all tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.model.hf.build import build_policy
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.serve import TinkerServer
from tests.tinker.speaking import Client, backend_of, serving
from tests.tiny_policy import TINY


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinker") / "policy"
    build_policy(TINY, folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def backend(model: Path) -> LocalBackend:
    return backend_of(model)


@pytest.fixture(scope="module")
def server(backend: LocalBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TinkerServer]]:
    with serving(backend, tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def address(server: tuple[str, TinkerServer]) -> str:
    return server[0]


@pytest.fixture
def client(address: str) -> Client:
    return Client(address)


@pytest.fixture
def id(client: Client) -> str:
    """A new model of the client."""
    return client.create()
