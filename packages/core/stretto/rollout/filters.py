"""Filters choose trajectories of a group that are not trained on, each with a reason.

Each filter gets the group without the trajectories that earlier filters refused. A group with too few trajectories left
is replaced: the next admission draws another prompt. `rollout.config.FILTERS` lists the filters that a recipe can name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mode

import msgspec

from stretto.core.errors import several
from stretto.core.records import Group, Outcome, StopReason
from stretto.rollout.config import FILTERS, RolloutConfig

_SILENT_BATCHES = 4
#: Returns the refused trajectories of a group: the reason by trajectory id.
Filter = Callable[[Group], Mapping[str, str]]
#: Returns the rewards of a group that the advantages compare, in the lists in which they are compared.
Compared = Callable[[Group], Iterable[Sequence[float]]]


def truncated(group: Group) -> Mapping[str, str]:
    """Refuse completions cut off at `sampling.max_tokens`: their reward would be noise (DAPO, arXiv 2503.14476, section
    3.4, overlong filtering). Returns the reason by trajectory id, as every `Filter`."""
    cut = (t.id for t in group.trajectories if t.stop_reason is StopReason.LENGTH)
    return dict.fromkeys(cut, "cut off at its length")


def success_rate(group: Group, low: float, high: float) -> Mapping[str, str]:
    """Refuse all trajectories of a group whose share of right completions is below `low` (too hard) or above `high`
    (too easy). Returns the reason by trajectory id, as every `Filter`."""
    right = sum(t.verdict.outcome is Outcome.RIGHT for t in group.trajectories)
    rate = right / len(group.trajectories)
    return {} if low <= rate <= high else _all(group, f"{right} of {len(group.trajectories)} completions are right")


def _of_trajectories(group: Group) -> Iterable[Sequence[float]]:
    """The rewards of the trajectories, as one list."""
    return [[t.reward for t in group.trajectories]]


def zero_variance(group: Group, compared: Compared = _of_trajectories) -> Mapping[str, str]:
    """Refuse all trajectories of a group whose rewards are equal within each list that `compared` returns, by default
    the one of all trajectories: their advantages and gradient are zero (DAPO, arXiv 2503.14476, dynamic sampling).
    Returns the reason by trajectory id, as every `Filter`."""
    if any(len(set(rewards)) > 1 for rewards in compared(group)):
        return {}
    return _all(group, f"all rewards are {group.trajectories[0].reward:g}")


def filters(config: RolloutConfig, compared: Compared | None = None) -> tuple[Filter, ...]:
    """The filters of a recipe in the order in which they apply: `truncated`, `success_rate`, then those that
    `rollout.filter` names. Each puts its name in front of its reasons. `compared`: returns the lists of rewards that
    `zero_variance` compares; None: one list, of the whole group. Raises RecipeError if a filter cannot be loaded."""
    chosen: list[tuple[str, Filter]] = []
    if config.truncated == "filter":
        chosen.append(("truncated", truncated))
    if (config.success_rate_min, config.success_rate_max) != (0, 1):
        rate = partial(success_rate, low=config.success_rate_min, high=config.success_rate_max)
        chosen.append(("success_rate", rate))
    for one in config.filters:
        bound = FILTERS.bound(one)
        given = compared is not None and getattr(bound, "func", None) is zero_variance
        chosen.append((str(getattr(one, "kind", one)), partial(bound, compared=compared) if given else bound))
    return tuple(partial(_named, name, refuses) for name, refuses in chosen)


def _named(name: str, refuses: Filter, group: Group) -> Mapping[str, str]:
    return {id: f"{name}: {reason}" for id, reason in refuses(group).items()}


def refused(group: Group, chosen: tuple[Filter, ...], fewest: int) -> dict[str, str]:
    """Apply the filters `chosen` one after the other; returns the reason of each refused trajectory by id. If a filter
    refuses some, and fewer than `fewest` trajectories would be left, all are refused."""
    reasons: dict[str, str] = {}
    for refuses in chosen:
        if not (left := _without(group, reasons)).trajectories:
            break
        reasons |= refuses(left)
    left = _without(group, reasons)
    if reasons and (count := len(left.trajectories)) < fewest:
        reasons |= _all(left, f"min_group_size: only {count} completions of the group are left")
    return reasons


def count_reasons(counts: dict[str, tuple[int, str]], reasons: Iterable[str]) -> None:
    """Count a group that was refused whole, with an example of its `reasons`, in `counts`, at the name of the filter
    that refused most of it."""
    by_name = [(reason.partition(": ")[0], reason) for reason in reasons]
    name = mode(name for name, _ in by_name)
    counts[name] = counts.get(name, (0, ""))[0] + 1, dict(by_name)[name]


def most_often(counts: Mapping[str, tuple[int, str]]) -> str:
    """Say which filter refuses the most groups, with its newest reason; "" without any.

    >>> most_often({"mine:short": (2, "mine:short: empty"), "zero_variance": (8, "zero_variance: all rewards are 0")})
    ' (most often zero_variance: all rewards are 0)'
    """
    return f" (most often {max(counts.values())[1]})" if counts else ""


def silence(batch_size: int) -> Callable[[int, Mapping[str, tuple[int, str]]], str]:
    """Return a function that is called after each group with the number of groups that were filtered since the last
    batch, and their reasons (`count_reasons`). It returns a sentence at four batches' worth of them, then each time
    that they are twice as many as at the last sentence; else ""."""
    at = _SILENT_BATCHES * batch_size

    def told(groups: int, reasons: Mapping[str, tuple[int, str]]) -> str:
        nonlocal at
        if groups < at:
            return ""
        at *= 2  # of the whole run: else a filter that refuses most groups is told at each batch
        said = f"{several(groups, 'group was', 'groups were')} filtered since the last batch"
        return f"{said}{most_often(reasons)}: see the filters of [rollout]"

    return told


def _without(group: Group, reasons: Mapping[str, str]) -> Group:
    left = tuple(t for t in group.trajectories if t.id not in reasons)
    return msgspec.structs.replace(group, trajectories=left)


def _all(group: Group, reason: str) -> dict[str, str]:
    return dict.fromkeys((t.id for t in group.trajectories), reason)
