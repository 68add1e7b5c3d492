"""Sums of the work of a run. Its conductor writes totals, judged completions and engines to the ledger; from these
follows the goodput budget, which puts each token and each second of a run into exactly one category
(docs/reference/metrics.md).

Tokens are counted: the sum over all categories is the number of tokens that engines have sampled or recomputed. Seconds
are measured for each role, and their sum is the role's wall time. Seconds of work are divided among the categories in
proportion to the tokens that the work was for; the other seconds are idle, each with a reason.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from stretto.core.records import Record


class Carried(Record, frozen=True):
    """Weight transfers to the engines. Each field has the newest 99 values.

    `medium`: how weights reach the engines: shared_memory, http or broadcast. `pulls`: (bytes, seconds) of each
    transfer to an engine. `pauses`: seconds for which generation paused for a load. `copied`: bytes that the trainer
    copied for a publication, while training waited. `written`: (bytes, seconds) of each publication that the trainer
    wrote.
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
    """Totals of a run, over all of its processes. The ledger's fact ``TOTALS``: tokens and accuracies up to now,
    seconds of work up to the last step.

    Tokens: `generated` for training prompts; of these, `stopped` in completions aborted for good, and `unfinished` in
    flight when the run ended; `recomputed`: with a KV cache computed again; `evaluated`: sampled for evaluations.
    `busy`: seconds of work by role; `activities`: the same by role and span name; `beside`: of further spans, not in
    `busy`. `starting_seconds`: until the first prompt was admitted. `cores`: seconds of the cores that the run may use,
    by the role that took them, or by `STARTING`, `ENDING`, `REST`, `OTHERS` and `IDLE`.
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
    beside: Mapping[str, Mapping[str, float]] = {}  # as `activities`, of the spans `BESIDE`, not counted as `busy`
    cores: Mapping[str, float] = {}  # their sum: cores × wall seconds; empty in runs of earlier versions


TOTALS = "totals"


class Membership(Record, frozen=True):
    """One engine of a run. `version`: the last that it served. `joined_step`, `left_step`: the newest finished step
    when it first joined, and when it left last (None while it is in the run); `reason`: why it left last. The ledger's
    fact ``ENGINES`` has one `Membership` for each engine.

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


TRAINED, WAITING, MASKED, EXPIRED, FILTERED, RECOMPUTED, FAILED, IDLE = CATEGORIES = (
    "trained",
    "generated_and_waiting",
    "masked",
    "expired",
    "filtered",
    "recomputed",
    "failed",
    "idle",
)

STARTING, ENDING = "starting", "ending"  #: before the first prompt was admitted; behind the last update
#: Cores' time between these: of processes of the run that are no role, or of a role that has ended since it was last
#: asked; of processes that are not the run's.
REST, OTHERS = "rest_of_the_run", "other_processes"
_REST = {"trainer": "batch", "rewards": "completions", "conductor": "events"}  # role: what it waits for while idle
_OF_ENGINES = "admission"
#: Spans of work on no token: name of the span: reason for which the role counts as idle.
_PAUSES = {"load": "loading", "prove": "proving", "publish": "publishing", "checkpoint": "checkpointing"}
AGAIN = "again"  #: name of a trainer's spans while it repeats a step of an earlier process
#: Spans that run beside other work of their role: name of the span: name of the pause to which its cores' time belongs.
BESIDE = {"map": "load", "write": "publish"}
#: Names of spans that count as work of their role. `map` does not: it runs while the engine steps.
WORK = frozenset({"generate", "recompute", "proximal", "update", AGAIN, *_PAUSES})


