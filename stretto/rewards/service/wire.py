"""What travels between the pool and its workers: frames on a socket, and one counter in shared memory.

    pool ── Request ──► worker ── WorkerReady | Refused | Verdicts ──► pool

One request asks for several verdicts and one reply brings them all, so a group of answers costs the conductor one
wake-up. Which answer a worker is busy with is told by the counter, so that a worker that hangs or dies inside the
user's function can be blamed on the one answer it hung on.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Self

import msgspec

from stretto.core.records import Outcome, Record, Verdict

_COUNTERS = struct.Struct("<qq")

#: No reward is larger than this, above or below zero: sums over a batch stay far from what a float cannot hold.
LARGEST_REWARD = 1e6

#: Bytes of what a worker may send at once: 64 verdicts with their reasons take a tenth of it.
LARGEST_REPLY = 1 << 20


class ScoreItem(Record, frozen=True, array_like=True):
    """One answer to judge; verdicts come back in order.

    Example: ``ScoreItem(prompt="3+8=", completion="11", answer="11")``
    """

    prompt: str
    completion: str
    answer: str
    fields: str = ""  # the other fields of the row, as a JSON object


class Worth(Record, frozen=True):
    """What right and wrong are worth; a number counts as right above the middle of the two."""

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


class WorkerSettings(Record, frozen=True):
    """What a worker is started with, as JSON on its command line: the reward, its own settings (JSON again), what its
    verdicts are worth, two inherited descriptors, and the bytes of memory that it may have."""

    function: str
    settings: str
    worth: Worth
    socket: int
    progress: int
    parent: int
    memory: int
    path: str | None = None  # where the reward's module is looked for first


class Request(Record, frozen=True, array_like=True):
    """Answers to judge, in order."""

    id: int
    items: tuple[ScoreItem, ...]


class WorkerReady(Record, frozen=True, tag=True):
    """The worker has its reward function and waits for requests. `facts`: what a run has to record about it."""

    facts: dict[str, str] = msgspec.field(default_factory=dict)


class Refused(Record, frozen=True, tag=True):
    """The reward function cannot be used; the worker ends."""

    place: str
    found: str
    remedy: str


class Verdicts(Record, frozen=True, tag=True):
    """The verdicts of one request, with the seconds (`time.monotonic`) between which it was worked on."""

    request: int
    verdicts: tuple[Verdict, ...]
    start: float
    end: float


FromWorker = WorkerReady | Refused | Verdicts


class JudgingCounter:
    """Two counters that the worker writes and the pool reads. `count` is odd while an answer is being judged, even
    between two; `beats` grows every second or so while the worker starts or waits.

    The pool reads them after the worker was killed, too: ``count // 2`` answers were finished since the worker started.
    """

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """A new counter and the descriptor to inherit; the caller closes the descriptor."""
        descriptor = os.memfd_create("stretto-progress", os.MFD_CLOEXEC)
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
        """Say that the worker lives; only the thread that judges may, or one while nothing is judged."""
        count, beats = self._read()
        _COUNTERS.pack_into(self._page, 0, count, beats + 1)

    def _read(self) -> tuple[int, int]:
        count, beats = _COUNTERS.unpack_from(self._page)
        return count, beats

    def close(self) -> None:
        self._page.close()
