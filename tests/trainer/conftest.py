from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from tests.trainer.tiny import tiny
from tests.trainer.two_machines import Site, two_machines


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def build() -> Callable[[], PreTrainedModel]:
    return tiny


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with two_machines(tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")) as made:
        yield made
