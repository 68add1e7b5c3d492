"""One fork server of stubborn roles for the room."""

from collections.abc import Iterator

import pytest

from stretto_app.forking.server import ForkServer

ROLE = "tests.processes.stubborn_role"


@pytest.fixture(scope="package")
def shared() -> Iterator[ForkServer]:
    server = ForkServer([ROLE])
    yield server
    server.close()
