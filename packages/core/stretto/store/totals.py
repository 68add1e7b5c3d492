"""Facts about a run that only its conductor knows. It writes them to the ledger: totals, judged completions,
engines."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.core.records import Record
from stretto.store.measures.goodput import Clock, Goodput, OnRecord, Produced, goodput


class Carried(Record, frozen=True):
    """Weight transfers to the engines. Each field has the newest 99 values.

    `medium`: shared_memory, http or broadcast. `pulls`: (bytes, seconds) of each transfer to an engine. `pauses`:
    seconds for which generation paused for a load. `copied`: bytes that the trainer copied for a publication, while
    training waited. `written`: (bytes, seconds) of each publication that the trainer wrote.
    """

    medium: str
    pulls: tuple[tuple[int, float], ...] = ()
    pauses: tuple[float, ...] = ()
    copied: tuple[int, ...] = ()
    written: tuple[tuple[int, float], ...] = ()


NEWEST_TRANSFERS = 99


class Judged(Record, frozen=True):
    """Numbers of right, wrong and undecided completions judged since the last step; `accuracy`: share of right ones
    among the decided completions between the last two steps. It is the ledger's fact ``JUDGED``, written in one
    transaction with these completions, so that a resumed run continues the count."""

    right: int = 0
    wrong: int = 0
    accuracy: float = 0.0
    undecided: int = 0


JUDGED = "judged"


class Totals(Record, frozen=True):
    """Totals of a run, over all of its processes. The ledger's fact ``TOTALS``, written after every step.

    Example: ``Totals(max_staleness=4, generated=81920, recomputed=9120, busy={"trainer": 88.1}, wall_seconds=161.0,
    rl_seconds=96.2, initial_accuracy=0.41, final_accuracy=0.96)``
    """

    max_staleness: float | None  # None: no bound; JSON turns infinity into None
    generated: int = 0  # tokens sampled by all engines for training prompts
    stopped: int = 0  # tokens of completions that were aborted for good
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
    """One engine of a run. `joined_step`, `left_step`: the newest finished step when it first joined, and when it left
    last (None while it is in the run). The ledger's fact ``ENGINES`` has one `Membership` for each engine.

    Example: ``Membership("engine-0", "native", "node-3", version=12, joined_step=0)``
    """

    name: str
    kind: str  # native, vllm or sglang
    host: str  # the name of its machine
    version: int  # version that it serves, or served last
    joined_step: int
    left_step: int | None = None  # None: it has not left
    reason: str = ""  # why it left the last time; kept if it has come back


ENGINES = "engines"


def budget(totals: Totals, on_record: OnRecord) -> Goodput:
    """Compute the goodput budget of a run from its totals and the tokens in its ledger."""
    return goodput(
        Produced(totals.generated, totals.stopped, totals.recomputed, totals.evaluated),
        on_record,
        Clock(totals.wall_seconds, totals.starting_seconds, totals.rl_seconds),
        totals.busy,
        totals.activities,
        engines=frozenset(totals.generated_by),
    )
