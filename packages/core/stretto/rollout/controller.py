"""The rollout controller (AReaL, section 4.1): decides which groups start, are kept, and are trained on next.

The controller owns no task, no socket and no clock, so a simulation drives the same class. An example, with batches of
two groups and ``max_staleness = 1``::

    admit, admit, admit, admit     four groups start: (0 + 1 + 1) * 2 = 4
    admit -> None                  the fifth group must wait (staleness bound)
    finish, finish                 the completions of two groups have ended and are judged
    take -> Batch(version=0)       the trainer gets a batch
    publish(1); load(1)            version 1 is published, then loaded by every engine
    admit, admit                   two more groups may start

The journal gets every state change before it takes effect. A controller is restored from the journal's unfinished
groups (`restore`) and its own saved state (`state`).
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Mapping, Sequence

from stretto.core.admission import BoundChange, Staleness, admits, due
from stretto.core.canary import is_of
from stretto.core.errors import StrettoError, several
from stretto.core.records import Batch, Group, Outcome, Prompt, Record, State, Trajectory, trajectory_id
from stretto.core.states import Journal
from stretto.rollout.adaptive import AdaptiveBound, AdaptiveInFlight, Pressure, adapted, decided, measured
from stretto.rollout.batching import QueueState, assert_within_bound, choose
from stretto.rollout.config import RolloutConfig
from stretto.rollout.filters import Compared, count_reasons, filters, refused, silence
from stretto.rollout.pacing import Continuous, Pacing
from stretto.rollout.prompts import Draw, Position, PromptStream

CONTROLLER = "standing"  #: key of the ledger under which the `ControllerState` is saved


class TooManyFailures(StrettoError):
    """More groups failed in a row than `rollout.max_failures_in_a_row` allows."""


class ControllerState(Record, frozen=True):
    """State of a controller that cannot be rebuilt from the records of trajectories: position in the prompts, number of
    failed attempts by unfinished group (if not 0), and the state of the adaptive bounds `staleness` and `in_flight`,
    None if the bound is fixed. `starved`: no second batch was ready when the newest batch was taken."""

    position: Position = Position()
    failures: Mapping[str, int] = {}
    staleness: AdaptiveBound | None = None
    starved: bool = True
    in_flight: AdaptiveInFlight | None = None


class Ticket(Record, frozen=True):
    """A group in flight: its prompt, version and bound at its admission, and a random seed for each member.

    `order`: running number of the admissions of this process. `draw`: the attempt at the prompt. `max_staleness`: the
    bound, in versions.

    Example::

        ticket = stretto.Scheduler([(2, 3)], batch_size=1, group_size=2).admit()
        print(ticket.prompt.token_ids, len(ticket.seeds), ticket.admitted_version)
    """

    order: int
    group_id: str
    draw: Draw
    admitted_version: int
    seeds: tuple[int, ...]
    max_staleness: Staleness = math.inf

    @property
    def prompt(self) -> Prompt:
        return self.draw.prompt

    @property
    def members(self) -> range:
        return range(len(self.seeds))

    @property
    def due(self) -> float:
        """Last version at which it can be trained within its bound."""
        return due(self.admitted_version, self.max_staleness)


class Controller:
    """Admission, filters, buffer and batches; see the module for an example.

    `published`: newest version of the trainer, at which the next batch is trained. `live`: newest version that every
    engine has loaded, at which new groups are admitted.
    """

    def __init__(
        self,
        config: RolloutConfig,
        prompts: PromptStream,
        journal: Journal,
        seed: int,
        version: int = 0,
        pacing: Pacing | None = None,
        state: ControllerState | None = None,
        compared: Compared | None = None,
    ) -> None:
        """Start a controller without groups. `seed`: decides the seeds of completions. `version`: newest published
        version. `pacing`: decides when groups start; None: as soon as allowed. `state`: saved by an earlier process of
        the run, whose unfinished groups `restore` adds afterwards; None: a new run. `compared`: returns the lists of
        rewards that the filter `zero_variance` compares; None: one list, of the whole group."""
        self.config = config
        state = state or ControllerState()
        lowest, _ = config.staleness_bounds
        start = AdaptiveBound(int(lowest)) if config.max_staleness == "auto" else None
        self._staleness, self._starved = state.staleness or start, state.starved
        fewest, _ = config.in_flight_bounds
        self._number = state.in_flight or (AdaptiveInFlight(fewest) if config.max_in_flight == "auto" else None)
        self._ended = 0  # groups ended since the last reading of the engines' pressure
        self._opens = pacing or Continuous().opens
        self.published = version
        self.live = version
        self._prompts = prompts
        self._journal = journal
        self._seed = seed
        self._filters = filters(config, compared)
        self._order = 0
        self._taken = version * config.batch_size
        self._in_flight: dict[str, Ticket] = {}
        self._buffer: list[tuple[Ticket, Group]] = []
        self._failures_in_a_row = 0
        self.filtered, self.reasons = 0, dict[str, tuple[int, str]]()  # groups filtered since the last batch; why
        self._silence = silence(config.batch_size)
        self.refused = 0  # late or duplicate results

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def tickets(self) -> list[Ticket]:
        """Tickets of the groups in flight."""
        return list(self._in_flight.values())

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    @property
    def queues(self) -> dict[str, float]:
        """Numbers of groups ``in_flight`` and ``buffered``, and the current limit, ``max_in_flight``, if it adapts."""
        sizes = {"in_flight": float(self.in_flight), "buffered": float(self.buffered)}
        return sizes | ({} if self._number is None else {"max_in_flight": float(self._number.number)})

    @property
    def counted(self) -> int:
        """Number of groups that are trained, buffered or in flight (N - 1 of equation 3, `core.admission`)."""
        return self._taken + len(self._buffer) + len(self._in_flight)

    @property
    def max_staleness(self) -> Staleness:
        """The staleness bound for groups admitted now."""
        return self._staleness.bound if self._staleness is not None else self.config.staleness_bounds[0]

    @property
    def max_in_flight(self) -> int:
        """The current limit of groups in flight."""
        return self._number.number if self._number is not None else self.config.in_flight_bounds[0]

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Adapt the staleness bound to the metrics of a step, and record a change in the journal; repeated steps are
        ignored. Call it before the step is recorded, so that a resume misses no measurement. Does nothing if the bound
        is fixed."""
        if (before := self._staleness) is None:
            return
        lowest, highest = map(int, self.config.staleness_bounds)
        self._staleness = now = adapted(before, step, metrics, self._starved, lowest, highest)
        if now.bound != before.bound:
            reason = f"mismatch {now.mismatch:.2f} of its limit ({now.worst})"
            self._journal.change_bound(BoundChange(step, "max_staleness", before.bound, now.bound, reason))

    def observe_pressure(self, now: Pressure) -> None:
        """Adapt the limit of groups in flight to a reading of the engines' load, and record a change in the journal.
        Does nothing if the limit is fixed."""
        if self._number is None:
            return
        window, self._ended = measured(self._number, now, self._ended), 0
        lowest, highest = self.config.in_flight_bounds
        useful = min(highest, (self.max_staleness + 1) * self.config.batch_size)
        short = self.in_flight >= window.number and self._is_its_turn()
        self._number = after = decided(window, now.engines, short, lowest, int(useful))
        if after.number != window.number:
            change = BoundChange(self.published, "max_in_flight", window.number, after.number, window.reason)
            self._journal.change_bound(change)

    def admit(self) -> Ticket | None:
        """Start one more group if the pacing policy allows it: draw its prompt, record it in the journal, and return
        its ticket; otherwise None. Built-in policies keep the staleness bound; all policies keep `max_in_flight`."""
        opens = self._opens(self.in_flight < self.max_in_flight and self._is_its_turn(), self.in_flight)
        if not opens or self.in_flight >= self.max_in_flight:
            return None
        config = self.config
        draw = self._prompts.take()
        ticket = self._ticket(draw, self.live, self.max_staleness)
        self._in_flight[ticket.group_id] = ticket  # before the journal, which may save `state` with the group
        self._journal.issue(ticket.group_id, draw.prompt, config.group_size, self.live)
        return ticket

    def _is_its_turn(self) -> bool:
        return admits(self.counted, self.live, self.config.batch_size, self.max_staleness)

    def restore(
        self,
        group_id: str,
        admitted_version: int,
        trajectories: Sequence[Trajectory],
        failures: int = 0,
        max_staleness: Staleness | None = None,
    ) -> Ticket:
        """Restore an untrained group that an earlier process recorded in the journal; returns its ticket. Call it for
        the groups in the order of admission, before any new admission. `failures`: failed attempts at its prompt so
        far; `max_staleness`: its bound, None: the initial one.

        Without `trajectories` it is in flight again, and the caller must request its completions; else it is buffered.
        """
        draw = self._prompts.named(group_id, failures)
        bound = self.config.staleness_bounds[0] if max_staleness is None else max_staleness
        ticket = self._ticket(draw, admitted_version, bound)
        if trajectories:
            bisect.insort(self._buffer, (ticket, self._group(ticket, trajectories)), key=_order_of_training)
        else:
            self._in_flight[group_id] = ticket
        return ticket

    def state(self) -> ControllerState:
        """The state to save for a later process, in addition to the journal."""
        draws = [ticket.draw for ticket in self._in_flight.values()] + [ticket.draw for ticket, _ in self._buffer]
        failures = {draw.group_id: draw.failures for draw in draws if draw.failures}
        return ControllerState(self._prompts.position(), failures, self._staleness, self._starved, self._number)

    def seeds_of(self, group_id: str) -> tuple[int, ...]:
        """The seed of each completion of a group: `derive_seed` of the run's seed and the completion's `trajectory_id`,
        computed faster, since the common beginning is hashed once."""
        common, seeds = hashlib.blake2b(f"{self._seed}\x1f{group_id}/".encode(), digest_size=8), list[int]()
        for member in range(self.config.group_size):
            whole = common.copy()
            whole.update(b"%d" % member)
            seeds.append(int.from_bytes(whole.digest(), "little") >> 1)
        return tuple(seeds)

    def _ticket(self, draw: Draw, admitted_version: int, max_staleness: Staleness) -> Ticket:
        group_id, seeds = draw.group_id, self.seeds_of(draw.group_id)
        ticket = Ticket(self._order, group_id, draw, admitted_version, seeds, max_staleness)
        self._order += 1
        return ticket

    def finish(self, ticket: Ticket, trajectories: Sequence[Trajectory]) -> Group | None:
        """Buffer a judged group, filter it, or fail it if fewer than `min_group_size` completions are decided;
        undecided ones always fail. The prompt of a failed group is tried at most `max_attempts` times in all. The
        journal records each trajectory's new state.

        Results of a group that is not in flight (duplicate or late) are refused and counted in `refused`.

        Returns the group with all decided trajectories, filtered ones too, ordered by member; None if it failed or was
        refused. Raises TooManyFailures if more than `max_failures_in_a_row` groups have failed in a row.
        """
        if self._in_flight.get(ticket.group_id) is not ticket:
            self.refused += 1
            return None
        trajectories = sorted(trajectories, key=lambda trajectory: trajectory.member)
        decided = tuple(t for t in trajectories if t.verdict.outcome is not Outcome.UNDECIDED)
        for trajectory in trajectories:
            if trajectory.verdict.outcome is Outcome.UNDECIDED:
                self._settle([trajectory], State.FAILED, trajectory.verdict.reason)
        if len(decided) < self.config.min_group_size:
            if decided:
                reason = f"only {len(decided)} of {len(trajectories)} completions were decided"
                self._settle(decided, State.FAILED, reason)
            self._leave_for_another_attempt(ticket)
            return None
        self._failures_in_a_row = 0
        group = self._group(ticket, decided)
        self._prompts.judged(ticket.draw, sum(t.verdict.outcome is Outcome.RIGHT for t in decided) / len(decided))
        reasons = refused(group, self._filters, self.config.min_group_size)
        kept = [t for t in decided if t.id not in reasons]
        for trajectory in [t for t in decided if t.id in reasons]:
            self._settle([trajectory], State.FILTERED, reasons[trajectory.id])
        if kept:
            left = self._group(ticket, kept)
            self._journal.buffer(left)
            bisect.insort(self._buffer, (ticket, left), key=_order_of_training)
        else:
            self.filtered += 1
            count_reasons(self.reasons, reasons.values())
        self._end(ticket)
        return group

    def without_a_batch(self) -> str:
        """Return a sentence, now and then, if filters refuse so much that perhaps no batch will come; else ""."""
        return self._silence(self.filtered, self.reasons)

    def _end(self, ticket: Ticket) -> None:
        del self._in_flight[ticket.group_id]
        self._ended += 1

    def _group(self, ticket: Ticket, trajectories: Sequence[Trajectory]) -> Group:
        prompt, version = ticket.draw.prompt, ticket.admitted_version
        return Group(ticket.group_id, prompt, version, tuple(trajectories), ticket.max_staleness)

    def lose(self, ticket: Ticket, reason: str) -> None:
        """Fail a group in flight whose engine was lost. Its prompt is tried again, without limit, since the prompt is
        not the cause."""
        self._settle_unanswered(ticket, State.FAILED, reason)
        self._end(ticket)
        self._prompts.give_back(ticket.draw)

    def fail(self, ticket: Ticket, reason: str) -> None:
        """Fail a group in flight whose request was refused. Its prompt is tried at most `max_attempts` times in all.
        Raises TooManyFailures if more than `max_failures_in_a_row` groups have failed in a row."""
        self._settle_unanswered(ticket, State.FAILED, reason)
        self._leave_for_another_attempt(ticket)

    def _leave_for_another_attempt(self, ticket: Ticket) -> None:
        self._end(ticket)
        self._failures_in_a_row += 1
        if ticket.draw.failures + 1 < self.config.max_attempts:
            self._prompts.give_back(ticket.draw, failures=1)
        if self._failures_in_a_row > self.config.max_failures_in_a_row:
            raise TooManyFailures(
                f"{several(self._failures_in_a_row, 'group')} failed in a row, the last one is {ticket.group_id}; "
                "`stretto export` shows the reason of each (rollout.max_failures_in_a_row)"
            )

    def take(self) -> Batch | None:
        """Take the next batch, to be trained at `published`, from the buffer and commit it to the journal; None if the
        trainer must wait for groups. Under ``beyond_bound = "expire"`` finished groups with stale tokens expire first.
        Raises BoundViolated if a chosen group breaks its bound (a bug)."""
        choice = choose(self.config.beyond_bound, self._facts(self.published))
        self._expire_finished(choice.expired)
        if not choice.groups:
            return None
        batch = Batch(
            step=self.published + 1,
            version=self.published,
            groups=choice.groups,
            oldest_trainable=choice.oldest_trainable,
            oldest_by_group=choice.oldest_by_group,
        )
        assert_within_bound(batch, self.config.beyond_bound)
        next_one = choose(self.config.beyond_bound, self._facts(self.published + 1, without=choice.groups))
        self._starved = not next_one.groups  # before the journal, which may write `state`
        self._journal.commit_batch(batch)
        self._taken += len(self._leave_buffer(choice.groups))
        self.filtered, self.reasons = 0, {}
        return batch

    def _facts(self, version: int, without: Sequence[Group] = ()) -> QueueState:
        taken = {group.id for group in without}
        return QueueState(
            finished=[group for _, group in self._buffer if group.id not in taken],
            in_flight=[ticket.due for ticket in self._in_flight.values()],
            version=version,
            batch_size=self.config.batch_size,
        )

    def _expire_finished(self, groups: Sequence[Group]) -> None:
        for group in groups:
            reason = f"sampled by version {group.oldest_version}, to be trained at {self.published}"
            self._drop(group, State.EXPIRED, reason)

    def _drop(self, group: Group, state: State, reason: str) -> None:
        self._settle(group.trajectories, state, reason)
        self._prompts.give_back(self._leave_buffer([group])[0].draw)

    def withdraw(self, engine: str, version: int, reason: str) -> None:
        """Fail the buffered groups that have tokens of `engine` and of `version`. Their prompts are tried again."""
        for _, group in [*self._buffer]:
            if any(is_of(segment, engine, version) for one in group.trajectories for segment in one.segments):
                self._drop(group, State.FAILED, reason)

    def _leave_buffer(self, groups: Sequence[Group]) -> list[Ticket]:
        ids = {group.id for group in groups}
        tickets = [ticket for ticket, group in self._buffer if group.id in ids]
        self._buffer = [entry for entry in self._buffer if entry[1].id not in ids]
        return tickets

    def overdue(self) -> list[Ticket]:
        """Groups in flight that can no longer be trained within their bound; empty unless ``beyond_bound = "expire"``.
        The caller aborts their requests and then calls `expire` for each."""
        if self.config.beyond_bound != "expire":
            return []
        return [ticket for ticket in self._in_flight.values() if ticket.due < self.published]

    def expire(self, ticket: Ticket) -> None:
        """Record an overdue group, whose requests were aborted, as expired. Its prompt is tried again."""
        reason = f"admitted at version {ticket.admitted_version}, still in flight at {self.published}"
        self._settle_unanswered(ticket, State.EXPIRED, reason)
        self._end(ticket)
        self._prompts.give_back(ticket.draw)

    def _settle(self, trajectories: Sequence[Trajectory], state: State, reason: str) -> None:
        for trajectory in trajectories:
            self._journal.settle(trajectory.id, state, reason, trajectory)

    def _settle_unanswered(self, ticket: Ticket, state: State, reason: str) -> None:
        for member in ticket.members:
            self._journal.settle(trajectory_id(ticket.group_id, member), state, reason)

    def publish(self, version: int) -> None:
        """Set `version` as the newest published one, at which the next batch is trained."""
        self.published = version

    def load(self, version: int) -> None:
        """Raise `live`, at which new groups are admitted, to `version`, which every engine has loaded or overtaken."""
        self.live = max(self.live, version)


def _order_of_training(entry: tuple[Ticket, Group]) -> tuple[float, int]:
    return entry[0].due, entry[0].order
