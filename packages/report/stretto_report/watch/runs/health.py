"""Data health of a run: states and reasons, truncation, reward by length, uninformative prompts, duplicates."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from stretto.core.errors import StoreError
from stretto.core.records import Record, State, trajectory_id
from stretto.store.inspection import CanaryProof, Inspection
from stretto.store.ledger.rows import decode_payload
from stretto_report.reading.inspection import RoleTime, role_times
from stretto_report.watch.index.columns import Column
from stretto_report.watch.index.files import read_ledger
from stretto_report.watch.index.trajectories import NONE, Trajectories
from stretto_report.watch.runs.questions import PromptTexts, Repeats
from stretto_report.watch.runs.table import PROMPT_SHOWN

_MOST_LOOKED_AT, _MOST_BYTES = 2_000, 16 << 20  # most trajectories, and bytes of payloads, compared for duplicates
_MOST_SAID, _SAID_SHOWN = 5, 200
_NEWEST = "SELECT key, length(payload) FROM payloads ORDER BY key DESC LIMIT ?"
_PAYLOAD = """
    SELECT group_key, groups.id, member, verdict, reward, stop_reason, interrupted, payload FROM trajectories AS t
    JOIN payloads USING (key) JOIN groups ON groups.key = group_key WHERE t.key = ?
