"""The segments of one trajectory as a forest, and its paths, which are the training samples.

    prompt ─► given ─► sampled ─┬─► given ─► sampled          two turns that follow each other
                                └─► given ─► sampled          a branch: the history was rewritten
    (nothing) ─► given ─► sampled                             another root: a subagent with other instructions

A path leads from a root to a leaf and is one training sample. A segment that several paths share is in each of them, as
context of the later tokens; but its sampled tokens are trained on only in the first of these paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.core.records import PROMPT, Sampling, Segment

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Path:
    """Segments from a root to the last sampled segment that the path trains: one training sample. `behind_prompt`:
    whether the prompt comes before the first segment. `segments`: indices of the segments, from the root on. `trained`:
    indices of the sampled segments that no earlier path trains.

    Example: the second path of the drawing above: ``Path(behind_prompt=True, segments=(0, 1, 4, 5), trained=(5,))``
    """

    behind_prompt: bool
    segments: tuple[int, ...]
    trained: tuple[int, ...]


def parent_of(segments: Sequence[Segment], place: int) -> int:
    """Return the index of the segment that precedes segment `place` on its path. At a root: PROMPT (-1) if it follows
    the prompt, NOTHING (-2) if it has no context."""
    found = segments[place].parent
    return place - 1 if found is None else found  # place 0: PROMPT


def way_to(segments: Sequence[Segment], place: int) -> tuple[bool, tuple[int, ...]]:
    """Return the path to segment `place`: whether it begins with the prompt, and the indices of its segments from the
    root to `place`."""
    found: list[int] = []
    while place >= 0:
        found.append(place)
        place = parent_of(segments, place)
    return place == PROMPT, tuple(reversed(found))


def paths(segments: Sequence[Segment]) -> list[Path]:
    """List the paths of a trajectory: one for each leaf, in order of the leaves. A leaf makes no path if earlier paths
    train all sampled segments on the way to it. Given segments after the last trained one are left out.

    A trajectory without branches has one path; without sampled segments, none.
    """
    done, found = set[int](), list[Path]()
    for behind_prompt, places in _ways(segments):
        new = tuple([place for place in places if segments[place].sampled and place not in done])
        if new:
            found.append(Path(behind_prompt, places[: places.index(new[-1]) + 1], new))
            done.update(new)
    return found


def _ways(segments: Sequence[Segment]) -> list[tuple[bool, tuple[int, ...]]]:
    """Return the path to each leaf, in the order of the leaves: whether it begins with the prompt, and the indices of
    its segments from the root."""
    if all(segment.parent is None for segment in segments):  # the usual case: no branches
        return [(True, tuple(range(len(segments))))]
    parents = {parent_of(segments, place) for place in range(len(segments))}
    return [way_to(segments, leaf) for leaf in range(len(segments)) if leaf not in parents]


@dataclass(frozen=True)
class TurnRequest:
    """A turn to sample: segment `node` (its index) of a session's forest.

    `prompt`: all tokens before the turn, those of the trajectory's prompt included. `prefix`: the tokens of the segment
    that are sampled already (usually none), with its parent and cause. `least`: oldest version that may sample it: the
    newest version on its path, since versions never fall along a path.
    """

    node: int
    prompt: Tokens
    sampling: Sampling
    seed: int
    prefix: Segment
    least: int = 0
