"""Process that follows a run for one tool: ``python -m stretto_report.outlets.role SPEC``.

It runs at the lowest CPU priority, and only the end of the run waits for it, for a bounded time. It does not retry: an
error of the tool ends it, and a new process continues from the cursor.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from stretto.core.errors import StoreError
from stretto.core.records import Record
from stretto.doors.loading import look_in
from stretto.launch.recipe.extensions import OUTLETS, PROMETHEUS
from stretto.processes.heartbeat import end_with_conductor, own_heartbeat
from stretto.store.ending import read_ending
from stretto.store.run_folder import RunFolder
from stretto_report.outlets.follower import About, Cursor, How, Outlet, RunFollower, read_cursor
from stretto_report.outlets.points import flat_recipe, stem
from stretto_report.outlets.tools.prometheus_page import PrometheusPage

MODULE = "stretto_report.outlets.role"
ALL_SENT = 86  #: exit code of a process that has sent everything; the tool's code may end it with 0

_WITHOUT_PROJECTS = frozenset({"tensorboard", PROMETHEUS})
_POLL_SECONDS = 1.0
_LOWEST = 19  # CPU priority (niceness)


class FollowerSpec(Record, frozen=True):
    """Run and tool of a follower process, made by its supervisor. `folder`: the run folder. `project`, `name`, `tags`:
    of the run in the tool; an empty `name` means that of the folder. `until`: file descriptor of a pipe; the run has
    ended when the pipe's other end is closed. `host`, `port`: of the page for Prometheus. `path`: folder that is
    searched first for the module of a user-defined tool; "": none.

    Example: ``FollowerSpec("wandb", "runs/first", "stretto", "first", ("baseline",), until=7)``
    """

    tool: str
    folder: str
    project: str
    name: str
    tags: tuple[str, ...]
    until: int
    host: str = ""
    port: int = 0
    path: str = ""


def main(arguments: list[str]) -> int:
    """Follow the run of the spec until it has ended, and send the rest, at the lowest CPU priority. Return the exit
    code: `ALL_SENT`, or 1 if the tool's code has called `sys.exit`; errors are raised. `arguments`: one, a
    `FollowerSpec` as JSON. The process ends with its conductor."""
    spec = msgspec.json.decode(arguments[0], type=FollowerSpec)
    end_with_conductor()
    os.nice(_LOWEST)
    try:
        follow(spec, own_heartbeat())
    except SystemExit as leaving:  # by the tool's code
        print(f"the code of {spec.tool} called exit({leaving.code!r})", file=sys.stderr)
        return 1
    return ALL_SENT


def follow(spec: FollowerSpec, beat: Callable[[], None]) -> None:
    """Send the records of a run to one logging tool as they are written; when the run has ended, send the rest and
    close the run in the tool. What an earlier process sent to the same project is not sent again, except to Prometheus.
    `beat`: heartbeat, called after each portion that the tool has taken and each poll. Raises any error of the tool,
    the run's files or the cursor."""
    look_in(spec.path)
    folder = RunFolder(Path(spec.folder).resolve())
    folder.outlets.mkdir(exist_ok=True)
    path = folder.outlets / f"{stem(spec.tool)}.json"
    cursor = read_cursor(path) if spec.tool != PROMETHEUS else Cursor()
    if spec.tool not in _WITHOUT_PROJECTS and cursor.project not in ("", spec.project):
        cursor = Cursor()
    cursor = msgspec.structs.replace(cursor, project=spec.project, began=cursor.began or _beginning(folder))
    name = spec.name or folder.path.name
    about = About(folder.path, spec.project, name, spec.tags, flat_recipe(folder.recipe), cursor.began)
    outlet = _outlet(spec, about, cursor)
    follower = RunFollower(folder.path, path, cursor, outlet, beat)
    beat()
    while not select.select([spec.until], (), (), _POLL_SECONDS)[0]:
        while follower.advance():
            beat()
        beat()
    follower.finish(lambda: _how(folder))


def _how(folder: RunFolder) -> How:
    """Return how the run ended, by its ledger. The conductor records a normal end before it asks followers to end, so a
    run that is still ``running`` there has failed. A run of an earlier version, without this record, counts as
    finished. If the ledger cannot be read, the error is printed to stderr, and the run counts as failed."""
    try:
        ending = read_ending(folder.ledger)
    except StoreError as error:
        print(error, file=sys.stderr)
        return "failed"
    if ending is None:
        return "finished"
    return "failed" if ending.how == "running" else ending.how


def _outlet(spec: FollowerSpec, about: About, cursor: Cursor) -> Outlet:
    if spec.tool == PROMETHEUS:
        return PrometheusPage(about, spec.host, spec.port)
    outlet: Outlet = OUTLETS.load(spec.tool)(about, cursor)
    return outlet


def _beginning(folder: RunFolder) -> float:
    """Return the Unix time when the run began: when its ``machine.json``, which is written once, or else its recipe was
    written."""
    machine = folder.path / "machine.json"
    return (machine if machine.exists() else folder.recipe).stat().st_mtime


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
