"""Facts that only the conductor knows and writes to the ledger: totals of the run, and its engines."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.core.records import Record
from stretto.measures.goodput import Clock, Goodput, OnRecord, Produced, goodput


class Carried(Record, frozen=True):
    """Weight transfers to the engines: bytes and seconds of each of the newest `NEWEST_TRANSFERS`, and the seconds for
    which generation paused; of the newest publications the bytes that the trainer copied while training waited, and
    those that it wrote, with the seconds."""

    medium: str
    pulls: tuple[tuple[int, float], ...] = ()
    pauses: tuple[float, ...] = ()
    copied: tuple[int, ...] = ()
    written: tuple[tuple[int, float], ...] = ()


NEWEST_TRANSFERS = 99


class Judged(Record, frozen=True):
    """Completions judged since the last step, and the share of right ones before it. The conductor writes it to the
    ledger under ``JUDGED``, together with the completions that it counts; a resumed run continues the count."""

    right: int = 0
    wrong: int = 0
    accuracy: float = 0.0


JUDGED = "judged"


class Totals(Record, frozen=True):
    """Totals that only the conductor knows; it writes them to the ledger, under ``TOTALS``, after every step.

    Example: ``Totals(max_staleness=4, generated=81920, recomputed=9120, busy={"trainer": 88.1}, wall_seconds=161.0,
    rl_seconds=96.2, initial_accuracy=0.41, final_accuracy=0.96)``
    """

    max_staleness: float | None  # None (also what JSON makes of an infinity): no bound
    generated: int = 0  # tokens sampled by all engines for training prompts
    stopped: int = 0  # tokens of completions that were aborted, and do not go on
    unfinished: int = 0  # tokens of completions in flight when the run ended; a resume may continue them
    recomputed: int = 0  # tokens whose KV cache was computed again after an interruption
    busy: Mapping[str, float] = {}  # role: seconds of work since the first prompt was admitted
    wall_seconds: float = 0.0
    rl_seconds: float = 0.0
    initial_accuracy: float | None = None  # held-out, version 0
    final_accuracy: float | None = None  # held-out, the last version evaluated
    generated_by: Mapping[str, int] = {}  # engine: its part of `generated`
    carried: Carried | None = None
    rewards: Mapping[str, float] = {}  # of several rewards, by name: mean value in the newest batch
    evaluated: int = 0  # tokens sampled by all engines for evaluations
    starting_seconds: float = 0.0  # until the first prompt was admitted
    activities: Mapping[str, Mapping[str, float]] = {}  # role, span name: seconds, counted as `busy`


TOTALS = "totals"


class Membership(Record, frozen=True):
    """One engine of a run; `joined_step` and `left_step` are the newest finished step at that moment. The conductor
    writes those of all engines to the ledger, under ``ENGINES``.

    Example: ``Membership("engine-0", "native", "node-3", version=12, joined_step=0)``
    """

    name: str
    kind: str  # native, vllm or sglang
    host: str  # the name of its machine
    version: int  # version that it serves, or served last
    joined_step: int
    left_step: int | None = None  # None: it was there to the end, or still is
    reason: str = ""  # why it left, or last left and came back


ENGINES = "engines"


def budget(totals: Totals, on_record: OnRecord) -> Goodput:
    """The goodput budget of a run."""
    return goodput(
        Produced(totals.generated, totals.stopped, totals.recomputed, totals.evaluated),
        on_record,
        Clock(totals.wall_seconds, totals.starting_seconds, totals.rl_seconds),
        totals.busy,
        totals.activities,
        engines=frozenset(totals.generated_by),
    )
