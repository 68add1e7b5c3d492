"""`stretto.Scheduler`: decides which prompt may start, and which completions form the next batch."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from stretto.core.admission import BoundChange
from stretto.core.errors import DataError, Problem, RecipeError, RunFolderError, StoreError
from stretto.core.records import (
    Batch,
    Group,
    Outcome,
    Prompt,
    Segment,
    State,
    Trajectory,
    Update,
    Verdict,
    trajectory_id,
)
from stretto.core.states import why_no_reward
from stretto.doors.mistakes import shown
from stretto.rollout.config import RolloutConfig, contradictions
from stretto.rollout.controller import CONTROLLER, Controller, ControllerState, Ticket
from stretto.rollout.pacing import pacing_of
from stretto.rollout.prompts import PromptStream
from stretto_verbs.arguments import (
    LIST,
    PROMPTS,
    TOKENIZER,
    VERSION,
    WHOLE,
    Asked,
    check,
    checked,
    instance,
    plain,
    prompt_of,
)
from stretto_verbs.completion import AS_RETURNED, TextCompletion, check_numbers, mark_of, marked
from stretto_verbs.ledger import GROUP_SIZE, PROMPTS_MARK, SEED, FolderLedger

if TYPE_CHECKING:  # the import loads transformers, which token ids do not need
    from stretto.model.hf.tokenizer import Tokenizer

#: One completion of a prompt, or the turns of a conversation; turns that were given, not sampled, are token ids.
Answer = TextCompletion | Sequence[TextCompletion | Sequence[int]]
log = logging.getLogger(__name__)
_TICKET, _REASON = instance(Ticket, "a ticket of this scheduler"), instance(str, "a text")
_LEDGER = instance(FolderLedger, "a stretto.Ledger").or_none


class GroupScheduler:
    """Admits groups of completions and forms batches of them, under a bound on staleness.

    Example::

        # Two prompts with two completions each make a batch.
        scheduler = stretto.Scheduler([(2, 3), (4, 5)], batch_size=2, group_size=2, max_staleness=0)
        engine = stretto.Engine.load("model")
        while ticket := scheduler.admit():
            completions = engine.sample(ticket, max_tokens=4)
            scheduler.finish(ticket, completions, rewards=[len(one.text) for one in completions])
        print(len(scheduler.take().groups))

    All methods must be called in one thread. They raise RunFolderError once the ledger is closed or a newer scheduler
    uses it. With a ledger, a new scheduler continues where a killed one has ended: `take` first returns the batches
    that the trainer has not trained, unchanged, if its version is behind; the groups in flight are admitted again, and
    the finished ones are buffered.
    """

    def __init__(
        self,
        prompts: Sequence[Asked | Prompt | Mapping[str, str]],
        *,
        tokenizer: Tokenizer | None = None,
        ledger: FolderLedger | None = None,
        version: int = 0,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Begin with no group in flight, or go on where the scheduler before this one in the ledger has ended.

        Args:
            prompts: texts, token ids, dicts with "prompt" and "answer", or `Prompt`s; each is drawn once per epoch.
            tokenizer: the engine's tokenizer; needed if prompts are texts.
            ledger: records each change before it takes effect; None: nothing is recorded.
            version: the trainer's present version.
            seed: determines the order of the prompts and the seeds of the completions.
            **settings: keys of a recipe's section ``[rollout]``: `batch_size` (groups), `group_size` (completions of a
                group), `max_staleness`, `max_in_flight` (a number), `filter`, …

        Raises:
            DataError: there is no prompt, a prompt is invalid, two have one id, or an argument has the wrong type.
            RecipeError: a setting is invalid.
            RunFolderError: the ledger is closed, or of a run with other prompts or order, another seed or group_size.
            StoreError: the ledger ends before the trainer's version, or is damaged.
        """
        check(
            "Scheduler",
            prompts=(prompts, PROMPTS),
            tokenizer=(tokenizer, TOKENIZER.or_none),
            ledger=(ledger, _LEDGER),
            version=(version, VERSION),
            seed=(seed, WHOLE),
        )
        version, seed = plain(version), plain(seed)
        config = checked(settings, "Scheduler", RolloutConfig)
        _check_settings(config)
        self._mark = "" if tokenizer is None else mark_of(tokenizer)
        asked = [_prompt(one, at, tokenizer) for at, one in enumerate(prompts)]
        if not asked:
            raise DataError([Problem("Scheduler: prompts", "there is none", "give one at least")])
        _check_ids(asked)
        self._ledger, self._again = ledger, deque[Batch]()
        self._whole = nullcontext() if ledger is None else ledger.lock  # held while a change is made
        self._changed, self._claim = asyncio.Event(), object()
        self._restored = deque[Ticket]()
        self._asked = {prompt.id: prompt for prompt in asked}
        self._admitted = 0  # orders of the tickets that `admit` has returned are below it
        self._out: Batch | None = None  # taken, and not trained yet
        self._shown: Batch | None = None  # the same, with the mark of its tokenizer
        if ledger is not None:
            ledger.check_open()
        origin: dict[str, int | str] = {SEED: seed, PROMPTS_MARK: _mark_of(asked), GROUP_SIZE: config.group_size}
        state = self._resume(ledger, version, origin) if ledger is not None else None
        self._controller = Controller(
            config,
            PromptStream(asked, seed, state.position if state is not None else None),
            ledger if ledger is not None else _Forgetful(),
            seed,
            version=self._again[-1].version + 1 if self._again else version,
            pacing=pacing_of(config, in_rounds=False),
            state=state,
        )
        self._version = version
        if ledger is not None and state is not None:
            self._restore(ledger, state)
            ledger.watch(CONTROLLER, self._controller.state)
            ledger.scheduler = self._claim

    @property
    def version(self) -> int:
        """Version of the policy that trains on the next batch."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Number of groups that are admitted and not finished."""
        return self._controller.in_flight

    @property
    def buffered(self) -> int:
        """Number of groups that are finished and not in a batch yet."""
        return self._controller.buffered

    def admit(self) -> Ticket | None:
        """Admit the next group; returns its ticket. After a kill, the groups that were in flight come first. None while
        another group would break the staleness bound or `max_in_flight`, or while batches of a killed run are trained
        again. Raises RunFolderError as `finish` does."""
        self._check_newest()
        if self._again:
            return None
        with self._whole:
            ticket: Ticket | None = None
            while ticket is None and self._restored:
                if self._is_in_flight(first := self._restored.popleft()):  # else it has expired meanwhile
                    ticket = first
            ticket = ticket or self._controller.admit()
            if ticket is not None:
                self._admitted = max(self._admitted, ticket.order + 1)
            return ticket

    async def tickets(self) -> AsyncIterator[Ticket]:
        """Yield the ticket of each group as soon as it is admitted; never ends. Waits for calls of other methods in the
        same event loop."""
        while True:
            while (ticket := self.admit()) is not None:
                yield ticket
            await self._change()

    def finish(self, ticket: Ticket, answers: Sequence[Answer], rewards: Sequence[float | None]) -> None:
        """Finish a group with its completions and rewards. With a ledger, they are recorded when this returns. A group
        that is no longer in flight is ignored. If the filters refuse all groups, a warning is logged.

        Args:
            answers: one for each seed of the ticket: a completion of the engine, or a conversation as a list of such
                completions and, between them, token ids that were given, such as the result of a tool.
            rewards: one for each answer; None: it is undecided, and not trained on.

        Raises:
            DataError: the ticket is another scheduler's; or there are too few or too many answers, or an answer lacks
                log-probabilities, has positive ones, was sampled with another tokenizer, or by a version that is not
                trained yet, or is older than that at which the group was admitted.
            RunFolderError: the ledger is closed, or another scheduler uses it now.
        """
        check("finish", ticket=(ticket, _TICKET), answers=(answers, LIST), rewards=(plain(rewards), LIST))
        self._check_newest()
        self._check_own(ticket, "finish")
        place = f"finish: group {ticket.group_id}"
        wanted = len(ticket.seeds)
        for name, given in (("answers", answers), ("rewards", rewards)):
            if len(given) != wanted:
                raise DataError([Problem(f"{place}: {name}", f"{len(given)} are given", f"{wanted} are needed")])
        found = list[Trajectory]()
        for member, (answer, reward) in enumerate(zip(answers, rewards, strict=True)):
            turns = [answer] if isinstance(answer, TextCompletion) else [*answer] if LIST.fits(answer) else []
            where = f"{place}: answers[{member}]"
            if not any(isinstance(turn, TextCompletion) for turn in turns):
                told = f"{shown(answer)} holds no completion"
                raise DataError([Problem(where, told, "give what the engine returned, with the turns between")])
            since = ticket.admitted_version
            segments = tuple(self._segment(turn, f"{where}[{at}]", since) for at, turn in enumerate(turns))
            text = "".join(turn.text for turn in turns if isinstance(turn, TextCompletion))
            name, verdict = trajectory_id(ticket.group_id, member), _verdict(reward, f"{place}: rewards[{member}]")
            found.append(Trajectory(name, segments, verdict, text))
        with self._whole:
            self._controller.finish(ticket, found)
        if sentence := self._controller.without_a_batch():
            log.warning(sentence)
        self._settled()

    def lose(self, ticket: Ticket, reason: str) -> None:
        """Give up a group that will have no completions; its prompt is drawn again. A group that is no longer in flight
        is ignored. `reason`: for the ledger. Raises DataError if the ticket is another scheduler's, and RunFolderError
        as `finish` does."""
        check("lose", ticket=(ticket, _TICKET), reason=(reason, _REASON))
        self._check_newest()
        self._check_own(ticket, "lose")
        with self._whole:
            if self._is_in_flight(ticket):
                self._controller.lose(ticket, reason)
        self._settled()

    def take(self) -> Batch | None:
        """Return the next batch; None while too few groups are finished. With a ledger, the batch is recorded before
        this returns. Until `advance`, each call returns the same batch. After a kill, batches that the trainer's
        version has not trained come first. Raises RunFolderError as `finish` does."""
        self._check_newest()
        if not self._again:
            with self._whole:
                self._out = self._out or self._controller.take()
        found = self._again[0] if self._again else self._out
        if found is None or not self._mark:
            return found
        if self._shown is None or self._shown.version != found.version:
            self._shown = marked(found, self._mark)
        return self._shown

    async def batch(self) -> Batch:
        """Wait until `take` has a batch, and return it."""
        while (batch := self.take()) is None:
            await self._change()
        return batch

    def advance(self, version: int, metrics: Mapping[str, float] | None = None) -> None:
        """Note that the batch of `take` is trained, and that the engines have loaded the new weights. With
        ``beyond_bound = "expire"``, groups in flight that have become too stale expire: `finish` ignores them.

        Args:
            version: the trainer's version after the step; it trains on the next batch.
            metrics: numbers of the step, recorded in the ledger; None: none.

        Raises:
            DataError: no batch was taken, it does not lead to this version, or a metric is not a number.
            RunFolderError: the ledger is closed, or another scheduler uses it now.
        """
        check("advance", version=(version, VERSION))
        version = plain(version)
        self._check_newest()
        if not (self._again or self._out):
            raise DataError([Problem("advance", "no batch was taken", "call it once after each batch that is trained")])
        if version != self._version + 1:
            told = f"version {version}, and the batch that was taken last leads to version {self._version + 1}"
            raise DataError([Problem("advance", told, "call it once after each batch, with the trainer's version")])
        measured = {name: _number(value, f"advance: metrics[{name!r}]") for name, value in (metrics or {}).items()}
        with self._whole:
            self._advance(version, measured)
        self._changed.set()

    def _advance(self, version: int, metrics: Mapping[str, float]) -> None:
        """Record the step that leads to `version`, and let groups that are now too stale expire. For a batch that is
        trained again after a kill: only record the step."""
        self._version = version
        self._controller.observe(version, metrics)  # before the update is on record: a resume observes each step once
        if self._ledger is not None:
            self._ledger.record_update(Update(version, version, 0, 0, dict(metrics)))
        if self._again:
            self._again.popleft()
            return
        self._out = None
        self._controller.publish(version)
        self._controller.load(version)
        for ticket in self._controller.overdue():
            self._controller.expire(ticket)

    def _check_newest(self) -> None:
        """Raise RunFolderError if there is a ledger that is closed, or that another scheduler uses now."""
        if self._ledger is None:
            return
        self._ledger.check_open()
        if self._ledger.scheduler is not self._claim:
            told, remedy = "another scheduler uses this ledger now", "use the newest scheduler, or a folder for each"
            raise RunFolderError([Problem(str(self._ledger.folder), told, remedy)])

    def _check_own(self, ticket: Ticket, place: str) -> None:
        """Raise DataError for a ticket that `admit` has not returned; of a group that has ended, a copy passes too."""
        own = ticket.order < self._admitted and ticket.seeds == self._controller.seeds_of(ticket.group_id)
        own = own and self._asked.get(ticket.prompt.id) == ticket.prompt
        if not own or any(one.group_id == ticket.group_id and one is not ticket for one in self._controller.tickets):
            told = f"group {ticket.group_id} of another scheduler, or a copy"
            raise DataError([Problem(f"{place}: ticket", told, "give the ticket that `admit` of this one returned")])

    def _settled(self) -> None:
        """Write the ledger to disk, and wake `tickets` and `batch`."""
        if self._ledger is not None:
            self._ledger.flush()
        self._changed.set()

    def _is_in_flight(self, ticket: Ticket) -> bool:
        return any(one is ticket for one in self._controller.tickets)

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _segment(self, turn: TextCompletion | Sequence[int], place: str, since: int) -> Segment:
        """Convert a turn, sampled or given, to a segment. Raises DataError if it cannot be one; `place`: of the turn,
        for messages; `since`: version at which its group was admitted, the oldest that may sample it."""
        if not isinstance(turn, TextCompletion):
            given = prompt_of(place, turn)
            if isinstance(given, str):
                remedy = "give its token ids: engine.tokenizer.encode(...)"
                raise DataError([Problem(place, f"is a text, {given!r:.80}", remedy)])
            return Segment.of(token_ids=given)
        tokens = len(turn.token_ids)
        if not len(turn.logprobs) == len(turn.versions) == tokens:
            told = f"{tokens} tokens, {len(turn.logprobs)} log-probabilities, {len(turn.versions)} versions"
            raise DataError([Problem(place, told, AS_RETURNED)])
        check_numbers(turn, self._mark, place)
        trained = self._version + bool(self._out or self._again)  # the engine may have it before `advance` is called
        told, remedy = "", "call `advance` after each batch, once the engine has its version"
        if (newest := max(turn.versions, default=0)) > trained:
            told = f"was sampled by version {newest}, and the scheduler is at version {self._version}"
        elif (oldest := min(turn.versions, default=since)) < since:
            told = f"was sampled by version {oldest}, and its group was admitted at version {since}"
        if told:
            raise DataError([Problem(place, told, remedy)])
        return turn.segment

    def _resume(self, ledger: FolderLedger, version: int, origin: Mapping[str, int | str]) -> ControllerState:
        """Read the ledger of a killed scheduler: return the state of its controller, and put the batches that the
        trainer, at `version`, has not trained yet into `_again`. `origin`: seed, prompts and group size of this
        scheduler, which are recorded.

        Raises:
            RunFolderError: groups were issued with another origin.
            StoreError: the ledger ends before `version`, or is damaged.
        """
        last = ledger.last_step()
        if ledger.balance().issued:
            _check_same_run(ledger, origin)
        ledger.begin(origin)
        if last is not None and last < version:
            found = f"its newest batch is that of version {last - 1}, and the trainer is at version {version}"
            raise StoreError(f"{ledger.folder}: {found}: the two are of different runs, or the disk has lost a part")
        self._again.extend(ledger.batches(version) if last is not None else ())
        return ledger.get(CONTROLLER, ControllerState) or ControllerState()

    def _restore(self, ledger: FolderLedger, state: ControllerState) -> None:
        """Put the ledger's unfinished groups back into the controller; tickets of those in flight go to `_restored`.
        Raises RunFolderError for a group whose prompt this scheduler does not have."""
        for group in ledger.unfinished():
            failures, bound = state.failures.get(group.id, 0), group.max_staleness
            try:
                ticket = self._controller.restore(group.id, group.admitted_version, group.trajectories, failures, bound)
            except KeyError as error:
                told = f"has a group of prompt {error.args[0]!r}, which is not among these prompts"
                raise RunFolderError([Problem(str(ledger.folder), told, "give the prompts of that run")]) from None
            if not group.trajectories:
                self._restored.append(ticket)


