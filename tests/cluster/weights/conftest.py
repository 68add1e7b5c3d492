"""Two machines: the trainer's with its mailbox and model folder, and another one."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.weights.shared_memory import SharedMemoryPublisher
from tests.cluster.weights.serving import serving, tensors


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The trainer's machine: versions 6 and 7, and a model folder."""
    publisher = SharedMemoryPublisher("run", tmp_path / "home")
    publisher.publish(6, tensors(6.0).items())
    publisher.publish(7, tensors(7.0).items())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"layers": 2}')
    (tmp_path / "model" / "model.safetensors").write_bytes(os.urandom(1 << 20))
    (tmp_path / "model" / "empty.txt").touch()
    return tmp_path / "home"


@pytest.fixture
def model(home: Path) -> Path:
    return home.parent / "model"


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """The mailbox of the other machine."""
    return tmp_path / "away"


@pytest.fixture
def source(home: Path, model: Path) -> Iterator[str]:
    with serving(home, model) as address:
        yield address
