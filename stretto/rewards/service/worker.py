"""A process that judges answers: ``python -m stretto.rewards.service.worker SETTINGS``.

It owns one socket and nothing else: the user's prints go to the log, a user's exception becomes an undecided verdict,
and when the function hangs the pool kills the process. It imports little, so that a killed worker is back at once.
"""

from __future__ import annotations

import io
import socket
import sys
import time

import msgspec

from stretto.core.errors import RewardFunctionError
from stretto.core.frames import Unframer, frame
from stretto.core.records import Verdict
from stretto.processes.heartbeat import die_with_parent
from stretto.rewards.functions import RewardFunction
from stretto.rewards.service.judging import judge
from stretto.rewards.service.loading import facts_of, load_reward
from stretto.rewards.service.wire import JudgingCounter, Ready, Refused, Reply, Request, ScoreItem, WorkerSettings

_READ_BYTES = 1 << 20


class Worker:
    """Reads requests, judges their answers in order, replies once per request, until the socket closes."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._worth = settings.worth
        self._function_name, self._settings = settings.function, settings.settings
        self._socket = socket.socket(fileno=settings.socket)
        self._progress = JudgingCounter(settings.progress)

    def run(self) -> None:
        try:
            function = load_reward(self._function_name, self._settings)
        except RewardFunctionError as error:
            problem = error.problems[0]
            self._socket.sendall(frame(Refused(place=problem.place, found=problem.found, remedy=problem.remedy)))
            return
        self._socket.sendall(frame(Ready(facts=facts_of(self._function_name, function))))
        decoder, unframer = msgspec.msgpack.Decoder(Request), Unframer()
        while data := self._socket.recv(_READ_BYTES):
            for body in unframer.feed(data):
                request = decoder.decode(body)
                start = time.monotonic()
                verdicts = tuple([self._judged(function, item) for item in request.items])
                reply = Reply(request=request.id, verdicts=verdicts, start=start, end=time.monotonic())
                self._socket.sendall(frame(reply))

    def _judged(self, function: RewardFunction, item: ScoreItem) -> Verdict:
        self._progress.count += 1
        verdict = judge(function, item, self._worth)
        self._progress.count += 1
        return verdict


def main(arguments: list[str]) -> None:
    settings = msgspec.json.decode(arguments[0], type=WorkerSettings)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what the reward printed before it hung is in the log
    die_with_parent(settings.parent)
    try:
        Worker(settings).run()
    except (BrokenPipeError, ConnectionResetError):
        return  # the pool closed its end first


if __name__ == "__main__":
    main(sys.argv[1:])
