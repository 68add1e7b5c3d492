from pathlib import Path
from typing import Any

import pytest

from stretto.rollout.workflow import WorkflowConfig
from tests.workflows.benches import OWN, Bench, MakeBench


@pytest.fixture
def bench(tmp_path: Path) -> MakeBench:
    def made(kind: str, settings: dict[str, Any] | None = None, members: int = 2, **further: Any) -> Bench:
        function = f"{OWN}:{kind}" if kind[0].isupper() else kind
        config = WorkflowConfig(function=function, settings=settings or {}, **further)
        return Bench(config, tmp_path / "workflow.txt", members=members)

    return made
