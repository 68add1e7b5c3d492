"""States of a trajectory with their allowed transitions, and the check of rewards from outside. The ledger, the
simulator and the audit share these rules.

    in_flight ─► buffered ─► trained
        │           └──────► expired
        └─► filtered, expired, failed

A group is filtered or fails when it is judged, before it is buffered. A buffered group is trained or expires.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from stretto.core.records import State

#: Bound on the size of a reward, so that sums and squares over a batch stay finite.
LARGEST_REWARD = 1e6

ALLOWED: Mapping[State, frozenset[State]] = {
    State.IN_FLIGHT: frozenset({State.BUFFERED, State.FILTERED, State.EXPIRED, State.FAILED}),
    State.BUFFERED: frozenset({State.TRAINED, State.EXPIRED}),
}

OPEN = tuple(ALLOWED)
FINAL = tuple(state for state in State if state not in ALLOWED)
UNTRAINED = frozenset(FINAL) - {State.TRAINED}  #: ended without training; the prompt may be drawn again


def why_no_reward(value: object) -> str:
    """Why `value` is not a valid reward (a number within ±`LARGEST_REWARD`), as in ``returned ...``; "" if it is.

    >>> why_no_reward(1.5), why_no_reward(float("nan")), why_no_reward("1"), why_no_reward(1e300)
    ('', 'nan', 'str, not a number', '1e+300; it must lie between ±1e+06')
    """
    if not isinstance(value, int | float):
        return f"{type(value).__name__}, not a number"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    if abs(value) > LARGEST_REWARD:
        shown = f"{value:g}" if isinstance(value, float) or value.bit_length() < 1024 else "an integer beyond any float"
        return f"{shown}; it must lie between ±{LARGEST_REWARD:g}"
    return ""


def bounded_reward(value: float) -> float:
    """The nearest valid reward, for records from before the bound existed."""
    return min(max(value, -LARGEST_REWARD), LARGEST_REWARD)