class OnRecord(Record, frozen=True):
    """Number of sampled tokens in the ledger, by the state of their trajectory. Tokens of a trained batch are either
    `trained` or `masked` (too old for the loss).

    `expired_unjudged` and `failed_unjudged` count trajectories, not tokens: those that were aborted, so that no tokens
    are recorded.
    """

    trained: int = 0
    masked: int = 0
    buffered: int = 0
    filtered: int = 0
    expired: int = 0
    failed: int = 0
    expired_unjudged: int = 0
    failed_unjudged: int = 0

    @property
    def tokens(self) -> int:
        """Number of sampled tokens of all trajectories."""
        return self.trained + self.masked + self.buffered + self.filtered + self.expired + self.failed


class Category(Record, frozen=True):
    """One category of the goodput budget: the seconds that all roles together spent for it, and its tokens."""

    seconds: float
    tokens: int


class _Goodput(Record, frozen=True):
    """The goodput budget of a run. `budget`: by category (one of `CATEGORIES`); `roles`: role: category: seconds;
    `idle`: role: reason: seconds, whose sum is the role's category `idle`.

    Example: ``_Goodput(budget={"trained": Category(81.2, 52_310), ...}, roles={"trainer": {"trained": 40.3, ...}, ...},
    idle={"trainer": {"batch": 12.5, "starting": 3.1, ...}, ...})``
    """

    budget: Mapping[str, Category] = {}
    roles: Mapping[str, Mapping[str, float]] = {}
    idle: Mapping[str, Mapping[str, float]] = {}


def tokens_by_category(totals: Totals, on_record: OnRecord) -> dict[str, int]:
    """Count the tokens of each category (all of `CATEGORIES`; "idle" has 0).

    Sampled tokens that are not in the ledger belong to completions in flight or to aborted ones. Tokens of aborted
    completions are divided between expired and failed in proportion to the numbers of unjudged trajectories. If engines
    were killed, they may have counted fewer tokens than the ledger has; then only those in the ledger count.

    >>> totals = Totals(max_staleness=4, generated=30, stopped=4, recomputed=7)
    >>> found = tokens_by_category(totals, OnRecord(trained=20, buffered=5))
    >>> {name: tokens for name, tokens in found.items() if tokens}
    {'trained': 20, 'generated_and_waiting': 6, 'recomputed': 7, 'failed': 4}
    """
    unrecorded = max(0, totals.generated - on_record.tokens)
    aborted = min(totals.stopped, unrecorded)
    ended = on_record.expired_unjudged + on_record.failed_unjudged
    expired = aborted * on_record.expired_unjudged // ended if ended else 0
    return {
        TRAINED: on_record.trained,
        WAITING: on_record.buffered + unrecorded - aborted,
        MASKED: on_record.masked,
        EXPIRED: on_record.expired + expired,
        FILTERED: on_record.filtered,
        RECOMPUTED: totals.recomputed,
        FAILED: on_record.failed + aborted - expired,
        IDLE: 0,
    }


def goodput(totals: Totals, on_record: OnRecord) -> _Goodput:
    """Compute the goodput budget of a run from its totals and the tokens in its ledger.

    The seconds of a role's work are divided by its `Totals.activities`; a role without any has done a single kind of
    work. Roles without busy seconds on record are left out.
    """
    tokens, rl = tokens_by_category(totals, on_record), totals.rl_seconds
    ending = totals.wall_seconds - totals.starting_seconds - rl
    roles: dict[str, dict[str, float]] = {}
    idle: dict[str, dict[str, float]] = {}
    for role, seconds in sorted(totals.busy.items()):
        worked = min(max(seconds, 0.0), rl)
        spent = in_proportion(worked, totals.activities.get(role, {}))  # spans may overlap, or have gaps
        if role in totals.generated_by:
            roles[role], reasons = _generation(spent, tokens, totals)
        elif role == "trainer":
            roles[role], reasons = _training(spent, tokens)
        else:
            roles[role], reasons = in_proportion(worked, _sampled(tokens), WAITING), {}
        reasons |= {STARTING: totals.starting_seconds, ENDING: ending}
        reasons[_OF_ENGINES if role in totals.generated_by else _REST.get(role, "events")] = rl - worked
        idle[role] = {reason: spell for reason, spell in sorted(reasons.items()) if spell > 0}
        roles[role] = {name: roles[role].get(name, 0.0) for name in CATEGORIES} | {IDLE: sum(idle[role].values())}
    budget = {name: Category(sum(role[name] for role in roles.values()), tokens[name]) for name in CATEGORIES}
    return _Goodput(budget, roles, idle)


