"""Batch formation: choose the finished groups of the next batch, and treat tokens beyond the staleness bound.

The paper admits by equation 3 and then trains on the finished groups, oldest first. A slow group is overtaken by other
groups, and may be trained on far beyond eta. The four policies of ``rollout.beyond_bound`` are pure functions of a
`QueueState`:

    train    the paper's rule
    wait     no batch is taken while it would leave a group that cannot be trained within its bound
    mask     as train; tokens beyond the bound of their group are context, not in the loss
    expire   groups beyond their bound are dropped, and their prompts are tried again

The bound of a group is the bound in force when it was admitted. **Why "wait" is always possible.** At version b, call a
group due by d if it was admitted at version d - eta. The invariant is: for every d >= b - 1, at most (d - b + 1) * B
untrained groups are due by d (so none is overdue). Admission keeps it, because a new group is due by i + eta and
equation 3 leaves at most (i + eta + 1 - b) * B untrained groups in all, whatever bounds the others have. A batch keeps
it if, for every d >= b, at most (d - b) * B of the groups left, finished or not, are due by d; then the same invariant
holds at b + 1. Taking the B groups with the earliest due versions always satisfies this. So at worst the trainer waits
until these have finished, and in-flight groups always end: nothing gets stuck. (docs/explanation/staleness.md)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stretto.core.admission import due
from stretto.core.errors import BoundViolated
from stretto.core.records import Batch, Group
from stretto.rollout.config import BeyondBound


@dataclass(frozen=True)
class QueueState:
    """Inputs of batch formation.

    `finished`: judged groups that wait for a batch, ordered by due version, then by admission (`core.admission.due`).
    `in_flight`: due versions of unfinished groups. `version`: the version at which the batch will be trained.
    `batch_size`: groups per batch (B).
    """

    finished: Sequence[Group]
    in_flight: Sequence[float]
    version: int
    batch_size: int


@dataclass(frozen=True)
class _BatchChoice:
    """Groups of the next batch (none: it must wait), and groups that expire now. `oldest_trainable`: oldest version in
    the loss; `oldest_by_group`: the same, by id, of groups that have a newer one; both as in the `Batch`."""

    groups: tuple[Group, ...] = ()
    expired: tuple[Group, ...] = ()
    oldest_trainable: int = 0
    oldest_by_group: Mapping[str, int] = field(default_factory=dict)


def choose(policy: BeyondBound, facts: QueueState) -> _BatchChoice:
    """Choose the next batch under the policy `rollout.beyond_bound`; without groups if the batch must wait."""
    return POLICIES[policy](facts)


def train_whatever_is_finished(facts: QueueState) -> _BatchChoice:
    """The paper's rule (section 5.1): take the first `batch_size` finished groups, however stale; none if fewer are
    finished."""
    if len(facts.finished) < facts.batch_size:
        return _BatchChoice()
    return _BatchChoice(groups=tuple(facts.finished[: facts.batch_size]))


def wait_for_what_is_due(facts: QueueState) -> _BatchChoice:
    """Take the first `batch_size` finished groups if all groups left can still be trained within their bounds;
    otherwise no groups, also if fewer are finished."""
    choice = train_whatever_is_finished(facts)
    left = [due(group.admitted_version, group.max_staleness) for group in facts.finished[facts.batch_size :]]
    if choice.groups and can_all_be_trained_in_time([*left, *facts.in_flight], facts):
        return choice
    return _BatchChoice()


def mask_what_is_stale(facts: QueueState) -> _BatchChoice:
    """Take the first `batch_size` finished groups, none if there are fewer; tokens older than the bound of their group
    are masked out of the loss (`Batch.oldest_of`)."""
    groups = train_whatever_is_finished(facts).groups
    oldest = {group.id: int(max(0, facts.version - group.max_staleness)) for group in groups}
    least = min(oldest.values(), default=0)
    stricter = {id: version for id, version in oldest.items() if version > least}
    return _BatchChoice(groups=groups, oldest_trainable=least, oldest_by_group=stricter)


def expire_what_is_stale(facts: QueueState) -> _BatchChoice:
    """Take the first `batch_size` finished groups without a token beyond the bound, none if there are fewer. All
    finished groups with such a token expire, also if no batch is taken."""
    fresh: list[Group] = []
    expired: list[Group] = []
    for group in facts.finished:
        (fresh if is_fresh(group, facts) else expired).append(group)
    taken = fresh[: facts.batch_size] if len(fresh) >= facts.batch_size else ()
    return _BatchChoice(groups=tuple(taken), expired=tuple(expired))


POLICIES = {
    "train": train_whatever_is_finished,
    "wait": wait_for_what_is_due,
    "mask": mask_what_is_stale,
    "expire": expire_what_is_stale,
}


def is_fresh(group: Group, facts: QueueState) -> bool:
    """Whether every token of the group is within the group's staleness bound at `facts.version`."""
    return facts.version - group.oldest_version <= group.max_staleness


def can_all_be_trained_in_time(left: Iterable[float], facts: QueueState) -> bool:
    """Whether all groups that remain after a batch at `facts.version` can be trained within their bounds.

    `left`: their due versions. For each version d, at most ``(d - version) * B`` groups may be due by d: as many as the
    batches until then can hold.
    """
    due_by = 0
    for last, groups in sorted(Counter(left).items()):
        due_by += groups
        if due_by > (last - facts.version) * facts.batch_size:
            return False
    return True


def assert_within_bound(batch: Batch, policy: BeyondBound) -> None:
    """Check that a batch keeps the staleness bounds of its groups; "train" promises none. Raises BoundViolated if a
    token would be trained beyond the bound of its group."""
    for group in batch.groups if policy != "train" else ():
        oldest = max(group.oldest_version, batch.oldest_of(group.id))
        if batch.version - oldest > group.max_staleness:
            raise BoundViolated(
                f"group {group.id} has a token of version {oldest} and would be trained at {batch.version}, beyond "
                f"max_staleness = {group.max_staleness:g} (beyond_bound = {policy!r})"
            )
