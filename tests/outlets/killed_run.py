"""A run that is killed: a step every few milliseconds, an evaluation beside every seventh, a checkpoint every fourth.
As a resumed run does, it begins by removing the lines behind its newest checkpoint, and does these steps again:

    python -m tests.outlets.killed_run FOLDER LAST_STEP TOOL ...
"""

import asyncio
import sys
from pathlib import Path

from stretto.launch.recipe.extensions import OutletsConfig
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import MetricsLog, read_metrics, rewind_metrics
from stretto_report.outlets.supervision import followed
from tests.outlets.recorded import evaluation, step

_STEP_SECONDS = 0.02
_CHECKPOINTS, _EVALUATIONS = 4, 7  # steps between them
_LATE = 3  # steps, that an evaluation takes


async def train(path: Path, last: int, config: OutletsConfig) -> None:
    """Resume the run at its newest checkpoint and train it to step `last`."""
    with RunFolder.resume(path) as folder:
        done = len(read_metrics(folder.metrics)[0]) // _CHECKPOINTS * _CHECKPOINTS
        rewind_metrics(folder.metrics, done)
        metrics = MetricsLog(folder.metrics)
        async with followed(config, folder, print, lambda: False):
            for number in range(done + 1, last + 1):
                metrics.append(step(number))
                if (begun := number - _LATE) > 0 and begun % _EVALUATIONS == 0:
                    metrics.append(evaluation(begun))
                await asyncio.sleep(_STEP_SECONDS)


if __name__ == "__main__":
    asyncio.run(train(Path(sys.argv[1]), int(sys.argv[2]), OutletsConfig.model_validate({"to": sys.argv[3:]})))
