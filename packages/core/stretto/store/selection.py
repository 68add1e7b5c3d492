"""Selection bias: do the trained groups differ from the lost ones?

A group is *lost* when it expires, or when all of its tokens are masked. In each window of `WINDOW` groups, lost and
other groups are compared in three measures: length of the completions, latency, and difficulty.

- A group that is masked in part counts as trained. `MaskedGroups` tells how much of the learning signal such groups
  carry.
- The completions of a group are not independent: they have the same prompt and admission. So each group counts once,
  with its mean.
- Filtered and failed groups are left out: they were not lost because of their age.

The test is that of Mann and Whitney (Ann. Math. Stat. 18, 1947) in its normal approximation, corrected for ties. The p
value of window k is multiplied by 3 k (k + 1), a Bonferroni correction: the inverse factors of all windows and the
three measures add up to one. So at most one of a hundred runs without bias ever reports a corrected p below 0.01.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import msgspec

from stretto.core.admission import BoundChange
from stretto.core.records import Batch, Group, Outcome, Prompt, Record, State, Trajectory
from stretto.core.states import Journal

MEASURES = ("length", "difficulty", "latency")
WINDOW = 256  #: number of groups in a window
SIGNIFICANT = 0.01
_LEAST = 8  # least number of lost groups, and of other groups, for a comparison
_LOST_ARE = {"length": ("longer", "shorter"), "difficulty": ("easier", "harder"), "latency": ("slower", "faster")}


class EndedGroup(Record, frozen=True, array_like=True):
    """Measures of a group that was trained or lost (expired, or masked whole); None: unknown. `length`: mean sampled
    tokens of its completions; `difficulty`: share of right ones; `latency`: seconds from admission to last verdict;
    `masked`: share of its tokens; `signal`: its rewards differ. For a group that was aborted in flight, `length` and
    `latency` are those until the abort, `difficulty` is unknown, and `masked` and `signal` say nothing.
    """

    lost: bool
    length: float | None = None  # sampled tokens of a completion, on average
    difficulty: float | None = None  # share of right completions
    latency: float | None = None  # seconds from admission until all completions were judged
    masked: float = 0.0  # share of its sampled tokens that are masked
    signal: bool = False  # its completions have different rewards, so advantages are not all zero


class Bias(Record, frozen=True):
    """Comparison of lost groups with others in one measure. `statistic`: probability that a lost group's value is
    larger than another group's, minus the probability that it is smaller (−1 … 1). `p`: p value, corrected for the
    number of comparisons."""

    statistic: float = 0.0
    p: float = 1.0


class MaskedGroups(Record, frozen=True):
    """Number of trained `groups` in a window and of those `masked` in part; then shares, from 0 to 1. `tokens`: masked
    among all tokens. `signal`, `signal_others`: groups whose rewards differ among the partly masked ones, and among
    the others. `of_signal`: partly masked ones among the groups whose rewards differ."""

    groups: int  # number of trained groups in the window
    masked: int  # number of these with some, but not all, tokens masked
    tokens: float  # share of masked tokens among all sampled tokens of trained groups
    signal: float  # share of groups with a signal among the partly masked ones
    signal_others: float  # share of groups with a signal among the other trained ones
    of_signal: float  # share of partly masked groups among the trained ones with a signal

    def __str__(self) -> str:
        return (
            f"{self.masked} of {self.groups} groups ({self.tokens:.1%} of all tokens); {self.signal:.0%} of them carry "
            f"a signal, {self.signal_others:.0%} of the others: {self.of_signal:.0%} of the signal is in masked groups"
        )


class SelectionBias(Record, frozen=True):
    """State of a `SelectionWatch`. `windows`: number of complete windows; `newest`: comparisons of the newest one, by
    measure (empty before the first); `open`: groups of the incomplete window; `masked`: partly masked groups of the
    newest complete window, None if it has none."""

    windows: int = 0
    newest: Mapping[str, Bias] = {}
    open: tuple[EndedGroup, ...] = ()
    masked: MaskedGroups | None = None


SELECTION = "selection"  #: name of the ledger's fact with the `SelectionBias`


def compare(lost: Sequence[float], others: Sequence[float], factor: int) -> Bias:
    """Compare the values of lost and of other groups by the two-sided Mann-Whitney test; p is multiplied by `factor`.
    With fewer than 8 values on one side, or with equal values only, the result is ``Bias()``.

    >>> compare([9.0] * 10, [1.0] * 30, factor=1).statistic
    1.0
    """
    total = len(lost) + len(others)
    if min(len(lost), len(others)) < _LEAST:
        return Bias()
    counts = Counter(lost) + Counter(others)
    below = _below(counts)
    pairs = len(lost) * len(others)
    rank_sum = sum(below[value] + (counts[value] + 1) / 2 for value in lost)
    excess = rank_sum - len(lost) * (total + 1) / 2
    ties = sum(count**3 - count for count in counts.values()) / (total * (total - 1))
    variance = pairs / 12 * (total + 1 - ties)
    if variance <= 0:
        return Bias()
    deviations = max(0.0, abs(excess) - 0.5) / math.sqrt(variance)
    return Bias(2 * excess / pairs, min(1.0, factor * math.erfc(deviations / math.sqrt(2))))


def _below(counts: Mapping[float, int]) -> dict[float, int]:
    """Return for each value the number of smaller values. `counts`: how often each value occurs."""
    values = sorted(counts)
    sums = accumulate((counts[value] for value in values), initial=0)
    return dict(zip(values, sums, strict=False))


def biases(groups: Sequence[EndedGroup], window: int) -> dict[str, Bias]:
    """Compare the lost groups of a window with its others; returns the result of each of `MEASURES`. `window`: number
    of the window in the run, from 1, for the correction of p."""
    found = {}
    for measure in MEASURES:
        known = [(group.lost, value) for group in groups if (value := getattr(group, measure)) is not None]
        lost, others = ([value for of, value in known if of is part] for part in (True, False))
        found[measure] = compare(lost, others, len(MEASURES) * window * (window + 1))
    return found


def masked_groups(groups: Sequence[EndedGroup]) -> MaskedGroups | None:
    """Summarise the trained groups of a window that are masked in part; None if there are none.

    >>> groups = [EndedGroup(False, 4.0, masked=0.5, signal=True), EndedGroup(False, 4.0, signal=True)]
    >>> str(masked_groups(groups))[:60]
    '1 of 2 groups (25.0% of all tokens); 100% of them carry a si'
    """
    trained = [group for group in groups if not group.lost]
    masked = [group for group in trained if group.masked > 0]
    if not masked:
        return None
    others = [group for group in trained if group.masked == 0]
    tokens = sum(group.length or 0.0 for group in trained)
    return MaskedGroups(
        groups=len(trained),
        masked=len(masked),
        tokens=sum(group.masked * (group.length or 0.0) for group in masked) / max(tokens, 1e-9),
        signal=_with_signal(masked) / len(masked),
        signal_others=_with_signal(others) / max(1, len(others)),
        of_signal=_with_signal(masked) / max(1, _with_signal(trained)),
    )


def _with_signal(groups: Sequence[EndedGroup]) -> int:
    return sum(group.signal for group in groups)


class SelectionWatch:
    """Journal that passes a controller's calls on to the run's journal, and measures trained and lost groups (expired,
    or masked whole); in each full window they are compared (`known`).

    Example: ``Controller(config, prompts, SelectionWatch(ledger, time.monotonic), seed)``
    """

    def __init__(
        self,
        journal: Journal,
        clock: Callable[[], float],
        known: SelectionBias | None = None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Start a watch.

        Args:
            journal: gets all calls, before they are measured.
            clock: returns the time in seconds, from any zero.
            known: state of an earlier process of the run; None for a new run.
            say: gets a log line, once for each measure that shows a bias.
        """
        self._journal, self._clock, self._say = journal, clock, say
        self._known = known or SelectionBias()
        self._open = list(self._known.open)
        #: Returns the number of tokens sampled so far for the group with an id, which is about to expire in flight.
        self.sampled: Callable[[str], int] = lambda group_id: 0
        # By group: time of its admission (None: before a resume), and number of its members that have not ended.
        self._in_flight: dict[str, tuple[float | None, int]] = {}
        self._finished: dict[str, EndedGroup] = {}  # judged groups, not yet known to be lost
        self._told: set[str] = set()

    @property
    def known(self) -> SelectionBias:
        """The state, for the ledger and for reports."""
        return msgspec.structs.replace(self._known, open=tuple(self._open))

    def restore(self, group_id: str, members: int, trajectories: Sequence[Trajectory]) -> None:
        """Restore a group that an earlier process has admitted and not trained; its latency stays unknown. Without
        `trajectories` the group is in flight, otherwise judged. `members`: number of its trajectories."""
        if trajectories:
            self._finished[group_id] = _measured(trajectories, None)
        else:
            self._in_flight[group_id] = None, members

    def issue(self, group_id: str, prompt: Prompt, members: int, admitted_version: int) -> None:
        self._journal.issue(group_id, prompt, members, admitted_version)
        self._in_flight[group_id] = self._clock(), members

    def buffer(self, group: Group) -> None:
        self._journal.buffer(group)
        since, _ = self._in_flight.pop(group.id, (None, 0))
        self._finished[group.id] = _measured(group.trajectories, self._since(since))

    def settle(self, id: str, state: State, reason: str, trajectory: Trajectory | None = None) -> None:
        self._journal.settle(id, state, reason, trajectory)
        group = id.rpartition("/")[0]
        if state is State.EXPIRED:
            self._lose(group)
        elif (found := self._in_flight.get(group)) is not None:
            since, members = found
            self._in_flight[group] = since, members - 1
            if members == 1:
                del self._in_flight[group]

    def commit_batch(self, batch: Batch) -> None:
        self._journal.commit_batch(batch)
        for group in batch.groups:
            ended = self._finished.pop(group.id, None) or _measured(group.trajectories, None)
            masked = _masked(group, batch.oldest_of(group.id))
            self._ended(msgspec.structs.replace(ended, lost=masked == 1, masked=masked))

    def change_bound(self, change: BoundChange) -> None:
        self._journal.change_bound(change)

    def _lose(self, group: str) -> None:
        """Count the group as lost, at the first of its members that expires; later ones change nothing. One that
        expires in flight counts with the mean tokens that its members have sampled."""
        if (ended := self._finished.pop(group, None)) is not None:
            self._ended(msgspec.structs.replace(ended, lost=True))
        elif (found := self._in_flight.pop(group, None)) is not None:
            since, members = found
            length = self.sampled(group) / members or None
            self._ended(EndedGroup(True, length, None, self._since(since)))

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else round(self._clock() - moment, 6)

    def _ended(self, group: EndedGroup) -> None:
        self._open.append(group)
        if len(self._open) < WINDOW:
            return
        window = self._known.windows + 1
        newest = biases(self._open, window)
        lost = sum(group.lost for group in self._open)
        self._known = SelectionBias(window, newest, masked=masked_groups(self._open))
        self._open.clear()
        for measure, bias in newest.items():
            if bias.p < SIGNIFICANT and measure not in self._told:
                self._told.add(measure)
                self._say(_sentence(measure, bias, lost))


