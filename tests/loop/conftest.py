"""A run folder that is written without roles."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop.desk import Desk
from tests.store.make import run_at


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with run_at(tmp_path / "run") as (folder, ledger):
        yield Desk(folder, ledger)


@pytest.fixture
def said() -> list[str]:
    """What a fleet or a link reports."""
    return []
