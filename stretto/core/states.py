"""The states of a trajectory: which may follow which. What writes them, simulates them and audits them asks here.

    in_flight ─► buffered ─► trained
        │           └──────► expired
        └─► filtered, expired, failed

A group is filtered, or fails, when it is judged: before it is buffered. A buffered one is trained, or becomes too old.
"""

from __future__ import annotations

from collections.abc import Mapping

from stretto.core.records import State

ALLOWED: Mapping[State, frozenset[State]] = {
    State.IN_FLIGHT: frozenset({State.BUFFERED, State.FILTERED, State.EXPIRED, State.FAILED}),
    State.BUFFERED: frozenset({State.TRAINED, State.EXPIRED}),
}

OPEN = tuple(ALLOWED)
FINAL = tuple(state for state in State if state not in ALLOWED)
UNTRAINED = frozenset(FINAL) - {State.TRAINED}  #: ended, and the prompt may be drawn again
