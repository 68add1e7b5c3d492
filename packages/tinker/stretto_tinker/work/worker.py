"""Thread that computes all requests, in short turns that are shared fairly among clients.

    HTTP ─ submit(asked) ─► lanes ─ Turns.choose ─► a micro-batch of a model's request, or a stretch of sampling
                                                        └► record.settle ─► listeners

A lane is a model or an engine. A model's requests are computed in the order of their numbers: a request that arrives
early waits for the numbers before it. Clients that sample from the same weights share an engine. A client that would
have to wait there for the sequences of another client gets an engine of its own meanwhile.

The bodies of queued requests are only in the record; this thread keeps their numbers and sizes in memory.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from stretto.core.errors import RefusedRequest, StoreError, StrettoError, described
from stretto_tinker.checkpoints import Place, Weights
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.compute.learner import Pieces
from stretto_tinker.record import DONE, FAILED, Asked, ModelRow, Record
from stretto_tinker.work import turns
from stretto_tinker.work.models import EFFECTS, LOAD, REFUSED, STEP, ModelLane, Models, busy_of, said
from stretto_tinker.work.sampling import Engines, Lane, SampleQueue, Sampling, Waiting, beginning, lane_of, waiting
from stretto_tinker.work.saving import SAVES, Saving
from stretto_tinker.work.turns import Backlog, Turns

log = logging.getLogger(__name__)

SAMPLE = "sample"
USER, SERVER = "user", "server"
_PAUSE_SECONDS = 1.0
#: Most unsettled requests of a client, and bytes of their bodies; further requests are refused for the moment.
_MOST_REQUESTS, _MOST_BYTES = 100_000, 1 << 32
#: A request fails if the process was killed this many times while it was computed: it may be the cause.
_MOST_KILLS = 3
_KILLED = f"the server was killed {_MOST_KILLS} times while it computed this"

#: Called in the worker's thread with the id and the lane of a request that is settled.
Settled = Callable[[str, str], None]


class Worker:
    """Computes requests in its own thread, in turns between clients. All public methods may be called in any thread."""

    def __init__(self, backend: LocalBackend, record: Record, weights: Weights, settled: Settled) -> None:
        self._record, self._weights, self._settled = record, weights, settled
        self.models = Models(backend, record, weights)
        self._saving = Saving(record, weights)
        self._engines = Engines(backend)
        self._turns = Turns()
        self._models: dict[str, ModelLane] = {}
        self._asked: dict[str, SampleQueue] = {}  # queued requests for samples, by path of weights
        self._samplings: dict[Lane, Sampling] = {}
        self._backlog = Backlog()
        self.computed = 0  # tokens computed in all lanes
        self._short, self._freed = "", False  # model that waits for memory; whether some was freed meanwhile
        self._full = False  # whether an engine waits for memory, and others begin no request
        self._leaving: dict[str, str] = {}  # models to retire once their requests are computed: `ended` of `_retire`
        self._cancelled: set[str] = set()  # ids of requests for samples to cancel after the turn
        self._orders: list[Callable[[], None]] = []  # functions of other threads, to call between two turns
        self._later: list[Asked] = []  # accepted requests for which the record could not be read, to queue `_again`
        self._clock = time.monotonic  # for the length of turns and for the clients' shares
        self._again = 0.0  # time of `time.monotonic` at which the record is tried again; 0: now
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tinker-worker", daemon=True)

    def start(self) -> None:
        """Queue the unsettled requests of the record, and start the thread."""
        for asked in self._record.queued():
            self._enqueue(asked)
        self._thread.start()

    def stop(self, seconds: float = 30.0) -> None:
        """Stop after the current turn, and write snapshots of models that have changed. Waits at most `seconds`; if the
        thread ends by then, records that no request is being computed."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)
        if not self._thread.is_alive():
            self._record.none_computed()

    def crowded(self, owner: str, model: str = "", seq: int = -1) -> bool:
        """Whether the client `owner` has too many unsettled requests, so that a further one is refused for the moment.
        Always False for a model without queued requests, and for the request that it needs next (`seq`)."""
        with self._wake:
            lane = self._models.get(model)
            if model and (lane is None or lane.next == seq):
                return False
            requests, size = self._backlog.of(owner)
            return requests >= _MOST_REQUESTS or size > _MOST_BYTES

    def submit(self, asked: Asked) -> None:
        """Queue a recorded request, with its body. If the record cannot be read now, the thread tries again later."""
        with self._wake:
            try:
                self._enqueue(asked)
            except sqlite3.Error as error:
                self._waits(asked, error)
                self._later.append(asked)
            self._wake.notify()

    def _waits(self, asked: Asked, error: sqlite3.Error) -> None:
        log.error("the record cannot be read, %s waits: %s", asked.id, error)
        self._again = time.monotonic() + _PAUSE_SECONDS

    def cancel(self, id: str) -> None:
        """Fail a request for samples at the end of the present turn, unless it is settled, and drop its sequences. (All
        that are cancelled in a turn are searched for together: a search goes through all requests.)"""
        with self._wake:
            self._cancelled.add(id)
            if len(self._cancelled) == 1:
                self._order(self._cancel_all)

    def retire(self, model: str, why: str, *, ended: bool) -> None:
        """Remove the model with this id from memory once its queued requests are computed; a further one keeps it.

        Args:
            why: reason for the errors of requests that fail.
            ended: no further requests will come. So queued requests whose predecessors are missing fail, and the
                model's snapshots are deleted; otherwise they stay.
        """
        self._order(lambda: self._retire(model, why if ended else ""))

    def end_samples(self, lanes: Collection[str], why: str) -> None:
        """Fail all unsettled requests of some sampling sessions (`lanes`) with the reason `why`."""
        ended = frozenset(lanes)
        self._order(lambda: self._cancel(lambda asked: asked.lane in ended, why))

    def forget_engine(self, path: str) -> None:
        """Stop using the engines of a path, whose weights were deleted or replaced; open requests are finished."""
        self._order(lambda: self._forget_engine(path))

    def _order(self, order: Callable[[], None]) -> None:
        with self._wake:
            self._orders.append(order)
            self._wake.notify()

    def _enqueue(self, asked: Asked) -> None:
        self._backlog.add(asked.id, asked.owner, len(asked.body or b""))
        if asked.kind == SAMPLE:
            weights, one = waiting(asked)
            self._asked.setdefault(weights, SampleQueue()).add(one)
            return
        if (lane := self._models.get(asked.lane)) is None:
            lane = self._models[asked.lane] = ModelLane(asked.owner, self._record.next_seq(asked.lane) or 0)
        if ended := self._leaving.pop(asked.lane, ""):  # it has waited for the record: no further one will come
            self._orders.append(lambda: self._retire(asked.lane, ended))
        if asked.seq < lane.next:  # its turn in the order has passed
            why = f"seq_id {asked.seq} comes after {lane.next - 1}, which was settled without it"
            self._orders.append(lambda: self._fail(asked, why, USER))
            return
        lane.waiting[asked.seq] = replace(asked, body=None)

    # In the worker's thread

    def _run(self) -> None:
        while not self._stopping:
            self._guarded(self._round)
        for id, lane in list(self._models.items()):
            if lane.work is not None:
                lane.work.close()
            self.models.retire(id)

    def _round(self) -> None:
        """Wait until there is work; do what other threads have ordered, and take a turn."""
        with self._wake:
            while not (self._stopping or self._ready() or self._orders):  # `_ready` may order
                self._wake.wait(max(0.0, self._again - time.monotonic()) if self._again else None)
            if self._stopping:
                return
            ready, held = self._ready(), self._held()
            orders, self._orders = self._orders, []
        for order in orders:
            self._guarded(order)
        if ready:
            chosen = self._turns.choose(ready, held)
            owners, began = ready[chosen], self._clock()
            self._guarded(partial(self._turn, chosen))
            self._turns.spent(owners, self._clock() - began)

    def _guarded(self, piece: Callable[[], None]) -> None:
        """Call a piece of work; an unexpected error (a bug) ends only this piece: it is logged, and a pause follows."""
        try:
            piece()
        except Exception:  # the thread must go on, for other clients
            log.exception("a piece of work failed")
            time.sleep(_PAUSE_SECONDS)

    def _ready(self) -> dict[str | Lane, list[str]]:
        """Queue again what was put off, if due; return what can work (models, engines), each with its clients."""
        if self._again and time.monotonic() >= self._again:
            self._again = 0.0
        if not self._again:
            later, self._later = self._later, []
            for asked in later:
                self.submit(asked)
        ready: dict[str | Lane, list[str]] = {}
        ready |= {id: [lane.owner] for id, lane in self._models.items() if lane.next in lane.waiting}
        ready |= {lane: sampling.owners for lane, sampling in self._samplings.items() if not sampling.idle}
        begin = {} if self._again else beginning(self._asked, self._samplings, self._has_room)
        self._full = not all(map(self._has_room, begin))
        for lane in [one for one in begin if not self._full or not one.weights]:
            ready[lane] = list(dict.fromkeys((*ready.get(lane, ()), *begin[lane])))
        return ready

    def _has_room(self, lane: Lane) -> bool:
        return lane in self._samplings or self._engines.has_room(lane, self._folder(lane))

    def _folder(self, lane: Lane) -> Path | None:
        return self._weights.folder(Place.of(lane.weights)) if lane.weights else None

    def _held(self) -> set[str]:
        """Models that may begin no request now: another model waits for memory, which the requests under way must free
        first. Models with requests under way go on. Empty if no model waits."""
        short, busy = self._models.get(self._short), busy_of(self._models)
        if short is None or short.next not in short.waiting or not busy:
            return set()
        return self._models.keys() - busy - ({self._short} if self._freed else set())

    def _turn(self, chosen: str | Lane) -> None:
        if isinstance(chosen, Lane):
            self._record.pause(*self._open(chosen), by=1)
            try:
                self._sample(chosen)
            finally:  # a kill in a turn of others is not theirs
                self._record.pause(*self._open(chosen))
            return
        with self._wake:
            lane, busy = self._models[chosen], busy_of(self._models)
            asked = lane.waiting.get(lane.next)
        if asked is None:
            return
        if asked.kind != REFUSED and not self.models.make_room(chosen, busy):
            self._short, self._freed = chosen, False
            return
        self._short = "" if chosen == self._short else self._short
        work = lane.work or self._work(asked)  # if the record cannot be read, a later turn tries again
        times, ended = self._record.begin(asked.id), True
        first, lane.started = lane.started != asked.seq, asked.seq
        try:
            if first and times > _MOST_KILLS:
                self.models.forget(asked.lane)  # to be restored from the record, in which this request has failed
                self._fail(asked, _KILLED, SERVER)
            else:
                lane.work = work
                if (tokens := next(work, None)) is not None:
                    self.computed += tokens
                    ended = False
        except sqlite3.Error:  # nothing has taken effect: a later turn begins the request again
            lane.work, ended, self._freed = None, False, True
            raise
        finally:  # also after an error, so that no request is computed twice in this process
            if ended:
                self._over(chosen, lane, asked)
            else:
                self._record.pause(asked.id)

    def _over(self, model: str, lane: ModelLane, asked: Asked) -> None:
        with self._wake:
            lane.work, self._freed = None, True
            lane.waiting.pop(asked.seq, None)
            lane.next = asked.seq + 1
            ended = None if lane.next in lane.waiting else self._leaving.get(model)
        if ended is not None:  # read under the lock: a request that comes now keeps the model
            self._retire(model, ended)

    def _work(self, asked: Asked) -> Pieces[None]:
        row, whole = self._record.model(asked.lane), self._record.request(asked.id)
        assert row is not None, "a model is on record before its requests"
        assert whole is not None, "a request is on record before it is computed"
        return self._train(asked, row, whole)

    def _train(self, asked: Asked, row: ModelRow, whole: Asked) -> Pieces[None]:
        if asked.kind == REFUSED:
            self._fail(asked, (whole.body or b"").decode(), USER)
            return
        try:
            live = yield from self.models.live(row)
            if asked.kind in SAVES:
                changed, result = self._saving.save(live, whole)
                form, proof = "json", ""
                for place in changed:
                    self._forget_engine(place.path)
            else:
                result, form, proof = yield from self.models.perform(live, whole)
            if asked.kind == LOAD:  # the loaded checkpoint may be deleted later
                self.models.snapshot_if_due(live, row.id, now=True)
        except sqlite3.Error:  # see `_turn`
            raise
        except (RefusedRequest, StoreError, OSError) as error:
            self._failed(asked, said(error), USER if isinstance(error, RefusedRequest) else SERVER)
            return
        except Exception as error:  # a bug, or a model that cannot compute this: the request fails, others go on
            log.exception("request %s failed", asked.id)
            self._failed(asked, said(error), SERVER)
            return
        keep = asked.kind in EFFECTS
        self._settle(asked, lambda: self._record.settle(asked.id, DONE, result, form, proof=proof, keep_body=keep))
        if asked.kind == STEP:
            try:
                self.models.snapshot_if_due(live, row.id)
            except (OSError, sqlite3.Error) as error:
                log.warning("%s: no snapshot: %s", row.id, described(error) if isinstance(error, OSError) else error)

    def _failed(self, asked: Asked, why: str, category: str) -> None:
        """Fail a request of a model, with the reason `why` and its `category` (the user's or the server's fault). After
        a failed load the model, which may hold a part of the new weights, is to be restored from the record."""
        if asked.kind == LOAD:
            self.models.forget(asked.lane)
        self._fail(asked, why, category)

    def _settle(self, asked: Asked, write: Callable[[], None]) -> None:
        """Record the outcome of a request with `write`, and wake its client. While the record cannot be written, tries
        again each second, until the worker stops. A result too large fails the request, and unloads its model."""
        while True:
            try:
                write()
            except sqlite3.DataError as error:  # too large for a row
                self.models.forget(asked.lane)
                body = msgspec.json.encode({"error": f"the result cannot be kept: {error}", "category": SERVER})
                write = partial(self._record.settle, asked.id, FAILED, body, "json")
            except sqlite3.Error as error:  # of any kind, because the request must not be computed again
                log.error("the record cannot be written, waiting: %s", error)
                if self._stopping:
                    return
                time.sleep(_PAUSE_SECONDS)
            else:
                break
        with self._wake:
            self._backlog.done(asked.id)
        self._settled(asked.id, asked.lane)

    def _fail(self, asked: Asked, why: str, category: str) -> None:
        body = msgspec.json.encode({"error": why, "category": category})
        self._settle(asked, lambda: self._record.settle(asked.id, FAILED, body, "json"))

    def _sample(self, lane: Lane) -> None:
        """Take a turn of sampling on one engine. If its weights cannot be loaded, the requests that wait for it fail;
        if the engine fails, its open ones do, and it is removed."""
        began = self._clock()
        try:
            sampling = self._sampling(lane)
        except Exception as error:  # weights are missing, damaged or too large: their requests fail, others go on
            why = f"the weights {lane.weights} are not there: {said(error)}"
            with self._wake:  # without an engine of its own, a client fails alone: others share one that works
                queue = self._asked.get(lane.weights, SampleQueue())
                gone = queue.discard(lambda asked: lane.owner in ("", asked.owner))
                self._asked = {weights: queue for weights, queue in self._asked.items() if queue.owners}
            for one in gone:
                self._fail(one, why, USER if isinstance(error, RefusedRequest | StoreError) else SERVER)
            return
        engine, before = sampling.engine, self.computed
        others = before - engine.computed

        def over(part: float = 1.0, due: int = 0) -> bool:
            """Whether the fraction `part` of the turn is used up; `due` tokens count as computed."""
            self.computed = others + engine.computed
            full = self.computed + due - before >= part * turns.TURN_TOKENS
            return full or self._clock() - began > part * turns.TURN_SECONDS

        try:
            self._engines.make_room(engine)
            while (found := self._next(lane, sampling)) is not None and self._begin(lane, sampling, found):
                if over(0.5, engine.backlog):  # the other half of the turn is for sequences that have begun
                    break
            self._engines.make_room(engine)  # again, because new sequences may be longer
            for asked, result in sampling.turn(over):
                if isinstance(result, StrettoError):
                    self._fail(asked, str(result), SERVER)
                else:
                    self._settle(asked, partial(self._record.settle, asked.id, DONE, result, "proto"))
        except Exception as error:  # the engine has failed: its requests fail, and the next one makes a new engine
            log.exception("the engine of %s failed", lane.weights or "the base model")
            self._engines.discard(engine)
            with self._wake:
                self._samplings.pop(lane, None)
            for asked in sampling.open():
                self._fail(asked, said(error), SERVER)
        with self._wake:
            self._samplings = {name: one for name, one in self._samplings.items() if not one.idle}
        self._engines.trim()

    def _open(self, lane: Lane) -> list[str]:
        return [asked.id for asked in self._samplings[lane].open()] if lane in self._samplings else []

    def _sampling(self, lane: Lane) -> Sampling:
        with self._wake:
            found = self._samplings.get(lane)
        if found is None:
            found = Sampling(self._engines.of(lane, self._folder(lane)))
            with self._wake:
                self._samplings[lane] = found
        return found

    def _next(self, lane: Lane, sampling: Sampling) -> Waiting | None:
        """Take the next request for an engine out of the queue: of the client with the fewest open ones in `sampling`.
        None if none can begin there, memory is full (and the lane has weights), or the record cannot be read now."""
        with self._wake:
            if (queue := self._asked.get(lane.weights)) is None or self._again or (self._full and lane.weights):
                return None
            owners = [one for one in queue.owners if lane_of(lane.weights, queue.first(one), self._samplings) == lane]
            if (found := queue.next(Counter(sampling.owners), owners)) is None:
                return None
            queue.remove(found)
            if not queue.owners:
                del self._asked[lane.weights]
            return found

    def _begin(self, lane: Lane, sampling: Sampling, found: Waiting) -> bool:
        """Open a request; fail it if it is wrong, or was begun too often (it may kill the server). False only if the
        record cannot be read now; the request is then queued again."""
        asked = found.asked
        try:
            whole, times = self._record.request(asked.id) or asked, self._record.begin(asked.id)
        except sqlite3.Error as error:
            with self._wake:
                self._asked.setdefault(lane.weights, SampleQueue()).add(found, first=True)
                self._waits(asked, error)
            return False
        try:
            if times > _MOST_KILLS:
                self._fail(asked, _KILLED, SERVER)
            else:
                sampling.begin(whole)
        except Exception as error:  # a wrong request, or a bug: it fails, others go on
            self._fail(asked, said(error), USER if isinstance(error, RefusedRequest) else SERVER)
        return True

    def _forget_engine(self, path: str) -> None:
        """Let new requests load the weights at `path` again; open ones continue with those that they began with."""
        self._engines.drop(path)
        with self._wake:
            for lane in [lane for lane in self._samplings if lane.weights == path]:
                sampling = self._samplings.pop(lane)
                self._samplings[Lane(f"{path} ({id(sampling)})", lane.owner)] = sampling

    def _cancel_all(self) -> None:
        with self._wake:
            ids, self._cancelled = self._cancelled, set()
        self._cancel(lambda asked: asked.id in ids, "its client cancelled it")

    def _cancel(self, chosen: Callable[[Asked], bool], why: str) -> None:
        """Fail the requests for samples for which `chosen` is true, queued or open, with the reason `why`."""
        with self._wake:
            ended = [asked for queue in self._asked.values() for asked in queue.discard(chosen)]
            self._asked = {weights: queue for weights, queue in self._asked.items() if queue.owners}
            for one in self._samplings.values():
                ended += [asked for asked in one.open() if chosen(asked) and one.abort(asked.id) is not None]
        for asked in ended:
            self._fail(asked, why, USER)

    def _retire(self, model: str, ended: str) -> None:
        """Remove a model from memory once its accepted requests are computed. `ended`: why no further request of the
        model will come; "" if some may. With a reason, requests fail that wait for a missing one before them."""
        with self._wake:
            lane, later = self._models.get(model), any(asked.lane == model for asked in self._later)
            if later or (lane is not None and lane.next in lane.waiting):
                self._leaving[model] = ended  # accepted requests are computed first
                return
            self._leaving.pop(model, None)
            early = [] if lane is None or not ended else sorted(lane.waiting.values(), key=lambda asked: asked.seq)
            if lane is not None and len(early) == len(lane.waiting):
                del self._models[model]
        for asked in early:
            self._fail(asked, f"{ended}; the requests before it never came", USER)
        (self.models.end if ended else self.models.retire)(model)
