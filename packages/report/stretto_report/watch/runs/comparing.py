"""Comparison of runs: differing recipe keys, and the first step and token that differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

import msgspec

from stretto.core.errors import StoreError
from stretto.core.records import Batch, Record, Trajectory
from stretto.store.ledger.reading import last_step, read_batches
from stretto_report.audit.diff import diff_runs
from stretto_report.reading.series import flat
from stretto_report.watch.index.files import LEDGER, refuse_strange_files
from stretto_report.watch.runs.run import WatchedRun

_MOST_FIELDS = 100


class _RecipeKey(Record, frozen=True):
    """A key of recipes with its value in each run, in the order of the runs; None where it is not set."""

    key: str
    values: list[Any]


class OneToken(Record, frozen=True):
    """One token of one run. `logprob`, `version`: of the engine that sampled it; None if the token was given."""

    id: int
    text: str
    logprob: float | None
    version: int | None


class _PartingToken(Record, frozen=True):
    """First token that differs between the runs `a` and `b`. `trajectory`: its id; `index`: of the token in it. `a` or
    `b` is None if that run's trajectory has ended before."""

    trajectory: str
    index: int
    a: OneToken | None
    b: OneToken | None


class Comparison(Record, frozen=True):
    """Result of `stretto diff` for the runs with the ids `a` and `b`, with the first token and the recipe keys that
    differ. `step`: first step that differs (if `equal`: their number of steps); `fields`: what differs in it, in words,
    at most a hundred. `policies`: versions whose weights were compared. `text`: the result in one sentence. `token`:
    None if no token differs or can be compared. `recipe`: objects with ``key``, ``a`` and ``b``."""

    a: str
    b: str
    equal: bool
    step: int
    fields: tuple[str, ...]
    policies: tuple[int, ...]
    text: str
    token: _PartingToken | None
    recipe: list[dict[str, Any]]


def recipe_differences(runs: Sequence[WatchedRun]) -> list[_RecipeKey]:
    """Return the recipe keys whose values are not equal in all runs, sorted; the value of a missing key is None."""
    recipes = [flat(run.recipe()) for run in runs]
    keys = sorted(set().union(*recipes))
    found = [_RecipeKey(key, [recipe.get(key) for recipe in recipes]) for key in keys]
    return [key for key in found if any(value != key.values[0] for value in key.values[1:])]


def compare(a: WatchedRun, b: WatchedRun) -> Comparison:
    """Compare two runs step by step, up to the first difference, and their recipes.

    Raises:
        RunFolderError: one of their folders holds no run.
        StoreError: a ledger cannot be read, is no regular file, or has not kept its tokens.
    """
    for run in (a, b):
        refuse_strange_files(run.folder)
    parting = diff_runs(a.folder, b.folder)
    keys = recipe_differences((a, b))
    return Comparison(
        a=a.id,
        b=b.id,
        equal=not parting.fields,
        step=parting.step,
        fields=tuple(_named(field, a, b) for field in parting.fields[:_MOST_FIELDS]),
        policies=parting.policies,
        text=_named(str(msgspec.structs.replace(parting, fields=parting.fields[:_MOST_FIELDS])), a, b),
        token=_parting_token(a, b, parting.step) if parting.fields else None,
        recipe=[{"key": key.key, "a": key.values[0], "b": key.values[1]} for key in keys],
    )


def _named(text: str, *runs: WatchedRun) -> str:
    for run in runs:
        text = text.replace(str(run.folder), run.name)
    return text


def _parting_token(a: WatchedRun, b: WatchedRun, step: int) -> _PartingToken | None:
    """Return the first token of a step, in the order of its batch, whose id, log-probability or version differs between
    the runs. None if there is none, if the batches have different trajectories before one is found, or if the ledger of
    a run does not have the step or its tokens."""
    batches = [batch for run in (a, b) if (batch := _batch(run, step)) is not None]
    if len(batches) < 2:
        return None
    trajectories = (chain.from_iterable(group.trajectories for group in batch.groups) for batch in batches)
    for ours, theirs in zip(*trajectories, strict=False):
        if ours.id != theirs.id:
            return None
        for index, (left, right) in enumerate(zip_longest(_tokens(ours), _tokens(theirs))):
            if left != right:
                return _PartingToken(ours.id, index, _one(a, left), _one(b, right))
    return None


def _batch(run: WatchedRun, step: int) -> Batch | None:
    ledger = run.folder / LEDGER
    if not 0 < step <= last_step(ledger):
        return None
    try:
        return next(read_batches(ledger, step - 1, step), None)
    except StoreError:  # its tokens were not kept
        return None


_Token = tuple[int, float | None, int | None]


def _tokens(trajectory: Trajectory) -> list[_Token]:
    found: list[_Token] = []
    for segment in trajectory.segments:
        given = (None,) * segment.length
        columns = (segment.token_ids, segment.behavior_logprobs or given, segment.versions or given)
        found += zip(*columns, strict=True)
    return found


def _one(run: WatchedRun, token: _Token | None) -> OneToken | None:
    if token is None:
        return None
    return OneToken(token[0], run.pieces.text([token[0]]), token[1], token[2])
