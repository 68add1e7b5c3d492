"""When groups start, within equation 3 and `max_in_flight`: each as soon as it may, or in rounds.

`rollout.pacing` names the policy (`PACINGS` in `rollout.config`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Protocol, cast

from stretto.doors.door import Section, guarded
from stretto.doors.loading import is_own
from stretto.rollout.config import PACINGS, RolloutConfig


class Pacing(Protocol):
    """The policy that decides when groups start. Each run makes one, which keeps nothing over a resume.

    `max_in_flight` is kept whatever the policy says. Equation 3 is not: a policy that opens where `may_start` is False
    admits groups that are older than the bound when they are trained. `stretto check` says so by its law `no group
    starts before its turn` (`audit/laws.py:no_group_starts_before_its_turn`).
    """

    def opens(self, may_start: bool, in_flight: int) -> bool:
        """Whether a group starts now. `may_start`: equation 3 and `max_in_flight` allow it."""


class Continuous:
    """Each group starts as soon as it may."""

    def opens(self, may_start: bool, in_flight: int) -> bool:
        return may_start


class InRounds:
    """Groups start together: all that may, once none is in flight; the next ones after all of these have left."""

    def __init__(self) -> None:
        self._opening = True  # the round still takes groups

    def opens(self, may_start: bool, in_flight: int) -> bool:
        self._opening = may_start and (self._opening or not in_flight)
        return self._opening


def pacing_of(config: RolloutConfig, in_rounds: bool) -> Pacing:
    """The policy of a run; "auto" is that of its engines."""
    chosen = config.pacing if config.pacing != "auto" else "rounds" if in_rounds else "continuous"
    policy: Pacing = PACINGS.bound(chosen)()
    name = chosen.kind if isinstance(chosen, Section) else chosen
    if not is_own(name):
        return policy
    return cast(Pacing, SimpleNamespace(opens=guarded(PACINGS.key, name, policy.opens)))
