"""The reward service: worker processes that can be killed, scoring while generation continues.

    score(items) ─► queue ─► least busy worker ─► verdicts
                      ▲           │ hangs or dies
                      └───────────┘ it is killed and replaced, the other items are scored again

A thread cannot be stopped in the middle of ``9 ** 9 ** 9``; a process can. So a completion costs at most its timeout.
Then its worker is killed and replaced, and the completion is undecided: it has a reason, and never a zero reward. The
timeout counts CPU time, so that a verdict does not depend on the load of the machine. A reward that waits instead of
computing has a longer limit in wall time (`stretto_verify.clock.clock_limit`).
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from stretto.core.deadlines import deadline
from stretto.core.errors import Problem, RewardFunctionError, RoleDied, WireError, described, several
from stretto.core.events import Span
from stretto.core.records import Outcome, Verdict
from stretto.processes.spawn import cut_log
from stretto.processes.supervisor import RestartBudget, Supervisor
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.judging import PLACE, undecided
from stretto.rewards.service.process import FORGED, WorkerProcess
from stretto.rewards.service.queueing import Call, Chunk, blame, chunks
from stretto.rewards.service.wire import Facts, Request, Row, ScoreItem, Verdicts
from stretto_verify.clock import clock_limit

ROLE = "rewards"
TIMED_OUT, DIED = "timeout after", "worker died"  # beginnings of reasons that may depend on the machine
_DEPTH = 2  # chunks a worker holds: one in work and one waiting, so that it never waits for the conductor
_LOSSES = 2  # workers that may die on one completion before it is undecided
_START_TRIES, _START_PAUSE_SECONDS = 3, 0.2
_NO_ROOM = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})  # there may be room in a moment
_ROOM_SECONDS = 10.0  # longest wait for it
_LOOK_SECONDS = 0.25
_LATEST_LOOK = 5.0  # seconds within which a late worker is noticed, and its verdict given
_SPAN_GAP = 0.002  # seconds; spans with a smaller gap are merged into one for the timeline


class RewardPool:
    """Pool of worker processes that judge completions. `busy_seconds`: time that all workers together have spent on
    it.

    Example::

        async with RewardPool(RewardsConfig(function="final_answer", workers=2)) as pool:
            [verdict] = await pool.score([ScoreItem(prompt="3+8=", completion="11", answer="11")])
    """

    def __init__(
        self,
        config: RewardsConfig,
        *,
        log: Path | None = None,
        on_change: Callable[[str], None] = lambda sentence: None,
        hung: float = 10.0,
        rows: Mapping[tuple[str, str], Row] | None = None,
    ) -> None:
        """Make a pool; its workers start when it is entered.

        Args:
            log: file for the workers' output, kept small; None: it is dropped.
            on_change: gets a sentence when a worker is replaced because of `hung`, or reports a fact that no
                worker before it did.
            hung: seconds without a heartbeat after which a worker that starts or is idle is replaced.
            rows: further data of the questions, by (prompt, gold answer); only `score_group` uses them, and a question
                that is not in them has none.
        """
        self._hung = hung
        self._rows = rows or {}
        self.busy_seconds = 0.0
        self._facts, self._on_change = Facts(), on_change
        self._config, self._log = config, log
        self._slots = [_Slot(f"{ROLE}-{number}") for number in range(config.workers)]
        self._queue: deque[Chunk] = deque()
        self._calls: set[Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spans: list[Span] = []
        self._failure: BaseException | None = None
        self._requests = 0
        self._seconds_per_item = 0.0
        self._undecided_in_a_row = 0

    @property
    def workers(self) -> int:
        return len(self._slots)

    @property
    def pids(self) -> list[int]:
        """Process ids of all workers."""
        return [pid for slot in self._slots if slot.process is not None for pid in slot.process.pids]

    @property
    def processor_seconds(self) -> float:
        """CPU seconds of all workers that run, and of their running descendants."""
        return sum(slot.process.processor_seconds for slot in self._slots if slot.process is not None)

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts about the reward, by name, for the run's record: those of all workers so far (`Facts`)."""
        return self._facts.known

    @property
    def takes(self) -> tuple[str, ...] | None:
        """Names of the further fields of a row that the rewards take; None: all. Of a pool that has started."""
        return () if (process := self._slots[0].process) is None else process.takes

    async def start(self) -> None:
        """Start all workers; returns when they have loaded the reward. After an error the pool is closed.

        Raises:
            RewardFunctionError: the reward cannot be used; the message says why.
            RoleDied: a worker ended while starting, three times, or could not be started.
            DeadlineExceeded: a worker was not ready after ``rewards.start_timeout`` seconds.
        """
        self._spawn(self._watch())
        try:
            await asyncio.gather(*[self._start(slot) for slot in self._slots])
        except BaseException:
            await self.close()
            raise

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        """Judge completions; returns one verdict per item, in order; [] for no items. Several calls may wait at the
        same time. A completion at which a worker hangs, or two of them die, gets an undecided verdict, not an error.

        Raises:
            RewardFunctionError: ``max_consecutive_undecided`` verdicts in a row were undecided, or a new worker cannot
                use the reward.
            RoleDied: a worker cannot be restarted, or the pool is closed.
            DeadlineExceeded: the verdicts took longer than ``rewards.patience`` seconds, or a restart too long.
        """
        if self._failure is not None:
            raise self._failure
        if not items:
            return []
        call = Call(items)
        self._calls.add(call)
        self._queue.extend(chunks(call, self._seconds_per_item))
        self._dispatch()
        try:
            async with deadline(ROLE, several(len(items), "verdict"), self._patience, works=lambda: True):
                await call.done
        finally:
            self._calls.discard(call)
        verdicts = [verdict for verdict in call.verdicts if verdict is not None]
        self._count(verdicts)
        return verdicts

    async def score_group(self, prompt: str, completions: Sequence[str], answer: str) -> list[Verdict]:
        """Judge several completions of one prompt, as texts, with the gold `answer`; returns one verdict per
        completion, in order. Fields and source come from `rows`. Raises RewardFunctionError, RoleDied and
        DeadlineExceeded as `score`."""
        row = self._rows.get((prompt, answer), Row())
        return await self.score([ScoreItem(prompt, text, answer, row.fields, row.source) for text in completions])

    def drain_spans(self) -> list[Span]:
        """Return the workers' spans of work since the last call, for the timeline, and forget them. Spans with almost
        no gap are one."""
        spans, self._spans = self._spans, []
        return spans

    async def close(self) -> None:
        """Kill all workers and wait until they are gone; pending and later calls of `score` raise `RoleDied`."""
        self._fail(RoleDied(ROLE, "was closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*[slot.process.end() for slot in self._slots if slot.process is not None])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Workers: start, watch, replace.

    async def _start(self, slot: _Slot) -> None:
        restarts = RestartBudget(_START_TRIES - 1, delay=_START_PAUSE_SECONDS)
        await Supervisor(slot.name, lambda: self._start_once(slot), restarts, log=str(self._log or "")).begin()

    async def _start_once(self, slot: _Slot) -> None:
        give_up = time.monotonic() + _ROOM_SECONDS
        while True:
            slot.begin(WorkerProcess(slot.name, lambda reply: self._replied(slot, reply), lambda: self._renew(slot)))
            assert slot.process is not None
            try:
                await slot.process.start(self._config, self._log)
                break
            except OSError as error:
                if error.errno not in _NO_ROOM or time.monotonic() >= give_up:
                    raise RoleDied(slot.name, f"cannot be started: {described(error)}", str(self._log or "")) from error
            await asyncio.sleep(_START_PAUSE_SECONDS)
        slot.ready = True
        for sentence in self._facts.hear(slot.name, slot.process.facts):
            self._on_change(sentence)
        self._dispatch()

    async def _watch(self) -> None:
        """Kill workers that exceed the timeout on one completion (in CPU seconds; up to ten times as long by the
        clock), that give no sign of life for `hung` seconds while they judge nothing, or whose process has exited; each
        kill leads to `_replace`. Also bounds the size of the log. Runs until it is cancelled."""
        timeout, patience = self._config.seconds_per_completion, self._clock_seconds
        pause = min(_LOOK_SECONDS, timeout / 10)
        while True:
            await asyncio.sleep(pause)
            for slot in self._slots:
                if slot.process is None:
                    continue
                still = slot.still_for(4 * pause)
                if slot.ready and slot.process.ended:
                    slot.process.give_up("")
                elif slot.ready and slot.is_judging and still >= timeout:
                    waited = slot.computed < timeout
                    if not waited or still >= patience:
                        slot.condemned, slot.waited = slot.seen, waited
                        slot.process.kill()
                elif not slot.is_judging and still >= self._hung:
                    silent = "did not reply" if slot.ready and slot.outstanding else "sent no heartbeat"
                    slot.process.give_up(how := f"{silent} for {still:.0f} s")
                    self._on_change(f"{slot.name} {how}: a new one is started")
            if self._log is not None:
                cut_log(self._log)

    def _renew(self, slot: _Slot) -> None:
        """Replace the worker of the slot, in the background, if it was ready, and the pool has not failed."""
        if slot.ready and self._failure is None:
            slot.ready = False
            self._spawn(self._replace(slot))

    async def _replace(self, slot: _Slot) -> None:
        assert slot.process is not None
        progress = slot.process.progress
        how = await slot.process.end()
        # A completion whose reward wrote into the wire has no reply yet, so it is in the oldest chunk.
        lost = blame(tuple(slot.outstanding.values()), slot.judged, 0 if how == FORGED else progress)
        slot.outstanding.clear()
        self._score_again(lost.innocent, how)
        if lost.culprit is not None:
            if progress == slot.condemned:
                lost.culprit.settle([undecided(self._late(slot.waited))])
            else:
                self._score_again([lost.culprit], how)
        self._dispatch()
        await self._start(slot)

    @property
    def _patience(self) -> float:
        """Seconds that a caller of `score` waits: `rewards.patience`, but no fewer than one completion may take."""
        return max(self._config.patience, self._clock_seconds + _LATEST_LOOK)

    @property
    def _clock_seconds(self) -> float:
        return clock_limit(self._config.seconds_per_completion)

    def _late(self, waited: bool) -> str:
        timeout = f"{self._config.seconds_per_completion:g} s"
        by_the_clock = f"{self._clock_seconds:g} s, with less than {timeout} of processor time"
        return f"{TIMED_OUT} {by_the_clock if waited else timeout}"

    # Chunks: send, receive verdicts, send again after a loss.

    def _dispatch(self) -> None:
        while self._queue:
            slot = min(self._slots, key=self._load)
            if self._load(slot) >= _DEPTH:
                return
            chunk = self._queue.popleft()
            if not chunk.call.done.done():
                self._send(slot, chunk)

    def _load(self, slot: _Slot) -> int:
        """Number of chunks that the slot holds, at most 2; 2 also if its worker is not ready or due for replacement."""
        return len(slot.outstanding) if slot.ready and not self._is_worn(slot) else _DEPTH

    def _is_worn(self, slot: _Slot) -> bool:
        return slot.judged >= self._config.recycle_after

    def _send(self, slot: _Slot, chunk: Chunk) -> None:
        assert slot.process is not None
        self._requests += 1
        try:
            slot.process.send(Request(id=self._requests, items=chunk.items))
        except UnicodeEncodeError:
            if len(chunk.indices) == 1:
                chunk.settle([undecided("the text is not valid Unicode (a lone surrogate)")])
            else:
                self._queue.extendleft(Chunk(chunk.call, (index,)) for index in reversed(chunk.indices))
            return
        slot.outstanding[self._requests] = chunk

    def _replied(self, slot: _Slot, reply: Verdicts) -> None:
        """Store the verdicts of a reply in their calls, count its seconds (work, span, seconds per item), replace the
        worker after `recycle_after` completions, and send further chunks. Raises WireError if the reply does not fit
        the oldest request: then user code has written the reply."""
        request, chunk = next(iter(slot.outstanding.items()), (None, None))
        if chunk is None or reply.request != request or len(reply.verdicts) != len(chunk.indices):
            raise WireError(f"{slot.name}: {several(len(reply.verdicts), 'verdict')} for request {reply.request}")
        del slot.outstanding[reply.request]
        slot.judged += len(reply.verdicts)
        chunk.settle(reply.verdicts)
        seconds = reply.end - reply.start
        self.busy_seconds += seconds
        self._seconds_per_item += 0.1 * (seconds / len(reply.verdicts) - self._seconds_per_item)
        self._note(Span(role=slot.name, name="score", start=reply.start, end=reply.end))
        if self._is_worn(slot) and not slot.outstanding:
            self._renew(slot)
        self._dispatch()

    def _score_again(self, lost: Sequence[Chunk], how: str) -> None:
        for chunk in reversed(lost):
            if chunk.losses < _LOSSES:
                self._queue.appendleft(chunk)
            else:
                chunk.settle([undecided(f"{DIED}: {how}")] * len(chunk.indices))

    # Statistics and failures.

    def _note(self, span: Span) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and last.role == span.role and span.start - last.end < _SPAN_GAP:
            self._spans[-1] = Span(role=span.role, name=span.name, start=last.start, end=span.end)
        else:
            self._spans.append(span)

    def _count(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            self._undecided_in_a_row += 1
            if verdict.outcome is not Outcome.UNDECIDED:
                self._undecided_in_a_row = 0
            if (times := self._undecided_in_a_row) >= self._config.max_consecutive_undecided:
                undecided = several(times, "completion was", "completions were")
                found = f"the last {undecided} undecided, the last one: {verdict.reason}"
                remedy = "fix the reward, or allow more with rewards.max_consecutive_undecided"
                raise RewardFunctionError([Problem(PLACE, found, remedy)])

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        for call in self._calls:
            if not call.done.done():
                call.done.set_exception(self._failure)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail all calls, pending and later ones, if a background task ended with an error; nobody awaits the task."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


class _Slot:
    """State of one of the pool's workers, whose process may be replaced, and the chunks that it holds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: WorkerProcess | None = None
        self.ready = False
        self.outstanding: dict[int, Chunk] = {}  # by request, the oldest first
        self.judged = 0
        self.condemned: int | None = None  # the counter at which the worker was killed for being stuck
        self.waited = False  # killed at the limit of wall time, with less CPU time than the timeout
        self.seen = 0
        self._before = 0.0  # CPU seconds when it was first polled on the current item
        self._signs: object = None
        self._looked, self._still = time.monotonic(), 0.0

    def begin(self, process: WorkerProcess) -> None:
        self.process, self.judged, self.condemned, self.seen = process, 0, None, 0
        self._signs, self._still = None, 0.0

    @property
    def is_judging(self) -> bool:
        return self.seen % 2 == 1

    def still_for(self, longest: float) -> float:
        """Poll the worker, which has a process; returns seconds without progress, and sets `seen` to its counter. While
        it starts or holds no chunk, a heartbeat counts as progress too. Of the time since the last poll at most
        `longest` seconds count, because the machine may have been suspended."""
        assert self.process is not None
        now, progress, signs = time.monotonic(), self.process.progress, self.process.signs
        elapsed, self._looked = min(now - self._looked, longest), now
        moved = progress != self.seen or (not self.outstanding and signs != self._signs)
        self.seen, self._signs = progress, signs
        if not moved and not self._still:
            self._before = self.process.processor_seconds
        self._still = 0.0 if moved else self._still + elapsed
        return self._still

    @property
    def computed(self) -> float:
        """CPU seconds that the worker has spent on its present item, since its progress was first seen to stand
        still."""
        assert self.process is not None
        return self.process.processor_seconds - self._before


async def check_reward(config: RewardsConfig) -> tuple[str, ...] | None:
    """Load the reward of `config` in a worker process, where a module that hangs or exits does no harm; returns the
    names of the further fields of a row that it takes; None: all.

    Raises:
        RewardFunctionError: the reward cannot be used; the message says why.
        RoleDied, DeadlineExceeded: the worker ended or hung while importing it.
    """
    async with RewardPool(config.model_copy(update={"workers": 1})) as pool:
        return pool.takes