def core_budget(totals: Totals, on_record: OnRecord) -> dict[str, float]:
    """Divide the seconds of the run's cores by what they went into: the goodput categories and the reasons of idleness
    for the work of engines and trainer, whose seconds are divided as in `goodput`; the other keys of `Totals.cores`.
    Empty if they were not recorded; else their sum is that of `Totals.cores`."""
    tokens, found = tokens_by_category(totals, on_record), dict[str, float]()
    for name, seconds in totals.cores.items():
        worked, beside = totals.activities.get(name, {}), totals.beside.get(name, {})
        parts = {one: worked.get(one, 0.0) + beside.get(one, 0.0) for one in worked.keys() | beside.keys()}
        spent = in_proportion(seconds, parts)
        if name in totals.generated_by:
            work, reasons = _generation(spent, tokens, totals)
        else:
            work, reasons = _training(spent, tokens) if name == "trainer" else ({name: seconds}, {})
        for use, part in (*work.items(), *reasons.items()):
            found[use] = found.get(use, 0.0) + part
    return {use: part for use, part in found.items() if part > 0}


def in_proportion(seconds: float, parts: Mapping[str, float], otherwise: str = "") -> dict[str, float]:
    """Divide `seconds` among the names in `parts`, in proportion to their values. If there are none, or all are 0 or
    too small to divide by, all seconds have the name `otherwise`."""
    whole = sum(parts.values())
    if whole < sys.float_info.min:  # a product with a subnormal number is rounded to a multiple of the least one
        return {otherwise: seconds}
    return {name: seconds * part / whole for name, part in parts.items()}


def _generation(
    spent: Mapping[str, float], tokens: Mapping[str, int], totals: Totals
) -> tuple[dict[str, float], dict[str, float]]:
    """Divide an engine's working seconds `spent` (by span name); returns (seconds by category, seconds that count as
    idle by reason). Loading and proving count as idle; recomputing is a category of its own. Of the rest, evaluation
    gets its share of the tokens in `totals`, as idle too, and the sampled `tokens` (by category) theirs."""
    reasons = {_PAUSES[name]: seconds for name, seconds in spent.items() if name in _PAUSES}
    again = spent.get("recompute", 0.0)
    stepping = sum(seconds for name, seconds in spent.items() if name not in {*_PAUSES, "recompute"})
    sampled = totals.generated + totals.evaluated
    # The quotient first: it is at most 1, and so the rest is not negative by rounding.
    reasons["evaluation"] = stepping * (totals.evaluated / sampled) if sampled else 0.0
    return in_proportion(stepping - reasons["evaluation"], _sampled(tokens), WAITING) | {RECOMPUTED: again}, reasons


def _training(spent: Mapping[str, float], tokens: Mapping[str, int]) -> tuple[dict[str, float], dict[str, float]]:
    """Divide the trainer's working seconds `spent` (by span name); returns (seconds by category, seconds that count as
    idle by reason). Publishing and checkpoints count as idle, repeated steps as recomputed. The rest is divided between
    trained and masked in proportion to their `tokens` (by category)."""
    reasons = {_PAUSES[name]: seconds for name, seconds in spent.items() if name in _PAUSES}
    updating = sum(seconds for name, seconds in spent.items() if name not in {*_PAUSES, AGAIN})
    parts = {name: tokens[name] for name in (TRAINED, MASKED)}
    return in_proportion(updating, parts, WAITING) | {RECOMPUTED: spent.get(AGAIN, 0.0)}, reasons


def _sampled(tokens: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in tokens.items() if name not in (RECOMPUTED, IDLE)}
