"""Sum of several rewards: each part judges alone, and their weighted sum is one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from stretto.core.records import Outcome, Verdict
from stretto.core.states import why_no_reward
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.functions import RewardFunction
from stretto.rewards.service.judging import judge, undecided
from stretto.rewards.service.loading import fields_taken, load_reward, why_lacking
from stretto.rewards.service.wire import PartSettings, ScoreItem, Worth


@dataclass(frozen=True)
class LoadedPart:
    """One reward of the sum: its settings, and its loaded function."""

    settings: PartSettings
    function: RewardFunction

    def judges(self, item: ScoreItem) -> bool:
        """Whether the part applies to the source of the item."""
        return not self.settings.sources or item.source in self.settings.sources

    def verdict(self, item: ScoreItem, worth: Worth) -> Verdict:
        """Verdict of this part alone; the function also gets the fields of the row that it has parameters for."""
        fields = fields_taken(self.function, item.fields)
        verdict = judge(partial(self.function, **fields) if fields else self.function, item, worth)
        if verdict.outcome is Outcome.UNDECIDED and (why := why_lacking(self.function, item.fields)):
            return undecided(why)
        return verdict


def loaded(parts: Sequence[PartSettings]) -> tuple[LoadedPart, ...]:
    """Load the functions of all parts.

    Raises:
        RewardFunctionError: one cannot be used.
    """
    return tuple([LoadedPart(part, load_reward(part.function, part.settings, part.place)) for part in parts])


def facts_of(parts: Sequence[LoadedPart]) -> dict[str, str]:
    """Facts for the run's record (sandbox level, say), from the `facts` of built-in rewards that have them."""
    found: dict[str, str] = {}
    for part in parts:
        found |= getattr(part.function, "facts", {}) if part.settings.function in BUILT_IN else {}
    return found


def judge_all(parts: Sequence[LoadedPart], item: ScoreItem, worth: Worth) -> Verdict:
    """Verdict of all parts that apply to the item's source; they are called in order.

    The reward is the sum of weight times value. The first part says whether the completion is right. One undecided part
    makes the whole verdict undecided, and later parts are not called.
    """
    outcome: Outcome | None = None
    reward, rewards = 0.0, dict[str, float]()
    for part in parts:
        if not part.judges(item):
            continue
        verdict, name = part.verdict(item, worth), part.settings.name
        if verdict.reward is None:
            return undecided(f"{name}: {verdict.reason}" if name else verdict.reason)
        outcome = outcome or verdict.outcome
        reward += part.settings.weight * verdict.reward
        if name:
            rewards[name] = verdict.reward
    if outcome is None:
        return undecided(f"no reward judges the completions of source {item.source!r}")
    if why := why_no_reward(reward):
        return undecided(f"the sum of the rewards is {why}")
    return Verdict(outcome=outcome, reward=reward, rewards=rewards)
