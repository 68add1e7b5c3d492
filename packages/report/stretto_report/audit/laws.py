"""Laws of a run. Each law is a generator function that reads `History` and yields a sentence for each breach, nothing
if it is kept; its docstring says what must hold.

The laws hold after any crash: work may be unfinished, but no record may be wrong.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice, pairwise, repeat

from stretto.core.states import FINAL, OPEN, UNTRAINED
from stretto_report.audit.history import History, RecordedGroup, RecordedStep, RecordedTrajectory
from stretto_report.audit.order import prompts_come_in_their_order
from stretto_report.audit.token_laws import (
    backward_versions,
    every_sampled_token_is_trained_once,
    every_segment_has_its_place,
    every_token_has_one_category,
)


def the_file_is_whole(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: SQLite's integrity check passes, and no row, piece, call or event is
    missing to which other rows point (`presence.broken_rows`)."""
    yield from history.damage


def every_checksum_fits(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: Checksums of groups, trajectories, partials, calls, batches and facts
    match, and no tokens are missing that the recipe keeps."""
    yield from history.broken_checksums


def the_start_is_what_it_was(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: The files of the first policy and of the reference model have not
    changed since the run started."""
    yield from history.broken_start


def the_recipe_is_the_one_on_record(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: The run's recipe differs from the record only in keys that a resume may
    change."""
    yield from history.edited


def everything_issued_has_one_state(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: Each trajectory has exactly one row, one of the six states, a reason if
    it ended untrained, and a training step if and only if it was trained. The ledger's own counts are those of the
    rows."""
    for group in history.groups:
        if (found := [one.member for one in group.trajectories]) != list(range(group.members)):
            yield f"group {group.id} has {group.members} members, on record are {found}"
    for one in history.trajectories:
        if one.state not in (*FINAL, *OPEN):
            yield f"{one.id} is {one.state!r}"
        if one.state in UNTRAINED and not one.reason:
            yield f"{one.id} is {one.state} without a reason"
        if (one.state == "trained") != (one.trained_step is not None):
            yield f"{one.id} is {one.state}, trained in step {one.trained_step}"
    counted, rows = Counter(history.counted), Counter(one.state for one in history.trajectories)
    # An earlier version of stretto may have gone on without counting; then the next start counts anew.
    if counted and all(counted[state] == rows[state] for state in OPEN):
        for state in FINAL:
            if counted[state] != rows[state]:
                yield f"{rows[state]} trajectories are {state}, and the ledger has counted {counted[state]}"


def nothing_is_trained_twice(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: The members of all batches are the trajectories in state trained, each
    once. An epoch trains a prompt once."""
    batches: dict[str, list[tuple[int, int]]] = {group.id: [] for group in history.groups}  # (member, step) by group
    for step in history.steps:
        for name, members in step.batch:
            batches.setdefault(name, []).extend((member, step.step) for member in members)
    by_rows = {group.id: group.trajectories for group in history.groups}
    for name, placed in batches.items():
        yield from _placed(name, placed, by_rows.get(name, ()))
    trained: dict[tuple[int, str], str] = {}
    for group in history.groups:
        if any(one.state == "trained" for one in group.trajectories):
            other = trained.setdefault((group.epoch, group.prompt), group.id)
            if other != group.id:
                yield f"prompt {group.prompt} was trained twice in epoch {group.epoch}: {other} and {group.id}"


def _placed(name: str, placed: list[tuple[int, int]], trajectories: tuple[RecordedTrajectory, ...]) -> Iterator[str]:
    """Yield a sentence for each member of group `name` that is in several batches, or whose batch and row disagree.
    `placed`: member and step, for each time that a batch has it."""
    rows = {(one.member, one.trained_step) for one in trajectories if one.state == "trained"}
    times = Counter(member for member, _ in placed)
    yield from (f"{name}/{member} is in {count} batches" for member, count in times.items() if count > 1)
    for member, step in {*placed} - rows:
        yield f"{name}/{member} is in the batch of step {step}, and its row does not say so"
    for member, step_of_row in rows - {*placed}:
        yield f"the row of {name}/{member} says step {step_of_row}, whose batch does not have it"


def versions_grow_by_one(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: Step n trains at version n - 1 and publishes version n; no step is
    missing; only the last may be unpublished. No kept policy and no sampled token has a version above the last step.
    Versions never fall along the turns of a trajectory."""
    for place, step in enumerate(history.steps, start=1):
        if (step.step, step.version) != (place, place - 1):
            yield f"the {place}. step on record is step {step.step}, at version {step.version}"
        if step.published_version is None and place < len(history.steps):
            yield f"step {step.step} was never published, and step {step.step + 1} was trained"
        if step.published_version not in (None, step.step):
            yield f"step {step.step} published version {step.published_version}"
    newest = len(history.steps)
    yield from (f"policy {version} belongs to no step on record" for version in history.policies if version > newest)
    for one in history.trajectories:
        yield from (f"{one.id}: its versions go back: {versions}" for versions in backward_versions(one))
        if one.newest_version is not None and one.newest_version > newest:
            yield f"{one.id} was sampled by version {one.newest_version}, and {newest} is the newest"


def no_group_starts_before_its_turn(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: When each group was issued, the number of earlier groups (without those
    that ended untrained), in whole batches, was at most the live version plus the staleness bound in force (AReaL,
    equation 3).

    The live version never decreases. No token of a group is older than the version at which the group was admitted.
    """
    bounds, counted, live = history.bounds, 0, 0
    for group in history.groups:
        version = group.admitted_version
        if counted // bounds.batch_size > version + group.max_staleness:
            bound = f"max_staleness {group.max_staleness:g}"
            yield f"{group.id} was admitted at version {version} behind {counted} groups; {bound}"
        if version < live:
            yield f"{group.id} was admitted at version {version}, an earlier group at {live}"
        counted, live = counted + (not _ended_untrained(group)), max(live, version)
        for one in group.trajectories:
            if one.oldest_version is not None and one.oldest_version < version:
                yield f"{one.id} has a token of version {one.oldest_version}, and was admitted at {version}"


def no_bound_is_broken(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: No token was trained with more staleness than the bound in force when
    its group was admitted, nor at a version before its own. Masked tokens may be older; with `beyond_bound = "train"`
    all may be. The staleness of a trajectory whose tokens were not kept is not checked if older tokens of its group
    were masked."""
    bounds, policy = {group.id: group.max_staleness for group in history.groups}, history.bounds.beyond_bound
    for step, one in _trained(history):
        bound, oldest = bounds[one.group], step.own_oldest.get(one.group, step.oldest_trainable)
        if one.newest_version is not None and one.newest_version > step.version:
            yield f"{one.id} has tokens of version {one.newest_version}, trained at {step.version}"
        if policy == "train" or math.isinf(bound):
            continue
        versions = [version for segment in one.sampled for version, _ in segment.stamps]
        if one.segments is None:
            if oldest or one.oldest_version is None:
                continue  # masked tokens cannot be told from trained ones without the tokens
            versions = [one.oldest_version]
        trainable = [version for version in versions if version >= oldest]
        if trainable and step.version - min(trainable) > bound:
            yield f"{one.id} was trained at {step.version} with a token of {min(trainable)}; max_staleness {bound:g}"


def no_more_are_in_flight_than_allowed(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: The number of groups in flight never exceeded the bound in force when a
    group was issued. Two counts are checked: the run's own record, and the groups that are still in flight at its
    end."""
    unfinished = 0
    for group in history.groups:
        unfinished += (still := "in_flight" in _states(group))
        found = max(unfinished * still, history.most_in_flight.get(group.id, 0))
        if found > group.max_in_flight:
            told = f"{found} groups were in flight when {group.id}, or one under the same bounds, was issued"
            yield f"{told}; max_in_flight {group.max_in_flight:g}"


def bounds_change_as_recorded(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: A bound changes only if the recipe makes it adaptive. Each change stays
    within the recipe's limits, begins with the value of the change before, and follows a recorded step. The staleness
    bound changes at most once per step."""
    adaptive = history.bounds.adaptive
    value = {name: lowest for name, (lowest, _) in adaptive.items()}
    newest = dict.fromkeys(adaptive, 0)
    for change in history.changes:
        told = f"{change.name} went from {change.before} to {change.after} after step {change.step}"
        if change.name not in adaptive:
            yield f"{told}, and the recipe fixes it"
            continue
        lowest, highest = adaptive[change.name]
        if not lowest <= change.after <= highest:
            yield f"{told}; the recipe allows {lowest} to {highest}"
        if change.before != value[change.name]:
            yield f"{told}, and was {value[change.name]}"
        earliest = newest[change.name] + (change.name == "max_staleness")
        if not earliest <= change.step <= len(history.steps):
            yield f"{told}; the one before it came after step {newest[change.name]}, {len(history.steps)} are on record"
        value[change.name], newest[change.name] = change.after, change.step


def batches_are_complete(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: Each batch has the recipe's number of groups, each with at least
    `min_group_size` trajectories. Each of these is judged and has all its tokens, and the step's counts agree with
    them."""
    groups = {group.id: group for group in history.groups}
    for step in history.steps:
        if len(step.batch) != history.bounds.batch_size:
            yield f"the batch of step {step.step} has {len(step.batch)} groups, not {history.bounds.batch_size}"
        for name, members in step.batch:
            yield from _incomplete(step, groups.get(name), name, members, history.bounds.min_group_size)
        trajectories = sum(len(members) for _, members in step.batch)
        if trajectories != step.trajectories:
            yield f"step {step.step} says {step.trajectories} trajectories, its batch has {trajectories}"
    counted: Mapping[int, list[RecordedTrajectory]] = defaultdict(list)
    for step, one in _trained(history):
        counted[step.step].append(one)
    for step in history.steps:
        tokens = sum(one.tokens for one in counted[step.step])
        if tokens != step.trained_tokens + step.masked_tokens:
            counts = f"{step.trained_tokens + step.masked_tokens} tokens"
            yield f"step {step.step} says {counts}, its trajectories have {tokens}"


def _incomplete(
    step: RecordedStep, group: RecordedGroup | None, name: str, members: tuple[int, ...], fewest: int
) -> Iterator[str]:
    if group is None:
        yield f"step {step.step} trained on group {name}, which was never issued"
        return
    if len(members) < fewest:
        yield f"group {name} was trained with {len(members)} trajectories, at least {fewest} are needed"
    for one in (group.trajectories[member] for member in members if member < len(group.trajectories)):
        if one.reward is None or one.verdict not in ("right", "wrong") or one.stop_reason is None:
            yield f"{one.id} was trained without a verdict"
        if one.segments is not None:
            counts = [(segment.tokens, segment.logprobs, segment.stamped) for segment in one.sampled]
            found = {one.tokens, *(map(sum, zip(*counts, strict=True)) if counts else (0,))}
            if len(found) > 1:
                yield f"{one.id} has {one.tokens} tokens, and on record are {sorted(found)}"


def every_token_has_its_engine(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: Each engine that sampled a token is on the run's roster. The engines of
    a trajectory sampled as many tokens as it has; one without recorded engines is not checked."""
    for one in history.trajectories:
        yield from (
            f"{one.id} has tokens of {name}, which is not on the roster"
            for name in sorted({name for name, _ in one.writers} - {"", *history.roster})
        )
        tokens = sum(segment.tokens for segment in one.sampled)
        if one.writers and sum(count for _, count in one.writers) != tokens:
            yield f"{one.id} has {tokens} sampled tokens, its engines wrote {one.writers}"


def every_token_was_sampled_by_proven_weights(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: The engine that sampled a token had proven, by the canary, that it held
    the token's version, and, unless the trajectory ended untrained, had not changed it until its next load. Nothing is
    checked for a run without proofs, or before they began. (Tokens of their first version may have been sampled by a
    stretto that recorded no engines.)"""
    if history.proofs is None:
        return
    since, proven = history.proofs.since, history.proofs.proven
    for one in history.trajectories:
        withdrawn = history.proofs.withdrawn if one.state not in UNTRAINED else ()
        stamps = chain.from_iterable(repeat(*stamp) for segment in one.sampled for stamp in segment.stamps)
        sampled = {(name, version) for name, count in one.writers for version in islice(stamps, count)}
        sampled |= {("", version) for version in stamps if version > since}
        yield from (
            f"{one.id} has a token of {name or 'no engine'} at version {version}, which it had not proven"
            + (", since its weights had changed before the next load" if (name, version) in withdrawn else "")
            for name, version in sorted(sampled)
            if (name, version) in withdrawn
            or (version >= since and not any(first <= version <= last for first, last in proven.get(name, ())))
        )


def no_prompt_is_skipped_or_repeated(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: Each epoch admits each prompt once. Another attempt follows only an
    attempt that ended untrained. An attempt that ended untrained and may be repeated was repeated, or is recorded as
    next."""
    epochs: dict[int, dict[str, list[RecordedGroup]]] = defaultdict(lambda: defaultdict(list))
    for group in history.groups:
        epochs[group.epoch][group.prompt].append(group)
    about_to = set(history.given_back)
    for epoch, prompts in epochs.items():
        for prompt, groups in prompts.items():
            yield from _attempts(epoch, prompt, groups, about_to, history.bounds.max_attempts)
    if history.position is not None:
        yield from _drawn(epochs, history.position, same=history.data is None)


def _attempts(
    epoch: int, prompt: str, groups: list[RecordedGroup], about_to: set[tuple[int, str, int]], most: int
) -> Iterator[str]:
    if (found := [group.attempt for group in groups]) != list(range(len(groups))):
        yield f"prompt {prompt} was asked in epoch {epoch} in the attempts {found}"
    for earlier, later in pairwise(groups):
        if not _ended_untrained(earlier):
            yield f"{later.id} was asked although {earlier.id} had not ended untrained"
    last = groups[-1]
    failures = sum(_failed(group) for group in groups)
    wanted = (epoch, prompt, len(groups))
    if _asked_again(last, failures, most) and wanted not in about_to:
        yield f"{last.id} ended untrained, and prompt {prompt} is not asked again"
    if wanted in about_to and not _ended_untrained(last):
        yield f"prompt {prompt} is to be asked again, and {last.id} has not ended untrained"


def _drawn(
    epochs: Mapping[int, Mapping[str, list[RecordedGroup]]], position: tuple[int, int], same: bool
) -> Iterator[str]:
    """Yield a sentence for each breach of this: as many prompts were issued as the recorded position in the data says.
    `epochs`: attempts by prompt, by epoch. `position`: newest epoch, and number of prompts drawn in it. `same`: each
    epoch draws all prompts, so all whole epochs must have the same ones. (Otherwise `prompts_come_in_their_order`
    checks this.)"""
    newest, drawn = position
    sizes = {epoch: len(prompts) for epoch, prompts in epochs.items()}
    if sizes.get(newest, 0) != drawn:
        yield f"{drawn} prompts of epoch {newest} were drawn, {sizes.get(newest, 0)} were issued"
    whole = {epoch: size for epoch, size in sizes.items() if epoch < newest}
    if not same:
        return
    if len(set(whole.values())) > 1 or len(whole) != newest:
        yield f"epochs before {newest} asked different numbers of prompts: {whole}"
    asked = [frozenset(epochs[epoch]) for epoch in whole]
    if len(set(asked)) > 1:
        yield "not every epoch asked the same prompts"


def _states(group: RecordedGroup) -> set[str]:
    return {one.state for one in group.trajectories}


def _ended_untrained(group: RecordedGroup) -> bool:
    return _states(group) <= UNTRAINED


def _failed(group: RecordedGroup) -> bool:
    return _states(group) == {"failed"}


def _asked_again(group: RecordedGroup, failures: int, most: int) -> bool:
    """Whether a prompt must be tried again after this attempt: always if a trajectory expired, after fewer than `most`
    failed attempts if all failed, never if any was filtered or did not end untrained. `failures`: number of failed
    attempts, this one included."""
    states = _states(group)
    return states <= {"expired", "failed"} and ("expired" in states or failures < most)


def _trained(history: History) -> Iterator[tuple[RecordedStep, RecordedTrajectory]]:
    steps = {step.step: step for step in history.steps}
    for one in history.trajectories:
        if one.trained_step in steps:
            yield steps[one.trained_step], one


LAWS: tuple[Callable[[History], Iterator[str]], ...] = (
    the_file_is_whole,
    every_checksum_fits,
    the_start_is_what_it_was,
    the_recipe_is_the_one_on_record,
    everything_issued_has_one_state,
    nothing_is_trained_twice,
    versions_grow_by_one,
    no_group_starts_before_its_turn,
    no_bound_is_broken,
    no_more_are_in_flight_than_allowed,
    bounds_change_as_recorded,
    batches_are_complete,
    every_segment_has_its_place,
    every_sampled_token_is_trained_once,
    every_token_has_one_category,
    every_token_has_its_engine,
    every_token_was_sampled_by_proven_weights,
    no_prompt_is_skipped_or_repeated,
    prompts_come_in_their_order,
)
