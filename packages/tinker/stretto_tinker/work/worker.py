"""The thread that computes: in fair turns over models and samplers, one piece of work a turn.

    HTTP ─ submit(asked) ─► lanes ─ Turns.choose ─► one request of a model, or a stretch of sampling
                                                        └► record.settle ─► listeners

A lane is a model, whose requests are computed in the order of their numbers, or the weights of a sampler. A request
whose number comes too early waits for those before it.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from stretto.core.errors import RefusedRequest, StoreError, StrettoError, described
from stretto_tinker.compute.backend import Backend
from stretto_tinker.record.checkpoints import Place, Weights
from stretto_tinker.record.record import DONE, FAILED, Asked, ModelRow, Record
from stretto_tinker.work.models import BACKWARD, CREATE, EFFECTS, FORWARD, LOAD, STEP, Models
from stretto_tinker.work.sampling import Engines, Sampling, Seeded
from stretto_tinker.work.saving import SAVES, Saving
from stretto_tinker.work.turns import Turns

log = logging.getLogger(__name__)

SAMPLE = "sample"
USER, SERVER = "user", "server"
_PAUSE_SECONDS = 1.0

#: Called in the worker's thread with the id and the lane of a request that is settled.
Settled = Callable[[str, str], None]
_TRAINING = frozenset({CREATE, LOAD, FORWARD, BACKWARD, STEP, *SAVES})


@dataclass
class _ModelLane:
    """The requests of a model that wait, by their number."""

    owner: str
    next: int
    waiting: dict[int, Asked] = field(default_factory=dict)


class Worker:
    """See the module. `submit`, `cancel` and `retire` are for any thread."""

    def __init__(self, backend: Backend, record: Record, weights: Weights, settled: Settled) -> None:
        self._record, self._weights, self._settled = record, weights, settled
        self.models = Models(backend, record, weights)
        self._saving = Saving(record, weights)
        self._engines = Engines(backend)
        self._turns = Turns()
        self._models: dict[str, _ModelLane] = {}
        self._asked: dict[str, list[Asked]] = {}  # samples that wait, by the weights they want
        self._samplings: dict[str, Sampling] = {}
        self._orders: list[Callable[[], None]] = []  # what other threads want done between two turns
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tinker-worker", daemon=True)

    def start(self) -> None:
        """Take up what is on record, and begin."""
        for asked in self._record.queued():
            self._enqueue(asked)
        self._thread.start()

    def stop(self, seconds: float = 30.0) -> None:
        """End after the turn that is being taken, and write snapshots of models that are ahead of theirs."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def waiting(self) -> int:
        """Requests that wait or are open."""
        with self._wake:
            samples = sum(map(len, self._asked.values())) + sum(len(one.open()) for one in self._samplings.values())
            return samples + sum(len(lane.waiting) for lane in self._models.values())

    def submit(self, asked: Asked) -> None:
        """Compute a request, which is on record."""
        with self._wake:
            self._enqueue(asked)
            self._wake.notify()

    def cancel(self, id: str) -> None:
        """End a request for samples, if it is not settled yet."""
        self._order(lambda: self._cancel(id))

    def retire(self, model: str, why: str) -> None:
        """Take a model from memory, and fail its requests that wait for one that never came."""
        self._order(lambda: self._retire(model, why))

    def end_samples(self, lane: str, why: str) -> None:
        """Fail the requests of a sampling session."""

        def end() -> None:
            own = [asked for waiting in self._asked.values() for asked in waiting if asked.lane == lane]
            own += [asked for one in self._samplings.values() for asked in one.open() if asked.lane == lane]
            for asked in own:
                self._cancel(asked.id, why)

        self._order(end)

    def forget_engine(self, path: str) -> None:
        """Take the engine of some weights from memory: they are gone, or others."""
        self._order(lambda: self._engines.drop(path))

    def _order(self, order: Callable[[], None]) -> None:
        with self._wake:
            self._orders.append(order)
            self._wake.notify()

    def _enqueue(self, asked: Asked) -> None:
        if asked.kind == SAMPLE:
            weights = msgspec.json.decode(asked.body or b"", type=Seeded).weights or ""
            self._asked.setdefault(weights, []).append(asked)
            return
        lane = self._models.get(asked.lane)
        if lane is None:
            lane = self._models[asked.lane] = _ModelLane(asked.owner, self._record.next_seq(asked.lane) or 0)
        lane.waiting[asked.seq] = asked

    # The thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._stopping or self._orders or (ready := self._ready())):
                    self._wake.wait()
                if self._stopping:
                    break
                orders, self._orders = self._orders, []
                ready = self._ready()
            for order in orders:
                self._guarded(order)
            if ready:
                chosen = self._turns.choose(ready)
                owners, began = ready[chosen], time.monotonic()
                self._guarded(lambda chosen=chosen: self._turn(*chosen))  # type: ignore[misc]
                self._turns.spent(owners, time.monotonic() - began)
        for id in list(self._models):
            self.models.retire(id)

    def _guarded(self, piece: Callable[[], None]) -> None:
        """A piece of work; a bug in it ends that piece alone."""
        try:
            piece()
        except Exception:  # the thread serves other clients too
            log.exception("a piece of work failed")
            time.sleep(_PAUSE_SECONDS)

    def _ready(self) -> dict[tuple[str, str], list[str]]:
        """The lanes with work, each with the clients it works for."""
        ready: dict[tuple[str, str], list[str]] = {
            ("model", id): [lane.owner] for id, lane in self._models.items() if lane.next in lane.waiting
        }
        for weights in {**self._asked, **self._samplings}:
            owners = [asked.owner for asked in self._asked.get(weights, ())]
            if weights in self._samplings:
                owners += self._samplings[weights].owners
            if owners:
                ready["sampler", weights] = list(dict.fromkeys(owners))
        return ready

    def _turn(self, kind: str, name: str) -> None:
        if kind == "sampler":
            self._sample(name)
            return
        with self._wake:
            lane = self._models[name]
            asked = lane.waiting.get(lane.next)
        if asked is None:
            return
        row = self._record.model(asked.lane)
        assert row is not None, "a model is on record before its requests"
        try:
            self._train(asked, row)
        finally:  # whatever happened: a request is never performed again in this process
            with self._wake:
                lane.waiting.pop(asked.seq, None)
                lane.next = asked.seq + 1

    def _train(self, asked: Asked, row: ModelRow) -> None:
        """One request of a model: its effect, its result on record, and then the word that it is there."""
        try:
            live = self.models.live(row)
            if asked.kind in SAVES:
                result, form, proof = self._saving.save(live, asked), "json", ""
            else:
                result, form, proof = self.models.perform(live, asked)
            if asked.kind == LOAD:  # what it has loaded may be gone later
                self.models.snapshot_if_due(live, row.id, now=True)
        except (RefusedRequest, StoreError, OSError) as error:
            told = described(error) if isinstance(error, OSError) else str(error)
            self._failed(asked, told, USER if isinstance(error, RefusedRequest) else SERVER)
            return
        except Exception as error:  # a bug, or a model that cannot compute this: its client is told, others go on
            log.exception("request %s failed", asked.id)
            self._failed(asked, f"{type(error).__name__}: {error}", SERVER)
            return
        keep = asked.kind in EFFECTS
        self._settle(asked, lambda: self._record.settle(asked.id, DONE, result, form, proof=proof, keep_body=keep))
        if asked.kind == STEP:
            try:
                self.models.snapshot_if_due(live, row.id)
            except (OSError, sqlite3.Error) as error:
                log.warning("%s: no snapshot: %s", row.id, described(error) if isinstance(error, OSError) else error)

    def _failed(self, asked: Asked, why: str, category: str) -> None:
        """A request of a model has failed. Of weights that were loaded in part, or loaded and then not kept, nothing
        stays: the model is restored from the record when it is asked for again."""
        if asked.kind == LOAD:
            self.models.forget(asked.lane)
        self._fail(asked, why, category)

    def _settle(self, asked: Asked, write: Callable[[], None]) -> None:
        """Put an outcome on record, when there is room for it: it is in memory already."""
        while True:
            try:
                write()
            except sqlite3.Error as error:  # any: the request is never performed again in this process
                log.error("the record cannot be written, waiting: %s", error)
                if self._stopping:
                    return
                time.sleep(_PAUSE_SECONDS)
            else:
                break
        self._settled(asked.id, asked.lane)

    def _fail(self, asked: Asked, why: str, category: str) -> None:
        body = msgspec.json.encode({"error": why, "category": category})
        self._settle(asked, lambda: self._record.settle(asked.id, FAILED, body, "json"))

    def _sample(self, weights: str) -> None:
        with self._wake:
            new = self._asked.pop(weights, [])
            sampling = self._samplings.get(weights)
        if sampling is None:
            try:
                folder = None if not weights else self._weights.folder(Place.of(weights))
                sampling = Sampling(self._engines.of(weights, folder))
            except (RefusedRequest, StoreError) as error:
                for asked in new:
                    self._fail(asked, f"the weights {weights} are not there: {error}", USER)
                return
        for asked in new:
            try:
                sampling.begin(asked)
            except RefusedRequest as refused:
                self._fail(asked, str(refused), USER)
        for asked, result in sampling.turn():
            if isinstance(result, StrettoError):
                self._fail(asked, str(result), SERVER)
            else:
                self._settle(asked, partial(self._record.settle, asked.id, DONE, result, "proto"))
        with self._wake:
            if sampling.idle:
                self._samplings.pop(weights, None)
            else:
                self._samplings[weights] = sampling

    def _cancel(self, id: str, why: str = "its client gave it up") -> None:
        ended: list[Asked] = []
        with self._wake:
            for waiting in self._asked.values():
                for asked in [one for one in waiting if one.id == id]:
                    waiting.remove(asked)
                    ended.append(asked)
            ended += [found for one in self._samplings.values() if (found := one.abort(id)) is not None]
        for asked in ended:
            self._fail(asked, why, USER)

    def _retire(self, model: str, why: str) -> None:
        with self._wake:
            lane = self._models.get(model)
            early = [] if lane is None else sorted(lane.waiting.values(), key=lambda asked: asked.seq)
            if lane is not None and lane.next in lane.waiting:
                return  # what was acknowledged is computed first; the next sweep comes by again
            for asked in early:
                assert lane is not None
                del lane.waiting[asked.seq]
            self._models.pop(model, None)
        for asked in early:
            self._fail(asked, f"{why}; the requests before it never came", USER)
        self.models.retire(model)
