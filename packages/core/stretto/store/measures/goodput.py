"""The goodput budget: it puts each token and each second of a run into exactly one category
(docs/reference/metrics.md).

Tokens are counted: the sum over all categories is the number of tokens that engines have sampled or recomputed. Seconds
are measured for each role, and their sum is the role's wall time. Seconds of work are divided among the categories in
proportion to the tokens that the work was for; the other seconds are idle, each with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from stretto.core.records import Record

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

_REST = {"trainer": "batch", "rewards": "completions", "conductor": "events"}  # role: what it waits for while idle
_OF_ENGINES = "admission"
#: Spans of work on no token: name of the span: reason for which the role counts as idle.
_PAUSES = {"load": "loading", "prove": "proving", "publish": "publishing", "checkpoint": "checkpointing"}
AGAIN = "again"  #: name of a trainer's spans while it repeats a step of an earlier process
#: Names of spans that count as work of their role. `map` does not: it runs while the engine steps.
WORK = frozenset({"generate", "recompute", "proximal", "update", AGAIN, *_PAUSES})
_OUTSIDE = ("starting", "ending")  # reasons of idle seconds before and after the training


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
        """Sum over all trajectories."""
        return self.trained + self.masked + self.buffered + self.filtered + self.expired + self.failed


class Produced(Record, frozen=True):
    """Tokens that engines have computed, by their own counters.

    `generated`: sampled for training prompts. `aborted`: the part of these that was sampled for aborted completions.
    `recomputed`: KV cache computed again. `evaluated`: sampled for evaluations, and in no other count.
    """

    generated: int = 0
    aborted: int = 0
    recomputed: int = 0
    evaluated: int = 0


class Clock(Record, frozen=True):
    """Seconds of a run. `wall`: in all; `starting`: until the first prompt was admitted; `rl`: from then to the last
    update."""

    wall: float = 0.0
    starting: float = 0.0
    rl: float = 0.0


class Category(Record, frozen=True):
    """One category of the budget: seconds of all roles together, and tokens."""

    seconds: float
    tokens: int


class Goodput(Record, frozen=True):
    """The budget. `budget`: by category; `roles`: role: category: seconds; `idle`: role: reason: seconds.

    Example: ``Goodput(budget={"trained": Category(81.2, 52_310), ...}, roles={"trainer": {"trained": 40.3, ...}, ...},
    idle={"trainer": {"batch": 12.5, "starting": 3.1, ...}, ...})``
    """

    budget: Mapping[str, Category] = {}
    roles: Mapping[str, Mapping[str, float]] = {}
    idle: Mapping[str, Mapping[str, float]] = {}


def tokens_by_category(produced: Produced, on_record: OnRecord) -> dict[str, int]:
    """Count the tokens of each category.

    Sampled tokens that are not in the ledger belong to completions in flight or to aborted ones. Tokens of aborted
    completions are divided between expired and failed in proportion to the numbers of unjudged trajectories. If engines
    were killed, they may have counted fewer tokens than the ledger has; then only the ledger's count.

    >>> found = tokens_by_category(Produced(generated=30, aborted=4, recomputed=7), OnRecord(trained=20, buffered=5))
    >>> {name: tokens for name, tokens in found.items() if tokens}
    {'trained': 20, 'generated_and_waiting': 6, 'recomputed': 7, 'failed': 4}
    """
    unrecorded = max(0, produced.generated - on_record.tokens)
    aborted = min(produced.aborted, unrecorded)
    ended = on_record.expired_unjudged + on_record.failed_unjudged
    expired = aborted * on_record.expired_unjudged // ended if ended else 0
    return {
        TRAINED: on_record.trained,
        WAITING: on_record.buffered + unrecorded - aborted,
        MASKED: on_record.masked,
        EXPIRED: on_record.expired + expired,
        FILTERED: on_record.filtered,
        RECOMPUTED: produced.recomputed,
        FAILED: on_record.failed + aborted - expired,
        IDLE: 0,
    }


def goodput(
    produced: Produced,
    on_record: OnRecord,
    clock: Clock,
    busy: Mapping[str, float],
    activities: Mapping[str, Mapping[str, float]],
    engines: frozenset[str],
) -> Goodput:
    """Compute the budget of a run.

    Args:
        produced: counters of the engines.
        on_record: tokens in the ledger.
        clock: seconds of the run.
        busy: seconds of work by role, from the first admission to the last update.
        activities: role: span name: seconds, to divide the work of a role. A role without spans has done a single kind
            of work.
        engines: names of the roles that are engines.
    """
    tokens = tokens_by_category(produced, on_record)
    roles: dict[str, dict[str, float]] = {}
    idle: dict[str, dict[str, float]] = {}
    for role, seconds in sorted(busy.items()):
        worked = min(max(seconds, 0.0), clock.rl)
        spent = parts_of_work(activities.get(role, {}), worked)
        if role in engines:
            roles[role], reasons = _generation(spent, tokens, produced)
        elif role == "trainer":
            roles[role], reasons = _training(spent, tokens)
        else:
            roles[role], reasons = _shared(worked, _sampled(tokens)), {}
        reasons |= {"starting": clock.starting, "ending": clock.wall - clock.starting - clock.rl}
        reasons[_OF_ENGINES if role in engines else _REST.get(role, "events")] = clock.rl - worked
        idle[role] = {reason: spell for reason, spell in sorted(reasons.items()) if spell > 0}
        roles[role] = {name: roles[role].get(name, 0.0) for name in CATEGORIES} | {IDLE: sum(idle[role].values())}
    budget = {name: Category(sum(role[name] for role in roles.values()), tokens[name]) for name in CATEGORIES}
    return Goodput(budget, roles, idle)


def parts_of_work(spans: Mapping[str, float], worked: float) -> dict[str, float]:
    """Divide `worked` seconds in proportion to the seconds of each span name; spans may overlap or have gaps. Without
    spans, all seconds have the name ""."""
    whole = sum(spans.values())
    return {name: seconds * worked / whole for name, seconds in spans.items()} if whole > 0 else {"": worked}


def _generation(
    spent: Mapping[str, float], tokens: Mapping[str, int], produced: Produced
) -> tuple[dict[str, float], dict[str, float]]:
    """Divide an engine's working seconds `spent` (by span name); returns (seconds by category, seconds that count as
    idle by reason). Loading, proving and evaluation count as idle. Recomputing is a category of its own. The rest is
    divided in proportion to the sampled `tokens` (by category)."""
    reasons = {_PAUSES[name]: seconds for name, seconds in spent.items() if name in _PAUSES}
    again = spent.get("recompute", 0.0)
    stepping = sum(seconds for name, seconds in spent.items() if name not in {*_PAUSES, "recompute"})
    sampled = produced.generated + produced.evaluated
    reasons["evaluation"] = stepping * produced.evaluated / sampled if sampled else 0.0
    return _shared(stepping - reasons["evaluation"], _sampled(tokens)) | {RECOMPUTED: again}, reasons


def _training(spent: Mapping[str, float], tokens: Mapping[str, int]) -> tuple[dict[str, float], dict[str, float]]:
    """Divide the trainer's working seconds `spent` (by span name); returns (seconds by category, seconds that count as
    idle by reason). Publishing and checkpoints count as idle, repeated steps as recomputed. The rest is divided between
    trained and masked in proportion to their `tokens` (by category)."""
    reasons = {_PAUSES[name]: seconds for name, seconds in spent.items() if name in _PAUSES}
    updating = sum(seconds for name, seconds in spent.items() if name not in {*_PAUSES, AGAIN})
    parts = {name: tokens[name] for name in (TRAINED, MASKED)}
    return _shared(updating, parts) | {RECOMPUTED: spent.get(AGAIN, 0.0)}, reasons


def _sampled(tokens: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in tokens.items() if name not in (RECOMPUTED, IDLE)}


def _shared(seconds: float, parts: Mapping[str, int]) -> dict[str, float]:
    """Divide seconds among categories in proportion to their tokens; without any tokens, all count as waiting."""
    whole = sum(parts.values())
    return {name: seconds * count / whole for name, count in parts.items()} if whole else {WAITING: seconds}


class RoleTime(Record, frozen=True):
    """Use of one role's time. `working`: share of the training time; `waiting`: idle shares of it by reason; `outside`:
    seconds before and after the training."""

    role: str
    working: float | None  # None: the training has not begun
    waiting: Mapping[str, float]
    outside: Mapping[str, float]


def role_times(roles: Mapping[str, Mapping[str, float]], idle: Mapping[str, Mapping[str, float]]) -> list[RoleTime]:
    """Compute the use of time of each role, engines and trainer first. `roles`: role: category: seconds. `idle`: role:
    reason: seconds.

    >>> role_times({"trainer": {"trained": 3.0, "idle": 7.0}}, {"trainer": {"starting": 6.0, "batch": 1.0}})[0].working
    0.75
    """
    found = []
    for role in sorted(roles, key=lambda name: (not name.startswith("engine"), name != "trainer", name)):
        reasons = idle.get(role, {})
        inside = {name: seconds for name, seconds in reasons.items() if name not in _OUTSIDE}
        work = sum(seconds for name, seconds in roles[role].items() if name != IDLE)
        whole = work + sum(inside.values())
        waiting = {name: seconds / whole for name, seconds in inside.items()} if whole > 0 else {}
        outside = {name: reasons[name] for name in _OUTSIDE if reasons.get(name)}
        found.append(RoleTime(role, work / whole if whole > 0 else None, waiting, outside))
    return found
