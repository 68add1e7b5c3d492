"""What the data of a run is like: states and reasons, truncation, reward against length, prompts that teach nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.core.records import Record, State
from stretto.store.inspection import Inspection
from stretto.watch.index.columns import Column
from stretto.watch.index.trajectories import NONE, Trajectories
from stretto.watch.runs.questions import PromptTexts
from stretto.watch.runs.table import PROMPT_SHOWN

_MOST_BINS, _MOST_POINTS, _MOST_REASONS, _MOST_PROMPTS = 30, 200, 100, 50


class LengthBin(Record, frozen=True, rename={"begin": "from", "end": "to"}):
    """Judged completions of `begin` to `end` tokens (without `end`)."""

    begin: int
    end: int
    count: int
    mean: float
    right: float


class ReasonCount(Record, frozen=True):
    """How many trajectories ended untrained for a reason."""

    state: str
    reason: str
    count: int


class PromptCount(Record, frozen=True):
    """A prompt with its judged completions, and their mean reward."""

    prompt_id: str
    prompt: str | None
    count: int
    mean: float


class PromptCounts(Record, frozen=True):
    """Prompts with judged completions: never, always and sometimes answered rightly."""

    asked: int
    never_solved: int
    always_solved: int
    sometimes: int
    never: list[PromptCount]
    always: list[PromptCount]


class TruncationShare(Record, frozen=True):
    """The share of trained completions that were cut off at their length limit, of all and step by step."""

    share: float | None
    by_step: dict[str, list[Any]]


class Health(Record, frozen=True):
    """See the module; `goodput` and `selection_bias` are those of `stretto inspect`, None where it has none."""

    goodput: Any
    selection_bias: Any
    states: dict[str, int]
    verdicts: dict[str, int]
    stop_reasons: dict[str, int]
    truncation: TruncationShare
    reward_by_length: list[LengthBin]
    prompts: PromptCounts
    reasons: list[ReasonCount]
    indexed: float


def health_of(trajectories: Trajectories, questions: PromptTexts, inspection: Inspection | None) -> Health:
    """The health of what is indexed; `inspection` is None if the ledger cannot be read."""
    return Health(
        goodput=inspection.goodput if inspection is not None else None,
        selection_bias=inspection.selection_bias if inspection is not None else None,
        states=trajectories.count("state"),
        verdicts=trajectories.count("verdict"),
        stop_reasons=trajectories.count("stop"),
        truncation=_truncation(trajectories),
        reward_by_length=_by_length(trajectories),
        prompts=_prompts(trajectories, questions),
        reasons=_reasons(trajectories),
        indexed=trajectories.indexed,
    )


def _truncation(trajectories: Trajectories) -> TruncationShare:
    table = trajectories.table
    trained = table["step"] > 0
    steps, cut = table["step"][trained], table["stop"][trained] == trajectories.words["stop"].code("length")
    if not len(steps):
        return TruncationShare(None, {"step": [], "share": []})
    bucket = -(-int(steps.max()) // _MOST_POINTS)
    places = (steps - 1) // bucket
    counts, cuts = np.bincount(places), np.bincount(places, weights=cut)
    there = np.flatnonzero(counts)
    shares = cuts[there] / counts[there]
    return TruncationShare(
        float(cut.mean()), {"step": ((there + 1) * bucket).clip(max=steps.max()).tolist(), "share": shares.tolist()}
    )


def _judged(trajectories: Trajectories) -> Column:
    return ~np.isnan(trajectories.table["reward"])


def _by_length(trajectories: Trajectories) -> list[LengthBin]:
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
        LengthBin(
            begin=place * width,
            end=(place + 1) * width,
            count=int(counts[place]),
            mean=float(sums[place] / counts[place]),
            right=float(rights[place] / counts[place]),
        )
        for place in np.flatnonzero(counts).tolist()
    ]


def _prompts(trajectories: Trajectories, questions: PromptTexts) -> PromptCounts:
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

    return PromptCounts(
        asked=len(asked),
        never_solved=len(never),
        always_solved=len(always),
        sometimes=len(asked) - len(never) - len(always),
        never=shown(never),
        always=shown(always),
    )


def _reasons(trajectories: Trajectories) -> list[ReasonCount]:
    table, words = trajectories.table, trajectories.words
    empty = words["reason"].find("")
    chosen = (table["reason"] != (NONE if empty is None else empty)) & (table["reason"] != NONE)
    chosen &= table["state"] != words["state"].code(State.TRAINED)
    pairs, counts = np.unique(np.stack((table["state"][chosen], table["reason"][chosen])), axis=1, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_MOST_REASONS]
    return [
        ReasonCount(words["state"][int(pairs[0, at])] or "", words["reason"][int(pairs[1, at])] or "", int(counts[at]))
        for at in order
    ]
