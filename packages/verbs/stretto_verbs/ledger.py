"""`stretto.Ledger`: a record of every trajectory of a loop, so that a loop that was killed and started again trains on
nothing twice."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from types import coroutine
from typing import Any

import msgspec

from stretto.core.errors import DataError, Problem, RefusedRequest, RunFolderError, StoreError
from stretto.core.forest import TurnRequest
from stretto.core.records import Batch, Completion, GenerateRequest, Segment, State, derive_seed, trajectory_id
from stretto.doors.mistakes import shown
from stretto.loop.engines.in_flight import Engines, InFlight, progress_of
from stretto.rollout.controller import CONTROLLER, Ticket
from stretto.store import lock
from stretto.store.config import StoreConfig
from stretto.store.ending import ENDING, Ending
from stretto.store.ledger.ledger import Ledger, Value
from stretto.store.ledger.partials import UnfinishedMember
from stretto.store.ledger.reading import BOUNDS, UnfinishedGroup, read_batches, read_unfinished
from stretto.store.ledger.rows import COUNTED, IN_FLIGHT
from stretto.store.totals import ENGINES, TOTALS
from stretto_verbs.arguments import FOLDER, WHOLE, ArgumentKind, check, checked, instance
from stretto_workflows.session import Session
from stretto_workflows.sessions import LedgerRecord, sessions_of_run

_KEEP_SECONDS = 1.0
#: Names of the facts about what a loop began with: they must be the same when it is continued.
ORIGIN = SEED, PROMPTS_MARK, GROUP_SIZE = "seed", "mark of the prompts", "group_size"
#: Readers know the last two.
_OWN_NAMES = frozenset({*ORIGIN, ENDING, CONTROLLER, BOUNDS, COUNTED, IN_FLIGHT, TOTALS, ENGINES})
TURN = ArgumentKind(
    "a ticket and the number of one of its answers, such as (ticket, 0)",
    lambda given: isinstance(given, tuple) and len(given) == 2 and _is_answer(*given),
)
_TEXT, _RUN = instance(str, "a text"), ArgumentKind("a function that returns a text", callable)


class _AnyThread(Ledger):
    """A ledger that several threads may call. The scheduler's thread makes changes; the background thread journals the
    tokens in flight. A caller holds `lock` while it makes several changes that belong together.
    """

    def __init__(self, path: Path, config: StoreConfig) -> None:
        self.lock, self.closed = threading.RLock(), False
        super().__init__(path, config)

    def check_open(self) -> None:
        """Check that the ledger is open.

        Raises:
            RunFolderError: it was closed.
        """
        if self.closed:
            raise RunFolderError([Problem(str(self._path.parent), "the ledger is closed", "make it again")])

    def awaits(self, group: str) -> bool:
        """Whether the group is in flight: issued, and without recorded results. False once the ledger is closed."""
        row = self._live.get(trajectory_id(group, 0))
        return not self.closed and row is not None and row.state is State.IN_FLIGHT

    def journal(self, id: str, piece: Segment, node: int = 0) -> None:
        """Append the tokens of `piece` to segment `node` (its index) of the trajectory `id`; ignored if the
        trajectory's group is no longer in flight."""
        with self.lock:
            if self.awaits(id.rpartition("/")[0]):
                super().journal(id, piece, node)

    def retract(self, id: str, count: int, node: int = 0) -> None:
        """Delete all recorded tokens but the first `count`, where a recorded piece ends, of segment `node` (its index)
        of the trajectory `id`, and the segment's end. Ignored if its group is no longer in flight."""
        with self.lock:
            if self.awaits(id.rpartition("/")[0]):
                super().retract(id, count, node)

    def begin_call(self, id: str, number: int, asked: bytes, *, durable: bool) -> None:
        """Record that call `number` of the trajectory `id` begins, with its encoded request `asked`; if `durable`, it
        is in the file on return, not synced to disk. Ignored if the trajectory's group is no longer in flight."""
        with self.lock:
            if self.awaits(id.rpartition("/")[0]):
                super().begin_call(id, number, asked, durable=durable)

    def end_call(self, id: str, number: int, reply: bytes) -> None:
        """Record the encoded `reply` to call `number` of the trajectory `id`; ignored if the trajectory's group is no
        longer in flight."""
        with self.lock:
            if self.awaits(id.rpartition("/")[0]):
                super().end_call(id, number, reply)

    def put(self, name: str, value: object) -> None:
        """Store a value as JSON under a name, replacing an earlier one. It is in the file after the next flush, in
        one transaction with all changes before it.

        Raises:
            DataError: the value cannot be written as JSON, or the ledger itself uses the name, as "ending" or "seed".
            RunFolderError: the ledger is closed.
        """
        with self.lock:
            self.check_open()
            if name in _OWN_NAMES:
                raise DataError([Problem(f"put: {name}", "the ledger's own name", "give another name")])
            try:
                json.dumps(msgspec.to_builtins(value), allow_nan=False)
            except (TypeError, ValueError) as error:
                told, remedy = shown(value), f"a JSON value is needed: {error}"
                raise DataError([Problem(f"put: {name}", told, remedy)]) from None
            super().put(name, value)

    def begin(self, origin: Mapping[str, int | str]) -> None:
        """Record what a scheduler begins with: its seed, prompts and group size, by the names in `ORIGIN`."""
        with self.lock:
            for name in ORIGIN:
                self._put(name, origin[name])

    def get(self, name: str, kind: type[Value]) -> Value | None:
        """Return the value stored under `name`, decoded as `kind`; None if there is none.

        Raises:
            DataError: the value is of another type.
            RunFolderError: the ledger is closed.
            StoreError: the value's row is damaged, or earlier changes cannot be written.
        """
        with self.lock:
            self.check_open()
            try:
                return super().get(name, kind)
            except StoreError as error:
                if not isinstance(error.__cause__, msgspec.ValidationError):
                    raise  # a damaged row
                told = f"holds no {getattr(kind, '__name__', kind)}: {error.__cause__}"
                raise DataError([Problem(f"get: {name}", told, "ask for the type that was put")]) from None

    def event(self, name: str, detail: str) -> None:
        """Record an event, such as a skipped step, for readers of the ledger: its `name` and a `detail`."""
        with self.lock:
            self.check_open()
            super().event(name, detail)

    def flush(self) -> None:
        """Write all buffered changes in one transaction.

        Raises:
            RunFolderError: the ledger is closed.
            StoreError: the file is gone or cannot be written.
        """
        with self.lock:
            self.check_open()
            super().flush()


