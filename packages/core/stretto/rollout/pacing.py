"""Pacing: when groups start, within the staleness bound and `max_in_flight`: as soon as possible, or in rounds.

`rollout.pacing` names the policy (`PACINGS` in `rollout.config`).
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.doors.door import Section, guarded
from stretto.doors.loading import is_own
from stretto.rollout.config import PACINGS, RolloutConfig

#: Decides whether a group starts now: the method `opens` of a policy, called before each possible start with
#: `may_start` (equation 3 and `max_in_flight` allow it) and the number of groups in flight. Each run creates one
#: policy; its state is not saved, so a resumed run starts anew.
#:
#: `max_in_flight` holds under any policy. Equation 3 does not: a policy that opens while `may_start` is False admits
#: groups that will be trained beyond the bound. `stretto check` reports that by its law `no group starts before its
#: turn` (`audit/laws.py:no_group_starts_before_its_turn`).
Pacing = Callable[[bool, int], bool]


class Continuous:
    """Pacing policy that starts each group as soon as equation 3 and `max_in_flight` allow it."""

    def opens(self, may_start: bool, in_flight: int) -> bool:
        return may_start


class InRounds:
    """Pacing policy that starts groups in rounds: as many as are allowed once no group is in flight, then none until
    all have ended."""

    def __init__(self) -> None:
        self._opening = True  # the round still admits groups

    def opens(self, may_start: bool, in_flight: int) -> bool:
        self._opening = may_start and (self._opening or not in_flight)
        return self._opening


def pacing_of(config: RolloutConfig, in_rounds: bool) -> Pacing:
    """Create the pacing policy of a run; returns its method `opens`. `in_rounds`: the engines start completions
    together only, so "auto" means "rounds"; else it means "continuous". Raises RecipeError, with the policy's name, if
    the policy cannot be loaded, or at a call of `opens` that fails."""
    chosen = config.pacing if config.pacing != "auto" else "rounds" if in_rounds else "continuous"
    opens: Pacing = PACINGS.bound(chosen)().opens
    name = chosen.kind if isinstance(chosen, Section) else chosen
    return guarded(PACINGS.key, name, opens) if is_own(name) else opens
