"""States of a trajectory, the allowed transitions between them, the `Journal` that records each transition, and the
check of rewards from users' code. The ledger, the simulator and the audit share these rules.

    in_flight ─► buffered ─► trained
        │           └──────► expired, failed
        └─► filtered, expired, failed

A group is filtered or fails when it is judged, before it is buffered. A buffered group is trained or expires, or fails
if the engine that sampled it is found to have had other weights than it had proven.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from stretto.core.admission import BoundChange
from stretto.core.records import Batch, Group, Prompt, State, Trajectory

#: Bound on the size of a reward, so that sums and squares over a batch stay finite.
LARGEST_REWARD = 1e6
_SHOWN = 60  # characters of a value in a message

ALLOWED: Mapping[State, frozenset[State]] = {
    State.IN_FLIGHT: frozenset({State.BUFFERED, State.FILTERED, State.EXPIRED, State.FAILED}),
    State.BUFFERED: frozenset({State.TRAINED, State.EXPIRED, State.FAILED}),
}

OPEN = tuple(ALLOWED)
FINAL = tuple(state for state in State if state not in ALLOWED)
UNTRAINED = frozenset(FINAL) - {State.TRAINED}  #: ended without training; the prompt may be drawn again


def why_no_reward(value: object) -> str:
    """Text of the reason why `value` is not a valid reward (a number within ±1e6), to follow the word "returned"; "" if
    it is valid.

    >>> why_no_reward(1.5), why_no_reward(float("nan")), why_no_reward("1"), why_no_reward(1e300)
    ('', 'nan', "str, not a number: '1'", '1e+300; it must lie between ±1e+06')
    """
    if not isinstance(value, int | float):
        return misfit(value, "not a number")
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    if abs(value) > LARGEST_REWARD:
        shown = f"{value:g}" if isinstance(value, float) or value.bit_length() < 1024 else "an integer beyond any float"
        return f"{shown}; it must lie between ±{LARGEST_REWARD:g}"
    return ""


def misfit(value: object, needed: str) -> str:
    """Text that says what a user's code has returned: the type of `value`, what is `needed` ("not a number"), and the
    value, shortened."""
    try:
        shown = " ".join(repr(value[:_SHOWN] if isinstance(value, str | bytes) else value).split())[:_SHOWN]
    except BaseException:  # its repr is user code, as which not even SystemExit may end a worker
        shown = "(it cannot be shown)"
    return f"{type(value).__name__}, {needed}: {shown}"


def bounded_reward(value: float) -> float:
    """The valid reward nearest to `value`, for records written before the bound existed."""
    return min(max(value, -LARGEST_REWARD), LARGEST_REWARD)


class Journal(Protocol):
    """Records each state change before it takes effect. The ledger and the simulator implement it."""

    def issue(self, group_id: str, prompt: Prompt, members: int, admitted_version: int) -> None:
        """Record that `members` trajectories of the group are in flight, admitted at `admitted_version`."""

    def buffer(self, group: Group) -> None:
        """Record that the group's trajectories, which are judged, wait for a batch."""

    def settle(self, id: str, state: State, reason: str, trajectory: Trajectory | None = None) -> None:
        """Record that the trajectory `id` ends untrained, in the `state` filtered, expired or failed, for the `reason`.
        `trajectory`: its record; None if it was never completed."""

    def commit_batch(self, batch: Batch) -> None:
        """Record that the batch is about to be trained on; durable when this returns."""

    def change_bound(self, change: BoundChange) -> None:
        """Record a new bound for groups issued from now on."""
