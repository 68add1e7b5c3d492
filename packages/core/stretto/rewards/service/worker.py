"""Process that judges completions: ``python -m stretto.rewards.service.worker SETTINGS``.

Output of the reward goes to the log, and its exceptions become undecided verdicts. The pool kills a worker that hangs.
This module imports little, so that a killed worker is soon replaced.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from stretto.core.errors import RewardFunctionError
from stretto.core.frames import Unframer, frame
from stretto.core.records import Verdict
from stretto.doors.loading import look_in
from stretto.processes.heartbeat import bound_memory, die_with_parent, keep_exit_codes, survive_a_full_disk
from stretto.rewards.service.judging import LoadedPart, carried, facts_of, forks_end, judge_all, loaded, taken_by
from stretto.rewards.service.wire import (
    JudgingCounter,
    Refused,
    Request,
    ScoreItem,
    Verdicts,
    WorkerReady,
    WorkerSettings,
)

_READ_BYTES = 1 << 20
_BEAT_SECONDS = 1.0
_OUT_OF_REACH = range(100, 200)  # descriptors that code writing to small numbers does not hit


class _Worker:
    """Judges completions for the pool over a socket. It sends `WorkerReady` once the reward is loaded, or `Refused` and
    ends. Then it answers each request in order with one `Verdicts`, until the socket closes."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._worth = settings.worth
        self._settings = settings.parts
        self._socket = socket.socket(fileno=_moved(settings.socket))
        self._progress = JudgingCounter(settings.progress)

    def run(self) -> None:
        try:
            with self._heartbeat(), forks_end():
                parts = loaded(self._settings)
        except RewardFunctionError as error:
            problem = error.problems[0]
            place, found, remedy = map(carried, (problem.place, problem.found, problem.remedy))
            self._socket.sendall(frame(Refused(place=place, found=found, remedy=remedy)))
            return
        self._socket.sendall(frame(WorkerReady(facts=facts_of(parts), takes=taken_by(parts))))
        decoder, unframer = msgspec.msgpack.Decoder(Request), Unframer()
        while data := self._read():
            for body in unframer.feed(data):
                request = decoder.decode(body)
                start = time.monotonic()
                verdicts = tuple([self._judged(parts, item) for item in request.items])
                reply = Verdicts(request=request.id, verdicts=verdicts, start=start, end=time.monotonic())
                self._socket.sendall(frame(reply))

    def _read(self) -> bytes:
        """Wait for the next bytes from the pool, with a heartbeat each second; empty when the pool has closed the
        socket, which also ends the wait, so there is no deadline."""
        self._progress.beat()
        while not select.select([self._socket], [], [], _BEAT_SECONDS)[0]:
            self._progress.beat()
        return self._socket.recv(_READ_BYTES)

    @contextmanager
    def _heartbeat(self) -> Iterator[None]:
        """Send heartbeats from a thread during the block (the import). No thread is left afterwards, so that a reward
        may fork."""
        over = threading.Event()

        def beat() -> None:
            self._progress.beat()
            while not over.wait(_BEAT_SECONDS):
                self._progress.beat()

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _judged(self, parts: Sequence[LoadedPart], item: ScoreItem) -> Verdict:
        self._progress.count += 1
        with forks_end():
            verdict = judge_all(parts, item, self._worth)
        self._progress.count += 1
        return verdict


def _moved(descriptor: int) -> int:
    """Move the socket to a random high descriptor, which child processes do not inherit; returns its number. Where the
    limit of descriptors is lower, the old one is kept and returned."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, random.choice(_OUT_OF_REACH))
    except OSError:  # the limit of descriptors is lower
        return descriptor
    os.close(descriptor)
    return moved


def main(arguments: list[str]) -> None:
    settings = msgspec.json.decode(arguments[0], type=WorkerSettings)
    survive_a_full_disk()
    keep_exit_codes()  # also for a reward that runs programs
    die_with_parent(settings.parent)
    bound_memory(settings.memory)
    look_in(settings.path or "")
    try:
        _Worker(settings).run()
    except (BrokenPipeError, ConnectionResetError):
        return  # the pool closed its end first


if __name__ == "__main__":
    main(sys.argv[1:])
