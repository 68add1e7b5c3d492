"""One fork server of stubborn roles for the room. Tests may be coroutines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stretto.processes.fork_server import ForkServer
from tests.asynchronous import pytest_pyfunc_call as pytest_pyfunc_call

ROLE = "tests.processes.stubborn_role"


@pytest.fixture(scope="package")
def shared() -> Iterator[ForkServer]:
    server = ForkServer([ROLE])
    yield server
    server.close()