def _measured(trajectories: Sequence[Trajectory], latency: float | None) -> EndedGroup:
    tokens = sum(trajectory.sampled_length for trajectory in trajectories)
    right = sum(trajectory.verdict.outcome is Outcome.RIGHT for trajectory in trajectories)
    members = len(trajectories)
    signal = len({trajectory.verdict.reward for trajectory in trajectories}) > 1
    waited = None if latency is None else round(latency, 6)
    return EndedGroup(False, tokens / members, right / members, waited, signal=signal)


def _masked(group: Group, oldest: int) -> float:
    """Share of a group's sampled tokens that are older than version `oldest`, and so masked; 1: the whole group."""
    if group.oldest_version >= oldest:
        return 0.0
    versions = [version for trajectory in group.trajectories for version in trajectory.versions]
    return sum(version < oldest for version in versions) / max(1, len(versions))


def _sentence(measure: str, bias: Bias, lost: int) -> str:
    how = _LOST_ARE[measure][bias.statistic < 0]
    return (
        f"selection bias: of {WINDOW} groups {lost} have expired or were masked whole, and they are {how} than the "
        f"others ({measure}: {bias.statistic:+.2f}, p = {bias.p:.1g}); the policy is trained on other groups than it "
        'samples (a larger rollout.max_staleness loses fewer, rollout.beyond_bound = "wait" none)'
    )
