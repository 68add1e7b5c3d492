"""Restoring the untrained groups of an earlier process of the run from the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.core.records import Completion
from stretto.loop.engines.in_flight import GroupInFlight, Prefix
from stretto.rollout.controller import Controller, ControllerState
from stretto.store.ledger.reading import UnfinishedGroup


def restore(
    controller: Controller, state: ControllerState, unfinished: Sequence[UnfinishedGroup]
) -> dict[str, GroupInFlight]:
    """Put the groups that an earlier process of the run left untrained back into the controller.

    Args:
        state: state of the earlier controller; its count of failures per group is used.
        unfinished: the groups, as read from the ledger.

    Returns:
        The journaled tokens of the groups in flight, by group id (for `InFlight`).
    """
    for group in unfinished:
        failures = state.failures.get(group.id, 0)
        controller.restore(group.id, group.admitted_version, group.trajectories, failures, group.max_staleness)
    return {group.id: progress_of(group) for group in unfinished if not group.trajectories}


def progress_of(group: UnfinishedGroup) -> GroupInFlight:
    """Journaled tokens of a group whose completions are single turns (one segment each). A segment with a stop reason
    has ended; the others are prefixes to be continued."""
    known = {member: found.segments[0] for member, found in group.members.items() if found.segments}
    ended = {member: segment for member, segment in known.items() if segment.stop_reason is not None}
    return GroupInFlight(
        ended={member: Completion(group.id, member, segment) for member, segment in ended.items()},
        prefixes={member: Prefix(segment) for member, segment in known.items() if member not in ended},
        journaled=set(ended),
    )
