"""Trial of a user-defined outlet before a run, in an empty folder."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stretto.core.records import Outcome
from stretto.launch.recipe.extensions import OUTLETS, OutletsConfig
from stretto.store.series.metrics import SampledCompletion
from stretto_report.audit.evidence import Alarm
from stretto_report.outlets.follower import About, Cursor, Outlet
from stretto_report.outlets.points import MetricsPoint

#: Run name that the outlet gets in the trial.
TRIAL = "dry-run"
_METHODS = ("send", "table", "alarm", "close")
_SAMPLE = SampledCompletion(0, "17", "3+8=", "11", "3+8=11", Outcome.RIGHT, 1.0, "", (0,))


def outlet_faults(tool: str, config: OutletsConfig) -> Iterator[str]:
    """Try the outlet class `tool` (``module:name``): create it with a temporary folder, send two points, a table and an
    alarm, and close it. Yield a sentence for each fault; after a missing or asynchronous method, nothing is
    sent. Exceptions of the class are raised."""
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        about = About(Path(folder), config.project, TRIAL, config.tags, {"trainer.steps": 1}, 0.0)
        outlet: Outlet = OUTLETS.load(tool)(about, Cursor())
        if lacking := [name for name in _METHODS if not callable(getattr(outlet, name, None))]:
            yield f"has no method {', '.join(lacking)} (docs/how_to/doors/outlet.md)"
            return
        if waiting := [name for name in _METHODS if inspect.iscoroutinefunction(getattr(outlet, name))]:
            yield f"has an asynchronous method {', '.join(waiting)}, which is called and not awaited"
            return
        if not isinstance(getattr(outlet, "run", None), str):
            yield "has no text 'run', the run id with which another process resumes logging"
        points = [MetricsPoint("step", step, float(step), {"reward": 0.5, "trainer/loss": 0.1}) for step in (1, 2)]
        outlet.send(points, 0)
        outlet.table(2, [_SAMPLE], 2)
        outlet.alarm(
            Alarm("entropy", "entropy collapse", 2, "the entropy is a tenth of what it was", "trainer/entropy")
        )
        outlet.close("finished")
