"""One cache of built models for all system tests of a session; a whole run with toys in place of its roles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from tests.launch.running import laboratory as laboratory
from tests.loop.conducting import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with RunFolder.create(tmp_path / "run") as folder:
        made = Stage(folder, Ledger(folder.ledger, StoreConfig()))
        yield made
        made.ledger.close()
