"""Replies of the routes, made from a run and the parameters of the request (`asked`; those of the path begin with "/").
They raise RefusedRequest for an invalid parameter, StoreError for a run that cannot be read, and return None if the
record does not exist."""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from stretto import __version__
from stretto.core.errors import RefusedRequest, nearest
from stretto.store.ending import Condition
from stretto.store.series.metrics import EvaluationLine, SetEvaluationLine
from stretto.store.totals import Totals
from stretto_report.watch.index.files import read_ledger
from stretto_report.watch.index.steps import curves
from stretto_report.watch.index.timeline import CATEGORIES, lanes, marks
from stretto_report.watch.runs.catalog import Catalog
from stretto_report.watch.runs.folder import json_of, logs_of
from stretto_report.watch.runs.health import duplicates_of, health_of
from stretto_report.watch.runs.run import RunSummary, WatchedRun
from stretto_report.watch.runs.table import parse_sort, parse_where
from stretto_report.watch.runs.trajectory import MOST_TOKENS

MOST_COMPARED = 12

_ALARMS_SECONDS = 0.3  # for the alarms of runs that are not open, in a request
_MOST_POINTS, _POINTS = 5_000, 1_000
_MOST_ROWS, _ROWS = 500, 50
_TOKENS = 4_000
_MOST_PIXELS, _PIXELS = 4_000, 1_000
_RECIPE_SHOWN = 200_000
_COMMITTED = "SELECT step, committed FROM steps ORDER BY step DESC LIMIT 1000"
_EVENTS = "SELECT at, name, detail FROM events ORDER BY rowid DESC LIMIT 2000"

Asked = Mapping[str, str]
Default = TypeVar("Default", int, None)


def list_page(catalog: Catalog) -> Any:
    """Return the rows of the catalog's runs, newest first, the number of those that it leaves out, and which are
    branches of others, for GET /api/runs. The row of a run that cannot be summarised has the reason. Alarms that there
    is no time to count are counted by a later request."""
    runs = catalog.all()
    rows = [_row(run, run.summary) for run in runs]
    until = time.monotonic() + _ALARMS_SECONDS
    for place, (run, row) in enumerate(zip(runs, rows, strict=True)):
        if time.monotonic() < until and not run.is_open and row.state != "unreadable":
            rows[place] = _row(run, partial(_with_alarms, run, row))
    return {"runs": rows, "branches": catalog.branches(), "left_out": catalog.left_out, "version": __version__}


def _with_alarms(run: WatchedRun, row: RunSummary) -> RunSummary:
    return msgspec.structs.replace(row, alarms=run.count_alarms(Condition(row.state, row.reason)))


def _row(run: WatchedRun, make: Callable[[], RunSummary]) -> RunSummary:
    try:
        return make()
    except Exception as error:  # a fault of one run, named in its row, must not hide the others
        traceback.print_exc(file=sys.stderr)
        return run.unreadable(run.told(error) or type(error).__name__)


def run_page(run: WatchedRun, asked: Asked) -> Any:
    """Return summary, recipe, machine, engines, alarms and names of the series of a run, for GET /api/runs/ID. No
    parameter is used."""
    totals, engines = run.facts()
    tables = run.tables
    return {
        **msgspec.structs.asdict(run.summary()),
        "recipe": run.recipe_text()[:_RECIPE_SHOWN],
        "versions": json_of(run.folder / "versions.json"),
        "machine": json_of(run.folder / "machine.json"),
        "totals": None if totals is None else _totals(totals),
        "engines_list": engines,
        "series": tables.steps.names,
        "evaluation_sets": sorted({name for line in tables.steps.evaluations if (name := set_of(line))}),
        **run.findings().told(),
        "indexed": tables.trajectories.indexed,
    }


def series_page(run: WatchedRun, asked: Asked) -> Any:
    """Return the curves of the series `names` (default: all) over the steps `from` to `to`, in at most `points` points,
    and all evaluations, for GET /api/runs/ID/series. Raises RefusedRequest for an unknown series or an invalid
    number."""
    steps = run.tables.steps
    names = [name for name in asked.get("names", "").split(",") if name] or steps.names
    for name in names:
        if name not in steps.names:
            raise RefusedRequest("names", f"unknown series {name[:40]!r}", nearest(name, steps.names))
    points = _whole(asked, "points", _POINTS, 2, _MOST_POINTS)
    first, last = (_whole(asked, name, None, 0, 1 << 62) for name in ("from", "to"))
    found = curves(steps, run.trained_by_step(), names, first, last, points)
    return {**msgspec.structs.asdict(found), "evaluations": [evaluation_of(line) for line in steps.evaluations]}


