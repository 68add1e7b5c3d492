"""The paths of a trajectory (`conversation.forest`) as sequences of tokens: each is one sample.

A sampled token that several paths share is an own token of the first of them, and context in the others. A single turn
is one path.

Axes: T token, S own sampled token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from stretto.conversation.forest import Path, paths
from stretto.core.errors import BoundViolated
from stretto.core.records import Prompt, Segment, StopReason, Trajectory

Value = TypeVar("Value")


@dataclass(frozen=True)
class PathTurn:
    """A sampled segment: how many tokens it has, and its reward; that of the trajectory is the reward of the last turn
    of each path, unless turns have rewards of their own."""

    tokens: int
    reward: float


@dataclass(frozen=True)
class PathTokens:
    """Example: prompt (5, 12), completion (4, 4, 2)::

    PathTokens(id="0.17.0/3", token_ids=(5, 12, 4, 4, 2), prompt_tokens=2, places=(2, 3, 4), ...,
        turns=(PathTurn(tokens=3, reward=1.0),))
    """

    id: str  # of the trajectory; of its second path with ":1", and so on
    token_ids: tuple[int, ...]  # [T]
    prompt_tokens: int  # 0 if it has a beginning of its own
    places: Sequence[int]  # [S] ascending
    behavior_logprobs: Sequence[float]  # [S]
    versions: Sequence[int]  # [S]
    turns: tuple[PathTurn, ...]  # own ones; their tokens add up to S
    turns_before: int  # turns of earlier paths in front of them
    stop_reason: StopReason | None  # of the last turn
    engine: str = ""  # that sampled the tokens of its newest version; "" where several did, or none is on record


def paths_of(prompt: Prompt, trajectory: Trajectory) -> list[PathTokens]:
    """One for each path of a decided trajectory; none if nothing was sampled.

    Raises:
        BoundViolated: a token has no log-probability or version, or was sampled behind nothing.
    """
    for segment in trajectory.segments:
        if not len(segment.versions) == len(segment.behavior_logprobs) in (0, len(segment.token_ids)):
            raise BoundViolated(f"trajectory {trajectory.id}: a token lacks its version or log-prob")
    return [
        _tokens(prompt, trajectory, path, path_id(trajectory.id, number))
        for number, path in enumerate(paths(trajectory.segments))
    ]


def path_id(trajectory: str, number: int) -> str:
    """The id of a trajectory's path."""
    return f"{trajectory}:{number}" if number else trajectory


def trajectory_of(path: str) -> str:
    """The id of the trajectory of a path."""
    group, slash, member = path.rpartition("/")
    return group + slash + member.partition(":")[0]


def _tokens(prompt: Prompt, trajectory: Trajectory, path: Path, id: str) -> PathTokens:
    start = end = len(prompt.token_ids) if path.behind_prompt else 0
    spans = list[range]()
    for place in path.segments:
        begin, end = end, end + len(trajectory.segments[place].token_ids)
        spans += [range(begin, end)] if place in path.trained else ()
    if spans[0].start == 0:
        raise BoundViolated(f"trajectory {trajectory.id}: a token was sampled behind nothing")
    own = [trajectory.segments[place] for place in path.trained]
    parts = [prompt.token_ids[:start], *(trajectory.segments[place].token_ids for place in path.segments)]
    return PathTokens(
        id=id,
        token_ids=sum(parts, start=()),
        prompt_tokens=start,
        places=_joined(spans),
        behavior_logprobs=_joined([segment.behavior_logprobs for segment in own]),
        versions=_joined([segment.versions for segment in own]),
        turns=tuple(_turns(trajectory, own)),
        turns_before=sum(trajectory.segments[place].sampled for place in path.segments) - len(own),
        stop_reason=own[-1].stop_reason,
        engine=_newest_writer(own),
    )


def _newest_writer(own: Sequence[Segment]) -> str:
    newest = max(segment.versions[-1] for segment in own)
    names = set[str]()
    for segment in own:
        if segment.versions[-1] == newest:
            name, wrote = segment.writers[-1]
            sampled = len(segment.versions) - bisect_left(segment.versions, newest)
            names.add(name if sampled <= wrote else "")
    return names.pop() if len(names) == 1 else ""


def _joined(parts: Sequence[Sequence[Value]]) -> Sequence[Value]:
    """One is not copied: most trajectories are one turn, and long."""
    return parts[0] if len(parts) == 1 else tuple(chain.from_iterable(parts))


def _turns(trajectory: Trajectory, own: Sequence[Segment]) -> Iterator[PathTurn]:
    apart = any(segment.reward is not None for segment in trajectory.segments)
    for segment in own:
        whole = 0.0 if apart or segment is not own[-1] else trajectory.reward
        yield PathTurn(len(segment.token_ids), whole if segment.reward is None else segment.reward)
