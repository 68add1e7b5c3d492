"""One cache of built models for all system tests of a session; a whole run with toys in place of its roles."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.model.hf.build import build_policy
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder
from tests.launch.running import laboratory as laboratory
from tests.loop.conducting import Stage
from tests.tiny_policy import TINY


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A folder with a policy; its path is short, for the sockets beside it."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as path:
        build_policy(TINY, Path(path) / "policy", seed=1)
        yield Path(path)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with RunFolder.create(tmp_path / "run") as folder:
        made = Stage(folder, Ledger(folder.ledger, StoreConfig()))
        yield made
        made.ledger.close()