class FolderLedger(_AnyThread):
    """The ledger in a folder, which only one process at a time can open. An existing ledger is continued.

    Example::

        # What became of the trajectories of a loop, and a fact of its own that is kept with them.
        with stretto.Ledger("loop") as ledger:
            scheduler = stretto.Scheduler([(2, 3, 4)], batch_size=1, group_size=2, ledger=ledger)
            ticket = scheduler.admit()
            ledger.put("note", "one group is in flight")
            print(ledger.balance().in_flight, ledger.get("note", str))

    Any thread may call it. Once it is closed, `put`, `get`, `event`, `flush`, `call`, `batches` and `unfinished` raise
    RunFolderError. A read or write of the file raises StoreError if it is damaged, gone or cannot be written. A kill
    loses no batch that was taken and no group that was finished. If an engine has this ledger
    (`Engine.load(..., ledger=...)`) and samples the scheduler's tickets, a kill loses only the tokens of the last one
    or two seconds. Other completions in flight are sampled again from their first token.

    Only `sync` forces the file to disk: a loss of power may take all changes since then, batches that were taken too.
    A checkpoint that is newer than the batches that are left is refused, so call `sync` before `Trainer.save`.
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        """Open or create the ledger in `folder`, and lock the folder. `settings`: keys of a recipe's section
        ``[store]``.

        Raises:
            RunFolderError: another process has it open, or the folder holds a run or cannot be created.
            StoreError: the file in the folder is no ledger, or is damaged.
            RecipeError: a setting is invalid.
        """
        check("Ledger", folder=(folder, FOLDER))
        self.folder = Path(folder).expanduser()
        config = checked(settings, "Ledger", StoreConfig)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            of_a_run = (self.folder / "recipe.toml").exists()
        except OSError as error:
            found = f"cannot be created or read: {error.strerror}"
            raise RunFolderError([Problem(str(folder), found, "give another folder")]) from error
        if of_a_run:
            found, remedy = "holds a run, whose ledger is its own", "give another folder; stretto.open_run reads a run"
            raise RunFolderError([Problem(str(folder), found, remedy)])
        self._release = weakref.finalize(self, os.close, lock.acquire(self.folder))
        self.scheduler: object = None  # the newest scheduler with this ledger; older ones may make no changes
        self._file_of_all = self.folder / "ledger.sqlite"
        self._calls: _CallRecords | None = None  # once a call is made
        try:
            super().__init__(self._file_of_all, config)
            self._put(ENDING, Ending("running"))
        except BaseException:
            self._release()
            raise

    def batches(self, after: int) -> Sequence[Batch]:
        """Read the recorded batches of all steps after step `after`. The oldest is first; empty if there are none.

        Raises:
            StoreError: a batch is not recorded completely.
        """
        self.flush()
        return list(read_batches(self._file_of_all, after, self.last_step() or after))

    def unfinished(self) -> Sequence[UnfinishedGroup]:
        """Read the groups that are in flight or buffered, in the order of their admission. Those in flight have no
        trajectories.

        Raises:
            StoreError: a group is not recorded completely.
        """
        self.flush()
        return read_unfinished(self._file_of_all)

    def call(self, turn: tuple[Ticket, int], asked: str, run: Callable[[], str], *, repeatable: bool = False) -> str:
        """Make a tool call of one trajectory, and record its reply. After a kill, the program makes its calls again,
        and gets the recorded replies in place of calls of `run`.

        Args:
            turn: the ticket and the index of the trajectory in its group.
            asked: text by which a recorded reply is found; each is returned once.
            run: makes the call; returns its reply. An error that the program handles belongs into the reply.
            repeatable: after a kill `run` may be called again. If False, the begin of the call is in the file before
                `run` starts, and its reply before this returns.

        Raises:
            DataError: an argument has the wrong type, or `run` returned no text.
            CallInterrupted (`stretto.core.errors`): the program was killed during this call, or during another one of
                this trajectory, and that call may have had its effect. Give the trajectory the reward None, or `lose`
                the ticket.
            RunFolderError: the ledger is closed.
        """
        check("call", turn=(turn, TURN), asked=(asked, _TEXT), run=(run, _RUN))
        (ticket, member), id = turn, trajectory_id(turn[0].group_id, turn[1])
        with self.lock:
            self.check_open()
            self._calls = self._calls or _CallRecords(self)
            call = self._calls.session(id, ticket, member).call(asked.encode(), _elsewhere, repeatable=repeatable)
            if (known := _sent(call, None)) is not None:
                return known.decode()
        try:
            reply = run()  # without the lock: other calls and the journal go on
            check("call: run", reply=(reply, _TEXT))
        except BaseException:
            call.close()
            raise
        with self.lock:
            _sent(call, reply.encode())
        return reply

    def close(self) -> None:
        """Flush, close the file, and release the lock of the folder. `stretto inspect` then shows the loop as finished;
        after a `with` block that raised, as failed or stopped."""
        self._close(Ending("finished"))

    def _close(self, ending: Ending) -> None:
        """Record the ending, close the file and unlock the folder; later calls do nothing."""
        with self.lock:
            try:
                if not self.closed:
                    self._put(ENDING, ending)
                    super().close()
            finally:
                self.closed = True
                self._release()

    def __enter__(self) -> FolderLedger:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._close(Ending.of_error(error))
        else:  # Ctrl-C and a cancelled task are no errors of the loop
            self._close(Ending("finished") if error is None else Ending("stopped", type(error).__name__))


class _CallRecords:
    """The calls of the trajectories in flight of a ledger: those that an earlier process has recorded, and new ones."""

    def __init__(self, ledger: FolderLedger) -> None:
        members = (
            (group.id, member, known) for group in ledger.unfinished() for member, known in group.members.items()
        )
        self._ledger, self._known = ledger, {trajectory_id(id, member): known for id, member, known in members}
        self._sessions: dict[str, Session] = {}

    def session(self, id: str, ticket: Ticket, member: int) -> Session:
        """Return the session that makes and records the calls of the trajectory `id` (it samples no turns). Sessions of
        groups that are no longer in flight are forgotten."""
        if id not in self._sessions:
            for other in [one for one in self._sessions if not self._ledger.awaits(one.rpartition("/")[0])]:
                del self._sessions[other]
            calls, record = self._known.pop(id, UnfinishedMember()).calls, LedgerRecord(self._ledger, id)
            prompt, seed = ticket.prompt.token_ids, ticket.seeds[member]
            self._sessions[id] = Session(id, prompt, seed, _no_turns, record, calls=calls)
        return self._sessions[id]


async def _no_turns(request: TurnRequest) -> Segment:
    raise NotImplementedError(f"turn {request.node}: this session makes calls alone")


@coroutine
def _elsewhere() -> Generator[None, bytes, bytes]:
    """Wait for a reply that is sent into the coroutine."""
    return (yield)


def _sent(call: Coroutine[Any, Any, bytes], reply: bytes | None) -> bytes | None:
    """Step a call by its reply, None at first; returns the result, None while it waits for the reply."""
    try:
        call.send(reply)
    except StopIteration as end:
        result: bytes = end.value
        return result
    return None


def _is_answer(ticket: object, member: object) -> bool:
    return isinstance(ticket, Ticket) and WHOLE.fits(member) and member in ticket.members


def turn_seeds(most: int = 4_096) -> Callable[[Ticket, int, tuple[int, ...]], AbstractContextManager[int]]:
    """Return a function that gives each turn its seed, without a ledger, by the same rule as a session with one.
    `most`: number of tickets that are remembered, the newest.

    The function takes a ticket, the index of one of its trajectories, and the tokens before a turn. It returns a
    context manager that yields the seed. The seed also depends on how many turns of this trajectory began after the
    same tokens before. If the block raises, the next such turn gets its seed.
    """
    known = OrderedDict[int, tuple[Ticket, dict[tuple[int, int], set[int]]]]()  # the ticket keeps its id in use

    @contextmanager
    def seeded(ticket: Ticket, member: int, before: tuple[int, ...]) -> Iterator[int]:
        _, turns = known.setdefault(id(ticket), (ticket, {}))
        known.move_to_end(id(ticket))
        if len(known) > most:
            known.popitem(last=False)
        taken = turns.setdefault((member, hash(before)), set())
        number = next(at for at in count() if at not in taken)
        taken.add(number)
        try:
            yield derive_seed(ticket.seeds[member], number, *before)
        except BaseException:
            taken.discard(number)
            raise

    return seeded


class TicketsInFlight:
    """Samples the groups that a scheduler has issued tickets for. While `keep` runs, new tokens are journaled each
    second; after a kill, a completion continues after its journaled tokens.

    A group is sampled whole (`generate`), or its members turn by turn (`turn`), not both. If it is sampled again before
    the scheduler has finished its ticket, the same completions come from memory. Call all methods in one event loop.
    """

    def __init__(self, engines: Engines, ledger: FolderLedger) -> None:
        self._ledger = ledger
        unfinished = [group for group in ledger.unfinished() if not group.trajectories]
        known = {group.id: progress_of(group) for group in unfinished}
        self._in_flight = InFlight(engines, ledger, known)
        self._open_session = sessions_of_run(self._in_flight, ledger, unfinished)
        self._known, self._open = set(known), Counter[str]()  # the latter by what is asked and not answered
        self._whole = set[str]()
        several = (group for group in unfinished if any(len(one.segments) > 1 for one in group.members.values()))
        self._in_turns: dict[str, dict[int, Session]] = {group.id: {} for group in several}

    def __contains__(self, group: str) -> bool:
        """Whether the group with this id is in flight in the ledger; tokens of other groups are not journaled."""
        return self._ledger.awaits(group)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Sample all completions of a group, whose id is that of `request`; returns them in the order of its members.
        Those that the ledger or an earlier call has are continued or returned.

        Raises:
            RefusedRequest: the group is being sampled already, or turn by turn, or an engine refused it.
            EngineLost: as for `stretto.Engine.sample`.
        """
        if request.id in self._in_turns:
            told = f"group {request.id} is sampled turn by turn"
            raise RefusedRequest("ticket", told, "give the history of each answer, and turn=(ticket, its number)")
        if self._open[request.id]:
            told = f"group {request.id} is being sampled already"
            raise RefusedRequest("ticket", told, "one call of `sample` or `submit` for a ticket")
        self._whole.add(request.id)
        self._known.add(request.id)
        self._open[request.id] += 1
        try:
            return [completion async for completion in self._in_flight.generate(request)]
        finally:
            self._open[request.id] -= 1

    async def turn(self, ticket: Ticket, member: int, request: GenerateRequest) -> Completion:
        """Sample a turn of one member after the history in `request`. If the ledger has this turn from before a kill,
        it is returned, or continued if it was cut off.

        Raises:
            RefusedRequest: the group is sampled whole, or an engine refused it.
            EngineLost: as for `stretto.Engine.sample`.
        """
        group = ticket.group_id
        if group in self._whole:
            remedy = "give `turn` with the first turn of each answer too"
            raise RefusedRequest("turn", f"group {group} is sampled whole", remedy)
        sessions = self._in_turns.setdefault(group, {})
        if member not in sessions:
            id, prompt = trajectory_id(group, member), ticket.prompt.token_ids
            sessions[member] = self._open_session(id, prompt, ticket.seeds[member])
        self._known.add(group)
        self._open[group] += 1
        try:
            turn = await sessions[member].turn(request.prompt_token_ids, request.sampling)
        finally:
            self._open[group] -= 1
        return Completion(request.id, 0, turn.segment)

    async def keep(self) -> None:
        """Journal new tokens each second. Returns when the ledger is closed or cannot be written; the ledger's other
        methods then raise the error."""
        while True:
            await asyncio.sleep(_KEEP_SECONDS)
            try:
                if not await self._kept():
                    return
            except StoreError:
                return

    async def _kept(self) -> bool:
        """Journal new tokens once, and forget groups that are no longer in flight; returns False once the ledger is
        closed."""
        await self._in_flight.keep(_KEEP_SECONDS)
        with self._ledger.lock:
            if self._ledger.closed:
                return False
            for group in [id for id in self._known if not self._open[id] and not self._ledger.awaits(id)]:
                self._known.discard(group)
                self._whole.discard(group)
                del self._open[group]
                self._in_turns.pop(group, None)
                self._in_flight.forget(group)
            self._ledger.flush()
        return True