def _check_settings(config: RolloutConfig) -> None:
    """Raise RecipeError for settings with which no batch would be formed, or that only a run can follow."""
    problems = [Problem("Scheduler", sentence) for sentence in contradictions(config)]
    if config.max_in_flight == "auto":
        told = "'auto' follows what the engines of a run tell every second"
        problems.append(Problem("Scheduler: max_in_flight", told, "give a number"))
    if problems:
        raise RecipeError(problems)


def _check_ids(prompts: Sequence[Prompt]) -> None:
    """Raise DataError with each prompt whose id an earlier prompt has."""
    first, problems = dict[str, int](), list[Problem]()
    for at, prompt in enumerate(prompts):
        if (before := first.setdefault(prompt.id, at)) != at:
            told = f"has the id {prompt.id!r} of prompts[{before}]"
            remedy = "give each prompt an id of its own; without one, its place is its id"
            problems.append(Problem(f"Scheduler: prompts[{at}]", told, remedy))
    if problems:
        raise DataError(problems)


def _check_same_run(ledger: FolderLedger, origin: Mapping[str, int | str]) -> None:
    """Raise RunFolderError with the first difference if the ledger's run began with other prompts, seed or group size.
    `origin`: these three of the present scheduler, by their names in the ledger."""
    for name, value in origin.items():
        if (known := ledger.get(name, type(value))) in (None, value):
            continue
        told, remedy = f"was begun with {name} {known}, not {value}", f"give {name}={known}"
        if name == PROMPTS_MARK:
            told, remedy = "was begun with other prompts, or in another order", "give the prompts of that run"
        raise RunFolderError([Problem(str(ledger.folder), told, f"{remedy}, or another folder")])


