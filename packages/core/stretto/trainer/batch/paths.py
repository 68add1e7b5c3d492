"""The paths of a trajectory (`core.forest`) as token sequences. Each path becomes one sample.

A sampled token that several paths share belongs to the first of them, where it is an *own* token, and is context in the
others. A single turn is one path.

Axes: T token, S own sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.core.errors import BoundViolated
from stretto.core.forest import Path, paths
from stretto.core.records import Prompt, Record, Segment, StopReason, Trajectory
from stretto.trainer.messages import Evidence

#: Arrays of a path, in 32 bits as the tensors made from them.
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class _PathTurn(Record, frozen=True):
    """A sampled segment: its number of tokens and its reward. If the trajectory has no rewards per turn, the last turn
    of each path has the trajectory's reward and the others have 0."""

    tokens: int
    reward: float


class PathTokens(Record, frozen=True):
    """One path (branch) of a trajectory as a token sequence. `places`: positions [S] of its own sampled tokens;
    `behavior_logprobs`, `versions` and `mixed` have a number for each. `turns`: own turns; `turns_before`: number of
    turns of earlier paths. `engine`: that sampled its newest version's tokens; "": several, or unrecorded. `mixed`: 1
    where the context may have KV entries of another version, else 0; empty: 0 for all.

    Example: prompt (5, 12), completion (4, 4, 2)::

        PathTokens(id="0.17.0/3", token_ids=(5, 12, 4, 4, 2), prompt_tokens=2, places=(2, 3, 4), ...,
                   turns=(_PathTurn(tokens=3, reward=1.0),))
    """

    id: str  # trajectory id; ":1" appended for its second path, and so on
    token_ids: Ints  # [T]
    prompt_tokens: int  # 0 if the path does not start with the prompt
    places: Ints  # [S] positions of the own sampled tokens in token_ids, ascending
    behavior_logprobs: Floats  # [S]
    versions: Ints  # [S], by which the tokens were sampled
    turns: tuple[_PathTurn, ...]  # own turns; their tokens sum to S
    turns_before: int  # number of turns before them, which belong to earlier paths
    stop_reason: StopReason | None  # stop reason of the last turn
    engine: str = ""  # engine that sampled the tokens of its newest version; "" if there are several, or unrecorded
    mixed: (
        Ints | tuple[()]
    ) = ()  # [S], 1 if the token's context may have KV entries of another version; empty: none has
    root: str = ""  # see `root_of`


def paths_of(prompt: Prompt, trajectory: Trajectory, evidence: Evidence = "all") -> list[PathTokens]:
    """The paths of a decided trajectory of `prompt` as token sequences; empty if no token was sampled. `evidence`:
    which tokens have a context of their own version (`messages.Evidence`); the others are marked as `mixed`. Raises
    BoundViolated if the checksum of a segment does not match, or a token was sampled without any context."""
    for segment in trajectory.segments:
        if not segment.intact:
            raise BoundViolated(f"trajectory {trajectory.id}: its tokens are not what was sampled: no checksum fits")
    return [
        _tokens(prompt, trajectory, path, path_id(trajectory.id, number), evidence)
        for number, path in enumerate(paths(trajectory.segments))
    ]


def path_id(trajectory: str, number: int) -> str:
    """Id of path `number` of the trajectory with this id: path 0 has the trajectory's own, path 1 ``ID:1``."""
    return f"{trajectory}:{number}" if number else trajectory


def trajectory_of(path: str) -> str:
    """Id of the trajectory that the path with this id belongs to; the inverse of `path_id`."""
    group, slash, member = path.rpartition("/")
    return group + slash + member.partition(":")[0]


def _tokens(prompt: Prompt, trajectory: Trajectory, path: Path, id: str, evidence: Evidence) -> PathTokens:
    context = [_array(tuple(prompt.token_ids))] if path.behind_prompt else []  # a loop's own may be a list
    start = end = len(prompt.token_ids) if path.behind_prompt else 0
    spans = list[Ints]()
    for place in path.segments:
        begin, end = end, end + trajectory.segments[place].length
        spans += [np.arange(begin, end, dtype=np.int32)] if place in path.trained else ()
    if spans[0][0] == 0:
        raise BoundViolated(f"trajectory {trajectory.id}: a token was sampled without any context")
    own = [trajectory.segments[place] for place in path.trained]
    parts = [*context, *[_ids(trajectory.segments[place]) for place in path.segments]]
    return PathTokens(
        id=id,
        token_ids=joined(parts, np.int32),
        prompt_tokens=start,
        places=joined(spans, np.int32),
        behavior_logprobs=joined([_logprobs(segment) for segment in own], np.float32),
        versions=joined([_versions(segment) for segment in own], np.int32),
        turns=turns_of(trajectory, own),
        turns_before=turns_before(trajectory, path),
        stop_reason=own[-1].stop_reason,
        engine=_newest_writer(own),
        mixed=_mixed(own, evidence),
        root=root_of(trajectory, path),
    )


