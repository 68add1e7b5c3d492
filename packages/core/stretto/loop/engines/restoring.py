"""Restore the untrained groups of an earlier process from the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.core.records import Completion
from stretto.loop.engines.in_flight import GroupInFlight, Prefix
from stretto.rollout.controller import Controller, ControllerState
from stretto.store.ledger.reading import UnfinishedGroup


def restore(
    controller: Controller, state: ControllerState, unfinished: Sequence[UnfinishedGroup]
) -> dict[str, GroupInFlight]:
    """Give the controller the groups that an earlier process had not trained; returns the progress of those in flight,
    by group."""
    for group in unfinished:
        failures = state.failures.get(group.id, 0)
        controller.restore(group.id, group.admitted_version, group.trajectories, failures, group.max_staleness)
    return {group.id: progress_of(group) for group in unfinished if not group.trajectories}


def progress_of(group: UnfinishedGroup) -> GroupInFlight:
    """Progress of a group of single turns, one segment each."""
    known = {member: found.segments[0] for member, found in group.members.items() if found.segments}
    ended = {member: segment for member, segment in known.items() if segment.stop_reason is not None}
    return GroupInFlight(
        ended={member: Completion(group.id, member, segment) for member, segment in ended.items()},
        prefixes={member: Prefix(segment) for member, segment in known.items() if member not in ended},
        journaled=set(ended),
    )
