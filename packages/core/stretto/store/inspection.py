"""The records of a run's summary. ``stretto inspect RUN --json`` prints an `Inspection`."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, UnsetType

from stretto.core.records import Record
from stretto.store.run_folder import Branch
from stretto.store.selection import Bias, MaskedGroups
from stretto.store.totals import Category, Membership

#: Name of the ledger's events that say which user-defined parts have changed between two starts of the run.
CHANGED = "changed"


class TokenCounts(Record, frozen=True):
    """Token counts. `recomputed`: KV cache computed again after an interruption. `wasted`: sampled tokens that are
    never trained on: of aborted or untrained completions, and masked ones."""

    generated: int
    trained: int
    recomputed: int
    wasted: int


class TrajectoryCounts(Record, frozen=True):
    """Trajectories by state; `issued` is the sum of the others. `undecided`: those of `failed` whose verdict is
    undecided; `undecided_reason`: newest reason of their most frequent kind."""

    issued: int
    trained: int
    buffered: int
    in_flight: int
    filtered: int
    expired: int
    failed: int
    undecided: int = 0
    undecided_reason: str = ""


class EngineRecord(Membership, frozen=True):
    """One engine, and the number of tokens that it sampled for training prompts."""

    generated: int = 0


class WeightsSummary(Record, frozen=True):
    """Weight transfers to the engines: medians over the newest 99; None if there are none.

    `medium`: how weights reach the engines: shared_memory, http or broadcast. `bytes`: size of one version.
    `seconds_pull_median`: transfer of one version to an engine. `seconds_pause_median`: pause of generation for a load.
    `copies`: how often each byte is copied in host memory between the trainer's parameters and the mailbox; each engine
    adds one copy. `seconds_publish_median`: from the trainer's copy until the version could be loaded.
    """

    medium: str | None
    bytes: int | None
    seconds_pull_median: float | None
    seconds_pause_median: float | None
    copies: float | None = None
    seconds_publish_median: float | None = None


class StalenessSummary(Record, frozen=True):
    """Staleness (versions between sampling and training) of trained tokens; `bound` None: no bound, or no step yet.
    `histogram`: number of tokens by staleness."""

    bound: float | None
    max: int
    mean: float
    histogram: dict[int, int]  # versions: tokens


class ChangedBound(Record, frozen=True):
    """A change of a bound by the run itself, after `step`, from `before` to `after`. `name`: key of the bound in
    ``[rollout]``."""

    step: int
    name: str
    before: int
    after: int
    reason: str


class CanaryProof(Record, frozen=True, omit_defaults=True):
    """Check of an engine's weights after it has loaded a version. `proven`: whether it passed.

    `distance`: difference between its log-probabilities of the canary text and the trainer's, in nats per token.
    `which`: "newest" of the engine, or "worst" of the run relative to its tolerance; "" in `Inspection.canary`.
    `tensors`: number of tensors of the version; `compared`: how many of these were compared in the engine's memory with
    the trainer's digests.
    """

    engine: str
    version: int
    distance: float
    tolerance: float
    proven: bool
    which: str = ""  # newest or worst; empty in `Inspection.canary`
    compared: int = 0
    tensors: int = 0


class Inspection(Record, frozen=True):
    """A run in numbers. `state`: running, finished, stopped (by a signal) or dead; `reason`: why it is not running.
    `busy`: role: share of `rl_seconds` in which it worked. Accuracies: None if not measured. `interrupted`: number of
    trajectories that an update of the weights interrupted; `multi_version`: of those with tokens of two or more
    versions."""

    steps: int
    version: int
    wall_seconds: float
    rl_seconds: float
    initial_accuracy: float | None  # None: not measured
    final_accuracy: float | None  # None: not measured
    tokens: TokenCounts
    trajectories: TrajectoryCounts
    staleness: StalenessSummary
    interrupted: int  # trajectories that weight updates interrupted
    multi_version: int  # trajectories with tokens of two or more versions
    busy: dict[str, float]
    engines: tuple[EngineRecord, ...]
    weights: WeightsSummary
    rewards: Mapping[str, float] = {}  # of several rewards, by name: mean value in the newest batch
    gateway: str | None = None  # where agents find the policy of a running run
    goodput: Mapping[str, Category] = {}  # category: seconds of all roles together, and tokens
    goodput_roles: Mapping[str, Mapping[str, float]] = {}  # role: category: seconds
    idle: Mapping[str, Mapping[str, float]] = {}  # role: reason: seconds
    selection_bias: Mapping[str, Bias] = {}  # length, difficulty, latency: lost groups against the others
    masked_groups: MaskedGroups | None = None  # of the newest complete window; None: no window, or no such group
    bounds: tuple[ChangedBound, ...] = ()  # changes made by the run itself
    canary: tuple[CanaryProof, ...] = ()  # newest of each engine, then the worst; empty for a run of an earlier stretto
    canary_proofs: tuple[CanaryProof, ...] = ()  # the same with all fields
    state: str = ""
    reason: str = ""
    replay: Branch | None = None  # origin of a branch of `stretto replay`, which generates and evaluates nothing
    cores: Mapping[str, float] | UnsetType = (
        UNSET  # use: seconds of the run's cores; a run of an earlier stretto has none
    )
    changed: tuple[str, ...] = ()  # sentences: user-defined parts whose source has changed between two starts
