from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.rollout.workflow import WorkflowConfig
from tests.workflows.benches import OWN, Bench


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    def made(kind: str, settings: dict[str, Any] | None = None, **further: Any) -> Bench:
        config = WorkflowConfig(
            function=f"{OWN}:{kind}" if kind[0].isupper() else kind, settings=settings or {}, **further
        )
        return Bench(config, tmp_path / "workflow.txt")

    return made