def table_page(run: WatchedRun, asked: Asked) -> Any:
    """Return one page of the trajectories that pass the filter `where`, in the order `sort`, with `limit` rows from
    `offset` on, for GET /api/runs/ID/trajectories. Raises RefusedRequest for a faulty filter, order or number."""
    where, sort = parse_where(asked.get("where", "")), parse_sort(asked.get("sort") or "id")
    offset, limit = _whole(asked, "offset", 0, 0, 1 << 40), _whole(asked, "limit", _ROWS, 1, _MOST_ROWS)
    return run.tables.reader.table.page(where, sort, offset, limit)


def trajectory_page(run: WatchedRun, asked: Asked) -> Any:
    """Return all records of a trajectory, with `limit` tokens from `offset` on, for GET
    /api/runs/ID/trajectories/TRAJECTORY; None if there is no such trajectory. Raises RefusedRequest for an invalid
    number."""
    offset, limit = _whole(asked, "offset", 0, 0, 1 << 40), _whole(asked, "limit", _TOKENS, 1, MOST_TOKENS)
    found = run.tables.reader.trajectory(asked["/trajectory"], offset, limit, run.tables.steps.skipped)
    return None if found is None else msgspec.to_builtins(found) | {"tokenizer_fault": run.pieces.why_numbers}


def group_page(run: WatchedRun, asked: Asked) -> Any:
    """Return all completions of a group, for GET /api/runs/ID/groups/GROUP; None if there is no such group."""
    return run.tables.reader.group(asked["/group"])


def timeline_page(run: WatchedRun, asked: Asked) -> Any:
    """Return the spans of each role, steps and events in a window (`from`, `to`: seconds since the first span; default:
    all), merged for a width of `pixels`, for GET /api/runs/ID/timeline. Raises RefusedRequest for an invalid number, or
    if the window ends before it begins."""
    spans = run.tables.spans
    first, last = _seconds(asked, "from", 0.0), _seconds(asked, "to", spans.end)
    if last < first:
        raise RefusedRequest("to", f"{last:g} is before from, {first:g}", "a later moment")
    pixels = _whole(asked, "pixels", _PIXELS, 10, _MOST_PIXELS)
    _, engines = run.facts()
    shown, count = lanes(spans, {engine.name: engine.host for engine in engines}, first, last, pixels)
    with read_ledger(run.folder) as connection:
        committed, events = (connection.execute(query).fetchall() for query in (_COMMITTED, _EVENTS))
    return {
        "from": first,
        "to": last,
        "end": spans.end,
        "spans": spans.table.rows,
        "in_window": count,
        "categories": CATEGORIES,
        "lanes": shown,
        "marks": marks(spans, committed, events, first, last, pixels // 4),
    }


def logs_page(run: WatchedRun, asked: Asked) -> Any:
    """Return the ends of the logs of the run and of its roles, for GET /api/runs/ID/logs. No parameter is used."""
    return {"logs": [{"name": name, "text": text} for name, text in logs_of(run.folder).items()]}


def health_page(run: WatchedRun, asked: Asked) -> Any:
    """Return the data health of a run, as far as it has been read, for GET /api/runs/ID/health. No parameter is
    used."""
    tables = run.tables
    return health_of(
        tables.trajectories, tables.questions, duplicates_of(run.folder, tables.questions), run.inspection()
    )


def set_of(line: EvaluationLine) -> str:
    """Return the name of the evaluation set; "" for the held-out prompts."""
    return line.name if isinstance(line, SetEvaluationLine) else ""


def evaluation_of(line: EvaluationLine) -> dict[str, Any]:
    """Return the fields of an evaluation for the JSON of a page. `set`: name of its evaluation set; "" for the held-out
    prompts."""
    found = msgspec.to_builtins(line, str_keys=True)
    return {"set": set_of(line), **{name: value for name, value in found.items() if name not in ("kind", "name")}}


def _totals(totals: Totals) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(totals)
    bound = totals.max_staleness
    return found | {"max_staleness": bound if bound is not None and math.isfinite(bound) else None}


def _whole(asked: Asked, name: str, default: Default, least: int, most: int) -> int | Default:
    """Return the integer `name` of a request; `default` if it is missing or empty. Raises RefusedRequest unless it is
    from `least` to `most`."""
    text = asked.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise RefusedRequest(name, f"found {text[:40]!r}", f"a whole number from {least} to {most}")
    return int(text)


def _seconds(asked: Asked, name: str, default: float) -> float:
    text = asked.get(name, "")
    if not text:
        return default
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or abs(found) > 1e12:
        raise RefusedRequest(name, f"found {text[:40]!r}", "seconds since the first span")
    return found