def _mixed(own: Sequence[Segment], evidence: Evidence) -> Ints | tuple[()]:
    """1 for each token whose context may have KV entries of another version, else 0: all tokens if `evidence` is
    "none", else those of interrupted segments; empty if it is "all"."""
    if evidence == "all":
        return ()
    return np.repeat(
        np.array([evidence == "none" or segment.interrupted > 0 for segment in own], np.int32),
        [segment.length for segment in own],
    )


def root_of(trajectory: Trajectory, path: Path) -> str:
    """Root of a path: "" if it begins with the prompt, else the cause of its first segment, such as "user" or "critic",
    or "-" without one. The paths of one root belong to one role of the workflow."""
    return "" if path.behind_prompt else trajectory.segments[path.segments[0]].cause or "-"


def turns_before(trajectory: Trajectory, path: Path) -> int:
    """Number of turns on the path that belong to earlier paths."""
    return sum([trajectory.segments[place].sampled for place in path.segments]) - len(path.trained)


@lru_cache(maxsize=1)  # the trajectories of a group follow each other
def _array(ids: tuple[int, ...]) -> Ints:
    return np.array(ids, np.int32)


def _ids(segment: Segment) -> Ints:
    return np.frombuffer(segment.columns, np.int32, segment.length)


def _logprobs(segment: Segment) -> npt.NDArray[Any]:
    """The log-probabilities as stored in the segment (`core.columns`): float32, or float64 if float32 would lose
    digits."""
    kind = np.float32 if len(segment.columns) == 8 * segment.length else np.float64
    return np.frombuffer(segment.columns, kind, offset=4 * segment.length)


def _versions(segment: Segment) -> Ints:
    if len(segment.stamps) == 1:
        return np.full(segment.length, segment.stamps[0][0], np.int32)
    versions, counts = np.asarray(segment.stamps, np.int32).T
    return np.repeat(versions, counts)


def _newest_writer(own: Sequence[Segment]) -> str:
    """The engine that sampled these segments' tokens of the newest version; "" if there are several, or unrecorded."""
    newest = max([segment.stamps[-1][0] for segment in own])
    names = set[str]()
    for segment in own:
        version, sampled = segment.stamps[-1]
        if version == newest:
            name, wrote = segment.writers[-1]
            names.add(name if sampled <= wrote else "")
    return names.pop() if len(names) == 1 else ""


def joined(parts: Sequence[Any], kind: Any) -> npt.NDArray[Any]:
    """Convert each column of numbers in `parts` to dtype `kind` (`as_column`), and concatenate them. A single array of
    this dtype is returned itself."""
    if len(parts) == 1:
        return as_column(parts[0], kind)
    return np.concatenate([as_column(part, kind) for part in parts])


@cache
def _nothing(kind: Any) -> npt.NDArray[Any]:
    return np.empty(0, kind)


def as_column(values: Any, kind: Any) -> npt.NDArray[Any]:
    """Convert numbers to an array of dtype `kind`; an array of this dtype is returned itself. Floating-point numbers
    beyond its range become infinite, as in a tensor. Integers must be within its range: those of an array would wrap.
    Raises OverflowError if a Python integer is beyond the range."""
    if isinstance(values, np.ndarray):
        if values.dtype == kind:
            return values
    elif not len(values):
        return _nothing(kind)
    with np.errstate(over="ignore"):
        return np.asarray(values, kind)


def turns_of(trajectory: Trajectory, own: Sequence[Segment]) -> tuple[_PathTurn, ...]:
    """The turns of a path, one for each of `own`, its own sampled segments. Without rewards of segments, the last turn
    has the trajectory's and the others 0; with them, a segment without one has 0 (`_PathTurn`)."""
    apart = any(segment.reward is not None for segment in trajectory.segments)
    last = 0.0 if apart else trajectory.reward
    rewards = [(last if segment is own[-1] else 0.0) if segment.reward is None else segment.reward for segment in own]
    return tuple([_PathTurn(segment.length, reward) for segment, reward in zip(own, rewards, strict=True)])