"""
_MOST_BINS, _MOST_POINTS, _MOST_REASONS, _MOST_PROMPTS = 30, 200, 100, 50


class _LengthBin(Record, frozen=True, rename={"begin": "from", "end": "to"}):
    """Judged completions with `begin` to `end` tokens (`end` excluded): number, mean reward (`mean`), share of right
    ones (`right`)."""

    begin: int
    end: int
    count: int
    mean: float
    right: float


class _ReasonCount(Record, frozen=True):
    """Number of trajectories in a state for a reason."""

    state: str
    reason: str
    count: int


class PromptCount(Record, frozen=True):
    """A prompt with the number of its judged completions (`count`), and their mean reward (`mean`). `prompt`: first
    characters of its text; None if that is not on record."""

    prompt_id: str
    prompt: str | None
    count: int
    mean: float


class _PromptCounts(Record, frozen=True):
    """Numbers of prompts with judged completions (`asked`), and of those whose completions were never, always or
    sometimes right. `never`, `always`: these prompts, most completions first, at most 50."""

    asked: int
    never_solved: int
    always_solved: int
    sometimes: int
    never: list[PromptCount]
    always: list[PromptCount]


class _TruncationShare(Record, frozen=True):
    """Share of trained completions cut off at their length limit. `share`: of all; None if none was trained. `by_step`:
    lists of equal length, ``step`` (the last one of each bucket of steps) and ``share``."""

    share: float | None
    by_step: dict[str, list[Any]]


class _SaidOften(Record, frozen=True):
    """First characters of a completion, and the number of the newest completions with exactly its tokens."""

    text: str
    count: int


class _Duplicates(Record, frozen=True):
    """Repeated texts. Equal completions of one prompt teach nothing; equal completions of many prompts mean
    collapse.

    `answers`: of the newest completions, those with the same tokens as another of their group. `prompts`: of the first
    million prompts, those with the text of another. `said_often`: completions that occur several times among the
    newest, in any groups.
    """

    answers: Repeats
    prompts: Repeats
    said_often: list[_SaidOften]


class Health(Record, frozen=True):
    """Data health of a run. The first five fields come from the summary of the ledger (as in `stretto inspect`); None
    or empty if the ledger cannot be read. The others count the trajectories read so far, a share `indexed` of all.
    `undecided`: the reasons of those whose verdict is undecided."""

    goodput: Any
    selection_bias: Any
    masked_groups: Any
    canary: tuple[CanaryProof, ...]
    roles: list[RoleTime]
    states: dict[str, int]
    verdicts: dict[str, int]
    stop_reasons: dict[str, int]
    truncation: _TruncationShare
    reward_by_length: list[_LengthBin]
    prompts: _PromptCounts
    reasons: list[_ReasonCount]
    undecided: list[_ReasonCount]
    duplicates: _Duplicates
    indexed: float


def health_of(
    trajectories: Trajectories, questions: PromptTexts, duplicates: _Duplicates, inspection: Inspection | None
) -> Health:
    """Return the health of the data read so far. `inspection`: summary of the run; None: the ledger cannot be read."""
    undecided = trajectories.table["verdict"] == trajectories.words["verdict"].code("undecided")
    return Health(
        goodput=inspection.goodput if inspection is not None else None,
        selection_bias=inspection.selection_bias if inspection is not None else None,
        masked_groups=inspection.masked_groups if inspection is not None else None,
        canary=inspection.canary_proofs if inspection is not None else (),
        roles=role_times(inspection.goodput_roles, inspection.idle) if inspection is not None else [],
        states=trajectories.count("state"),
        verdicts=trajectories.count("verdict"),
        stop_reasons=trajectories.count("stop"),
        truncation=_truncation(trajectories),
        reward_by_length=_by_length(trajectories),
        prompts=_prompts(trajectories, questions),
        reasons=_reasons(trajectories, trajectories.table["state"] != trajectories.words["state"].code(State.TRAINED)),
        undecided=_reasons(trajectories, undecided),
        duplicates=duplicates,
        indexed=trajectories.indexed,
    )


def duplicates_of(folder: Path, questions: PromptTexts) -> _Duplicates:
    """Find repeated texts among the newest completions of the run in `folder` whose tokens were kept, up to 2,000
    completions and 16 MiB, and among its `questions`. Damaged completions are skipped (their own page reports the
    damage), as are all if the ledger cannot be read."""
    in_group, said, texts = Counter[tuple[int, int]](), Counter[int](), dict[int, str]()
    left = _MOST_BYTES
    with contextlib.suppress(StoreError), read_ledger(folder) as connection:
        for key, size in connection.execute(_NEWEST, (_MOST_LOOKED_AT,)).fetchall():
            if (left := left - size) < 0:
                break
            group, id, member, *columns, sealed = connection.execute(_PAYLOAD, (key,)).fetchone()
            with contextlib.suppress(StoreError):
                payload = decode_payload(trajectory_id(id, member), tuple(columns), sealed)
                tokens = hash(tuple(segment.token_ids for segment in payload.segments if segment.sampled))
                in_group[group, tokens] += 1
                said[tokens] += 1
                texts.setdefault(tokens, payload.text[:_SAID_SHOWN])
    most = [_SaidOften(texts[tokens], count) for tokens, count in said.most_common(_MOST_SAID) if count > 1]
    return _Duplicates(Repeats.among(in_group.values()), questions.repeats, most)


def _truncation(trajectories: Trajectories) -> _TruncationShare:
    table = trajectories.table
    trained = table["step"] > 0
    steps, cut = table["step"][trained], table["stop"][trained] == trajectories.words["stop"].code("length")
    if not len(steps):
        return _TruncationShare(None, {"step": [], "share": []})
    bucket = -(-int(steps.max()) // _MOST_POINTS)
    places = (steps - 1) // bucket
    counts, cuts = np.bincount(places), np.bincount(places, weights=cut)
    there = np.flatnonzero(counts)
    shares = cuts[there] / counts[there]
    return _TruncationShare(
        float(cut.mean()), {"step": ((there + 1) * bucket).clip(max=steps.max()).tolist(), "share": shares.tolist()}
    )


def _judged(trajectories: Trajectories) -> Column:
    return ~np.isnan(trajectories.table["reward"])


def _by_length(trajectories: Trajectories) -> list[_LengthBin]:
    table, judged = trajectories.table, _judged(trajectories)
    lengths, rewards = table["length"][judged], table["reward"][judged]
    right = table["verdict"][judged] == trajectories.words["verdict"].code("right")
    if not len(lengths):
        return []
    width = int(lengths.max()) // _MOST_BINS + 1
    places = lengths // width
    counts = np.bincount(places)
    sums, rights = np.bincount(places, weights=rewards), np.bincount(places, weights=right)
    return [
        _LengthBin(
            begin=place * width,
            end=(place + 1) * width,
            count=int(counts[place]),
            mean=float(sums[place] / counts[place]),
            right=float(rights[place] / counts[place]),
        )
        for place in np.flatnonzero(counts).tolist()
    ]


def _prompts(trajectories: Trajectories, questions: PromptTexts) -> _PromptCounts:
    table, judged = trajectories.table, _judged(trajectories)
    codes = table["prompt"][judged]
    right = table["verdict"][judged] == trajectories.words["verdict"].code("right")
    counts = np.bincount(codes, minlength=1)
    rights = np.bincount(codes, weights=right, minlength=1)
    rewards = np.bincount(codes, weights=table["reward"][judged], minlength=1)
    asked = np.flatnonzero(counts)
    never, always = asked[rights[asked] == 0], asked[rights[asked] == counts[asked]]

    def shown(chosen: Column) -> list[PromptCount]:
        most = chosen[np.argsort(-counts[chosen], kind="stable")][:_MOST_PROMPTS].tolist()
        ids = [trajectories.words["prompt"].all[code] for code in most]
        texts = questions.find(ids)
        return [
            PromptCount(
                prompt_id=id,
                prompt=texts[id].prompt[:PROMPT_SHOWN] if id in texts else None,
                count=int(counts[code]),
                mean=float(rewards[code] / counts[code]),
            )
            for id, code in zip(ids, most, strict=True)
        ]

    return _PromptCounts(
        asked=len(asked),
        never_solved=len(never),
        always_solved=len(always),
        sometimes=len(asked) - len(never) - len(always),
        never=shown(never),
        always=shown(always),
    )


def _reasons(trajectories: Trajectories, among: Column) -> list[_ReasonCount]:
    table, words = trajectories.table, trajectories.words
    empty = words["reason"].find("")
    chosen = among & (table["reason"] != (NONE if empty is None else empty)) & (table["reason"] != NONE)
    pairs, counts = np.unique(np.stack((table["state"][chosen], table["reason"][chosen])), axis=1, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_MOST_REASONS]
    return [
        _ReasonCount(words["state"][int(pairs[0, at])] or "", words["reason"][int(pairs[1, at])] or "", int(counts[at]))
        for at in order
    ]
