"""`stretto diff`: the first step at which two runs differ, and the differing fields."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path

import msgspec

from stretto.core.errors import several
from stretto.core.records import Batch, Record, Trajectory
from stretto.store.ledger.reading import read_batches
from stretto.store.ledger.schema import once_at_rest, reading
from stretto.store.run_folder import RunFolder
from stretto_report.reading.policies import same_weights

_TIMES = "seconds"  # prefix of measured times, which differ between any two runs


class _Parting(Record, frozen=True):
    """Result of a comparison. `step` is the first step that differs, in `fields` (words for a message; one says if a
    run ends before the other). If `fields` is empty, the runs are equal and `step` is their number of steps.
    `policies`: versions whose weights were compared; left empty for runs that differ."""

    step: int
    fields: tuple[str, ...] = ()
    policies: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.fields:
            return f"the runs differ at step {self.step}: {', '.join(self.fields)}"
        equal = f"equal in all {several(self.step, 'step')}: batches, tokens, log-probabilities, rewards and losses"
        if not self.policies:
            return f"{equal}; no version's weights could be compared"
        return f"{equal}, and the weights of versions {', '.join(map(str, self.policies))}"


def diff_runs(first: str | Path, second: str | Path) -> _Parting:
    """Compare two runs step by step, up to the first difference: batches, measurements but times, and the weights of
    the policies that both have kept. A run that ends earlier differs there.

    Raises:
        RunFolderError: one folder holds no run.
        StoreError: a ledger cannot be read, or has not kept its tokens.
    """
    folders = RunFolder.open(first), RunFolder.open(second)
    steps, compared = 0, list[int]()
    if fields := _weights(folders, 0, compared):
        return _Parting(step=0, fields=fields)
    for step, (one, other) in enumerate(zip_longest(*map(_steps, folders)), start=1):
        if one is None or other is None:
            missing = folders[0] if one is None else folders[1]
            return _Parting(step=step, fields=(f"{missing.path} ends before",))
        if fields := tuple(_differences(one, other)) or _weights(folders, step, compared):
            return _Parting(step=step, fields=fields)
        steps = step
    return _Parting(step=steps, policies=tuple(compared))


class _Step(Record, frozen=True):
    batch: Batch
    metrics: dict[str, float | None]


def _steps(folder: RunFolder) -> Iterator[_Step]:
    metrics = once_at_rest(folder.ledger, partial(_metrics, folder.ledger))
    for batch in read_batches(folder.ledger, 0, max(metrics, default=0)):  # a run may take another step meanwhile
        text = metrics[batch.step]
        found = msgspec.json.decode(text, type=dict[str, float | None]) if text else {}
        kept = {name: value for name, value in found.items() if not name.startswith(_TIMES)}
        yield _Step(batch=batch, metrics=kept)


def _metrics(ledger: Path) -> dict[int, str | None]:
    with reading(ledger) as connection:
        return dict(connection.execute("SELECT step, metrics FROM steps").fetchall())


def _differences(one: _Step, other: _Step) -> Iterator[str]:
    ids = [[group.id for group in step.batch.groups] for step in (one, other)]
    if ids[0] != ids[1]:
        yield f"groups of the batch ({' '.join(ids[0])} and {' '.join(ids[1])})"
        return
    if [one.batch.oldest_of(id) for id in ids[0]] != [other.batch.oldest_of(id) for id in ids[1]]:
        yield "oldest version trained on"
    for ours, theirs in zip(one.batch.groups, other.batch.groups, strict=True):
        if ours.prompt.token_ids != theirs.prompt.token_ids:
            yield f"prompt of {ours.id}"
        if len(ours.trajectories) != len(theirs.trajectories):
            yield f"trajectories of {ours.id}"
            continue
        for left, right in zip(ours.trajectories, theirs.trajectories, strict=True):
            if left.member != right.member:
                yield f"member of {left.id}"
            yield from _of_segments(left, right)
            if left.verdict != right.verdict:
                yield f"reward of {left.id}"
    if one.metrics and other.metrics:
        names = sorted(one.metrics.keys() | other.metrics.keys())
        yield from (f"measured {name}" for name in names if one.metrics.get(name) != other.metrics.get(name))


def _of_segments(left: Trajectory, right: Trajectory) -> Iterator[str]:
    """Yield the names of what differs between two trajectories: "segments" with both numbers if they have not equally
    many, then each field in which two segments of the same index differ. Segments are numbered if there are several.
    Engines and interruptions are not compared."""
    if (counts := [len(one.segments) for one in (left, right)])[0] != counts[1]:
        yield f"segments of {left.id} ({counts[0]} and {counts[1]})"
    for place, (ours, theirs) in enumerate(zip(left.segments, right.segments, strict=False)):
        where = f"segment {place} of {left.id}" if max(counts) > 1 else left.id
        for name in ("token_ids", "behavior_logprobs", "versions", "parent", "cause", "reward"):
            if getattr(ours, name) != getattr(theirs, name):
                yield f"{name} of {where}"


def _weights(folders: tuple[RunFolder, RunFolder], version: int, compared: list[int]) -> tuple[str, ...]:
    """Compare the weights of a version in both runs. Return one name for the difference, or an empty tuple if they are
    equal or cannot be compared. A version that both have kept is appended to `compared`."""
    try:
        same = same_weights(*(folder.policy(version) for folder in folders))
    except FileNotFoundError:  # a run that goes on has removed the version meanwhile (trainer.keep_versions)
        same = None
    if same is not None:
        compared.append(version)
    return (f"weights of version {version}",) if same is False else ()