def _mark_of(prompts: Sequence[Prompt]) -> str:
    """Compute a hash of the ids and tokens of the prompts, in their order; gold answers are left out."""
    told = msgspec.json.encode([(prompt.id, prompt.token_ids) for prompt in prompts])
    return hashlib.blake2b(told, digest_size=16).hexdigest()


class _Forgetful:
    """Journal of a scheduler without a ledger; records nothing."""

    def issue(self, group_id: str, prompt: Prompt, members: int, admitted_version: int) -> None: ...

    def buffer(self, group: Group) -> None: ...

    def settle(self, id: str, state: State, reason: str, trajectory: Trajectory | None = None) -> None: ...

    def commit_batch(self, batch: Batch) -> None: ...

    def change_bound(self, change: BoundChange) -> None: ...


def _prompt(given: Any, number: int, tokenizer: Tokenizer | None) -> Prompt:
    """Convert one of the scheduler's prompts; its id is its `number` unless it is a `Prompt`. Raises DataError or
    RefusedRequest for anything that is no prompt, and for a text without a tokenizer."""
    if isinstance(given, Prompt):
        return given
    place, answer = f"Scheduler: prompts[{number}]", ""
    if isinstance(given, Mapping):
        if "prompt" not in given:
            raise DataError([Problem(place, "has no key 'prompt'", 'a row is {"prompt": ..., "answer": ...}')])
        answer, given = str(given.get("answer", "")), given["prompt"]
    asked = prompt_of(place, given)
    if not isinstance(asked, str):
        return Prompt(id=str(number), token_ids=asked, text="", answer=answer)
    if tokenizer is None:
        raise DataError([Problem(place, "is a text, and there is no tokenizer", "give tokenizer=engine.tokenizer")])
    return Prompt(id=str(number), token_ids=tokenizer.encode(asked), text=asked, answer=answer)


def _verdict(reward: object, place: str) -> Verdict:
    """Convert a reward: None is undecided, above 0 right, else wrong. Raises DataError for anything but a number within
    ±1e6; `place`: for the message."""
    if reward is None:
        return Verdict(Outcome.UNDECIDED, None, "not judged")
    value = _number(reward, place)
    if why := why_no_reward(value):
        raise DataError([Problem(place, why, "a finite number, or None")])
    return Verdict(Outcome.RIGHT if value > 0 else Outcome.WRONG, value)


def _number(given: object, place: str) -> float:
    """Convert a number of Python, numpy or torch to a float. Raises DataError for anything else. `place`: name of the
    argument, for the message."""
    if not isinstance(value := plain(given), int | float):
        raise DataError([Problem(place, shown(given), "a number is needed")])
    return float(value)
