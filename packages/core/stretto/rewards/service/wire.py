"""The wire between the pool and its workers: frames on a socket, and two counters in shared memory.

    pool ── Request ──► worker ── WorkerReady | Refused | Verdicts ──► pool

One request asks for several verdicts and one reply brings them all, so a group costs the conductor one wake-up. A
counter names the completion in work, so that a worker that hangs or dies in the user's function blames that one.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Self

import msgspec

from stretto.core.records import Outcome, Record, Verdict
from stretto.processes.kernel.memory import memory_file

_COUNTERS = struct.Struct("<qq")

#: Bytes of one reply at most: 64 verdicts with their reasons take a tenth of it.
LARGEST_REPLY = 1 << 20


class ScoreItem(Record, frozen=True, array_like=True):
    """One completion to judge; `answer` is the gold answer.

    Example: ``ScoreItem(prompt="3+8=", completion="11", answer="11")``
    """

    prompt: str
    completion: str
    answer: str
    fields: str = ""  # the other fields of the row, as a JSON object
    source: str = ""  # the name of the source that the question is from


class Row(Record, frozen=True):
    """Data of a question that a reward may need beside its text and gold answer."""

    fields: str = ""  # the other fields of its row, as a JSON object
    source: str = ""  # the name of its source


class Worth(Record, frozen=True):
    """The rewards of right and wrong; a number above their middle counts as right."""

    right: float
    wrong: float

    @property
    def threshold(self) -> float:
        return 0.5 * (self.right + self.wrong)

    @property
    def verdict_right(self) -> Verdict:
        return Verdict(outcome=Outcome.RIGHT, reward=self.right)

    @property
    def verdict_wrong(self) -> Verdict:
        return Verdict(outcome=Outcome.WRONG, reward=self.wrong)


class PartSettings(Record, frozen=True):
    """One reward of the sum. `settings` are the reward's own (JSON); `place` is where the recipe names it; a part
    without a name is the only one."""

    function: str
    settings: str
    place: str
    name: str = ""
    weight: float = 1.0
    sources: tuple[str, ...] = ()  # empty: all


class WorkerSettings(Record, frozen=True):
    """A worker's settings, as JSON on its command line. `socket` and `progress` are inherited descriptors; `memory` is
    a limit in bytes."""

    parts: tuple[PartSettings, ...]
    worth: Worth
    socket: int
    progress: int
    parent: int
    memory: int
    path: str | None = None  # first entry of the import path


class Request(Record, frozen=True, array_like=True):
    """Completions to judge; verdicts come back in order."""

    id: int
    items: tuple[ScoreItem, ...]


class WorkerReady(Record, frozen=True, tag=True):
    """The worker has its reward function and waits for requests; `facts` go on the run's record."""

    facts: dict[str, str] = msgspec.field(default_factory=dict)


class Refused(Record, frozen=True, tag=True):
    """The reward function cannot be used; the worker ends."""

    place: str
    found: str
    remedy: str


class Verdicts(Record, frozen=True, tag=True):
    """The verdicts of one request; `start` and `end` of the work are seconds of `time.monotonic`."""

    request: int
    verdicts: tuple[Verdict, ...]
    start: float
    end: float


FromWorker = WorkerReady | Refused | Verdicts


class JudgingCounter:
    """Two counters that the worker writes and the pool reads. `count` is odd while a completion is being judged, even
    between two; `beats` is a heartbeat, about one a second, while the worker starts or waits.

    They outlive a killed worker: ``count // 2`` completions were judged since its start.
    """

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """A new counter and the descriptor to inherit; the caller closes the descriptor."""
        descriptor = memory_file("stretto-progress")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return cls(descriptor), descriptor

    @property
    def count(self) -> int:
        return self._read()[0]

    @count.setter
    def count(self, value: int) -> None:
        _COUNTERS.pack_into(self._page, 0, value, self.beats)

    @property
    def beats(self) -> int:
        return self._read()[1]

    def beat(self) -> None:
        """Count one heartbeat; only from the thread that judges, or while nothing is judged."""
        count, beats = self._read()
        _COUNTERS.pack_into(self._page, 0, count, beats + 1)

    def _read(self) -> tuple[int, int]:
        count, beats = _COUNTERS.unpack_from(self._page)
        return count, beats

    def close(self) -> None:
        self._page.close()
