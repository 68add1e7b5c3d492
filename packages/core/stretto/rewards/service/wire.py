"""The wire between the pool and its workers: frames on a socket, and two counters in shared memory; the facts about a
reward that a run records.

    pool ── Request ──► worker ── WorkerReady | Refused | Verdicts ──► pool

A request holds several completions and its reply all of their verdicts, so a group costs the conductor one wake-up. A
counter tells which completion is being judged, so that the pool knows the one at which a worker hung or died.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from typing import Self

import msgspec

from stretto.core.frames import Count, Moment
from stretto.core.records import Record, Verdict
from stretto.processes.kernel import memory_file


class Facts:
    """Facts about the reward that its workers report, as the level of the sandbox: those of the first worker that
    reports any, and of later workers those that no worker has reported under the same name. `known`: all, by name;
    those of later workers as "NAME of WORKER".

    >>> facts = Facts()
    >>> facts.hear("rewards-0", {"sandbox": "level A"}), facts.hear("rewards-1", {"sandbox": "level A"})
    ([], [])
    >>> facts.hear("rewards-1", {"sandbox": "level D"})
    ['rewards-1 works with another sandbox: level D, in place of level A']
    >>> facts.hear("rewards-1", {"judge": "level D"})  # the same text, of something else
    ['rewards-1 works with judge: level D, of which the first worker reported nothing']
    >>> facts.known
    {'sandbox': 'level A', 'sandbox of rewards-1': 'level D', 'judge of rewards-1': 'level D'}
    """

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def hear(self, worker: str, found: Mapping[str, str]) -> list[str]:
        """Add a worker's facts, by name; returns a sentence for each that is new, except for the first worker's."""
        if not self.known:
            self.known = dict(found)
        news = {name: fact for name, fact in found.items() if fact not in self._told(name)}
        self.known |= {f"{name} of {worker}": fact for name, fact in news.items()}
        return [
            f"{worker} works with another {name}: {fact}, in place of {self.known[name]}"
            if name in self.known
            else f"{worker} works with {name}: {fact}, of which the first worker reported nothing"
            for name, fact in news.items()
        ]

    def _told(self, name: str) -> list[str]:
        return [fact for known, fact in self.known.items() if known == name or known.startswith(f"{name} of ")]


_COUNTERS = struct.Struct("<qq")

#: Most bytes of one reply; 64 verdicts with their reasons take a tenth of it.
LARGEST_REPLY = 1 << 20


class ScoreItem(Record, frozen=True, array_like=True):
    """One completion to judge; `answer`: the gold answer. `fields`: other fields of the question's row, as a JSON
    object. `source`: name of the question's source.

    Example: ``ScoreItem(prompt="3+8=", completion="11", answer="11")``
    """

    prompt: str
    completion: str
    answer: str
    fields: str = ""  # the other fields of the row, as a JSON object
    source: str = ""  # the name of the source that the question is from


class Row(Record, frozen=True):
    """Data of a question that a reward may need beside its prompt and gold answer. `fields`: the other fields of its
    row, as a JSON object. `source`: name of its source. Both are empty where no reward needs them."""

    fields: str = ""  # the other fields of its row, as a JSON object
    source: str = ""  # the name of its source


class Worth(Record, frozen=True):
    """Rewards of a right and of a wrong completion. `threshold`: their mean; a numeric reward above it counts as
    right."""

    right: float
    wrong: float

    @property
    def threshold(self) -> float:
        return 0.5 * (self.right + self.wrong)


class PartSettings(Record, frozen=True):
    """One reward of the sum. `function`: its name, as in the recipe. `settings`: the reward's section of the recipe, as
    JSON. `place`: the recipe's key that names the function, for messages. `name`: key of its metric; empty if it is the
    only reward. `sources`: names of the sources whose completions it judges; empty: all."""

    function: str
    settings: str
    place: str
    name: str = ""
    weight: float = 1.0
    sources: tuple[str, ...] = ()  # empty: all


class WorkerSettings(Record, frozen=True):
    """A worker's settings, as JSON on its command line. `socket` and `progress` (the `JudgingCounter`) are inherited
    descriptors. `parent`: id of the process to die with. `memory`: limit in bytes. `path`: folder that comes first in
    the import path."""

    parts: tuple[PartSettings, ...]
    worth: Worth
    socket: int
    progress: int
    parent: int
    memory: int
    path: str | None = None


class Request(Record, frozen=True, array_like=True):
    """Message to a worker: completions to judge. `id` comes back with the `Verdicts`, which are in the same order."""

    id: int
    items: tuple[ScoreItem, ...]


class WorkerReady(Record, frozen=True, tag=True):
    """Message: the worker has loaded its reward and waits for requests; `facts` go to the run's record.
    `takes`: the further fields of a row that a user's reward takes; None: all."""

    facts: dict[str, str] = msgspec.field(default_factory=dict)
    takes: tuple[str, ...] | None = ()


class Refused(Record, frozen=True, tag=True):
    """Message: the reward function cannot be used; the worker ends. The fields are those of a `Problem`."""

    place: str
    found: str
    remedy: str


class Verdicts(Record, frozen=True, tag=True):
    """Message: the verdicts of one request (`request`: its id), in the order of its items. `start`, `end`: of the work,
    in seconds of `time.monotonic`."""

    request: Count
    verdicts: tuple[Verdict, ...]
    start: Moment
    end: Moment


FromWorker = WorkerReady | Refused | Verdicts


class JudgingCounter:
    """Two counters in shared memory, which the worker writes and the pool reads, even after the worker was killed.

    `count` is twice the number of completions judged since the worker's start, plus one while one is being judged.
    `beats` counts heartbeats, about one a second while the worker starts or waits.
    """

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """Create the counters; returns them and the descriptor for the worker to inherit, which the caller closes.
        Raises OSError if too many descriptors are open."""
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
        """Count one heartbeat. Another thread than the judging one may call it only while nothing is judged."""
        count, beats = self._read()
        _COUNTERS.pack_into(self._page, 0, count, beats + 1)

    def _read(self) -> tuple[int, int]:
        count, beats = _COUNTERS.unpack_from(self._page)
        return count, beats

    def close(self) -> None:
        self._page.close()
